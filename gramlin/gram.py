"""The weight Gram matrix and its rivals: chapter 1, the Feature Learning Equation.

Rows are samples and weights have PyTorch's layout: H (n, d), W (k, d), Z = HWᵀ + b (n, k). L is the mean loss,
Δ = ∂L/∂Z, and ∂L/∂H = ΔW is the gradient of the features through this layer only. All of it is exact; nothing is
sampled, and no matrix over pairs of samples is ever formed.
"""

import math
from collections.abc import Callable
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramlin.checks import check_finite, check_floating, check_one_device
from gramlin.hooks import LayerRecord, check_layer, weight_matrix
from gramlin.moments import to_float64

# A matrix whose entries differ by less than this, relative to its norm, has them equal but for float64's rounding.
_EQUAL = 1e-14


def weight_gram(weight: Float[Tensor, "k *d"], *, groups: int = 1) -> Float[Tensor, "*groups d d"]:
    """G = WᵀW, the inner products of a weight's columns (``eq:fle-gram``).

    Args:
        weight: (k, d), or a convolution's (out, in/groups, kh, kw), where d = in/groups·kh·kw.
        groups: the convolution's ``groups``; with more than one, a Gram matrix a group.

    Raises:
        ValueError: fewer than two axes, or rows that do not split into ``groups``; not finite.
        TypeError: not a floating-point tensor.

    Example:
        >>> import torch
        >>> weight_gram(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """
    _check_numbers(weight=weight)
    matrix = weight_matrix(weight, groups)
    return matrix.mT @ matrix


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
    step = weight_matrix(after - before, groups)
    cross = weight_matrix(before, groups).mT @ step
    return cross + cross.mT + step.mT @ step


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
        ValueError: the weight has no gradient, or the layer was not run inside the block.

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
    weight = record.layer.weight
    if weight.grad is None:
        raise ValueError(f"layer {record.name!r} has no weight.grad: call loss.backward() with the weight unfrozen")
    groups = getattr(record.layer, "groups", 1)
    left = weight_matrix(weight.detach(), groups).mT @ weight_matrix(weight.grad, groups)
    gradients = record.feature_gradients
    return left, gradients.mT @ record.features.to(gradients.dtype)


def virtual_update(
    features: Float[Tensor, "*groups n d"], gradient: Float[Tensor, "*groups n d"], lr: float
) -> Float[Tensor, "*groups n d"]:
    """H̃ = H − η ∂L/∂H, the step in feature space that no optimizer takes (``eq:fle-virtual-update``).

    Args:
        features: H.
        gradient: ∂L/∂H through the layer, of the same shape; L is the mean loss over the n rows.
        lr: the learning rate η.

    Raises:
        ValueError: shapes differ, fewer than two axes, not finite.
        TypeError: not floating-point tensors, or an lr that is not a number.

    Example:
        >>> import torch
        >>> H, gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> virtual_update(H, gradient, lr=0.5).tolist()
        [[0.0, 2.0], [3.0, 2.0]]
    """
    _check_feature_gradient(features, gradient, lr)
    return features - lr * gradient


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
    _check_feature_gradient(features, gradient, lr)
    cross = gradient.mT @ features
    return -lr * (cross + cross.mT) + lr**2 * (gradient.mT @ gradient)


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
        ValueError: axes that do not agree; not finite.
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
    _check_learning_rate(lr)
    expected = (*features.shape[:-2], deltas.shape[-1], features.shape[-1])
    if features.shape[:-1] != deltas.shape[:-1] or tuple(weight.shape) != expected:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, deltas {tuple(deltas.shape)}, weight "
            f"{tuple(weight.shape)}: expected (n, d), (n, k) and (k, d)"
        )
    weight_gradient, feature_gradient = deltas.mT @ features, deltas @ weight
    return lr**2 * (weight_gradient.mT @ weight_gradient - feature_gradient.mT @ feature_gradient)


def agop(
    function: Callable[[Tensor], Tensor], inputs: Float[Tensor, "n *shape"], *, chunk_size: int | None = None
) -> Float[Tensor, "d d"]:
    """The average gradient outer product (1/n) Σᵢ JᵢᵀJᵢ, Jᵢ = ∂f/∂hᵢ (K, d) (``eq:fle-agop``).

    Exact, by ``torch.func``: Jacobians of all K outputs, a chunk of samples at a time.

    Args:
        function: maps a batch ``(n, *shape)`` to outputs (n, K) or (n,), each sample by itself; a module in ``eval``
            mode, say.
        inputs: the points, ``(n, *shape)``; d is the product of ``shape``.
        chunk_size: samples a chunk; by default as many as keep the Jacobians of a chunk under 2²⁵ numbers.

    Raises:
        ValueError: no samples, not finite, an output of another shape, or a function that mixes samples (seen on the
            first two) or draws random numbers (batch normalisation, dropout in training mode).

    Source: Radhakrishnan, Beaglehole, Pandit and Belkin (2024), the Neural Feature Ansatz.

    Example:
        >>> import torch
        >>> H, W = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> agop(lambda h: h @ W.mT, H).tolist() == weight_gram(W).tolist()
        True
        >>> agop(lambda h: h.square().sum(dim=1), H).tolist()
        [[4.0, 4.0], [4.0, 8.0]]
    """
    _check_numbers(inputs=inputs)
    if inputs.ndim < 2 or inputs.shape[0] == 0:
        raise ValueError(f"inputs have shape {tuple(inputs.shape)}: expected (n, d) with at least one sample")

    def one_sample(point: Tensor) -> Tensor:
        return function(point.unsqueeze(0)).reshape(-1)

    inputs = inputs.detach()
    with torch.no_grad():
        outputs = function(inputs[:2])
        if outputs.ndim not in (1, 2) or outputs.shape[0] != len(inputs[:2]):
            raise ValueError(
                f"the function maps shape {tuple(inputs[:2].shape)} to {tuple(outputs.shape)}: expected (n, K)"
            )
        alone = "the function must treat each sample by itself and draw no random numbers; call .eval() on a module"
        if len(outputs) == 2 and not _same_alone(one_sample, inputs[1], outputs[1].reshape(-1)):
            raise ValueError(f"{alone} (a sample's output depends on the sample before it)")
        dimension, n_outputs = inputs[0].numel(), outputs[0].numel()
        chunk_size = chunk_size or max(1, 2**25 // (dimension * n_outputs))
        jacobian = torch.func.vmap(torch.func.jacrev(one_sample))
        total = _zeros_float64(dimension, inputs.device)
        for chunk in inputs.split(chunk_size):
            try:
                rows = jacobian(chunk).reshape(-1, dimension)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ValueError(f"{alone} ({str(error).splitlines()[0]})") from error
            total += (rows.mT @ rows).to(total.device)
    return (total / len(inputs)).to(inputs)


def _same_alone(function: Callable[[Tensor], Tensor], point: Tensor, output: Tensor) -> bool:
    """Whether a sample has this output also without others beside it; a failure is left to be reported later."""
    try:
        own = function(point)
    except (RuntimeError, ValueError):
        return True
    # Products of a batch and of a row may be rounded differently: half of the digits are enough to tell mixing.
    tolerance = torch.finfo(output.dtype).eps ** 0.5
    return own.shape == output.shape and torch.allclose(own, output, rtol=tolerance, atol=tolerance * output.norm())


def matrix_correlation(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> float:
    """Pearson correlation of the entries of two matrices, in [−1, 1]; blind to scale and offset.

    Raises:
        ValueError: shapes differ, not finite, or a matrix with all entries equal but for float64's rounding: it has no
            correlation.

    Example:
        >>> import torch
        >>> A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> round(matrix_correlation(A, 5 - 2 * A), 6)
        -1.0
        >>> round(matrix_correlation(A, torch.tensor([[2.0, 1.0], [3.0, 4.0]])), 6)
        0.8
    """
    _check_numbers(a=a, b=b)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: they must agree")
    a, b = (to_float64(matrix).flatten() for matrix in (a, b))
    a, b = (matrix / matrix.abs().max().clamp(min=torch.finfo(matrix.dtype).tiny) for matrix in (a, b))
    sizes = a.norm(), b.norm()
    a, b = a - a.mean(), b - b.mean()
    if any(each.norm() <= _EQUAL * size for each, size in zip((a, b), sizes, strict=True)):
        raise ValueError("a matrix with all entries equal has no correlation with another")
    return max(-1.0, min(1.0, (a / a.norm() @ (b / b.norm())).item()))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖_F / ‖reference‖_F, over all entries; ``ValueError`` for a reference of zeros."""
    value, reference = to_float64(value), to_float64(reference)
    if not reference.any():
        raise ValueError(f"the reference of shape {tuple(reference.shape)} is zero: nothing is relative to it")
    return ((value - reference).norm() / reference.norm()).item()


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

    Args:
        layer: an ``nn.Linear`` or ``nn.Conv2d``, used anywhere in a model.
        optimizer: the ``torch.optim.Optimizer`` that trains ``layer.weight``.

    Attributes:
        steps: how many steps have been added.

    Raises:
        TypeError: another kind of layer.
        ValueError: the optimizer does not hold the layer's weight; ``step(closure)``, which computes the gradient
            too late to be read.

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

    def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer):
        check_layer(layer)
        self._weight = layer.weight
        self._groups = getattr(layer, "groups", 1)
        self._parameter_group(optimizer)
        self.reset()
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    @property
    def shift(self) -> Float[Tensor, "*groups d d"]:
        """The sum so far, (d, d), or (groups, d, d) for a grouped convolution; a new tensor at each reading."""
        return -(self._sum + self._sum.mT)

    def reset(self) -> None:
        """Start again from zero."""
        matrix = weight_matrix(self._weight.detach(), self._groups)
        shape = (*matrix.shape[:-2], matrix.shape[-1], matrix.shape[-1])
        # Half precision would lose the sum of thousands of small steps.
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        self._sum = torch.zeros(shape, dtype=dtype, device=matrix.device)
        self.steps = 0

    def remove(self) -> None:
        """Detach from the optimizer; ``shift`` stays readable."""
        self._handle.remove()

    def _parameter_group(self, optimizer: torch.optim.Optimizer) -> dict:
        for group in optimizer.param_groups:
            if any(parameter is self._weight for parameter in group["params"]):
                return group
        raise ValueError("the optimizer does not train this layer: its weight is in none of the parameter groups")

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise ValueError(
                "step(closure) computes the gradient inside the step, where it cannot be read; call "
                "loss.backward() first and then step() without a closure"
            )
        gradient = self._weight.grad
        if gradient is None:  # as the optimizer does: a weight without a gradient is not stepped
            return
        # A fused optimizer under GradScaler gets its gradients still scaled, and skips the step itself on overflow.
        if getattr(optimizer, "found_inf", None) is not None and optimizer.found_inf:
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            gradient = gradient / optimizer.grad_scale.to(gradient.device)
        self._sum = self._sum.to(gradient.device)  # where the model has moved since
        group = self._parameter_group(optimizer)
        rate = float(group["lr"]) * (-1 if group.get("maximize") else 1)
        weight, gradient = (
            weight_matrix(matrix.detach(), self._groups).to(self._sum.dtype) for matrix in (self._weight, gradient)
        )
        # One product a step: the symmetric half is taken when the sum is read.
        if self._groups == 1:
            self._sum.addmm_(weight.mT, gradient, alpha=rate)
        else:
            self._sum.baddbmm_(weight.mT, gradient, alpha=rate)
        self.steps += 1


def _check_numbers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        check_finite(name, tensor)
    check_one_device(tensors)


def _check_learning_rate(lr: float) -> None:
    if not isinstance(lr, Real):
        raise TypeError(f"lr is a {type(lr).__name__}; pass a number")
    if not math.isfinite(lr):
        raise ValueError(f"lr is {lr}; pass a finite number")


def _check_feature_gradient(features: Tensor, gradient: Tensor, lr: float) -> None:
    _check_numbers(features=features, gradient=gradient)
    _check_learning_rate(lr)
    if features.shape != gradient.shape or features.ndim < 2:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, gradient {tuple(gradient.shape)}: both must be (n, d)"
        )


def _zeros_float64(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
