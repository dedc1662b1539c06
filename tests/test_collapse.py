"""Chapter 4's laws: Neural Collapse, what it forces of Target Linearity, and what it does not."""

import io
import math

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from torch import nn
from torchmetrics import MetricCollection

from gramlin import (
    NeuralCollapse,
    TargetLinearity,
    equiangularity,
    equinorm,
    etf_distance,
    nearest_class_mean_disagreement,
    neural_collapse,
    probe,
    self_duality,
    simplex_etf,
    target_linearity,
)
from gramlin.collapse import MEASURES
from gramlin.moments import Moments
from tests.drawing import few, seeds, tensors

# Singular vectors of float64 class means, and pseudo-inverses of well-conditioned sums.
TIGHT = 1e-10


def draw(seed: int, *shape: int) -> torch.Tensor:
    return tensors(seed, shape)[0]


def clusters(seed: int, counts: list[int], d: int, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Features off centre around one random mean a class, with noise that is not isotropic."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    noise = draw(seed, len(labels), d) @ draw(seed + 1, d, d)
    return draw(seed + 2, len(counts), d)[labels] + 3 + spread * noise, labels


def exact_clusters(means: torch.Tensor, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Balanced classes with the given means, each of covariance root rootᵀ without sampling error."""
    K, d = means.shape
    offsets = torch.cat([root.mT, -root.mT]) * math.sqrt(root.shape[1])
    return (means[:, None] + offsets).reshape(-1, d), torch.arange(K).repeat_interleave(len(offsets))


def shuffled(H: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(len(H), generator=torch.Generator().manual_seed(seed))
    return H[order], labels[order]


def by_loops(H, labels, weight=None) -> dict[str, float]:
    """All measures again, in NumPy, a definition a line."""
    H, labels = np.asarray(H, dtype=np.longdouble), np.asarray(labels)
    K, (n, d) = labels.max() + 1, H.shape
    means = [sum(h for h, c in zip(H, labels, strict=True) if c == k) / sum(labels == k) for k in range(K)]
    centre = sum(means) / K
    within = sum(np.outer(h - means[c], h - means[c]) for h, c in zip(H, labels, strict=True)) / n
    between = sum(np.outer(m - centre, m - centre) for m in means) / K
    inverse = np.linalg.pinv(between.astype(float), rcond=1e-12, hermitian=True)
    norms = [np.sqrt(sum((m - centre) ** 2)) for m in means]
    pairs = [(a, b) for a in range(K) for b in range(a)]
    cosines = [float((means[a] - centre) @ (means[b] - centre) / norms[a] / norms[b]) for a, b in pairs]
    gram = np.array([[(a - centre) @ (b - centre) for b in means] for a in means]).astype(float)
    etf = np.array([[(a == b) - 1 / K for b in range(K)] for a in range(K)])
    one_hot = np.eye(K)[labels]
    fit = LinearRegression().fit(H.astype(float), one_hot).predict(H.astype(float))
    values = {
        "nc1": sum(within[i] @ inverse[:, i] for i in range(d)) / K,
        "nc2_equinorm": np.std(norms) / np.mean(norms),
        "nc2_equiangular": np.std(cosines),
        "nc2_etf": np.linalg.norm(gram / np.linalg.norm(gram) - etf / np.linalg.norm(etf)),
        "target_linearity": 1 - np.sum((one_hot - fit) ** 2) / np.sum((one_hot - one_hot.mean(axis=0)) ** 2),
    }
    if weight is not None:
        M, W = np.array([m - centre for m in means]).astype(float), np.asarray(weight)
        values["nc3"] = np.linalg.norm(W / np.linalg.norm(W) - M / np.linalg.norm(M))
    return {name: float(value) for name, value in values.items()}


def assert_same(one: dict, other: dict, abs: float = TIGHT, rel: float = TIGHT) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert float(one[name]) == pytest.approx(float(other[name]), abs=abs, rel=rel), name


def filled(K: int, batches) -> NeuralCollapse:
    metric = NeuralCollapse(K)
    for features, targets in batches:
        metric.update(features, targets)
    return metric


def impurity(labels: torch.Tensor) -> float:
    """g = 1 − Σ p², the variance of one-hot classes."""
    return 1 - (labels.bincount().double() / len(labels)).square().sum().item()


# ---- definitions ----


@few
@given(counts=st.lists(st.integers(1, 9), min_size=2, max_size=5), d=st.integers(1, 12), seed=seeds)
def test_measures_are_their_definitions(counts, d, seed):
    # n ≤ d is among the cases: there the rows are kept.
    H, labels = shuffled(*clusters(seed, counts, d))
    weight = draw(seed + 3, len(counts), d)
    assert_same(neural_collapse(H, labels, weight), by_loops(H, labels, weight), rel=1e-8)


@pytest.mark.parametrize(("K", "d", "counts"), [(2, 1, [3, 3]), (4, 3, [5, 5, 5, 5]), (5, 9, [1, 40, 2, 3, 7])])
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(0)], ids=["fixed", "drawn"])
def test_a_simplex_has_collapsed_whatever_the_counts(K, d, counts, generator):
    corners = 3 * simplex_etf(K, d, generator=generator)
    labels = torch.arange(K).repeat_interleave(torch.tensor(counts))
    measures = neural_collapse(corners[labels] + 7, labels, weight=0.1 * corners)
    assert measures.pop("target_linearity").item() == pytest.approx(1, abs=1e-12)
    assert measures.keys() == {"nc1", "nc2_equinorm", "nc2_equiangular", "nc2_etf", "nc3"}
    for name, value in measures.items():
        assert value.item() == pytest.approx(0, abs=1e-13), name


@pytest.mark.parametrize(("radius", "width"), [(1.0, 1.0), (2.0, 0.1), (0.3, 5.0)])
def test_round_clusters_on_a_simplex_have_closed_forms(radius, width):
    K, d = 4, 7
    H, labels = exact_clusters(radius * simplex_etf(K, d), width * torch.eye(d, dtype=torch.float64))
    measures = neural_collapse(H, labels)
    ratio = (K - 1) * width**2 / radius**2
    assert measures["nc1"].item() == pytest.approx((K - 1) / K * ratio, rel=TIGHT)
    assert measures["target_linearity"].item() == pytest.approx(1 / (1 + ratio), rel=TIGHT)
    assert measures["nc2_etf"].item() == pytest.approx(0, abs=TIGHT)


def test_each_part_of_the_simplex_is_seen_by_its_measure():
    corners = simplex_etf(4, 6)
    stretched = corners * torch.tensor([[1.0], [1.0], [1.0], [2.0]], dtype=torch.float64)
    square = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]], dtype=torch.float64)
    assert equinorm(stretched) > 0.1
    assert equinorm(square).item() == pytest.approx(0, abs=1e-15)
    # Cosines of the square: −1 twice, 0 four times.
    assert equiangularity(square).item() == pytest.approx(math.sqrt(2) / 3, rel=TIGHT)
    assert etf_distance(square) > 0.1


@few
@given(K=st.integers(2, 7), d=st.integers(1, 9), seed=seeds)
def test_distance_from_a_simplex_is_how_unevenly_means_spread_over_directions(K, d, seed):
    means = draw(seed, K, d)
    variances = torch.linalg.svdvals(means - means.mean(dim=0)).square()
    participation = variances.sum().square() / variances.square().sum()
    expected = 2 - 2 * (participation / (K - 1)).sqrt()
    assert etf_distance(means).square().item() == pytest.approx(expected.item(), abs=1e-12)


def test_a_class_mean_at_the_centre_has_no_angle():
    means = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    assert equiangularity(means).isnan()
    assert equiangularity(means / 3 + 0.1).isnan()  # the centre is off by a rounding
    assert not equinorm(means).isnan()
    assert not equiangularity(means + torch.tensor([[0.0], [1e-6], [0.0]])).isnan()


# ---- invariances ----


@few
@given(counts=st.lists(st.integers(2, 9), min_size=2, max_size=5), d=st.integers(2, 9), seed=seeds)
def test_measures_are_blind_to_place_scale_rotation_and_names_of_classes(counts, d, seed):
    H, labels = clusters(seed, counts, d)
    rotation = torch.linalg.qr(draw(seed + 4, d, d)).Q
    renamed = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed))
    expected = neural_collapse(H, labels)
    assert_same(neural_collapse(1e-3 * H @ rotation - 5, renamed[labels]), expected, abs=1e-8, rel=1e-7)


def test_measures_are_not_blind_to_other_linear_maps():
    H, labels = clusters(0, [20, 20, 20], 5)
    mapped = neural_collapse(H @ draw(9, 5, 5), labels)
    expected = neural_collapse(H, labels)
    for name in MEASURES:
        assert abs(mapped[name] - expected[name]) > 0.01 * expected[name], name
    assert mapped["target_linearity"].item() == pytest.approx(expected["target_linearity"].item(), abs=TIGHT)


def test_measures_are_of_distributions():
    H, labels = clusters(0, [4, 7, 2], 5)
    assert_same(neural_collapse(H.repeat(3, 1), labels.repeat(3)), neural_collapse(H, labels), rel=1e-8)


# ---- digits ----


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    ("d", "batch"), [(6, 200), (6, 7), (6, 1), (500, 200)], ids=["once", "batches", "single", "rows"]
)
def test_digits_survive_collapse_and_a_large_mean(offset, d, batch):
    # Within classes a millionth of what is between them: a 1e-12th of the scatter. Features at 1e4 are rounded to 2e-12
    # themselves; the reference is of these, in extended precision.
    H, labels = shuffled(*clusters(0, [30, 50, 40], d, spread=1e-6))
    H += offset
    metric = filled(3, zip(H.split(batch), labels.split(batch), strict=True))
    expected = by_loops(H, labels) if d < 10 else None
    if expected is None:
        means = torch.stack([H[labels == c].mean(dim=0) for c in range(3)])
        inverse = torch.linalg.pinv(means - means.mean(dim=0), rtol=1e-9)
        expected = {"nc1": ((H - means[labels]) @ inverse).square().sum().item() / len(H)}
    assert metric.compute()["nc1"].item() == pytest.approx(expected["nc1"], rel=1e-6 if offset else 1e-8)
    assert 1e-13 < expected["nc1"] < 1e-9 * d


def test_a_difference_of_scatters_would_lose_them():
    H, labels = clusters(0, [300, 500, 400], 6, spread=1e-7)
    H += 100
    moments = Moments()
    moments.update(H, F.one_hot(labels).double())  # as real targets: one joint mean
    counts = labels.bincount().double()
    between = (moments.cross / counts) @ moments.cross.mT
    means = torch.stack([H[labels == c].mean(dim=0) for c in range(3)])
    inverse = torch.linalg.pinv(means - means.mean(dim=0))
    lost = (inverse.mT @ (moments.scatter - between) @ inverse).trace().item() / len(H)
    right = by_loops(H, labels)["nc1"]
    assert abs(lost / right - 1) > 1e-4
    assert neural_collapse(H, labels)["nc1"].item() == pytest.approx(right, rel=1e-6)


def test_a_constant_feature_stays_constant():
    # Sums of 30,000 times 0.7 are off by more than what counts as rounding.
    H, labels = torch.full((60000, 1), 0.7, dtype=torch.float64), torch.arange(60000) % 2
    with pytest.raises(ValueError, match="coincide"):
        neural_collapse(H, labels)
    moments = Moments()
    moments.update(H, labels)
    assert moments.squares == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_of_any_precision_are_summed_in_float64(dtype):
    H, labels = clusters(0, [30, 20, 25], 6)
    H = H.to(dtype)
    measures = neural_collapse(H, labels)
    assert all(value.dtype == torch.float64 for value in measures.values())
    assert_same(measures, neural_collapse(H.double(), labels), rel=1e-9)


# ---- what collapse forces, and what it does not ----


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    extra=st.integers(0, 6),
    spread=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    seed=seeds,
)
def test_collapse_forces_linearity_whatever_the_counts(counts, extra, spread, seed):
    H, labels = clusters(seed, counts, len(counts) - 1 + extra, spread)
    measures, g = neural_collapse(H, labels), impurity(labels)
    assert measures["target_linearity"] >= g / (g + measures["nc1"]) - 1e-9


def test_nc1_is_the_error_of_reading_the_class_off_its_mean():
    H, labels = clusters(0, [4, 9, 5, 20], 6)
    means = torch.stack([H[labels == c].mean(dim=0) for c in range(4)])
    centre = means.mean(dim=0)
    read = (H - centre) @ torch.linalg.pinv(means - centre) + 1 / 4
    error = (read - F.one_hot(labels)).square().sum(dim=1).mean()
    assert neural_collapse(H, labels)["nc1"].item() == pytest.approx(error.item(), rel=TIGHT)


@pytest.mark.parametrize("repeats", [[1, 1, 1], [1, 2, 5]], ids=["balanced", "unbalanced"])
def test_the_bound_is_reached_where_noise_has_the_shape_of_the_weighted_means(repeats):
    # Along the class means Σ_W is α times the covariance of means weighted by class, about the mean of all samples;
    # across them it is anything.
    alpha, means, p = 0.7, F.pad(draw(0, 3, 2), (0, 3)), torch.tensor(repeats).double() / sum(repeats)
    shifts = (means - p @ means) * p.sqrt()[:, None]
    along, across = math.sqrt(alpha) * shifts.mT, F.pad(draw(1, 3, 3), (0, 0, 2, 0))

    def measured(root: torch.Tensor) -> tuple[float, float]:
        H, labels = exact_clusters(means, root)
        each = torch.tensor(repeats)[labels]
        H, labels = H.repeat_interleave(each, dim=0), labels.repeat_interleave(each)
        measures, g = neural_collapse(H, labels), impurity(labels)
        assert measures["nc1"].item() == pytest.approx(alpha * g, rel=1e-9)
        return measures["target_linearity"].item(), g / (g + measures["nc1"].item())

    linearity, bound = measured(torch.cat([along, across], dim=1))
    assert linearity == pytest.approx(bound, rel=1e-9)
    # The same noise along the means and across them, but one tells of the other: linear readouts subtract it.
    linearity, bound = measured(along + across)
    assert linearity > bound + 0.05


def test_equal_canonical_correlations_do_not_reach_the_bound():
    # Of two classes there is only one. Noise along the means that noise across them gives away.
    corners = simplex_etf(2, 2)
    H, labels = exact_clusters(corners, torch.tensor([[1.0, 3.0], [0.0, 1.0]], dtype=torch.float64))
    measures = neural_collapse(H, labels)
    # Σ_W = [[10, 3], [3, 1]], of which 10 − 3·3/1 = 1 is left along the means once the other is known.
    assert measures["nc1"].item() == pytest.approx(10 / 2, rel=TIGHT)
    assert measures["target_linearity"].item() == pytest.approx(1 / 2, rel=TIGHT)
    assert measures["target_linearity"] > 0.5 / (0.5 + measures["nc1"]) + 0.4


def test_linearity_does_not_force_collapse():
    # A shear of collapsed features: noise across the means, of variance one, is added along them `a` times over.
    a = 100.0
    collapsed, labels = exact_clusters(simplex_etf(2, 2), torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    before = neural_collapse(collapsed, labels)
    sheared = neural_collapse(collapsed @ torch.tensor([[1.0, 0.0], [a, 1.0]], dtype=torch.float64), labels)
    assert before["nc1"].item() == pytest.approx(0, abs=TIGHT)
    assert sheared["nc1"].item() == pytest.approx(a**2 / 2, rel=1e-9)
    for measures in (before, sheared):
        assert measures["target_linearity"].item() == pytest.approx(1, abs=1e-9)


@few
@given(K=st.integers(2, 5), spread=st.sampled_from([0.01, 0.3, 3.0]), seed=seeds)
def test_linearity_forces_collapse_where_all_noise_is_along_the_means(K, spread, seed):
    # d = K − 1: nc1 is then blind to invertible maps too, and a mean over 1/ρ² − 1 of canonical correlations ρ.
    H, labels = clusters(seed, [9] * K, K - 1, spread)
    measures = neural_collapse(H, labels)
    mapped = neural_collapse(H @ (draw(seed + 5, K - 1, K - 1) + 3 * torch.eye(K - 1)), labels)
    assert mapped["nc1"].item() == pytest.approx(measures["nc1"].item(), rel=1e-5)
    short = (K - 1) * (1 - measures["target_linearity"].item())
    if short < 0.99:
        assert measures["nc1"].item() <= (K - 1) / K * short / (1 - short) * (1 + 1e-7)


@few
@given(K=st.integers(2, 5), d=st.integers(4, 9), seed=seeds)
def test_canonical_correlations_stand_between_the_two(K, d, seed):
    # nc1 ≥ mean over K of 1/ρ² − 1 ≥ ((K − 1)/K)(1/TL − 1), and TL = Pillai's trace/(K − 1): balanced classes.
    H, labels = clusters(seed, [12] * K, d)
    measures = neural_collapse(H, labels)
    X, Y = H - H.mean(dim=0), F.one_hot(labels).double() - 1 / K
    squared = torch.linalg.svdvals(torch.linalg.qr(X).Q.mT @ torch.linalg.qr(Y[:, 1:]).Q).square()[: K - 1]
    assert measures["target_linearity"].item() == pytest.approx(squared.mean().item(), abs=TIGHT)
    middle = (1 / squared - 1).sum() / K
    assert measures["nc1"] >= middle * (1 - 1e-9)
    assert middle >= (K - 1) / K * (1 / squared.mean() - 1) * (1 - 1e-9)


def test_linearity_of_unbalanced_classes_is_not_pillais_trace():
    H, labels = clusters(0, [5, 40, 15], 4)
    X = H - H.mean(dim=0)
    means = torch.stack([X[labels == c].mean(dim=0) for c in range(3)])
    between = means.mT @ (labels.bincount()[:, None] * means)
    pillai = (torch.linalg.inv(X.mT @ X) @ between).trace() / 2
    assert (neural_collapse(H, labels)["target_linearity"] - pillai).abs() > 0.01


def test_collapse_onto_too_few_directions_forces_less():
    # Three points on a line: no noise at all, and yet one of the two canonical correlations is zero.
    H = torch.tensor([[-1.0], [0.0], [1.0]]).double().repeat(4, 1)
    measures = neural_collapse(H, torch.arange(3).repeat(4))
    assert measures["nc1"].item() == 0
    assert measures["target_linearity"].item() == pytest.approx(1 / 2, abs=TIGHT)
    assert measures["nc2_etf"] > 0.5


def test_directions_that_no_class_mean_varies_in_do_not_count():
    # Four means in a plane of six dimensions; the third direction of M is rounding.
    means, noise = draw(0, 4, 2), torch.eye(6, dtype=torch.float64)
    rotation = torch.linalg.qr(draw(1, 6, 6)).Q
    measured = neural_collapse(*exact_clusters(F.pad(means, (0, 4)) @ rotation + 50, noise))["nc1"].item()
    assert measured == pytest.approx(neural_collapse(*exact_clusters(means, noise[:2, :2]))["nc1"].item(), rel=1e-9)

    def with_third(size: float) -> float:
        third = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], dtype=torch.float64)
        return neural_collapse(*exact_clusters(torch.cat([means, size * third], dim=1), noise[:3, :3]))["nc1"].item()

    assert with_third(1e-8) == pytest.approx(measured, rel=1e-6)
    assert with_third(1e-5) > 1e9 > measured  # the variation is real


# ---- self-duality ----


def test_self_duality_is_a_distance_of_directions():
    means = draw(0, 4, 6) + 5
    M = means - means.mean(dim=0)
    assert self_duality(weight=3 * M, class_means=means) < 1e-14
    assert self_duality(weight=-M, class_means=means).item() == pytest.approx(2, rel=TIGHT)
    across = torch.linalg.qr(torch.stack([M.flatten(), draw(1, 24)], dim=1)).Q[:, 1].view(4, 6)
    assert self_duality(weight=across, class_means=means).item() == pytest.approx(math.sqrt(2), rel=TIGHT)
    # The weight is taken as it is; the class means are centred.
    shared = M + draw(2, 1, 6)
    assert self_duality(weight=shared, class_means=means) > 0.1
    assert self_duality(weight=shared - shared.mean(dim=0), class_means=means) < 1e-14


def test_weight_and_class_means_are_not_taken_for_one_another():
    with pytest.raises(TypeError, match="positional"):
        self_duality(draw(0, 3, 3), draw(1, 3, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_weight_decay_makes_the_classifier_dual_to_a_simplex(bias):
    # The Feature Learning Equation where training has come to rest, W = −ΔᵀH/λ. With collapsed features Δ has one row
    # a class: on a simplex it is a multiple of I − 11ᵀ/K, elsewhere it is not.
    corners, decay = 2 * simplex_etf(4, 6), 1e-2
    tilted = corners @ torch.diag(torch.tensor([1.0, 0.5, 0.2, 1, 1, 1], dtype=torch.float64))

    def trained(means: torch.Tensor) -> nn.Linear:
        torch.manual_seed(0)
        head = nn.Linear(6, 4, bias).double()
        optimizer = torch.optim.LBFGS(
            head.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(head(means), torch.arange(4)) + decay / 2 * head.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return head

    for means, dual in ((corners, True), (tilted, False), (corners + draw(0, 6), bias)):
        head = trained(means)
        deltas = (head(means).softmax(dim=1) - torch.eye(4)) / 4
        assert torch.allclose(head.weight, -deltas.mT @ means / decay, atol=1e-7)
        assert (self_duality(weight=head.weight, class_means=means) < 1e-6) == dual


# ---- the simplex ----


@pytest.mark.parametrize(("K", "d"), [(2, 1), (2, 5), (3, 2), (10, 9), (10, 512)])
@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)], ids=["fixed", "drawn"])
def test_simplex_has_unit_rows_and_equal_angles(K, d, generator):
    corners = simplex_etf(K, d, generator=generator)
    assert corners.shape == (K, d)
    expected = torch.full((K, K), -1 / (K - 1), dtype=torch.float64).fill_diagonal_(1)
    assert torch.allclose(corners @ corners.mT, expected, atol=1e-14)
    assert torch.allclose(corners.sum(dim=0), torch.zeros(d).double(), atol=1e-14)


def test_drawn_simplices_differ_and_repeat_with_the_seed():
    one, two, again = (simplex_etf(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 0))
    assert torch.equal(one, again)
    assert not torch.allclose(one, two)
    assert torch.equal(simplex_etf(3, 4), simplex_etf(3, 4))


def test_drawn_simplices_favour_no_direction():
    drawn = torch.stack([simplex_etf(2, 2, generator=torch.Generator().manual_seed(seed))[0] for seed in range(300)])
    assert (drawn.mean(dim=0).abs() < 0.15).all()  # 3.7 standard errors


# ---- the decision ----


@few
@given(K=st.integers(2, 6), d=st.integers(1, 7), offset=st.sampled_from([0.0, 1e4]), seed=seeds)
def test_disagreement_is_by_distance(K, d, offset, seed):
    H, means = draw(seed, 50, d) + offset, draw(seed + 1, K, d) + offset
    predictions = torch.randint(K, (50,), generator=torch.Generator().manual_seed(seed))
    distances = torch.tensor([[sum((h - m) ** 2) for m in means.numpy()] for h in H.numpy()])
    expected = (distances.argmin(dim=1) != predictions).double().mean()
    assert nearest_class_mean_disagreement(H, predictions, means) == expected
    assert nearest_class_mean_disagreement(H, distances.argmin(dim=1), means) == 0


def test_a_bias_moves_the_decision_off_the_nearest_mean():
    H, labels = clusters(0, [40, 40, 40], 5, spread=0.3)
    metric = filled(3, [(H, labels)])
    means = metric.class_means()
    M, centre = means - means.mean(dim=0), means.mean(dim=0)
    scores = (H - centre) @ M.mT
    nearest = scores - M.square().sum(dim=1) / 2
    assert nearest_class_mean_disagreement(H, nearest.argmax(dim=1), means) == 0
    biased = nearest + torch.tensor([100.0, 0.0, 0.0])
    assert nearest_class_mean_disagreement(H, biased.argmax(dim=1), means) > 0.5


# ---- sums over batches and processes ----


@few
@given(size=st.integers(1, 40), K=st.integers(2, 5), d=st.sampled_from([3, 30]), seed=seeds)
def test_the_split_of_the_data_does_not_matter(size, K, d, seed):
    H, labels = shuffled(*clusters(seed, list(range(3, 3 + 6 * K, 6)), d))
    whole = neural_collapse(H, labels)
    assert_same(filled(K, zip(H.split(size), labels.split(size), strict=True)).compute(), whole, rel=1e-8)
    by_class = [(H[labels == c], labels[labels == c]) for c in range(K)]
    assert_same(filled(K, by_class).compute(), whole, rel=1e-8)
    one, two = filled(K, by_class[:1]), filled(K, by_class[1:])
    one.merge_state(two)
    assert_same(one.compute(), whole, rel=1e-8)
    two.merge_state(filled(K, by_class[:1]))
    assert_same(two.compute(), whole, rel=1e-8)


def test_the_metric_is_the_function():
    H, labels = clusters(0, [8, 9, 10], 5)
    weight = draw(1, 3, 5)
    metric = filled(3, [(H, labels)])
    assert "nc3" not in metric.compute()
    assert_same(metric.compute(weight=weight), neural_collapse(H, labels, weight))  # no stored value in the way
    assert "nc3" not in metric.compute()
    assert torch.equal(metric.class_means()[1], metric.class_means()[1])
    assert torch.allclose(metric.class_means()[1], H[labels == 1].mean(dim=0))
    assert metric.compute()["target_linearity"] == target_linearity(H, labels)
    metric.reset()
    metric.update(H * 2, labels)
    assert_same(metric.compute(), neural_collapse(H, labels), rel=1e-8)


def test_forward_returns_the_batch_and_adds_it():
    H, labels = shuffled(*clusters(0, [20, 20], 3))
    metric = NeuralCollapse(2)
    for half in (slice(0, 15), slice(15, 40)):
        assert_same(metric(H[half], labels[half]), neural_collapse(H[half], labels[half]))
    assert_same(metric.compute(), neural_collapse(H, labels))


def test_the_metric_is_saved_cast_and_collected_without_loss():
    H, labels = clusters(0, [8, 9, 10], 5)
    metric = filled(3, [(H, labels)])
    metric.persistent(True)
    buffer = io.BytesIO()
    torch.save(metric.half().state_dict(), buffer)
    buffer.seek(0)
    loaded = NeuralCollapse(3)
    loaded.load_state_dict(torch.load(buffer))
    assert_same(loaded.compute(), neural_collapse(H, labels))
    loaded.update(H, labels)
    assert_same(loaded.compute(), neural_collapse(H, labels), rel=1e-8)
    collection = MetricCollection([NeuralCollapse(3), TargetLinearity()])
    collection.update(H, labels)
    assert_same(collection["NeuralCollapse"].compute(), neural_collapse(H, labels))


def _process(rank: int, init: str, parts: list, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    values = []
    for per_rank in parts:
        metric = filled(4, per_rank[rank])
        metric._update_count = 1  # a process without data joins in all the same
        values.append(({name: value.item() for name, value in metric.compute().items()}, metric.class_means()))
    torch.save(values, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    H, labels = clusters(0, [9, 20, 15, 16], 5, spread=1e-4)
    wide, mixed = shuffled(*clusters(1, [9, 20, 15, 16], 70))
    parts = [
        [[(H[:29], labels[:29])], [(H[29:], labels[29:])]],  # no class in common
        [[(wide[:20], mixed[:20])], [(wide[20:], mixed[20:])]],  # rows
        [[(H[::2], labels[::2])], [(h[None], c[None]) for h, c in zip(H[1::2], labels[1::2], strict=True)]],
        [[], [(H, labels)]],
    ]
    torch.multiprocessing.spawn(_process, (f"file://{tmp_path}/init", parts, str(tmp_path)), nprocs=2, join=True)
    for rank in range(2):
        for index, (measures, means) in enumerate(torch.load(tmp_path / f"{rank}.pt")):
            data = (wide, mixed) if index == 1 else (H, labels)
            assert_same(measures, neural_collapse(*data), abs=0, rel=1e-10)
            assert torch.allclose(means, filled(4, [data]).class_means(), rtol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree():
    H, labels = clusters(0, [30, 20, 25], 6)
    weight = draw(1, 3, 6)
    on_gpu = neural_collapse(H.cuda(), labels.cuda(), weight.cuda())
    assert all(value.is_cuda for value in on_gpu.values())
    assert_same(on_gpu, neural_collapse(H, labels, weight), rel=1e-8)
    corners = simplex_etf(3, 6, generator=torch.Generator("cuda").manual_seed(0))
    assert corners.is_cuda
    assert nearest_class_mean_disagreement(corners, torch.arange(3).cuda(), corners) == 0


# ---- columns of the layer table ----


def test_the_layer_table_has_the_measures():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    H, labels = shuffled(*clusters(0, [20, 30, 25], 5))
    table = probe(model, (H, labels), metrics=MEASURES, batch_size=16)
    assert list(table.columns[4:]) == list(MEASURES)
    for row, features in zip(table.to_dict("records"), (H, model[:2](H)), strict=True):
        measures = neural_collapse(features, labels)
        assert_same({name: row[name] for name in MEASURES}, {name: measures[name] for name in MEASURES}, rel=1e-8)


def test_the_layer_table_has_no_measures_of_constant_features_or_missing_classes():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    nn.init.constant_(model[0].bias, -1e6)  # no unit is on
    H, labels = clusters(0, [20, 30, 25], 5)
    assert probe(model, (H, labels), metrics=["nc1"])["nc1"].isna().tolist() == [False, True]
    with pytest.raises(ValueError, match="layer '0': there are no samples of class 1"):
        probe(model, (H[labels != 1], labels[labels != 1]), metrics=["nc1"])
    with pytest.raises(ValueError, match="layer '0': the targets are real"):
        probe(model, (H, labels.double()), metrics=["nc1"])


# ---- words ----


H5, C5 = torch.arange(15.0).reshape(5, 3), torch.tensor([0, 1, 2, 0, 1])
MEANS = torch.eye(3)
ERRORS = {
    "missing class": (lambda g: g.neural_collapse(H5, C5 * 2), ValueError, r"no samples of classes 1, 3, of 5"),
    "missing last": (lambda g: g.neural_collapse(H5, C5, num_classes=4), ValueError, r"no samples of class 3, of 4"),
    "one class": (lambda g: g.neural_collapse(H5, C5 * 0), ValueError, r"all 5 samples are of class 0"),
    "num_classes": (lambda g: g.NeuralCollapse(1), ValueError, r"num_classes is 1; pass an integer of at least 2"),
    "class outside": (lambda g: g.neural_collapse(H5, C5, num_classes=2), ValueError, r"class 2 with num_classes=2"),
    "negative class": (lambda g: g.neural_collapse(H5, C5 - 1), ValueError, r"class -1; pass classes counted from 0"),
    "real targets": (lambda g: g.neural_collapse(H5, C5.float()), TypeError, r"float32 of shape \(5,\); pass integer"),
    "one-hot": (lambda g: g.NeuralCollapse(3).update(H5, F.one_hot(C5)), TypeError, r"shape \(5, 3\); pass integer"),
    "booleans": (lambda g: g.neural_collapse(H5, C5 > 0), TypeError, r"targets are torch.bool"),
    "lists": (
        lambda g: g.neural_collapse(H5, [0, 1]),
        TypeError,
        r"targets: got a list; pass a torch.Tensor of integer",
    ),
    "integer features": (lambda g: g.neural_collapse(H5.long(), C5), TypeError, r"features: got a torch.int64 tensor"),
    "not finite": (lambda g: g.neural_collapse(H5 / 0, C5), ValueError, r"features: 15 NaN or infinite entries"),
    "empty": (lambda g: g.neural_collapse(H5[:0], C5[:0]), ValueError, r"the batch is empty"),
    "lengths": (lambda g: g.neural_collapse(H5, C5[:4]), ValueError, r"\(5, 3\), targets \(4,\): the first axes"),
    "coincide": (lambda g: g.neural_collapse(H5 * 0 + 7, C5), ValueError, r"means of all 3 classes coincide"),
    "weight": (lambda g: g.neural_collapse(H5, C5, H5), ValueError, r"\(5, 3\), the class means \(3, 3\)"),
    "zero weight": (lambda g: g.neural_collapse(H5, C5, MEANS * 0), ValueError, r"weight of shape \(3, 3\) is zero"),
    "integer weight": (
        lambda g: g.neural_collapse(H5, C5, MEANS.int()),
        TypeError,
        r"weight: got a torch.int32 tensor",
    ),
    "vector": (lambda g: g.equinorm(MEANS[0]), ValueError, r"class means: got shape \(3,\); pass a non-empty \(K, d\)"),
    "one mean": (lambda g: g.etf_distance(MEANS[:1]), ValueError, r"\(1, 3\); pass \(K, d\) with two classes"),
    "array": (lambda g: g.equiangularity(MEANS.numpy()), TypeError, r"class means: got a ndarray"),
    "infinite": (lambda g: g.equinorm(MEANS / 0), ValueError, r"class means: 9 NaN or infinite .*, shape \(3, 3\)"),
    "too flat": (lambda g: g.simplex_etf(5, 3), ValueError, r"got K=5, d=3; pass"),
    "one corner": (lambda g: g.simplex_etf(1, 3), ValueError, r"got K=1, d=3; pass K of at least 2"),
    "logits": (
        lambda g: g.nearest_class_mean_disagreement(H5, H5, MEANS),
        TypeError,
        r"predictions are torch.float32 of shape \(5, 3\); pass integer classes \(n,\), e.g. scores.argmax",
    ),
    "prediction outside": (
        lambda g: g.nearest_class_mean_disagreement(H5, C5 + 2, MEANS),
        ValueError,
        r"predictions go from 2 to 4; pass classes from 0 to 2",
    ),
    "widths": (
        lambda g: g.nearest_class_mean_disagreement(H5[:, :2], C5, MEANS),
        ValueError,
        r"features have shape \(5, 2\), predictions \(5,\), class means \(3, 3\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, unchecked):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


def test_a_metric_without_data_says_so(unchecked):
    metric = unchecked.NeuralCollapse(3)
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ValueError, match="no samples yet"):
        metric.compute()
    with pytest.raises(ValueError, match="no samples yet; call update"):
        metric.class_means()


def test_a_refused_batch_changes_nothing(unchecked):
    metric = unchecked.NeuralCollapse(3)
    metric.update(H5, C5)
    for bad, kind in (((H5, C5.float()), TypeError), ((H5 / 0, C5), ValueError), ((H5, C5 + 1), ValueError)):
        with pytest.raises(kind):
            metric.update(*bad)
    with pytest.raises(ValueError, match="no samples of class 2"):
        metric(H5[:2], C5[:2])  # forward's value of this batch alone
    assert torch.equal(metric.class_means(), torch.stack([H5[c == C5].double().mean(dim=0) for c in range(3)]))


@few
@given(seed=seeds)
def test_variation_outside_the_span_of_the_means_is_no_negative_nc1(seed):
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    y = torch.arange(60) % 3
    H = torch.zeros(60, 8, dtype=torch.float64)
    H[:, :3] = simplex_etf(3, 3).to(H)[y]
    H[:, 3:] = 10 * torch.randn(60, 5, generator=generator, dtype=torch.float64)
    H[:, 3:] -= torch.stack([H[y == c, 3:].mean(dim=0) for c in range(3)])[y]  # the means stay in their plane
    nc1 = neural_collapse(H @ turn, y)["nc1"]
    assert 0 <= nc1 < 1e-12  # the rounding of variances of 100, of which nothing is left
