"""What chosen layers of a model saw: inputs, outputs and the gradients of the outputs.

A recorded layer is a matrix product on rows: for ``nn.Linear`` every sample (or token) is a row, for ``nn.Conv2d``
every receptive field is. ``LayerRecord`` gives the three matrices of that product, H, Δ and ∂L/∂H.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

SUPPORTED_LAYERS = (nn.Linear, nn.Conv2d)


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
    return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))


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
    return _rows_of_groups(outputs.flatten(2), layer.groups)


def _rows_of_groups(columns: Float[Tensor, "B c P"], groups: int) -> Float[Tensor, "*groups n c_group"]:
    rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return rows[0] if groups == 1 else rows


def check_layer(layer: nn.Module, name: str = "the layer") -> None:
    """Raise ``TypeError`` unless the layer is a matrix product on rows: ``nn.Linear`` or ``nn.Conv2d``."""
    if not isinstance(layer, SUPPORTED_LAYERS):
        raise TypeError(f"{name} is {type(layer).__name__}; only nn.Linear and nn.Conv2d have a weight Gram matrix")


def chosen_layers(model: nn.Module, layers: str | Iterable[str] | None) -> dict[str, nn.Module]:
    """The named layers of a model, or all of its ``nn.Linear`` and ``nn.Conv2d``; errors as in ``record``."""
    modules = dict(model.named_modules())
    if layers is None:
        layers = [name for name, module in modules.items() if isinstance(module, SUPPORTED_LAYERS)]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no nn.Linear or nn.Conv2d layer")
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise ValueError("layers is empty; pass names of layers, or None for all")
    for name in names:
        if name not in modules:
            raise ValueError(f"no layer {name!r} in the model; it has {', '.join(filter(None, modules))}")
        check_layer(modules[name], f"layer {name!r}")
    return {name: modules[name] for name in names}


@dataclass
class _Call:
    """One use of a layer. A layer used twice in a forward pass has two."""

    inputs: Tensor
    version: int
    output_shape: torch.Size
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
        if not self._calls:
            raise ValueError(f"layer {self.name!r} was not called: run the model inside the `with record(…)` block")
        return torch.cat([input_rows(self.layer, call.inputs) for call in self._calls], dim=-2)

    @property
    def deltas(self) -> Float[Tensor, "*groups n k_group"]:
        """Δ = ∂L/∂Z: the gradient of the loss with respect to the rows that left the layer."""
        if all(call.output_gradient is None for call in self._calls):
            raise ValueError(
                f"no gradient reached layer {self.name!r}: call loss.backward() inside the `with record(…)` block"
            )
        rows = []
        for call in self._calls:
            gradient = call.output_gradient
            if gradient is None:  # this use does not enter the loss, so its gradient is zero
                gradient = self.layer.weight.new_zeros(call.output_shape)
            rows.append(output_rows(self.layer, gradient))
        return torch.cat(rows, dim=-2)

    @property
    def feature_gradients(self) -> Float[Tensor, "*groups n d"]:
        """∂L/∂H = ΔW: the gradient of the features *through this layer only*, without skip connections."""
        weight = weight_matrix(self.layer.weight.detach(), getattr(self.layer, "groups", 1))
        return self.deltas.to(weight.dtype) @ weight  # under autocast the deltas come in the lower precision


@contextmanager
def record(model: nn.Module, layers: str | Iterable[str] | None = None) -> Iterator[dict[str, LayerRecord]]:
    """Record what layers see while the block runs; the model is left as it was found.

    Run the forward pass, and the backward pass for gradients, inside the block. Several backward passes add up,
    as they do in ``.grad``.

    Args:
        model: any ``nn.Module``.
        layers: a name, or names, as in ``model.named_modules()``; by default every ``nn.Linear`` and ``nn.Conv2d``.

    Yields:
        A dictionary from layer name to ``LayerRecord``, in the order of ``layers``.

    Raises:
        ValueError: a name is not in the model, ``layers`` is empty, there is no layer to record, or a later in-place
            operation overwrote a recorded input.
        TypeError: a named layer is neither ``nn.Linear`` nor ``nn.Conv2d``.
    """
    modules = chosen_layers(model, layers)
    records = {name: LayerRecord(name, layer) for name, layer in modules.items()}
    handles = []
    for each in records.values():
        handles.append(each.layer.register_forward_hook(_recorder(each._calls, handles), with_kwargs=True))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()
    for each in records.values():
        if any(_version(call.inputs) != call.version for call in each._calls):
            raise ValueError(f"the input of layer {each.name!r} was changed in place after it was recorded")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # an inference tensor counts no changes


def _recorder(calls: list[_Call], handles: list):
    def hook(module: nn.Module, inputs: tuple, named: dict, output: Tensor) -> None:
        features = (inputs[0] if inputs else named["input"]).detach()
        call = _Call(features, _version(features), output.shape)
        calls.append(call)

        def keep_gradient(gradient: Tensor) -> None:
            gradient = gradient.detach()
            call.output_gradient = gradient if call.output_gradient is None else call.output_gradient + gradient

        if output.requires_grad:
            handles.append(output.register_hook(keep_gradient))

    return hook
