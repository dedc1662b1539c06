"""The weight Gram matrix and its rivals: chapter 1, the Feature Learning Equation.

Rows are samples and weights have PyTorch's layout: H (n, d), W (k, d), Z = HWᵀ + b (n, k). L is the mean loss,
Δ = ∂L/∂Z, and ∂L/∂H = ΔW is the gradient of the features through this layer only. All of it is exact; nothing is
sampled, and no matrix over pairs of samples is ever formed.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gramlin.checks import check_finite, check_floating, check_one_device
from gramlin.hooks import LayerRecord, check_layer, unwrapped, weight_matrix
from gramlin.moments import to_float64
from gramlin.stepping import check_optimizer, has_closure, is_nested_step

# A matrix whose entries differ by less than this, relative to its norm, has them equal but for float64's rounding.
_EQUAL = 1e-14


def weight_gram(weight: Float[Tensor, "k *d"], *, groups: int = 1) -> Float[Tensor, "*groups d d"]:
    """G = WᵀW, the inner products of a weight's columns (``eq:fle-gram``).

    Args:
        weight: (k, d), or a convolution's (out, in/groups, kh, kw), where d = in/groups·kh·kw.
        groups: the convolution's ``groups``; with more than one, a Gram matrix a group.

    Raises:
        ValueError: fewer than two axes, or rows that do not split into ``groups``; not finite; products that overflow
            the dtype, or that all underflow to zero.
        TypeError: not a floating-point tensor, or one of 8 bits.

    Example:
        >>> import torch
        >>> weight_gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """
    _check_numbers(weight=weight)
    matrix = _matrix(weight, groups)
    return _in_range("the Gram matrix", matrix.mT @ matrix, weight=[matrix, matrix])


def gram_shift(
    before: Float[Tensor, "k *d"], after: Float[Tensor, "k *d"], *, groups: int = 1
) -> Float[Tensor, "*groups d d"]:
    """W⁺ᵀW⁺ − WᵀW, how a change of the weight moves its Gram matrix (``eq:fle-gram-shift``).

    Computed from D = W⁺ − W as WᵀD + DᵀW + DᵀD, so that a small step is not lost in the difference of two large
    matrices.

    Args:
        before: the weight W, (k, d) or (out, in/groups, kh, kw).
        after: the weight W⁺, of the same shape.
        groups: as in ``weight_gram``.

    Raises:
        ValueError: the shapes differ, or as in ``weight_gram``.

    Example:
        >>> import torch
        >>> gram_shift(torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
        [[0.0, 2.0], [2.0, 4.0]]
        >>> gram_shift(torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])).tolist()
        [[0.0, 0.0], [0.0, 0.0]]
    """
    _check_numbers(before=before, after=after)
    if before.shape != after.shape:
        raise ValueError(f"before has shape {tuple(before.shape)}, after {tuple(after.shape)}: they must agree")
    step = _matrix(after - before, groups)
    cross = _matrix(before, groups).mT @ step
    return _in_range("the Gram shift", cross + cross.mT + step.mT @ step, before_and_after=[step, step])


def feature_learning_sides(
    record: LayerRecord,
) -> tuple[Float[Tensor, "*groups d d"], Float[Tensor, "*groups d d"]]:
    """Both sides of the Feature Learning Equation for a recorded layer, Wᵀ ∂L/∂W and (∂L/∂H)ᵀH (``eq:fle``).

    The left side is what autograd left in ``weight.grad``, the right side is what the layer saw: equal to rounding
    (on GPUs that of TensorFloat-32 for float32 convolutions, unless ``torch.backends.cudnn.allow_tf32`` is off).
    Set gradients to zero before the recorded pass. A weight that other layers share gets their gradients too; tie
    uses by calling one layer twice, which is recorded, rather than by sharing the parameter.

    Args:
        record: a layer's entry in ``gramlin.hooks.record``, after ``loss.backward()``.

    Raises:
        ValueError: the weight has no gradient, or is computed by a parametrization; the layer was not run inside the
            block; numbers that are not finite, or whose products over- or underflow.
        TypeError: not a record.

    Example:
        >>> import torch
        >>> from gramlin.hooks import record
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
        >>> with record(model) as records:
        ...     model(torch.eye(3)).square().mean().backward()
        >>> left, right = feature_learning_sides(records["0"])
        >>> torch.allclose(left, right, atol=1e-6)
        True
    """
    if not isinstance(record, LayerRecord):
        raise TypeError(f"record: got a {type(record).__name__}; pass one layer's LayerRecord, e.g. records['0']")
    name = f"layer {record.name!r}"
    parameter = _own_weight(record.layer, name)
    if parameter.grad is None:
        raise ValueError(f"{name} has no weight.grad: call loss.backward() with the weight unfrozen")
    groups = getattr(record.layer, "groups", 1)
    weight, weight_gradient = (weight_matrix(each, groups) for each in (parameter.detach(), parameter.grad))
    features, deltas = record.features, record.deltas
    _check_numbers(weight=weight, weight_gradient=weight_gradient, features=features, deltas=deltas)
    gradients = _in_range(f"∂L/∂H of {name}", record.feature_gradients, weight=[weight], loss=[deltas])
    features = features.to(gradients.dtype)
    left = _in_range(f"Wᵀ ∂L/∂W of {name}", weight.mT @ weight_gradient, weight=[weight], loss=[weight_gradient])
    right = _in_range(f"(∂L/∂H)ᵀH of {name}", gradients.mT @ features, features=[features], loss=[gradients])
    return left, right


def virtual_update(
    features: Float[Tensor, "*groups n d"], gradient: Float[Tensor, "*groups n d"], lr: float
) -> Float[Tensor, "*groups n d"]:
    """H̃ = H − η ∂L/∂H, the step in feature space that no optimizer takes (``eq:fle-virtual-update``).

    Args:
        features: H.
        gradient: ∂L/∂H through the layer, of the same shape; L is the mean loss over the n rows.
        lr: the learning rate η.

    Raises:
        ValueError: shapes differ, fewer than two axes, not finite, or over- or underflow.
        TypeError: not floating-point tensors, or an lr that is not a number.

    Example:
        >>> import torch
        >>> H, gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> virtual_update(H, gradient, lr=0.5).tolist()
        [[0.0, 2.0], [3.0, 2.0]]
    """
    step = _check_feature_gradient(features, gradient, lr) * gradient
    return _in_range("the virtual update", features - step)


def virtual_covariance_shift(
    features: Float[Tensor, "*groups n d"], gradient: Float[Tensor, "*groups n d"], lr: float
) -> Float[Tensor, "*groups d d"]:
    """H̃ᵀH̃ − HᵀH for the virtual update, with its second-order term (``eq:fle-virtual-shift``).

    Equal to −η[(∂L/∂H)ᵀH + Hᵀ∂L/∂H] + η²(∂L/∂H)ᵀ∂L/∂H, and computed so. Not divided by n.

    Args, errors: as in ``virtual_update``.

    Example:
        >>> import torch
        >>> H, gradient = torch.eye(2), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
        >>> virtual_update(H, gradient, lr=0.5).tolist()
        [[1.0, -1.0], [0.0, 1.0]]
        >>> virtual_covariance_shift(H, gradient, lr=0.5).tolist()
        [[0.0, -1.0], [-1.0, 1.0]]
    """
    # η first: η² underflows where η∂L/∂H does not.
    step = _check_feature_gradient(features, gradient, lr) * gradient
    cross = step.mT @ features
    return _in_range("the virtual covariance shift", step.mT @ step - (cross + cross.mT), gradient=[step, step])


def second_order_gap(
    features: Float[Tensor, "*groups n d"],
    deltas: Float[Tensor, "*groups n k"],
    weight: Float[Tensor, "*groups k d"],
    lr: float,
) -> Float[Tensor, "*groups d d"]:
    """η²(HᵀΔΔᵀH − WᵀΔᵀΔW): Gram shift minus virtual covariance shift, for one plain step (``eq:fle-gap``).

    Args:
        features: H.
        deltas: Δ = ∂L/∂Z.
        weight: W, as a matrix (see ``gramlin.hooks.weight_matrix``).
        lr: the learning rate η.

    Raises:
        ValueError: axes that do not agree; not finite, or over- or underflow.
        TypeError: not floating-point tensors, or an lr that is not a number.

    Example:
        >>> import torch
        >>> H, deltas, W = torch.eye(2), torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> second_order_gap(H, deltas, W, lr=0.5).tolist()
        [[0.0, -0.5], [-0.5, -1.0]]
        >>> (gram_shift(W, W - 0.5 * deltas.mT @ H) - virtual_covariance_shift(H, deltas @ W, lr=0.5)).tolist()
        [[0.0, -0.5], [-0.5, -1.0]]
    """
    _check_numbers(features=features, deltas=deltas, weight=weight)
    lr = _learning_rate(lr)
    expected = (*features.shape[:-2], *deltas.shape[-1:], *features.shape[-1:])
    if features.ndim < 2 or features.shape[:-1] != deltas.shape[:-1] or tuple(weight.shape) != expected:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, deltas {tuple(deltas.shape)}, weight "
            f"{tuple(weight.shape)}: expected (n, d), (n, k) and (k, d)"
        )
    step = lr * deltas
    weight_step, feature_step = step.mT @ features, step @ weight
    gap = weight_step.mT @ weight_step - feature_step.mT @ feature_step
    larger = max(features, weight, key=_log_size)
    return _in_range("the gap", gap, deltas=[step, step], features_and_weight=[larger, larger])


def agop(
    function: Callable[[Tensor], Tensor], inputs: Float[Tensor, "n *shape"], *, chunk_size: int | None = None
) -> Float[Tensor, "d d"]:
    """The average gradient outer product (1/n) Σᵢ JᵢᵀJᵢ, Jᵢ = ∂f/∂hᵢ (K, d) (``eq:fle-agop``).

    Exact, by ``torch.func``: Jacobians of all K outputs, a chunk of samples at a time. The function works on copies of
    the inputs, and tensors of its own that it changes in place (a normalisation's running statistics) have their
    values back afterwards, as has the random number generator, also after an error.

    Args:
        function: maps a batch ``(n, *shape)`` to outputs (n, K) or (n,), each sample by itself; a module in ``eval``
            mode, say.
        inputs: the points, ``(n, *shape)``; d is the product of ``shape``.
        chunk_size: samples a chunk; by default as many as keep the Jacobians of a chunk under 2²⁵ numbers.

    Raises:
        ValueError: no samples, not finite, an output of another shape, a function that mixes samples (seen on the
            first two) or draws random numbers (batch normalisation, dropout in training mode), or products that over-
            or underflow.
        TypeError: a function that cannot be called, or does not give floating-point tensors.

    Source: Radhakrishnan, Beaglehole, Pandit and Belkin (2024), the Neural Feature Ansatz.

    Example:
        >>> import torch
        >>> H, W = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> agop(lambda h: h @ W.mT, H).tolist() == weight_gram(W).tolist()
        True
        >>> agop(lambda h: h.square().sum(dim=1), H).tolist()
        [[4.0, 4.0], [4.0, 8.0]]
    """
    if not callable(function):
        raise TypeError(f"function: got a {type(function).__name__}; pass a module or function from (n, d) to (n, K)")
    _check_numbers(inputs=inputs)
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise ValueError(f"inputs have shape {tuple(inputs.shape)}: expected (n, d) with at least one sample")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size is {chunk_size!r}; pass a positive integer, or None")

    def one_sample(point: Tensor) -> Tensor:
        return function(point.unsqueeze(0).clone()).reshape(-1)

    inputs = inputs.detach()
    with torch.no_grad(), _left_as_found(function, inputs.device):
        outputs = _checked_outputs(function(inputs[:2].clone()), inputs[:2])
        if len(outputs) == 2 and not _same_alone(one_sample, inputs[1], outputs[1].reshape(-1)):
            raise ValueError(f"{_ALONE} (a sample's output depends on the sample before it)")
        dimension, n_outputs = inputs[0].numel(), outputs[0].numel()
        chunk_size = chunk_size or max(1, 2**25 // (dimension * n_outputs))
        jacobian = torch.func.vmap(torch.func.jacrev(one_sample))
        total, largest = _zeros_float64(dimension, inputs.device), 0.0
        for chunk in inputs.split(chunk_size):
            try:
                rows = jacobian(chunk).reshape(-1, dimension)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, torch.jit.Error) as error:
                raise ValueError(f"{_ALONE} ({str(error).splitlines()[0]})") from error
            check_finite("the function's Jacobian", rows)
            largest = max(largest, _largest(rows))
            total += (rows.mT @ rows).to(total.device)
    return _in_range("AGOP", (total / len(inputs)).to(inputs), outputs=[largest, largest])


_ALONE = "the function must treat each sample by itself and draw no random numbers; call .eval() on a module"


def _checked_outputs(outputs: Tensor, inputs: Tensor) -> Tensor:
    check_floating("the function's output", outputs)
    if outputs.ndim not in (1, 2) or outputs.shape[0] != len(inputs) or outputs.numel() == 0:
        raise ValueError(f"the function maps shape {tuple(inputs.shape)} to {tuple(outputs.shape)}: expected (n, K)")
    return outputs


def _same_alone(function: Callable[[Tensor], Tensor], point: Tensor, output: Tensor) -> bool:
    """Whether a sample has this output also without others beside it; a failure is left to be reported later."""
    try:
        own = function(point)
    except (RuntimeError, ValueError, torch.jit.Error):
        return True
    # Products of a batch and of a row may be rounded differently: half of the digits are enough to tell mixing.
    tolerance = torch.finfo(output.dtype).eps ** 0.5
    return own.shape == output.shape and torch.allclose(own, output, rtol=tolerance, atol=tolerance * output.norm())


@contextmanager
def _left_as_found(function: Callable[..., object], device: torch.device) -> Iterator[None]:
    """Give back what calls of the function change: the random state, tensors in place, buffers of its modules."""
    modules = [module for each in _parts(function) if isinstance(each, nn.Module) for module in each.modules()]
    # Scripted modules have no such dictionary; what they write is seen by operation as everything is.
    buffers = [(module, dict(module._buffers)) for module in modules if isinstance(module._buffers, dict)]
    writes = _Writes()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), writes:
            yield
    finally:
        for module, before in buffers:
            # A buffer that was not changed in place but replaced; within torch.func, by one that is of no use outside.
            module._buffers.update(before)
        writes.undo()


def _parts(function: Callable[..., object]) -> Iterator[object]:
    """The function itself and the objects that it names: of a method, a partial, a closure."""
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield function
    if inspect.ismethod(function):
        yield function.__self__
        function = function.__func__
    if inspect.isfunction(function):
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # of a name that is not bound yet
                yield cell.cell_contents


class _Writes(TorchDispatchMode):
    """Keeps what tensors from outside hold before operations in this context write to them, until ``undo``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's __init__ has no annotations
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._inside: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = func._schema.arguments
        given = {each.name: value for each, value in zip(arguments, args, strict=False)} | (kwargs or {})
        for each in arguments:
            # The schemas of batch normalisation do not tell that it writes to running_mean and running_var.
            if (each.alias_info and each.alias_info.is_write) or each.name.startswith("running_"):
                self._keep(given.get(each.name))
        outputs = func(*args, **(kwargs or {}))
        old = {storage.data_ptr() for storage in _storages(given.values())}
        self._inside |= {storage.data_ptr() for storage in _storages(outputs)} - old
        return outputs

    def _keep(self, values: object) -> None:
        for storage in _storages(values):
            if storage.data_ptr() not in self._inside and storage.data_ptr() not in self._kept:
                self._kept[storage.data_ptr()] = storage, storage.clone()

    def undo(self) -> None:
        """Write the kept values back."""
        for storage, kept in self._kept.values():
            storage.copy_(kept)


def _storages(values: object) -> Iterator[torch.UntypedStorage]:
    """Of a tensor, or of the tensors in a nest of lists; a sparse tensor has none."""
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield values.untyped_storage()
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from _storages(value)


def matrix_correlation(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> float:
    """Pearson correlation of the entries of two matrices, in [−1, 1]; blind to scale and offset.

    Raises:
        ValueError: shapes differ, empty, not finite, or a matrix with all entries equal but for float64's rounding:
            it has no correlation.
        TypeError: not floating-point tensors.

    Example:
        >>> import torch
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> round(matrix_correlation(A, 5 - 2 * A), 6)
        -1.0
        >>> round(matrix_correlation(A, torch.tensor([[2.0, 1.0], [3.0, 4.0]])), 6)
        0.8
    """
    _check_numbers(a=a, b=b)
    if a.shape != b.shape or a.numel() == 0:
        raise ValueError(f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: they must agree, and not be empty")
    a, b = (to_float64(matrix).flatten() for matrix in (a, b))
    a, b = (matrix / matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny) for matrix in (a, b))
    sizes = a.norm(), b.norm()
    a, b = a - a.mean(), b - b.mean()
    if any(each.norm() <= _EQUAL * size for each, size in zip((a, b), sizes, strict=True)):
        raise ValueError("a matrix with all entries equal has no correlation with another")
    correlation: float = (a / a.norm() @ (b / b.norm())).item()
    return max(-1.0, min(1.0, correlation))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖_F / ‖reference‖_F, over all entries.

    Raises:
        ValueError: shapes differ, not finite, a reference of zeros, or a ratio that overflows.
        TypeError: not floating-point tensors.
    """
    _check_numbers(value=value, reference=reference)
    if value.shape != reference.shape:
        raise ValueError(f"value has shape {tuple(value.shape)}, reference {tuple(reference.shape)}: they must agree")
    value, reference = to_float64(value), to_float64(reference)
    if not reference.any():
        raise ValueError(f"the reference of shape {tuple(reference.shape)} is zero: nothing is relative to it")
    # Half of each, for the difference of two numbers may overflow where neither does.
    (error, error_unit), (size, unit) = _norm(value / 2 - reference / 2), _norm(reference)
    ratio = 2 * (error / size) * (error_unit / unit)
    if not math.isfinite(ratio):
        raise ValueError("the relative error overflows float64: the value is not of the reference's size at all")
    return ratio


def _norm(tensor: Tensor) -> tuple[float, float]:
    """A norm as a number and a power of two, whose product may over- or underflow where neither does."""
    unit = power_of_two(tensor)
    return (tensor / unit).norm().item(), unit


def power_of_two(tensor: Tensor) -> float:
    """The largest power of two that the largest magnitude reaches, 1 for zeros: the tensor over it keeps its digits."""
    largest = _largest(tensor)
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 1.0


class VirtualCovariance:
    """The virtual covariance shift of a layer, summed over the steps of an ordinary training run.

    Each step adds −η[(∂L/∂H)ᵀH + Hᵀ∂L/∂H], the first-order shift of the virtual update. By the Feature Learning
    Equation this is −η[Wᵀ∂L/∂W + (∂L/∂W)ᵀW], so it is read off the weight and its gradient just before the
    optimizer steps. No forward or backward hook is needed, and the sum is right for a layer inside a residual block,
    a layer used twice, accumulated or clipped gradients and mixed precision: whatever gradient the optimizer is about
    to use. What the weight does not know is the second-order term η²(∂L/∂H)ᵀ∂L/∂H; ``virtual_covariance_shift``
    has it, for a single step.

    η is the learning rate of the layer's parameter group at that step. Momentum, adaptive scaling and weight decay
    change the weight's step, not the virtual one: with heavy-ball momentum μ each gradient finally moves the weight by
    η/(1 − μ), and the sum is smaller by that factor.

    A step counts once, when it has been made: a ``step`` that calls ``super().step()`` is one, one that raises none.
    Steps may be compiled. Nothing is put on the layer, and after ``remove()`` nothing is left on the optimizer; the
    sum is kept. A copy or a pickle holds the sum alone and adds nothing more, and steps of a copy of the optimizer are
    not counted.

    Args:
        layer: an ``nn.Linear`` or ``nn.Conv2d``, used anywhere in a model; compiled, or wrapped for data parallelism,
            it is unwrapped.
        optimizer: the ``torch.optim.Optimizer`` that trains ``layer.weight``. Of an optimizer around another one (SAM,
            Lookahead), the inner one.

    Attributes:
        steps: how many steps have been added.

    Raises:
        TypeError: another kind of layer, a scripted one, or an optimizer that is none.
        ValueError: the optimizer does not hold the layer's weight, wraps the optimizer that does, or has no learning
            rate; a weight that a parametrization computes; ``step(closure)``, which computes the gradient too late to
            be read.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> virtual = VirtualCovariance(layer, optimizer)
        >>> layer(torch.ones(5, 3)).square().mean().backward()
        >>> optimizer.step()
        >>> virtual.shift.shape, virtual.steps
        (torch.Size([3, 3]), 1)
        >>> virtual.remove()
    """

    def __init__(self, layer: nn.Module, optimizer: Optimizer):
        layer = unwrapped(layer) if isinstance(layer, nn.Module) else layer
        check_layer(layer)
        self._weight = _own_weight(layer, "the layer")
        self._groups = getattr(layer, "groups", 1)
        check_optimizer(optimizer, [self._weight])
        if "lr" not in self._parameter_group(optimizer):
            raise ValueError(f"{type(optimizer).__name__} has no learning rate, 'lr', in the layer's parameter group")
        matrix = weight_matrix(self._weight.detach(), self._groups)
        shape = (*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-1])
        # Half precision would lose the sum of thousands of small steps.
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        self._sum = torch.zeros(shape, dtype=dtype, device=matrix.device)
        self.steps = 0
        self._pending: tuple[Tensor, Tensor, float] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_groups": self._groups, "_sum": self._sum, "steps": self.steps, "_handles": []}

    @property
    def shift(self) -> Float[Tensor, "*groups d d"]:
        """The sum so far, (d, d), or (groups, d, d) for a grouped convolution; a new tensor at each reading."""
        return -(self._sum + self._sum.mT)

    def reset(self) -> None:
        """Start again from zero."""
        self._sum = torch.zeros_like(self._sum)
        self.steps = 0

    def remove(self) -> None:
        """Detach from the optimizer; ``shift`` stays readable."""
        for handle in self._handles:
            handle.remove()

    def _parameter_group(self, optimizer: Optimizer) -> dict[str, Any]:
        for group in optimizer.param_groups:
            if any(parameter is self._weight for parameter in group["params"]):
                return group
        raise ValueError("the optimizer does not train this layer: its weight is in none of the parameter groups")

    @_disable_dynamo  # in a compiled step too, this is no part of what is compiled
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_nested_step(optimizer):
            return
        self._pending = None
        if has_closure(args, kwargs):
            raise ValueError(
                "step(closure) computes the gradient inside the step, where it cannot be read; call "
                "loss.backward() first and then step() without a closure"
            )
        gradient = self._weight.grad
        if gradient is None:  # as the optimizer does: a weight without a gradient is not stepped
            return
        # A fused optimizer under GradScaler gets its gradients still scaled, and skips the step itself on overflow.
        overflow, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if overflow is not None and overflow:
            return
        if scale is not None:
            gradient = gradient / scale.to(gradient.device)
        group = self._parameter_group(optimizer)
        rate = group["lr"].item() if isinstance(group["lr"], Tensor) else float(group["lr"])
        # Copies, for the step changes the weight and may change the gradient; and added only after it, if it is made.
        self._pending = self._weight.clone(), gradient.clone(), -rate if group.get("maximize") else rate

    @_disable_dynamo
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._pending is None or is_nested_step(optimizer):
            return
        weight, gradient, rate = self._pending
        self._pending = None
        # Where the model has moved to since, and in no less than its precision.
        self._sum = self._sum.to(gradient.device, torch.promote_types(self._sum.dtype, weight.dtype))
        weight, gradient = (weight_matrix(matrix, self._groups).to(self._sum.dtype) for matrix in (weight, gradient))
        # One product a step: the symmetric half is taken when the sum is read.
        if self._groups == 1:
            self._sum.addmm_(weight.mT, gradient, alpha=rate)
        else:
            self._sum.baddbmm_(weight.mT, gradient, alpha=rate)
        self.steps += 1


# ---- checks ----


def _own_weight(layer: nn.Module, name: str) -> nn.Parameter:
    """The weight, if it is a parameter of the layer that holds numbers: one that autograd and the optimizer know."""
    weight = layer._parameters.get("weight")
    if weight is None:
        if parametrize.is_parametrized(layer, "weight"):
            parametrizations = layer.get_submodule("parametrizations.weight")._modules.values()
            how = f"by {', '.join(type(each).__name__ for each in parametrizations)}"
        else:
            others = [each for each in layer._parameters if each.startswith("weight")]
            how = f"from {', '.join(others)}" if others else "elsewhere"
        raise ValueError(
            f"the weight of {name} is computed {how}: it has no gradient and the optimizer does not hold it; remove "
            "the parametrization (torch.nn.utils.parametrize.remove_parametrizations) or choose another layer"
        )
    if is_lazy(weight):
        raise ValueError(f"{name} is lazy and has no weight yet; run the model once on a batch first")
    _check_numbers(**{f"the weight of {name}": weight})
    return weight


def _matrix(weight: Tensor, groups: int) -> Tensor:
    if not isinstance(groups, int):
        raise TypeError(f"groups: got a {type(groups).__name__}; pass an integer, the convolution's groups")
    return weight_matrix(weight, groups)


def _check_numbers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        if tensor.itemsize < 2:
            raise TypeError(f"{name}: got a {tensor.dtype} tensor, which PyTorch cannot multiply; pass {name}.float()")
        check_finite(name, tensor)
    check_one_device(tensors)


def _learning_rate(lr: float) -> float:
    if not isinstance(lr, Real):
        raise TypeError(f"lr is a {type(lr).__name__}; pass a number")
    try:
        rate = float(lr)
    except OverflowError:  # an integer of over 300 digits
        rate = math.inf
    if not math.isfinite(rate):
        raise ValueError(f"lr is {rate}; pass a finite number")
    return rate


def _check_feature_gradient(features: Tensor, gradient: Tensor, lr: float) -> float:
    """The learning rate, if all three are as they should be."""
    _check_numbers(features=features, gradient=gradient)
    if features.shape != gradient.shape or features.ndim < 2:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, gradient {tuple(gradient.shape)}: both must be (n, d)"
        )
    return _learning_rate(lr)


def _in_range(what: str, result: Tensor, **factors: list[Tensor | float]) -> Tensor:
    """The result, a sum of products of the factors' entries, unless products left the range of its dtype.

    A result of zeros is an underflow if even the product of each factor's largest entry is below all numbers of the
    dtype; otherwise it is taken for an exact zero.
    """
    dtype, names = str(result.dtype).removeprefix("torch."), " and ".join(factors).replace("_", " ")
    size = _largest(result)
    if not math.isfinite(size):
        raise ValueError(f"{what} overflows {dtype}; scale {names or 'the learning rate'} down, or pass a wider dtype")
    if factors and not size:
        sizes = [_log_size(factor) for group in factors.values() for factor in group]
        smallest = math.log2(torch.finfo(result.dtype).tiny) + math.log2(torch.finfo(result.dtype).eps)
        if -math.inf not in sizes and sum(sizes) < smallest:
            raise ValueError(f"{what} underflows {dtype} to zero; scale {names} up, or pass a wider dtype")
    return result


def _largest(tensor: Tensor) -> float:
    """The largest magnitude, 0 for none; not a number or infinite if an entry is."""
    return max(abs(bound.item()) for bound in tensor.detach().aminmax()) if tensor.numel() else 0.0


def _log_size(factor: Tensor | float) -> float:
    """log₂ of the largest magnitude, −∞ for none."""
    largest = factor if isinstance(factor, float) else _largest(factor)
    return math.log2(largest) if largest else -math.inf


def _zeros_float64(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
