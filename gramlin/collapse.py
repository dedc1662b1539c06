"""Neural Collapse: chapter 4, how the features of a class become one point, and the points a regular simplex.

Rows are samples: features H (n, d), integer classes (n,) with n_c samples each. μ_c is the mean of class c, and M
(K, d) has the rows μ_c − μ_G, with μ_G the mean of the *class means*. It is the mean of all samples where classes are
balanced; elsewhere it is what leaves the measures of a simplex at zero, whatever the counts. Everything is float64.

Source: Papyan, Han and Donoho (2020), whose definitions these are; where theirs leave a choice, the docstring says
which was made.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from gramlin.checks import check_integer, check_integers, check_matrix, check_one_device
from gramlin.linearity import Features, MomentsMetric, linearity_of
from gramlin.moments import Moments, centred, check_squares, to_float64

# Directions along which class means vary by less than this fraction of their largest variation count as rounding.
RANK_CUTOFF = 1e-6

# A class mean closer to their mean than this, relative to the means themselves, is there but for rounding.
_AT_CENTRE = 1e-13

# Rows of a (K, K) matrix over pairs of classes that are worked out at a time.
_BLOCK = 256

Classes = Integer[Tensor, " n"]
ClassMeans = Float[Tensor, "K d"]
Measures = dict[str, Float[Tensor, ""]]


# ---- all measures of one set of features ----


def neural_collapse(
    features: Features, targets: Classes, weight: Float[Tensor, "K d"] | None = None, *, num_classes: int | None = None
) -> Measures:
    """How far features have collapsed (``eq:nc-measures``): all is 0 at collapse, and ``target_linearity`` 1.

    The measures:
        ``nc1``: tr(Σ_W Σ_B⁺)/K, with Σ_W = (1/n) Σ_i (h_i − μ_c)(h_i − μ_c)ᵀ, an average over *samples*, and
            Σ_B = (1/K) MᵀM, one over *classes*. As long as M has rank K − 1 it is then, for any counts, the mean over
            samples of ‖M⁺ᵀ(h − μ_G) − (e_c − 1/K)‖²: the squared error of reading the class off its mean. The
            pseudo-inverse leaves out directions in which class means vary by less than 1e-6 of their largest
            variation (singular values of M).
        ``nc2_equinorm``: as in ``equinorm``.
        ``nc2_equiangular``: as in ``equiangularity``.
        ``nc2_etf``: as in ``etf_distance``.
        ``nc3``: as in ``self_duality``; only with ``weight``.
        ``target_linearity``: ``gramlin.target_linearity`` without ridge.

    Collapse forces linearity (``eq:nc-bound``): if M has rank K − 1, then ``target_linearity`` ≥ g/(g + ``nc1``)
    with g = 1 − Σ_c (n_c/n)², which is (K − 1)/K for balanced classes. Linearity does not force collapse.

    Args:
        features: H (n, d), in any floating-point precision.
        targets: integer classes (n,), counted from 0. Each needs a sample; one with a single sample adds nothing to
            Σ_W.
        weight: the (K, d) weight of the linear layer that these features enter.
        num_classes: K, by default the largest class + 1.

    Returns:
        Float64 tensors without axes. With K > d + 1 class means, which cannot be a simplex, ``nc2_etf`` stays above 0.

    Raises:
        ValueError: wrong shapes, no samples, a class without samples, fewer than two classes, NaN or infinite entries,
            class means that all coincide, a weight of another shape or of zeros, several devices.
        TypeError: features that are not floating-point; targets that are not integers.

    Example:
        >>> import torch
        >>> corners = simplex_etf(3, 4)
        >>> measures = neural_collapse(corners.repeat(5, 1), torch.arange(3).repeat(5), weight=2 * corners)
        >>> for name, value in measures.items():
        ...     print(f"{name:16} {value.abs():.3f}")
        nc1              0.000
        nc2_equinorm     0.000
        nc2_equiangular  0.000
        nc2_etf          0.000
        nc3              0.000
        target_linearity 1.000
    """
    check_integers("targets", targets)
    moments = Moments(num_classes)
    moments.update(features, targets)
    return collapse_of(moments, weight)


def collapse_of(moments: Moments, weight: Float[Tensor, "K d"] | None = None) -> Measures:
    """``neural_collapse`` of data whose moments have been added up."""
    check_classes(moments)
    measures = {name: measure(moments) for name, measure in MEASURES.items()}
    if weight is not None:
        measures["nc3"] = self_duality(weight=weight, class_means=moments.class_means)
    return measures | {"target_linearity": linearity_of(moments)}


def variability_of(moments: Moments) -> Float[Tensor, ""]:
    """``nc1`` of ``neural_collapse``: tr(Σ_W Σ_B⁺)/K = tr(Σ_W (MᵀM)⁺)."""
    M = _centred_means(moments.class_means)
    _, variations, directions = torch.linalg.svd(M, full_matrices=False)
    rank = int((variations[: len(M) - 1] > RANK_CUTOFF * variations[0]).sum())
    whitening = directions[:rank].mT / variations[:rank]
    # Where classes vary far more outside the span of M than inside, rounding can leave less than nothing.
    return (moments.within_products(whitening).trace() / moments.count).clamp(min=0)


def check_classes(moments: Moments) -> None:
    """Raise ``ValueError`` unless the targets are classes, two or more, with samples of each."""
    if not moments.count:
        raise ValueError("there are no samples yet; call update(features, targets) first")
    if not moments.are_classes:
        raise ValueError("the targets are real numbers: collapse is measured of classes; pass integers (n,)")
    K = moments.num_targets
    missing = (moments.class_counts == 0).nonzero().flatten().tolist()
    if missing:
        raise ValueError(
            f"there are no samples of {'class' if len(missing) == 1 else 'classes'} {', '.join(map(str, missing))}, "
            f"of {K}: each needs at least one; pass more data, or count classes without gaps"
        )
    if K < 2:
        raise ValueError(f"all {moments.count} samples are of class 0: collapse is between classes; pass two or more")


# ---- geometry of class means ----


def equinorm(class_means: ClassMeans) -> Float[Tensor, ""]:
    """Coefficient of variation of ‖μ_c − μ_G‖: standard deviation (over K) by mean.

    Args:
        class_means: μ_c (K, d), not centred.

    Raises:
        ValueError: not (K, d) with K ≥ 2, NaN or infinite entries, means that all coincide.
        TypeError: not a floating-point tensor.

    Example:
        >>> import torch
        >>> means = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]])
        >>> round(equinorm(means).item(), 6)
        0.5
    """
    norms: Tensor = _unit_means(class_means)[0].norm(dim=1)
    return norms.std(correction=0) / norms.mean()


def equiangularity(class_means: ClassMeans) -> Float[Tensor, ""]:
    """Standard deviation (over pairs) of the cosines between μ_c − μ_G.

    Where norms are equal and it is 0, the cosines are all −1/(K − 1), since the rows of M sum to zero. NaN if a class
    mean is at the centre, where it has no direction; 0 for two classes.

    Args, errors: as in ``equinorm``.

    Example:
        >>> import torch
        >>> round(equiangularity(simplex_etf(4, 3)).item(), 6)
        0.0
        >>> round(equiangularity(torch.tensor([[6.0], [-1.0], [-2.0], [-3.0]])).item(), 6)
        1.0
    """
    M, size = _unit_means(class_means)
    K = len(M)
    norms: Tensor = M.norm(dim=1)
    directions = M / norms.where(norms > _AT_CENTRE * size, torch.nan)[:, None]
    pairs = K * (K - 1)
    mean = (directions.sum(dim=0).square().sum() - K) / pairs
    total = norms.new_zeros(())
    for start, rows in _blocks(directions):
        deviations = rows @ directions.mT - mean
        deviations.diagonal(start).zero_()
        total += deviations.square().sum()
    return (total / pairs).sqrt()


def etf_distance(class_means: ClassMeans) -> Float[Tensor, ""]:
    """‖MMᵀ/‖MMᵀ‖_F − (I − 11ᵀ/K)/√(K − 1)‖_F: from a simplex equiangular tight frame.

    0 exactly if the class means are the corners of a regular simplex, of any size and place. Its square is
    2 − 2√(r/(K − 1)), with r = (Σ s²)²/Σ s⁴ ≤ K − 1 the participation ratio of M's variances, s its singular values:
    it sees how evenly class means spread over directions, and nothing else.

    Args, errors: as in ``equinorm``.

    Example:
        >>> import torch
        >>> round(etf_distance(3 * simplex_etf(5, 4) + 1).item(), 6)
        0.0
        >>> round(etf_distance(torch.arange(5.0)[:, None]).item(), 6)
        1.0
    """
    M, _ = _unit_means(class_means)
    K, d = M.shape
    size: Tensor = (M.mT @ M if d < K else M @ M.mT).norm()
    total = size.new_zeros(())
    for start, rows in _blocks(M):
        difference = rows @ M.mT / size + 1 / K / (K - 1) ** 0.5
        difference.diagonal(start).sub_(1 / (K - 1) ** 0.5)
        total += difference.square().sum()
    return total.sqrt()


def self_duality(*, weight: Float[Tensor, "K d"], class_means: ClassMeans) -> Float[Tensor, ""]:
    """‖W/‖W‖_F − M/‖M‖_F‖_F: how far the classifier is from the class means.

    0 if W is a positive multiple of M, √2 if they are orthogonal, 2 if it is a negative one. The class means are
    centred here, the weight is taken as it is. With cross-entropy a row that all classes' weights share changes no
    prediction, and weight decay removes it: to look past it, pass ``weight - weight.mean(dim=0)``. A bias plays no
    part.

    Args:
        weight: W (K, d) of the classifier, in PyTorch's layout.
        class_means: μ_c (K, d) of the features that enter it, not centred.

    Raises:
        ValueError: shapes that differ or are not (K, d), a weight of zeros, several devices; as in ``equinorm``.
        TypeError: not floating-point tensors.

    Example:
        >>> import torch
        >>> means, W = torch.tensor([[1.0], [3.0]]), torch.tensor([[-5.0], [5.0]])
        >>> round(self_duality(weight=W, class_means=means).item(), 6)
        0.0
        >>> round(self_duality(weight=-W, class_means=means).item(), 6)
        2.0
    """
    check_matrix("weight", weight, "(K, d)")
    M, _ = _unit_means(class_means)
    if weight.shape != M.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, the class means {tuple(M.shape)}: both are (K, d) and must agree"
        )
    W = to_float64(weight)
    check_one_device({"weight": weight, "class means": class_means})
    if not W.any():
        raise ValueError(f"weight of shape {tuple(weight.shape)} is zero: it has no direction")
    W = _of_unit_size(W)
    distance: Tensor = (W / W.norm() - M / M.norm()).norm()
    return distance


def simplex_etf(K: int, d: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "K d"]:
    """K unit vectors with inner products −1/(K − 1), which sum to zero: a simplex equiangular tight frame.

    Args:
        K: the number of vectors.
        d: of dimensions, at least K − 1.
        generator: for an orientation drawn uniformly, on its device; by default one fixed orientation, in the first
            K − 1 coordinates, on the CPU.

    Raises:
        ValueError: K < 2, or d < K − 1.
        TypeError: a generator of another type.

    Example:
        >>> corners = simplex_etf(3, 4)
        >>> print((corners @ corners.mT).round(decimals=6))
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]], dtype=torch.float64)
    """
    check_integer("K", K, least=1)
    check_integer("d", d, least=1)
    if K < 2 or d < K - 1:
        raise ValueError(f"got K={K}, d={d}; pass K of at least 2, and d of at least K - 1")
    if K * d > 2**30:
        raise ValueError(f"got K={K}, d={d}: {K * d / 2**27:.2g} GiB; pass a smaller d")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator is a {type(generator).__name__}; pass a torch.Generator, or None")
    device = "cpu" if generator is None else generator.device
    # Column j − 1 sets the first j corners against corner j (Helmert): orthonormal, and orthogonal to the ones.
    j = torch.arange(1, K, dtype=torch.float64, device=device)
    contrasts = torch.ones(K, K - 1, dtype=torch.float64, device=device).triu()
    contrasts[1:] -= j.diag()
    corners = contrasts / (j * (j + 1)).sqrt() * (K / (K - 1)) ** 0.5
    if generator is None:
        return torch.nn.functional.pad(corners, (0, d - K + 1))
    drawn = torch.randn(d, K - 1, dtype=torch.float64, device=device, generator=generator)
    frame, upper = torch.linalg.qr(drawn)
    oriented: Tensor = corners @ (frame * upper.diagonal().sign()).mT
    return oriented


# ---- the decision ----


def nearest_class_mean_disagreement(
    features: Features, predictions: Classes, class_means: ClassMeans
) -> Float[Tensor, ""]:
    """Fraction of samples whose predicted class is not that of the nearest class mean (NC4).

    Distances are Euclidean. It needs a second pass over the data, once class means are known: for batches, average
    with their sizes as weights. A classifier's bias is in its predictions.

    Args:
        features: H (n, d), what enters the classifier.
        predictions: its classes (n,), e.g. ``logits.argmax(dim=1)``.
        class_means: μ_c (K, d), usually of the training data: ``NeuralCollapse.class_means()``.

    Raises:
        ValueError: wrong shapes, no samples, a class outside K, NaN or infinite entries, several devices; as in
            ``equinorm``.
        TypeError: features or class means that are not floating-point; predictions that are not integers.

    Example:
        >>> import torch
        >>> means = torch.tensor([[0.0], [10.0]])
        >>> H = torch.tensor([[1.0], [4.0], [6.0], [11.0]])
        >>> nearest_class_mean_disagreement(H, torch.tensor([0, 1, 1, 1]), means).item()
        0.25
    """
    check_matrix("features", features)
    check_integers("predictions", predictions)
    M = _centred_means(class_means)
    if features.shape[1] != M.shape[1] or predictions.shape != features.shape[:1]:
        raise ValueError(
            f"features have shape {tuple(features.shape)}, predictions {tuple(predictions.shape)}, class means "
            f"{tuple(M.shape)}: expected (n, d), (n,) and (K, d)"
        )
    check_one_device({"features": features, "predictions": predictions, "class means": class_means})
    check_squares("features", features)
    predictions = predictions.long()
    if predictions.min() < 0 or predictions.max() >= len(M):
        raise ValueError(
            f"predictions go from {predictions.min()} to {predictions.max()}; pass classes from 0 to {len(M) - 1}"
        )
    # ‖h − m‖² = ‖h‖² − 2(hᵀm − ‖m‖²/2), with h and m about the mean of class means, where nothing cancels.
    origin, offsets = to_float64(class_means).mean(dim=0), M.square().sum(dim=1) / 2
    wrong = torch.zeros((), dtype=torch.int64, device=M.device)
    for chunk, predicted in zip(features.split(4096), predictions.split(4096), strict=True):
        wrong += ((to_float64(chunk) - origin) @ M.mT - offsets).argmax(dim=1).ne(predicted.to(M.device)).sum()
    return wrong.double() / len(features)


# ---- helpers ----


def _centred_means(class_means: ClassMeans) -> ClassMeans:
    """M: the class means in float64 less their mean."""
    check_matrix("class means", class_means, "(K, d)")
    check_squares("class means", class_means)
    return _without_mean(to_float64(class_means))


def _unit_means(class_means: ClassMeans) -> tuple[ClassMeans, Float[Tensor, ""]]:
    """M of largest entry 1, for measures that know no scale, and the largest norm of a class mean in its units."""
    check_matrix("class means", class_means, "(K, d)")
    means = _of_unit_size(to_float64(class_means))
    M = _without_mean(means)
    return _of_unit_size(M), means.norm(dim=1).max() / M.abs().max()


def _without_mean(means: ClassMeans) -> ClassMeans:
    if len(means) < 2:
        raise ValueError(f"class means have shape {tuple(means.shape)}; pass (K, d) with two classes or more")
    M = centred(means)
    if not M.any():
        raise ValueError(f"the means of all {len(M)} classes coincide: there is nothing between classes to measure by")
    return M


def _of_unit_size(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return matrix / matrix.abs().max().clamp_min(torch.finfo(matrix.dtype).tiny)


def _blocks(rows: Float[Tensor, "K d"]) -> Iterator[tuple[int, Float[Tensor, "k d"]]]:
    """Some rows at a time, with the number of the first: a matrix over all pairs of classes is not formed."""
    return zip(range(0, len(rows), _BLOCK), rows.split(_BLOCK), strict=True)


# The measures that need nothing but the moments, by name: also columns of ``gramlin.probe``.
MEASURES: dict[str, Callable[[Moments], Float[Tensor, ""]]] = {
    "nc1": variability_of,
    "nc2_equinorm": lambda moments: equinorm(moments.class_means),
    "nc2_equiangular": lambda moments: equiangularity(moments.class_means),
    "nc2_etf": lambda moments: etf_distance(moments.class_means),
}


# ---- sums over batches, devices and processes ----


class NeuralCollapse(MomentsMetric):
    """``neural_collapse`` of data that come in batches, on one or several devices or processes.

    Sums of each class are centred on the class's own mean, so that ``nc1`` keeps its digits at collapse (but for what
    rounding leaves of variation outside the span of the means, if classes vary far more there than inside). Memory is
    O(d² + dK) whatever the number of samples; as long as there are no more samples than features, the rows are kept
    instead, which is less. A batch may lack classes, and may be of one sample; all data together may not lack any.
    ``forward`` returns the measures of its batch, which therefore needs all classes: call ``update`` for smaller ones.

    Args:
        num_classes: K, at least 2.
        kwargs: those of ``torchmetrics.Metric``.

    Raises:
        ValueError, TypeError: as ``neural_collapse``, at construction, ``update`` or ``compute``.

    Example:
        >>> import torch
        >>> metric = NeuralCollapse(num_classes=2)
        >>> metric.update(torch.tensor([[0.9], [1.1], [-1.0]]), torch.tensor([0, 0, 1]))
        >>> metric.update(torch.tensor([[-1.0]]), torch.tensor([1]))
        >>> round(metric.compute()["nc1"].item(), 6)
        0.0025
        >>> round(metric.compute(weight=torch.tensor([[3.0], [-3.0]]))["nc3"].item(), 6)
        0.0
    """

    def __init__(self, num_classes: int, **kwargs: Any):
        check_integer("num_classes", num_classes, least=2)
        super().__init__(num_classes, **kwargs)
        self.compute_with_cache = False  # the value depends on the weight

    def update(self, features: Features, targets: Classes) -> None:
        """Add a batch of features (n, d) and integer classes (n,)."""
        super().update(features, targets)

    def _check_targets(self, targets: Classes) -> None:
        check_integers("targets", targets)

    def compute(self, weight: Float[Tensor, "K d"] | None = None) -> Measures:
        """``neural_collapse`` of all the data so far, of all processes."""
        return collapse_of(self._moments(), weight)

    def class_means(self) -> ClassMeans:
        """μ_c of all the data so far, of all processes, not centred: what ``nearest_class_mean_disagreement`` takes."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            moments = self._moments()
            check_classes(moments)
            return moments.class_means.clone()
