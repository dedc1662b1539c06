r"""Optimizer steps that keep their Gram shift and drop their rotation ("whitening").

After a plain step W → W⁺ the weight is replaced by R* W⁺, where R* is the orthogonal matrix that brings W⁺ nearest
to W. The Gram matrix W⁺ᵀW⁺ stays what the plain step made it; the left rotation that came with it is taken out.

Why R* is a polar factor (book: ``eq:gw-procrustes``): for orthogonal R, ‖R W⁺ − W‖² = ‖W⁺‖² + ‖W‖² − 2 tr(Rᵀ W W⁺ᵀ).
With W W⁺ᵀ = UΣVᵀ the trace is Σᵢ σᵢ (UᵀRV)ᵢᵢ, and no entry of the orthogonal UᵀRV exceeds 1: the largest trace is
Σᵢ σᵢ, reached by R = UVᵀ.

Two things are asked of R, and they are not the same. That it is *orthogonal* keeps the Gram, and is held to rounding
here, always. That it is *nearest* is what makes it the rotation of the step and of nothing else; it is the harder one
in float32, because M = W W⁺ᵀ is a large symmetric matrix plus a small skew one, and only the skew part turns. A
step of 10⁻⁵ ‖W‖ has a skew part that the float32 rounding of M drowns. So M is formed in float64, whatever the
weights are stored in, and R enters as W⁺ + (R − I) W⁺: the one rounding left is that of the stored weight. (For float32
weights on a CPU there is a faster way, whose M is I plus a small skew matrix that float32 resolves by itself.)
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gramlin.checks import check_finite, check_floating, check_tensor
from gramlin.gram import power_of_two
from gramlin.stepping import check_optimizer, has_closure, is_nested_step

__all__ = ["WhiteningHandle", "nearest_with_same_gram", "newton_schulz_polar", "polar_factor", "whiten"]

# Scaled Newton–Schulz, on singular values in [LOWEST, 1]. A scale above SCALE_CAP (the limit is √3) would send
# values near 1 to almost 0, and rounding would then turn their directions.
_LOWEST = 1e-10
_SCALE_CAP = 1.69

# Bounds of the shortcut for small rotations, ``_small_rotation``, whose measured errors its docstring states.
_MIN_ROWS = 64  # below, a float64 SVD takes less time than the shortcut
_MAX_SKEW = 0.05  # ‖M − Mᵀ‖/‖M‖ above which it would hardly ever be accepted: do not begin
_RESOLVED = 3e-5  # eigenvalues of M below this share of the largest drown in float32 (some 100 × its rounding)
_MAX_UNRESOLVED = 1 / 20  # share of such eigenvalues; its square is about the share of the step that is not turned
_MAX_SQUARE = 3e-2  # ‖Ω²‖ up to which the series is orthogonal to 1e-8, also with all of Ω in one plane

# Added to M's diagonal, relative to ‖M‖: where M says nothing about R (a rank-deficient W), R is nearest to identity.
_TIE_BREAK = 1e-12


def polar_factor(M: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """UVᵀ of M = UΣVᵀ: the matrix with orthonormal rows (or columns) nearest to M.

    Book: ``eq:gw-polar``. R Rᵀ = I if m ≤ n and RᵀR = I if m ≥ n, for any M: ill-conditioned, rank-deficient or zero.
    Where M has singular values of zero R is not unique, and is completed to orthonormality, as an SVD completes it.

    Computed in float64 for every input. On a CPU: an SVD, for this size the fastest method that is exact for any M
    (QDWH and Newton's iteration need more, by the time of their factorizations). On CUDA: matrix products only, by
    scaled Newton–Schulz to convergence (Chen and Chow, 2014), with the SVD behind it for what does not converge.

    Args:
        M: real floating-point, shape (..., m, n), no empty axis, finite.

    Returns:
        Tensor of M's shape and device, and of M's dtype, but float32 for float16 and bfloat16, in which no matrix
        is orthogonal to better than 1e-3.

    Raises:
        TypeError: M is integer, complex, of 8 bits, or no dense tensor.
        ValueError: M has fewer than two axes, an empty axis, or NaN or infinite entries.

    Example:
        >>> import torch
        >>> M = torch.tensor([[3.0, -4.0], [4.0, 3.0]], dtype=torch.float64)
        >>> polar_factor(M).round(decimals=6).tolist()
        [[0.6, -0.8], [0.8, 0.6]]
    """
    _check_matrices(M)
    dtype = M.dtype if M.dtype in (torch.float32, torch.float64) else torch.float32
    if M.device.type == "cuda":
        R = _polar_by_products(M.detach().double())
        if R is not None:
            return R.to(dtype)
    check_finite("M", M)
    # Devices other than CUDA may lack float64 or the SVD: the CPU has both.
    work = M.detach() if M.device.type == "cuda" else M.detach().cpu()
    U, _, Vh = torch.linalg.svd(_over_largest(work.double()), full_matrices=False)
    exact: Tensor = U @ Vh
    return exact.to(device=M.device, dtype=dtype)


def newton_schulz_polar(M: Float[Tensor, "*batch m n"], steps: int = 10) -> Float[Tensor, "*batch m n"]:
    """The usual approximate polar factor: a fixed number of quintic Newton–Schulz steps, in M's own precision.

    X ← X (15 I − 10 XᵀX + 3 (XᵀX)²)/8 from X₀ = M/‖M‖_F. Book: ``eq:gw-newton-schulz``. It stands here to be compared
    with ``polar_factor``. A step multiplies a small singular value by 15/8, so ten reach 1 only from about 1e-2 ‖M‖_F
    up: on an ill-conditioned M the result is not orthogonal, and a zero M gives zero.

    Args:
        M: floating-point, shape (..., m, n), finite.
        steps: number of steps.

    Returns:
        Tensor of M's shape, dtype and device.

    Raises:
        TypeError, ValueError: as in ``polar_factor``; steps that are no number, or negative.

    Example:
        >>> import torch
        >>> M = torch.tensor([[3.0, -4.0], [4.0, 3.0]], dtype=torch.float64)
        >>> newton_schulz_polar(M).round(decimals=6).tolist()
        [[0.6, -0.8], [0.8, 0.6]]
        >>> newton_schulz_polar(torch.tensor([1.0, 1e-6]).double().diag()).diagonal().round(decimals=4).tolist()
        [1.0, 0.0005]
    """
    _check_matrices(M)
    check_finite("M", M)
    if not isinstance(steps, int):
        raise TypeError(f"steps: got a {type(steps).__name__}; pass a number of steps")
    if steps < 0:
        raise ValueError(f"steps is {steps}; pass 0 or more")
    X: Tensor = _over_largest(M)
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(torch.finfo(M.dtype).tiny)
    # On the smaller side: X p(XᵀX) = p(XXᵀ) X.
    wide = M.shape[-2] < M.shape[-1]
    X = X.mT if wide else X
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    for _ in range(steps):
        A = X.mT @ X
        X = X @ (15 * eye - 10 * A + 3 * A @ A) / 8
    return X.mT if wide else X


def nearest_with_same_gram(*, before: Float[Tensor, "k d"], after: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
    """R* W⁺: of all weights with the Gram matrix of ``after``, the one nearest to ``before``.

    Book: ``eq:gw-procrustes``. R* is the ``polar_factor`` of ``before @ after.T`` computed in float64. Three things
    are done to it on the way:

    - Small steps of float32 weights (64 ≤ k ≤ d) on a CPU take a shortcut, ``_small_rotation``, in half the time of the
      SVD. It is orthogonal to 1e-8, so the Gram is as exact, and it gives away up to 1e-3 of the distance to ``before``
      (measured; 1e-7 where W's condition number is below 100), by not turning, among themselves, the few directions
      of WWᵀ that drown in float32.
    - Where R* is not unique (W rank-deficient or zero) it is the solution nearest to the identity: what ``before`` does
      not determine is left as the step made it.
    - More than twice as many rows as columns (embeddings) go through the span of both weights, 2d × 2d.

    Args:
        before: weight before the step, finite.
        after: weight after the step, finite, of the same shape, precision and device.

    Returns:
        The rotated weight in ``after``'s dtype. Its Gram error is that of rounding it to this dtype.

    Raises:
        ValueError: shapes, dtypes or devices differ; weights that are not real floating-point matrices, are empty, or
            hold NaN or infinite entries; a rotated weight that overflows their dtype.
        TypeError: not dense tensors.

    Example:
        >>> import torch
        >>> before = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
        >>> after = torch.tensor([[-2.0, -2.0], [4.0, 2.0]])  # 2 · before, turned by 90°
        >>> nearest_with_same_gram(before=before, after=after).round(decimals=4).tolist()
        [[4.0, 2.0], [2.0, 2.0]]
    """
    _check_pair(before, after)
    if before.device.type not in ("cpu", "cuda"):  # may lack float64
        return nearest_with_same_gram(before=before.cpu(), after=after.cpu()).to(after.device)
    k, d = before.shape
    small = before.dtype == torch.float32 and before.device.type == "cpu" and _MIN_ROWS <= k <= d
    if small and _float32_products_are_full():
        turn = _small_rotation(before @ after.mT, before @ (after - before).mT)
        if turn is not None:
            return after + turn @ after
    check_finite("the weight before the step", before)
    check_finite("the weight after the step", after)
    # R has no scale: entries of 1e200 or 1e-200 are brought near 1 for it.
    unit = power_of_two(after)
    B, A = before.double() / power_of_two(before), after.double() / unit
    span = None
    if k > 2 * d:
        span = torch.linalg.qr(torch.cat([B, A], dim=1)).Q
        B, A = span.mT @ B, span.mT @ A
    M = B @ A.mT
    size = M.norm()
    M.diagonal().add_(torch.where(size > 0, _TIE_BREAK * size, 1.0))
    R = polar_factor(M)
    turned = (R - torch.eye(len(R), dtype=R.dtype, device=R.device)) @ A
    rotated = (after.double() + unit * (turned if span is None else span @ turned)).to(after.dtype)
    check_finite("the rotated weight, which overflows", rotated)
    return rotated


class WhiteningHandle:
    """What ``whiten`` returns: ``remove()`` detaches it, and the optimizer steps plainly again."""

    def __init__(self, optimizer: Optimizer, whitening: "_Whitening"):
        self._optimizer, self._whitening = optimizer, whitening

    def remove(self) -> None:
        """Detach from the optimizer. A second call does nothing."""
        _detach(self._optimizer, self._whitening)


def whiten(
    optimizer: Optimizer,
    params: Iterable[Tensor] | None = None,
    *,
    keep: Literal["gram", "rotation"] = "gram",
    solver: Callable[[Tensor], Tensor] = polar_factor,
) -> WhiteningHandle:
    """Make each step of ``optimizer`` keep its Gram shift and nothing else: W⁺ becomes R* W⁺.

    Book: ``eq:gw-procrustes``. Attaches with torch's own step hooks, so schedulers, closures, gradient scaling,
    clipping, ``foreach``, ``fused`` and state_dict work as before. Nothing is remembered from one step to the next:
    after loading a state_dict, attach again and training goes on bit for bit. A copy or a pickle of the optimizer goes
    on whitening its own parameters; a new ``whiten`` on it takes the place of what it brought along. A step is a whole
    call of ``optimizer.step``, compiled or not, however often a closure is evaluated or ``super().step()`` called
    within it. A weight that the step leaves as it was (skipped, no gradient) is not touched. A weight of more than two
    axes is the matrix of its first axis against all others, (out, in·kh·kw) for a convolution without groups; a
    transposed or grouped convolution is another matrix: leave it out through ``params``.

    *Biases are left alone.* Turning b by the R of W would keep the Gram of [W b] as well, the matrix that belongs to
    the features (H, 1). But (FLE) holds for WᵀW by itself, bias or not. And to first order W's whitened step is −η
    times the projection of ∂L/∂W off the rotations {ΩW}, so it still descends, while R b would add Ωb to the bias: of
    the same order in η, unknown to the bias's gradient, and able to raise the loss. (Taking R from [W b] would
    descend too, but W would no longer be nearest.)

    *Momentum buffers* are not turned either: R* W⁺ is W⁺ brought back to the output coordinates of W, and the
    gradients in the buffer are in those.

    *What is not finite stops the step.* A gradient with NaN or infinite entries, of any parameter of the optimizer, is
    an error before anything has moved. What only the step brings about (a gradient from a closure, an overflow) is an
    error after it: all parameters are put back to where they were, but the optimizer's state (momentum buffers, step
    counts) is what the step made it. An optimizer that skips such steps itself, a fused one under a gradient scaler,
    goes on doing so.

    R* W⁺ Wᵀ is positive semi-definite, so det W keeps its sign: such steps do not take a square W through a singular
    one (up to what the shortcut of ``nearest_with_same_gram`` does not resolve).

    Args:
        optimizer: any ``torch.optim.Optimizer``. Of one around another optimizer (SAM, Lookahead), the inner one, whose
            steps are then whitened.
        params: the parameters to whiten, each of at least two axes and in the optimizer. Default: at each step, all of
            the optimizer's that have at least two axes and require a gradient.
        keep: "gram", or "rotation" for the other half of the step: R*ᵀ W, which turns W as the step turned it and
            leaves the Gram matrix WᵀW what it was. (By the same theorem with W and W⁺ exchanged, it is the weight with
            the old Gram matrix that is nearest to W⁺.)
        solver: from M = W W⁺ᵀ (k, k), in the weight's dtype (at least float32), to R. The default is computed by
            ``nearest_with_same_gram``; any other is applied plainly, as R @ W⁺, so that approximate solvers such as
            ``newton_schulz_polar`` can be compared.

    Returns:
        A handle with ``remove()``.

    Raises:
        TypeError: no optimizer, no parameters, a solver that cannot be called; a parameter is complex, or (at the step)
            has a sparse gradient.
        ValueError: ``keep`` is neither of the two; ``params`` is empty; a given parameter is not in the optimizer, or
            has fewer than two axes or no values yet; a parameter is whitened already; an optimizer around another one,
            or a differentiable one.
        FloatingPointError: at the step, a gradient or a weight with NaN or infinite entries, named as the optimizer
            knows it: it has names if it was made with ``model.named_parameters()``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = whiten(optimizer)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> plain = (model.weight - 0.1 * model.weight.grad).detach()
        >>> optimizer.step()
        >>> torch.allclose(model.weight.mT @ model.weight, plain.mT @ plain, atol=1e-6)
        True
        >>> handle.remove()
    """
    if keep not in ("gram", "rotation"):
        raise ValueError(f"keep is {keep!r}; pass 'gram' or 'rotation'")
    if not callable(solver):
        raise TypeError(f"solver: got a {type(solver).__name__}; pass a function from W W⁺ᵀ to R, e.g. polar_factor")
    check_optimizer(optimizer, (p for _, p in _named(optimizer)) if isinstance(optimizer, Optimizer) else ())
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("the optimizer is differentiable, and the rotation is not; pass differentiable=False to it")
    whitening = _Whitening(_chosen(params, optimizer), keep, solver)
    for name, p in whitening.targets(optimizer):  # complain now of what is wrong now
        check_floating(name, p)
        _check_wide(name, p)
        check_finite(name, p)
    _make_room(optimizer, whitening)
    optimizer.register_step_pre_hook(whitening.before_step)
    optimizer.register_step_post_hook(whitening.after_step)
    # torch leaves hooks out of copies and pickles, which would then make plain steps without a word.
    state = functools.partial(_state_with_whitening, optimizer)
    optimizer.__getstate__ = state  # type: ignore[method-assign]  # of this optimizer, not of its class
    return WhiteningHandle(optimizer, whitening)


class _Whitening:
    """The hooks of one call of ``whiten``. It holds no optimizer, so a copy can belong to another one."""

    def __init__(self, chosen: list[Tensor] | None, keep: str, solver: Callable[[Tensor], Tensor]):
        self.chosen, self.keep, self.solver = chosen, keep, solver
        self.copied = False
        self._before: list[tuple[str, Tensor, Tensor, bool]] = []  # name, parameter, old values, whether to whiten it

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"copied": True, "_before": []}

    def within_reach(self, optimizer: Optimizer) -> dict[Tensor, str]:
        """The parameters to whiten, frozen ones too, and what to call them; a tied weight is one."""
        wanted = None if self.chosen is None else set(self.chosen)
        named = {p: name for name, p in _named(optimizer) if not is_lazy(p) and p.ndim >= 2}
        return {p: name for p, name in named.items() if wanted is None or p in wanted}

    def targets(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """The parameters to whiten at this step, by name."""
        found = [(name, p) for p, name in self.within_reach(optimizer).items() if p.requires_grad]
        for name, p in found:
            if p.is_complex():
                raise TypeError(f"{name}, of shape {tuple(p.shape)} is {p.dtype}: only real weights can be whitened")
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"{name}, of shape {tuple(p.shape)} has a sparse gradient, and a rotation changes every row: "
                    "leave it out through params, or use a dense gradient"
                )
        return found

    @_disable_dynamo  # in a compiled step too, this is no part of what is compiled
    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the parameters are, if the step may be made."""
        if is_nested_step(optimizer):
            return
        self._before = []
        whitened = {p for _, p in self.targets(optimizer)}
        stepped = {p: name for name, p in _named(optimizer) if p.grad is not None}
        # A closure has the gradients yet to come; under GradScaler, a fused optimizer itself skips what is not finite.
        if not has_closure(args, kwargs) and getattr(optimizer, "found_inf", None) is None:
            gradients = [(f"the gradient of {name}", p.grad) for p, name in stepped.items() if p.grad is not None]
            _check_all_finite(gradients)
        named = {p: name for name, p in _named(optimizer) if p.requires_grad and not is_lazy(p)} | stepped
        self._before = [(name, p, p.clone(), p in whitened) for p, name in named.items()]

    @_disable_dynamo
    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Turn the weights that the step changed, or put all back where that cannot be done."""
        if is_nested_step(optimizer):
            return
        before, self._before = self._before, []
        try:
            changed = [each for each in before if each[1].numel() and not torch.equal(each[1], each[2])]
            _check_all_finite([(f"{name} after the step", p) for name, p, _, _ in changed])
            for name, p, old, whitened in changed:
                if whitened:
                    p.copy_(self._rotated(name, old.flatten(1), p.flatten(1)).view(p.shape))
        except BaseException:
            for _, p, old, _ in before:
                p.copy_(old)
            raise

    def _rotated(self, name: str, target: Tensor, kept: Tensor) -> Tensor:
        """The weight ``kept`` turned until it is nearest to ``target``."""
        if self.keep == "rotation":
            target, kept = kept, target
        try:
            if self.solver is polar_factor:
                return nearest_with_same_gram(before=target, after=kept)
            dtype = torch.promote_types(kept.dtype, torch.float32)
            target, kept = target.to(dtype), kept.to(dtype)
            M = target @ kept.mT
            R = self.solver(M)
            check_tensor("the solver's R", R)
            if R.shape != M.shape:
                raise ValueError(f"the solver's R has shape {tuple(R.shape)}; it must be {tuple(M.shape)}, as W W⁺ᵀ is")
            rotated = R @ kept
            check_finite("the rotated weight", rotated)
            return rotated
        except ValueError as error:
            raise FloatingPointError(f"{name} after the step: {error}{_STOPPED}") from error


_STOPPED = ": lower the learning rate, or look at the data; every parameter is as it was before the step"


def _check_all_finite(named: list[tuple[str, Tensor]]) -> None:
    """Raise ``FloatingPointError`` naming the first of the tensors that is not finite."""
    for name, tensor in named:
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()
        try:
            check_finite(name, torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        except ValueError as error:
            raise FloatingPointError(f"{error}{_STOPPED}") from error


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """An optimizer's parameters, by the names that it was given or by their places."""
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for j, p in enumerate(group["params"]):
            yield (f"parameter {names[j]!r}" if names else f"parameter {j} of group {i}"), p


def _chosen(params: Iterable[Tensor] | None, optimizer: Optimizer) -> list[Tensor] | None:
    """The parameters that the caller names, checked; None for all."""
    if params is None:
        return None
    if isinstance(params, (Tensor, nn.Module, str)) or not isinstance(params, Iterable):
        hints = {Tensor: ", [weight]", nn.Module: ", module.parameters()"}
        hint = next((hints[kind] for kind in hints if isinstance(params, kind)), "")
        raise TypeError(f"params: got a {type(params).__name__}; pass an iterable of parameters{hint}, or None for all")
    chosen = list(params)
    if not chosen:
        raise ValueError("params is empty, or an iterator that was used up; pass weights, or None for all")
    ours = {id(p) for _, p in _named(optimizer)}
    for p in chosen:
        if not isinstance(p, Tensor):
            raise TypeError(f"params holds a {type(p).__name__}; pass the parameters themselves, without their names")
        shape = "not known yet" if is_lazy(p) else tuple(p.shape)
        if id(p) not in ours:
            raise ValueError(f"params has a tensor of shape {shape} that is not in the optimizer")
        if is_lazy(p):
            raise ValueError("params has a lazy parameter, without a shape yet; run the model once on a batch first")
        if p.ndim < 2:
            raise ValueError(f"params has a tensor of shape {shape}: a weight to whiten has 2 or more axes")
    return chosen


# ---- what is attached to an optimizer ----


def _whitenings(optimizer: Optimizer) -> list[_Whitening]:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values())
    return [owner for owner in owners if isinstance(owner, _Whitening)]


def _make_room(optimizer: Optimizer, whitening: _Whitening) -> None:
    """Raise for a parameter that is whitened already, unless by what a copy of an optimizer brought along."""
    ours = whitening.within_reach(optimizer)
    for other in _whitenings(optimizer):
        shared = [name for p, name in other.within_reach(optimizer).items() if p in ours]
        if shared and not other.copied:
            raise ValueError(f"{shared[0]} is whitened already; call remove() on the handle of that first")
        if shared:
            _detach(optimizer, other)


def _detach(optimizer: Optimizer, whitening: _Whitening) -> None:
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is whitening]:
            del hooks[key]
    if not _whitenings(optimizer):
        vars(optimizer).pop("__getstate__", None)


def _state_with_whitening(optimizer: Optimizer) -> dict[str, Any]:
    """What a copy or a pickle of the optimizer is made from: torch's own, and the hooks of ``whiten`` with it.

    The keys of torch's hooks are numbers that it counts up in each process; a whitening itself is a key that no hook
    registered later can have.
    """
    whitenings = _whitenings(optimizer)
    return type(optimizer).__getstate__(optimizer) | {
        "_optimizer_step_pre_hooks": OrderedDict((each, each.before_step) for each in whitenings),
        "_optimizer_step_post_hooks": OrderedDict((each, each.after_step) for each in whitenings),
        "__getstate__": functools.partial(_state_with_whitening, optimizer),
    }


def _small_rotation(cross: Float[Tensor, "k k"], cross_step: Float[Tensor, "k k"]) -> Float[Tensor, "k k"] | None:
    """R* − I from W W⁺ᵀ and W (W⁺ − W)ᵀ in float32, or None where the rotation is not small.

    The two have the same skew part, which the first has lost to rounding and the second has not. For M = R H with
    R = exp(Ω) close to the identity, M − Mᵀ = ΩS + SΩ up to third order, S being the symmetric part of M (Ω is odd in
    the skew part, so there is no second order): in the eigenbasis of S, a division by λᵢ + λⱼ. Float32 is enough for S,
    whose rounding is symmetric and turns nothing. Then (I + Ω)(I − Ω²)^(−1/2), the polar factor of I + Ω, by its
    series up to Ω⁹: orthogonal to a rounding of Ω, since Ω is exactly skew.

    Directions whose eigenvalues float32 does not resolve are not turned among themselves. Measured over training
    (MLP, SGD with momentum 0.95 and Adam): up to 1e-3 of the distance ‖R* W⁺ − W‖ is given away, 1e-4 on average.
    """
    symmetric = (cross + cross.mT) / 2
    skew = cross_step - cross_step.mT
    size = symmetric.norm()
    if not 0 < size < torch.inf or not skew.norm() <= _MAX_SKEW * size:  # false for NaN
        return None
    eigenvalues, basis = torch.linalg.eigh(symmetric)
    resolved = _RESOLVED * eigenvalues[-1]
    if eigenvalues[0] < -resolved or (eigenvalues < resolved).sum() > _MAX_UNRESOLVED * len(eigenvalues):
        return None
    sums = (eigenvalues[:, None] + eigenvalues).clamp_min(resolved)
    generator: Tensor = basis @ (basis.mT @ skew @ basis / sums) @ basis.mT
    generator = (generator - generator.mT) / 2
    square = generator @ generator
    if not square.norm() <= _MAX_SQUARE:
        return None
    fourth = square @ square
    even = square / 2 + 3 / 8 * fourth + fourth @ (5 / 16 * square + 35 / 128 * fourth)  # (I − Ω²)^(−1/2) − I
    return generator + (even + generator @ even)


def _polar_by_products(M: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"] | None:
    """The polar factor in M's precision by matrix products alone, or None where it did not converge.

    X ← ρX(3 − ρ²XᵀX)/2, where ρ is the scale that lifts the smallest singular value most. One pass is as long as
    singular values down to 1e-10 ‖M‖_F need; smaller ones take another. An identity of 1e-14 ‖M‖_F completes the
    rank. Looks at the result once a pass, so the device is waited for once.
    """
    wide = M.shape[-2] <= M.shape[-1]
    X: Tensor = M if wide else M.mT
    m, n = X.shape[-2:]
    tiny = torch.finfo(X.dtype).tiny
    X = _over_largest(X)
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(tiny)
    X = X + 1e-14 * torch.eye(m, n, dtype=X.dtype, device=X.device)
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    eye = torch.eye(m, dtype=X.dtype, device=X.device)
    for _ in range(4):
        low = _LOWEST
        while low < 1 - 1e-15:
            scale = min((3 / (1 + low + low * low)) ** 0.5, _SCALE_CAP)
            X = scale / 2 * (3 * X - scale**2 * (X @ X.mT) @ X)
            low = min(scale / 2 * x * (3 - (scale * x) ** 2) for x in (low, 1.0))
        if (X @ X.mT - eye).abs().amax() < 1e-12:  # false for NaN
            return X if wide else X.mT
    return None


def _float32_products_are_full() -> bool:
    """Whether float32 matrix products are left in float32, rather than TensorFloat-32 or bfloat16."""
    try:
        return torch.get_float32_matmul_precision() == "highest" and not torch.is_autocast_enabled("cpu")
    except RuntimeError:  # set by backend, not alike for all
        return False


def _over_largest(M: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Each matrix over its largest magnitude: neither 1e-200 nor 1e200 under- or overflows in products of it."""
    return M / M.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(M.dtype).tiny)


def _check_matrices(M: Tensor) -> None:
    check_floating("M", M, "e.g. M.double()")
    _check_wide("M", M)
    if M.ndim < 2 or 0 in M.shape:
        raise ValueError(f"M: got shape {tuple(M.shape)}; pass (..., m, n) with no empty axis")
    check_finite("M", M[..., :0])  # that it has numbers at all; what they are is looked at where it costs least


def _check_wide(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.itemsize < 2:
        raise TypeError(f"{name}: got a {tensor.dtype} tensor, which PyTorch cannot multiply; pass {name}.float()")


def _check_pair(before: Tensor, after: Tensor) -> None:
    """Two real matrices of one shape, dtype and device, that hold numbers."""
    weights = {"before": before, "after": after}
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        for what in ("dtype", "device"):
            if getattr(before, what) != getattr(after, what):
                raise ValueError(f"before is {getattr(before, what)}, after {getattr(after, what)}: they must agree")
    for name, weight in weights.items():
        check_tensor(name, weight)
        _check_wide(name, weight)
    if before.shape != after.shape:
        raise ValueError(f"before has shape {tuple(before.shape)}, after {tuple(after.shape)}: they must agree")
    if before.ndim != 2 or before.numel() == 0 or not before.is_floating_point():
        raise ValueError(
            f"weights have shape {tuple(before.shape)} and dtype {before.dtype}; pass real matrices (k, d), not empty"
        )
    for name, weight in weights.items():
        check_finite(name, weight[:0])  # that it has numbers at all
