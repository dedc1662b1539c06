"""What chosen layers of a model saw: inputs, outputs and the gradients of the outputs.

A recorded layer is a matrix product on rows: for ``nn.Linear`` every sample (or token) is a row, for ``nn.Conv2d``
every receptive field is. ``LayerRecord`` gives the three matrices of that product, H, Δ and ∂L/∂H.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

SUPPORTED_LAYERS = (nn.Linear, nn.Conv2d)

# What stands for the module inside it, and the names that the inner one then has: those of torch.compile, activation
# checkpointing and FSDP are nobody else's, "module" is the parallel wrappers' alone.
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_INNER = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_ORIGINAL = "of a scripted, traced, exported or quantized model, pass the nn.Module that it was made of"


def weight_matrix(weight: Float[Tensor, "k *d"], groups: int = 1) -> Float[Tensor, "*groups k_group d"]:
    """View a weight as the matrix of its product: (k, d), or (groups, k/groups, d) for a grouped convolution.

    Args:
        weight: ``nn.Linear``'s (k, d) or ``nn.Conv2d``'s (out, in/groups, kh, kw), where d = in/groups·kh·kw.
        groups: the convolution's ``groups``; each group is a product of its own.

    Raises:
        ValueError: the weight has fewer than two axes, or its rows do not split into ``groups`` equal parts.
    """
    if weight.ndim < 2:
        raise ValueError(f"a weight has at least two axes (k, d); got shape {tuple(weight.shape)}")
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"{weight.shape[0]} output channels do not split into groups={groups} equal groups")
    matrix = weight.flatten(1)
    if groups != 1:
        matrix = matrix.unflatten(0, (groups, -1))
    return matrix


def input_rows(layer: nn.Module, inputs: Float[Tensor, "..."]) -> Float[Tensor, "*groups n d"]:
    """Lay a layer's input out as the rows H that its weight matrix multiplies.

    Linear: all leading axes are flattened, (n, d). Conv2d: one row a receptive field, n = batch · positions and
    d = in/groups·kh·kw, after the layer's own padding, stride and dilation; (groups, n, d) if groups > 1.

    Raises:
        TypeError: the layer is neither ``nn.Linear`` nor ``nn.Conv2d``.
    """
    check_layer(layer)
    if isinstance(layer, nn.Linear):
        return inputs.reshape(-1, layer.in_features)
    assert isinstance(layer, nn.Conv2d)
    # `_reversed_padding_repeated_twice` also resolves padding="same" and the padding modes, as the layer does.
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)  # (B, in·kh·kw, P)
    return _rows_of_groups(patches, layer.groups)


def output_rows(layer: nn.Module, outputs: Float[Tensor, "..."]) -> Float[Tensor, "*groups n k_group"]:
    """Lay a layer's output, or the gradient of it, out as rows in the order of ``input_rows``."""
    check_layer(layer)
    if isinstance(layer, nn.Linear):
        return outputs.reshape(-1, layer.out_features)
    assert isinstance(layer, nn.Conv2d)
    return _rows_of_groups(outputs.flatten(2), layer.groups)


def _rows_of_groups(columns: Float[Tensor, "B c P"], groups: int) -> Float[Tensor, "*groups n c_group"]:
    rows: Tensor = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return rows[0] if groups == 1 else rows


def check_layer(layer: nn.Module, name: str = "the layer") -> None:
    """Raise ``TypeError`` unless the layer is a matrix product on rows: ``nn.Linear`` or ``nn.Conv2d``."""
    if not isinstance(layer, SUPPORTED_LAYERS):
        kind = type(layer)
        # Scripted and quantized layers are called Linear, too.
        label = kind.__name__ if kind.__module__.startswith(("torch.nn.", "builtins")) else _path_of(kind)
        advice = f"; {_ORIGINAL}" if _is_out_of_reach(layer) else ""
        raise TypeError(f"{name} is {label}; only nn.Linear and nn.Conv2d have a weight Gram matrix{advice}")


# ---- layers of a model ----


def layer_names(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name as in ``model.named_modules()``, but for wrappers, and for modules in several places.

    A wrapper (``torch.compile``, ``nn.DataParallel``, ``DistributedDataParallel``, FSDP, activation checkpointing)
    leaves no trace: its name is that of the module inside, without ``_orig_mod`` or ``module``. A module that stands in
    several places has all its names. What is inside a scripted module is left out, since no hook sees it.

    Raises:
        TypeError: not an ``nn.Module``, or one that is scripted or traced.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model: got a {type(model).__name__}; pass an nn.Module ({_ORIGINAL})")
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, name: str, above: tuple[int, ...]) -> None:
        if id(module) in above:
            return
        found[name] = module  # where the wrapper was
        if isinstance(module, torch.jit.ScriptModule):
            return
        for key, child in module._modules.items():
            if child is not None:
                stands_for = key in _INNER or (key == "module" and isinstance(module, _PARALLEL))
                child_name = name if stands_for else f"{name}.{key}" if name else key
                walk(child, child_name, (*above, id(module)))

    walk(model, "", ())
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``nn.DataParallel`` and ``DistributedDataParallel``, to be run by itself."""
    while True:
        if isinstance(model, _PARALLEL):
            model = model.module
        elif "_orig_mod" in model._modules and (inner := model._modules["_orig_mod"]) is not None:
            model = inner
        else:
            return model


def chosen_layers(model: nn.Module, layers: str | Iterable[str] | None) -> dict[str, nn.Module]:
    """The named layers of a model, or all of its ``nn.Linear`` and ``nn.Conv2d``; names and errors as in ``record``."""
    modules = layer_names(model)
    if layers is None:
        return _all_layers(model, modules)
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers: got a {type(layers).__name__}; pass names of layers, or None for all")
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise ValueError("layers is empty; pass names of layers, or None for all")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"layers: got a {type(name).__name__} among them; pass names, as in model.named_modules()")
        if name not in modules:
            bare = ".".join(part for part in name.split(".") if part not in (*_INNER, "module"))
            if bare in modules:
                raise ValueError(f"no layer {name!r} in the model: names are those without wrappers; pass {bare!r}")
            raise ValueError(f"no layer {name!r} in the model; it has {', '.join(filter(None, modules))}")
        check_layer(modules[name], f"layer {name!r}")
    return {name: modules[name] for name in names}


def _all_layers(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """All supported layers, each under its first name; refuses a model with layers that would be passed over."""
    for name, module in modules.items():
        if _is_out_of_reach(module):
            raise TypeError(
                f"layer {name!r} is {_path_of(type(module))}: it cannot be recorded; {_ORIGINAL}, or name other layers "
                "in layers="
            )
    names: dict[nn.Module, str] = {
        module: name for name, module in reversed(modules.items()) if isinstance(module, SUPPORTED_LAYERS)
    }
    if not names:
        raise ValueError(f"{type(model).__name__} has no nn.Linear or nn.Conv2d layer ({_ORIGINAL})")
    return {name: module for name, module in modules.items() if names.get(module) == name}


def _is_out_of_reach(module: nn.Module) -> bool:
    """Whether this is, or holds, a linear layer or convolution that is scripted or quantized."""
    if isinstance(module, torch.jit.ScriptModule):
        kinds = {getattr(each, "original_name", "") for each in module.modules()}
        return not kinds.isdisjoint(kind.__name__ for kind in SUPPORTED_LAYERS)
    kind = type(module)
    return (
        kind.__module__.startswith("torch.ao.nn.")
        and kind.__name__.startswith(("Linear", "Conv"))
        and callable(getattr(module, "weight", None))  # a packed one, and a method that unpacks it
    )


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


# ---- watching them ----


@contextmanager
def watching(modules: dict[str, nn.Module], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Show (name, input, output) of each use of the modules, by name, to ``see`` while the block runs.

    Code that ``torch.compile`` made is not used inside: it would call no hook that came after it.
    """
    handles: list[RemovableHandle] = []

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if getattr(module, "_is_replica", False):
                raise ValueError(
                    f"layer {name!r} ran as a replica of nn.DataParallel, with a part of the batch; run model.module, "
                    "the model inside it"
                )
            if module is modules[name]:  # and not a copy of it, which has its hooks
                see(name, next(iter((*args, *kwargs.values()))), output)

        return hook

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_hook(hook_of(name), with_kwargs=True))
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


# ---- recording ----


@dataclass
class _Call:
    """One use of a layer. A layer used twice in a forward pass has two."""

    inputs: Tensor
    version: int
    output_shape: torch.Size
    has_gradient: bool
    output_gradient: Tensor | None = None


@dataclass
class LayerRecord:
    """What one layer saw inside ``record``: the rows of all its uses, one use after the other.

    Attributes:
        name: the layer's name in the model.
        layer: the layer itself.
    """

    name: str
    layer: nn.Module
    _calls: list[_Call] = field(default_factory=list, repr=False)

    @property
    def features(self) -> Float[Tensor, "*groups n d"]:
        """H: the rows that entered the layer."""
        self._check_called()
        self._check_unchanged()
        return torch.cat([input_rows(self.layer, call.inputs) for call in self._calls], dim=-2)

    @property
    def deltas(self) -> Float[Tensor, "*groups n k_group"]:
        """Δ = ∂L/∂Z: the gradient of the loss with respect to the rows that left the layer."""
        self._check_called()
        if not any(call.has_gradient for call in self._calls):
            raise ValueError(
                f"the output of layer {self.name!r} has no gradient: it was used under torch.no_grad(), or neither its "
                "input nor its weight requires one; run it with gradients, after requires_grad_() on one of them"
            )
        if all(call.output_gradient is None for call in self._calls):
            raise ValueError(
                f"no gradient reached layer {self.name!r}: call loss.backward() inside the `with record(…)` block"
            )
        rows = []
        for call in self._calls:
            gradient = call.output_gradient
            if gradient is None:  # this use does not enter the loss, so its gradient is zero
                gradient = self._weight.new_zeros(call.output_shape)
            rows.append(output_rows(self.layer, gradient))
        return torch.cat(rows, dim=-2)

    @property
    def feature_gradients(self) -> Float[Tensor, "*groups n d"]:
        """∂L/∂H = ΔW: the gradient of the features *through this layer only*, without skip connections."""
        weight = weight_matrix(self._weight.detach(), getattr(self.layer, "groups", 1))
        return self.deltas.to(weight.dtype) @ weight  # under autocast the deltas come in the lower precision

    @property
    def _weight(self) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def _check_called(self) -> None:
        if not self._calls:
            raise ValueError(f"layer {self.name!r} was not called: run the model inside the `with record(…)` block")

    def _check_unchanged(self) -> None:
        if any(_version(call.inputs) != call.version for call in self._calls):
            raise ValueError(f"the input of layer {self.name!r} was changed in place after it was recorded")


@contextmanager
def record(model: nn.Module, layers: str | Iterable[str] | None = None) -> Iterator[dict[str, LayerRecord]]:
    """Record what layers see while the block runs; the model is left as it was found.

    Run the forward pass, and the backward pass for gradients, inside the block. Several backward passes add up,
    as they do in ``.grad``.

    Args:
        model: any ``nn.Module``, also compiled or wrapped. What ``torch.compile`` made of it is not used inside the
            block, which runs all code as it was written.
        layers: a name, or names, as in ``model.named_modules()`` without wrappers; by default every ``nn.Linear`` and
            ``nn.Conv2d``.

    Yields:
        A dictionary from layer name to ``LayerRecord``, in the order of ``layers``.

    Raises:
        ValueError: a name is not in the model, ``layers`` is empty, there is no layer to record, or a later in-place
            operation overwrote a recorded input.
        TypeError: a named layer is neither ``nn.Linear`` nor ``nn.Conv2d``; a scripted, traced or quantized model.
    """
    modules = chosen_layers(model, layers)
    records = {name: LayerRecord(name, layer) for name, layer in modules.items()}
    handles: list[RemovableHandle] = []

    def keep(name: str, inputs: Tensor, output: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:  # in a backward pass: checkpointing computes what was recorded
            return
        features = inputs.detach()
        if features.is_inference():  # it counts no changes, by which an overwritten one could be told
            features = features.clone()
        call = _Call(features, _version(features), output.shape, output.requires_grad)
        records[name]._calls.append(call)

        def keep_gradient(gradient: Tensor) -> None:
            gradient = gradient.detach()
            call.output_gradient = gradient if call.output_gradient is None else call.output_gradient + gradient

        if output.requires_grad:
            handles.append(output.register_hook(keep_gradient))

    try:
        with watching(modules, keep):
            yield records
    finally:
        for handle in handles:
            handle.remove()
    for each in records.values():
        each._check_unchanged()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
