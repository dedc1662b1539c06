"""Target Linearity and the surrogate: chapter 3, how linear in the target a layer's features are.

Rows are samples: features H (n, d), targets Y (n, K), a weight W (k, d). Both measures are of centred H and Y, in
float64, and no (n, n) matrix is formed for n samples, unless n ≤ d, where it is the smaller one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from gramlin.checks import check_floating, check_one_device
from gramlin.moments import (
    ClassSums,
    Moments,
    Sums,
    centred,
    check_features,
    check_squares,
    checked_targets,
    chunk_rows,
    target_matrix,
    target_values,
    to_float64,
)

# Directions of the features whose variance is below this fraction of the largest are left out as rounding: float64 sums
# of squares resolve no standard deviation below about 1e-7 of the largest.
_RANK_CUTOFF = 1e-12

# Pre-activations below this fraction of what features and weight could make of them are float64's rounding.
_ROUNDING = 1e-14

Features = Float[Tensor, "n d"]
Targets = Float[Tensor, "n *outputs"] | Integer[Tensor, " n"]


# ---- Target Linearity ----


def target_linearity(
    features: Features,
    targets: Targets,
    ridge: float = 0.0,
    *,
    num_classes: int | None = None,
    per_output: bool = False,
) -> Float[Tensor, "*scores"]:
    """1 − ‖Y − Ŷ‖²_F/‖Y − Ȳ‖²_F, Ŷ the ridge prediction of Y from H with intercept (``eq:tl-definition``).

    The fraction of the targets' variance that an affine function of the features explains, on the data it is fitted
    on: in [0, 1] but for rounding; 1 if the targets are affine in the features. Always 1 if n − 1 ≤ d features are in
    general position and ridge is 0.

    With ridge 0 the fit is by pseudo-inverse: exact for duplicated, dependent or constant features. Features are first
    scaled to unit variance, which changes no prediction; then directions with less than 1e-12 of the largest variance
    (1e-6 of its standard deviation) count as constant. So does a feature whose standard deviation is below 1e-13 of
    its mean.

    Args:
        features: H (n, d), in any floating-point precision.
        targets: Y, real (n, K) or (n,), or integer classes (n,), which are taken one-hot.
        ridge: λ of the penalty λ‖B‖² on the coefficients, beside the *sum* of squared errors (scikit-learn's
            ``alpha``); the intercept is not penalised.
        num_classes: K for classes, by default the largest + 1; a class without samples does not change the value.
        per_output: a value for each of the K outputs rather than their average weighted by variance; NaN for an output
            that is constant.

    Returns:
        A float64 tensor, of no axes or (K,).

    Raises:
        ValueError: wrong shapes, no samples, NaN or infinite entries, targets that are constant or of one class, a
            class outside ``num_classes``, several devices, a negative ridge.
        TypeError: features that are not floating-point; targets that are neither real nor integer classes.

    Example:
        >>> import torch
        >>> H = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> round(target_linearity(H, 5 - 2 * H).item(), 4)
        1.0
        >>> round(target_linearity(H, torch.tensor([0, 0, 1, 1])).item(), 4)
        0.8
    """
    return linearity_of(_moments_of(features, targets, num_classes), ridge, per_output=per_output)


def fit_linear(
    features: Features, targets: Targets, ridge: float = 0.0, *, num_classes: int | None = None
) -> "LinearFit":
    """The ridge regression behind ``target_linearity``, to predict and to score other data with.

    Args, errors: as in ``target_linearity``.

    Example:
        >>> import torch
        >>> H = torch.tensor([[0.0], [1.0], [2.0]])
        >>> fit = fit_linear(H, 3 * H + 1)
        >>> round(fit.predict(torch.tensor([[10.0]])).item(), 4)
        31.0
        >>> round(fit.score(H, 1 + 3 * H.square()).item(), 4)
        0.5385
    """
    return fit_of(_moments_of(features, targets, num_classes), ridge)


def linearity_of(moments: Moments, ridge: float = 0.0, *, per_output: bool = False) -> Float[Tensor, "*scores"]:
    """``target_linearity`` of data whose moments have been added up."""
    _check_flag(per_output)
    total = _target_variation(moments)
    return _fraction(_solve(moments, ridge).explained, total, per_output)


def fit_of(moments: Moments, ridge: float = 0.0) -> "LinearFit":
    """``fit_linear`` of data whose moments have been added up."""
    _target_variation(moments)
    solution = _solve(moments, ridge)
    coefficients = solution.coefficients()
    intercept = moments.target_mean - moments.mean @ coefficients
    return LinearFit(coefficients, intercept, ridge, solution.rank, bool(moments.are_classes))


@dataclass(frozen=True)
class LinearFit:
    """The best affine map from features to targets: ``features @ coefficients + intercept``.

    Attributes:
        coefficients: B, (d, K) in float64; of all that fit equally well, the one of least norm.
        intercept: (K,).
        ridge: the penalty it was fitted with.
        rank: of the centred features.
        of_classes: whether the targets were classes.

    Example:
        >>> import torch
        >>> H = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fit = fit_linear(H, torch.tensor([1.0, 3.0, 4.0]))
        >>> fit
        LinearFit(ridge=0.0, rank=2, of_classes=False)
        >>> fit.coefficients.round(decimals=4).tolist(), fit.intercept.round(decimals=4).tolist()
        ([[2.0], [3.0]], [1.0])
    """

    coefficients: Float[Tensor, "d K"] = field(repr=False)
    intercept: Float[Tensor, " K"] = field(repr=False)
    ridge: float
    rank: int
    of_classes: bool

    def predict(self, features: Features) -> Float[Tensor, "n K"]:
        """Ŷ of new features, in float64.

        Raises:
            ValueError: features of another width, empty or on another device; NaN or infinite entries.
            TypeError: features that are not floating-point.
        """
        check_features(features)
        rows = to_float64(features)
        if rows.shape[1] != len(self.coefficients):
            raise ValueError(f"features have width {rows.shape[1]}, the fit {len(self.coefficients)}: they must agree")
        if rows.device != self.intercept.device:
            raise ValueError(f"features are on {rows.device}, the fit is on {self.intercept.device}; move the features")
        check_squares("features", features)
        return rows @ self.coefficients + self.intercept

    def score(self, features: Features, targets: Targets, *, per_output: bool = False) -> Float[Tensor, "*scores"]:
        """Target Linearity of other data under this fit, 1 − ‖Y − Ŷ‖²_F/‖Y − Ȳ‖²_F; negative if worse than Ȳ.

        Ȳ is the mean of the *given* targets, as in scikit-learn's ``r2_score(multioutput="variance_weighted")``; unlike
        there, errors count also in an output that is constant over the given samples, such as a class they lack.

        Args, errors: as in ``target_linearity``; also widths or kinds of targets that differ from the fit's.
        """
        held_out = HeldOut(self)
        held_out.update(features, targets)
        return held_out.score(per_output=per_output)


class HeldOut:
    """``LinearFit.score`` of data that come in batches: ``update`` with each, then ``score``."""

    def __init__(self, fit: LinearFit):
        self.fit = fit
        # Of targets and residuals side by side. Residuals are summed themselves, not worked out from other sums: the
        # error of a good fit is a small difference of large ones.
        self._sums = Sums.zeros(0, 2 * len(fit.intercept), fit.intercept.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, features: Features, targets: Targets) -> None:
        """Add a batch. Errors as in ``LinearFit.score``."""
        K, of_classes = len(self.fit.intercept), self.fit.of_classes
        values, width = checked_targets(features, targets, K if of_classes else None)
        if of_classes == values.is_floating_point() or width != K:
            raise ValueError(
                f"targets are {targets.dtype} of shape {tuple(targets.shape)}, the fit is to "
                f"{f'{K} classes' if of_classes else f'real (n, {K})'}: they must agree"
            )
        self._sums = self._sums.ordinary()
        size = chunk_rows(2 * K)
        for chunk, chunk_values in zip(features.split(size), values.split(size), strict=True):
            Y = target_matrix(chunk_values, K)
            self._sums.add_rows(Y, Y - self.fit.predict(chunk))

    def score(self, *, per_output: bool = False) -> Float[Tensor, "*scores"]:
        """The score so far.

        Raises:
            ValueError: no samples, or targets that do not vary.
        """
        _check_flag(per_output)
        K = len(self.fit.intercept)
        n, mean = self._sums.count, self._sums.mean
        total = _check_variation(self._sums.target_squares()[:K], n, self.fit.of_classes)
        residual = self._sums.squares[K:] + n * mean[K:].square()
        return _fraction(total - residual, total, per_output)


def _moments_of(features: Features, targets: Targets, num_classes: int | None) -> Moments:
    moments = Moments(num_classes)
    moments.update(features, targets)
    return moments


def _target_variation(moments: Moments) -> Float[Tensor, " K"]:
    return _check_variation(moments.target_squares, moments.count, bool(moments.are_classes))


def _check_variation(squares: Float[Tensor, " K"], n: int, of_classes: bool) -> Float[Tensor, " K"]:
    if n == 0:
        raise ValueError("there are no samples yet; call update(features, targets) first")
    if not squares.any():
        what = "of one class" if of_classes else "constant"
        raise ValueError(f"the targets of all {n} samples are {what}: there is no variance to explain; pass others")
    return squares


def _fraction(explained: Float[Tensor, " K"], total: Float[Tensor, " K"], per_output: bool) -> Float[Tensor, "*scores"]:
    return (explained / total).where(total > 0, torch.nan) if per_output else explained.sum() / total.sum()


@dataclass(frozen=True)
class _Solution:
    explained: Float[Tensor, " K"]
    rank: int
    coefficients: Callable[[], Float[Tensor, "d K"]]


def _solve(moments: Moments, ridge: float) -> _Solution:
    """Ridge regression through the thin SVD UΣVᵀ of the centred features, from the eigenvectors on the smaller side.

    What is explained is read off UᵀY, since the norms of coefficients and features would cancel where features nearly
    depend on one another.
    """
    _check_ridge(ridge)
    squares = moments.squares
    if not (squares.isfinite().all() and moments.target_squares.isfinite().all()):
        raise ValueError("the sums of squares overflow float64; scale features and targets down")
    varies = squares > 0
    scale = ((squares.sqrt() if ridge == 0 else torch.ones_like(squares)) * varies)[:, None]
    inverse = (1 / scale).where(varies[:, None], 0.0)
    if moments.sums is None:
        H, Y = moments.centred_rows()
        H *= inverse.mT  # a copy already
        variances, U = _significant(H @ H.mT)
        deviations = variances.sqrt()[:, None]
        projected = U.mT @ Y
    else:
        variances, V = _significant(moments.scatter * inverse * inverse.mT)
        deviations = variances.sqrt()[:, None]
        projected = V.mT @ (inverse * moments.cross) / deviations

    def coefficients() -> Tensor:
        right = V if moments.sums is not None else H.mT @ U / deviations.mT
        B = inverse * (right @ (projected * deviations / (variances + ridge)[:, None]))
        if ridge == 0 and len(variances) < len(scale):  # of equal fits the one of least norm lies in the rows' span
            basis = torch.linalg.qr(scale * right).Q
            B = basis @ (basis.mT @ B)
        return B

    shrunk = variances / (variances + ridge)
    kept = shrunk * (1 + ridge / (variances + ridge))  # 1 − (1 − shrunk)², without squares of squares
    return _Solution(kept @ projected.square(), len(variances), coefficients)


def _check_ridge(ridge: float) -> None:
    if not isinstance(ridge, Real):
        raise TypeError(f"ridge is a {type(ridge).__name__}; pass a number")
    if not 0 <= ridge < math.inf:
        raise ValueError(f"ridge is {ridge}; pass a finite number, 0 or more")


def _check_flag(per_output: bool) -> None:
    if not isinstance(per_output, bool):
        raise TypeError(f"per_output is {per_output!r}; pass True or False")


def _significant(gram: Float[Tensor, "m m"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "m r"]]:
    """Eigenvalues and eigenvectors of a Gram matrix, without those that are zero but for rounding."""
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _RANK_CUTOFF * values[-1].clamp_min(0)
    return values[kept], vectors[:, kept]


# ---- sums over batches, devices and processes ----


class MomentsMetric(Metric):
    """A ``torchmetrics.Metric`` whose state are the moments of features and targets; a subclass computes from them.

    States are float64 whatever ``half()``, ``to(dtype)`` or ``set_dtype`` say: only devices are followed. The first
    batch sets the device. Batches, metrics (``merge_state``) and processes add up to what one pass over all the data
    gives, but for rounding. ``forward`` returns the value of the batch alone; a batch that is refused changes nothing.
    torchmetrics' option ``compute_on_cpu`` is refused with a ``ValueError``.
    """

    is_differentiable = False
    full_state_update = False

    # States that are read by name; torchmetrics sets them.
    rows: list[Tensor]
    mean: Tensor

    def __init__(self, num_classes: int | None = None, **kwargs: Any):
        if kwargs.get("compute_on_cpu"):
            raise ValueError("compute_on_cpu is not supported; move the features to the CPU before update()")
        super().__init__(**kwargs)
        self.num_classes = num_classes
        for name, state in _states_of(Moments(num_classes)).items():
            self.add_state(name, default=state)

    def update(self, features: Features, targets: Targets) -> None:
        """Add a batch: ``Moments.update``."""
        moments = self._moments()
        try:
            self._check_targets(targets)
            moments.update(features, targets)
        except Exception:
            self._update_count -= 1  # torchmetrics counts before it calls
            raise
        self._store(moments)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw a value, or a sequence of them: torchmetrics' own convention.

        Args:
            val: what ``compute`` or ``forward`` returned, or a list of that, such as one an epoch; by default the value
                of all the data so far.
            ax: the matplotlib axes to draw into; by default new ones.

        Returns:
            matplotlib's figure and axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return self._plot(val, ax)

    def forward(self, features: Features, targets: Targets) -> Any:
        """Add a batch, and return the value of this batch alone."""
        batch = self.clone()
        batch.reset()
        batch._to_sync = self.dist_sync_on_step
        batch.update(features, targets)
        self._forward_cache = batch.compute()
        self._reduce_states(batch.metric_state)
        return self._forward_cache

    def merge_state(self, incoming_state: "dict[str, Any] | Metric") -> None:
        """Add the state of another metric of this class, which is left as it was.

        Args:
            incoming_state: the metric, or its ``metric_state``.

        Raises:
            ValueError: another class or ``num_classes``; other widths, kinds of targets or devices; a dictionary that
                is not such a state, or is not in its types.
        """
        if isinstance(incoming_state, MomentsMetric) and incoming_state.num_classes != self.num_classes:
            raise ValueError(
                f"num_classes is {incoming_state.num_classes} there, {self.num_classes} here: they must agree"
            )
        if isinstance(incoming_state, dict):
            _check_states(incoming_state, self.metric_state)
        super().merge_state(incoming_state)

    def _check_targets(self, targets: Targets) -> None:
        """Raise what a subclass has against these targets, beyond ``Moments.update``."""

    def _moments(self) -> Moments:
        return _moments_from(self.metric_state, self.num_classes)

    def _store(self, moments: Moments) -> None:
        for name, state in _states_of(moments, self._update_count).items():
            setattr(self, name, state)

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        moments = self._moments()
        moments.merge(_moments_from(incoming_state, self.num_classes))
        self._update_count += int(incoming_state["layout"][3])
        self._store(moments)
        self._computed = None

    def _sync_dist(
        self, dist_sync_fn: Callable[..., list[Tensor]] = gather_all_tensors, process_group: Any = None
    ) -> None:
        # Every process gives one tensor a state, empty ones too, and merges what it gets in the order of the ranks.
        local = self.metric_state
        local["rows"] = torch.cat(self.rows) if self.rows else self.mean.new_zeros(0, 0)
        gathered = {
            name: dist_sync_fn(state, group=process_group or self.process_group) for name, state in local.items()
        }
        total = Moments(self.num_classes)
        for states in zip(*gathered.values(), strict=True):
            state = dict(zip(gathered, states, strict=True))
            total.merge(
                _moments_from({**state, "rows": [state["rows"]] if len(state["rows"]) else []}, self.num_classes)
            )
        self._store(total)

    @contextmanager
    def sync_context(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        should_unsync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> Iterator[None]:
        """As in ``Metric``; the process's own sums also come back when the value cannot be computed."""
        self.sync(dist_sync_fn, process_group, should_sync, distributed_available)
        try:
            yield
        finally:
            self.unsync(should_unsync=self._is_synced and should_unsync)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            return state if device.type == "mps" else state.to(device)

        return super()._apply(move, exclude_state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        layout = state_dict.get(f"{prefix}layout")
        if layout is not None:
            if len(layout) != 4:
                raise ValueError("the state was saved by another version of gramlin; add the data up again")
            self._update_count = int(layout[3])
            self._computed = None
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in self._defaults:  # copies, since updates write into the sums
            state = getattr(self, name)
            setattr(self, name, state.clone() if isinstance(state, Tensor) else [each.clone() for each in state])


def _check_states(incoming: dict[str, Any], states: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless a dictionary has the states of a metric, in their types."""
    missing = [name for name in states if name not in incoming]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}; pass the metric, or its metric_state")
    for name, state in states.items():
        theirs = incoming[name]
        if isinstance(state, Tensor) and not (isinstance(theirs, Tensor) and theirs.dtype == state.dtype):
            kind = theirs.dtype if isinstance(theirs, Tensor) else type(theirs).__name__
            raise ValueError(f"the state {name!r} is {kind}; pass it as it was, {state.dtype}")


def _states_of(moments: Moments, updates: int = 0) -> dict[str, Any]:
    kind = -1 if moments.are_classes is None else int(moments.are_classes)
    states = {
        "rows": moments.rows,
        "layout": torch.tensor([moments.num_features, moments.num_targets, kind, updates], device=moments.device),
    }
    # Every process has the states of both kinds of sums, also one that has seen no data and knows no kind.
    for sums in (Sums.zeros(0, 0, moments.device), ClassSums.zeros(0, 0, moments.device)):
        states |= vars(moments.sums if isinstance(moments.sums, type(sums)) else sums)
    return states | {"count": torch.tensor(states["count"], device=moments.device)}


def _moments_from(states: dict[str, Any], num_classes: int | None) -> Moments:
    moments = Moments(num_classes)
    moments.num_features, moments.num_targets, kind, _ = states["layout"].tolist()
    moments.are_classes = None if kind < 0 else bool(kind)
    moments.rows = states["rows"]
    if states["count"] > 0:
        moments.sums = Sums(int(states["count"]), states["mean"], states["products"], states["squares"])
    elif len(states["counts"]):
        moments.sums = ClassSums(states["counts"], states["means"], states["within"])
    return moments


class TargetLinearity(MomentsMetric):
    """``target_linearity`` of data that come in batches, on one or several devices or processes.

    Memory is O(d² + dK) whatever the number of samples. As long as there are no more samples than features, the
    rows are kept instead, which is less.

    Integer targets may lack a class in any batch: it counts as a column of zeros there, and a class that no batch has
    had so far adds a column when it comes. Give ``num_classes`` to refuse larger ones, and for ``per_output`` values of
    a fixed length.

    Args:
        ridge: as in ``target_linearity``.
        num_classes: K for classes; by default the largest class seen + 1.
        per_output: as in ``target_linearity``.
        kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError, TypeError: as ``target_linearity``, at construction, ``update`` or ``compute``.

    Example:
        >>> import torch
        >>> metric = TargetLinearity()
        >>> for batch in torch.arange(6.0).reshape(2, 3, 1):
        ...     metric.update(batch, batch.square())
        >>> round(metric.compute().item(), 4)
        0.9214
        >>> H = torch.tensor([[6.0], [9.0]])
        >>> round(metric.fit().score(H, H.square()).item(), 4)
        -0.614
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, ridge: float = 0.0, *, num_classes: int | None = None, per_output: bool = False, **kwargs: Any):
        super().__init__(num_classes, **kwargs)
        _check_ridge(ridge)
        _check_flag(per_output)
        self.ridge = ridge
        self.per_output = per_output

    def compute(self) -> Float[Tensor, "*scores"]:
        """Target Linearity of all the data so far, of all processes."""
        return linearity_of(self._moments(), self.ridge, per_output=self.per_output)

    def fit(self) -> LinearFit:
        """The fit to all the data so far, of all processes, to score other data with."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return fit_of(self._moments(), self.ridge)


# ---- the surrogate ----


def surrogate(
    features: Features, weight: Float[Tensor, "k d"], targets: Targets, *, num_classes: int | None = None
) -> Float[Tensor, ""]:
    """(1/K)‖W HᵀY‖²_F, H and Y centred: the squared covariance of targets and pre-activations (``eq:tl-surrogate``).

    Sums over samples are not divided by n: the value grows as n². K times the value over (n − 1)² is the linear HSIC
    of the pre-activations Z = HWᵀ and Y. A bias changes nothing.

    Args:
        features: H (n, d); for a convolution the rows of ``gramlin.hooks.input_rows``, with each sample's target
            repeated for its positions.
        weight: W (k, d), as a matrix (see ``gramlin.hooks.weight_matrix``).
        targets: Y, real (n, K) or (n,), or integer classes (n,), which are taken one-hot.
        num_classes: K for classes, by default the largest + 1; a class without samples counts in the factor 1/K.

    Returns:
        A float64 tensor without axes.

    Raises:
        ValueError, TypeError: as in ``target_linearity``; a weight that does not fit the features.

    Example:
        >>> import torch
        >>> H, W = torch.tensor([[0.0], [2.0]]), torch.tensor([[3.0]])
        >>> surrogate(H, W, H).item()
        36.0
        >>> surrogate(H.repeat(2, 1), W, H.repeat(2, 1)).item()
        144.0
    """
    moments, exponent, _ = _preactivation_moments(features, weight, targets, num_classes)
    return surrogate_of(moments.cross, exponent)


def surrogate_of(cross: Float[Tensor, "k K"], exponent: int = 0) -> Float[Tensor, ""]:
    """``surrogate`` from ZᵀY, both centred: (1/K)‖ZᵀY‖²_F, of 2^exponent times the Z that is given.

    Raises:
        ValueError: a value beyond float64.
    """
    largest = cross.abs().max()
    if largest == 0:
        return largest
    value = ((cross / largest).square().sum() / cross.shape[1]).sqrt() * largest
    value = (value * 2.0**exponent).square()
    if not torch.finfo(value.dtype).tiny <= value < math.inf:
        raise ValueError("the surrogate leaves the range of float64: rescale features, weight or targets")
    return value


def normalized_surrogate(
    features: Features, weight: Float[Tensor, "k d"], targets: Targets, *, num_classes: int | None = None
) -> Float[Tensor, ""]:
    """‖W HᵀY‖²_F/(‖ZᵀZ‖_F ‖YᵀY‖_F), Z = HWᵀ, all centred: linear CKA of pre-activations and targets, in [0, 1].

    Blind to rotation and scale of Z and of Y. ``target_linearity`` is blind to every invertible linear map of Z; this
    is not.

    Args: as in ``surrogate``.

    Raises:
        ValueError, TypeError: as in ``surrogate``; pre-activations that are constant over the samples, but for
            rounding.

    Source: Kornblith, Norouzi, Lee and Hinton (2019), centred kernel alignment.

    Example:
        >>> import torch
        >>> H = torch.cat([torch.eye(4), -torch.eye(4)])
        >>> round(normalized_surrogate(H, 3 * torch.eye(4), H).item(), 6)
        1.0
        >>> round(normalized_surrogate(H, torch.eye(4)[:1], H).item(), 6)
        0.5
    """
    moments, _, size = _preactivation_moments(features, weight, targets, num_classes)
    if moments.squares.sum().sqrt() <= _ROUNDING * size:
        raise ValueError(f"the pre-activations of all {len(features)} samples are equal: alignment is undefined")
    if moments.are_classes:
        return alignment_of(moments.cross, moments.scatter, moments.class_scatter_norm)
    return alignment_of(moments.cross, moments.scatter, _gram_norm(centred(target_values(targets)[0])))


def alignment_of(
    cross: Float[Tensor, "k K"], scatter: Float[Tensor, "k k"], target_size: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """``normalized_surrogate`` from ZᵀY, ZᵀZ and ‖YᵀY‖_F, all centred: ‖ZᵀY‖²_F/(‖ZᵀZ‖_F ‖YᵀY‖_F) (``eq:tl-cka``)."""
    return (frobenius_norm(cross) / frobenius_norm(scatter).sqrt() / target_size.sqrt()).square()


def frobenius_norm(matrix: Float[Tensor, "m n"]) -> Float[Tensor, ""]:
    """‖A‖_F, also of entries whose squares leave float64."""
    largest = matrix.abs().max()
    return largest * (matrix / largest).norm() if largest > 0 else largest


def _preactivation_moments(
    features: Features, weight: Float[Tensor, "k d"], targets: Targets, num_classes: int | None
) -> tuple[Moments, int, Float[Tensor, ""]]:
    """Moments of Z = HWᵀ 2^−e and Y, e, and what the size of the centred Z is at most.

    Features are centred before they are multiplied, so that a large mean costs no digits; a chunk at a time.
    """
    values, _ = checked_targets(features, targets, num_classes)
    check_floating("weight", weight)
    if weight.ndim != 2 or 0 in weight.shape or weight.shape[1] != features.shape[1]:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, weight {tuple(weight.shape)}: expected (n, d) and (k, d)"
        )
    check_one_device({"features": features, "weight": weight})
    check_squares("weight", weight)
    W = to_float64(weight)
    exponent = int(torch.frexp(W.abs().max()).exponent)
    W = W * 2.0**-exponent
    inputs = Sums.zeros(0, features.shape[1], values.device)
    size = chunk_rows(features.shape[1])
    for chunk in features.split(size):
        inputs.add_rows(to_float64(chunk))
    squares = inputs.target_squares()
    W = W * (squares > 0)
    moments = Moments(num_classes)
    for chunk, chunk_targets in zip(torch.split(features, size), torch.split(targets, size), strict=True):
        moments.update((to_float64(chunk) - inputs.mean) @ W.mT, chunk_targets)
    _target_variation(moments)
    return moments, exponent, squares.sum().sqrt() * torch.linalg.vector_norm(W)


def _gram_norm(A: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """‖AᵀA‖_F = ‖AAᵀ‖_F, by the smaller of the two."""
    return frobenius_norm(A.mT @ A if A.shape[0] > A.shape[1] else A @ A.mT)
