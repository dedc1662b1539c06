"""What numbers are measured: stored in any precision, at the ends of float64, labels of any width, many classes."""

import tracemalloc

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import gramlin
from gramlin import Moments, NeuralCollapse, TargetLinearity
from gramlin.linearity import HeldOut, alignment_of
from gramlin.moments import ClassSums
from tests.drawing import tensors

N, D, K = 60, 6, 3


def drawn(n=N, d=D):
    H, Y, W, means = tensors(0, (n, d), (n, 2), (K, d), (K, d))
    return H, torch.arange(n) % K, Y, W, means


# Each of features, classes, real targets, a weight and class means; and the powers of scales that its value grows by.
MEASURES = {
    "target_linearity, classes": lambda H, y, Y, W, M: gramlin.target_linearity(H, y),
    "target_linearity, real": lambda H, y, Y, W, M: gramlin.target_linearity(H, Y),
    "score": lambda H, y, Y, W, M: gramlin.fit_linear(H, Y).score(H.flip(0), Y),
    "surrogate, classes": lambda H, y, Y, W, M: gramlin.surrogate(H, W, y),
    "surrogate, real": lambda H, y, Y, W, M: gramlin.surrogate(H, W, Y),
    "cka, classes": lambda H, y, Y, W, M: gramlin.normalized_surrogate(H, W, y),
    "cka, real": lambda H, y, Y, W, M: gramlin.normalized_surrogate(H, W, Y),
    "collapse": lambda H, y, Y, W, M: torch.stack(list(gramlin.neural_collapse(H, y, weight=W).values())),
    "equinorm": lambda H, y, Y, W, M: gramlin.equinorm(M),
    "equiangularity": lambda H, y, Y, W, M: gramlin.equiangularity(M),
    "etf_distance": lambda H, y, Y, W, M: gramlin.etf_distance(M),
    "self_duality": lambda H, y, Y, W, M: gramlin.self_duality(weight=W, class_means=M),
    "nearest_class_mean": lambda H, y, Y, W, M: gramlin.nearest_class_mean_disagreement(H, y, M),
}


# ---- precision ----


@pytest.mark.parametrize("n", [4, N], ids=["rows", "sums"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MEASURES)
def test_features_in_any_precision_give_the_figure_of_the_same_numbers_in_float64(name, dtype, n):
    H, y, Y, W, M = drawn(n)
    stored = [(300 + H).to(dtype), y, Y.to(dtype), W.to(dtype), (300 + M).to(dtype)]
    in_float64 = [each.double() if each.is_floating_point() else each for each in stored]
    # The same numbers in, the same operations on them: not a digit may differ.
    assert torch.equal(MEASURES[name](*stored), MEASURES[name](*in_float64))


def test_features_in_half_precision_give_the_figure_of_scikit_learn():
    H, _, Y, _, _ = drawn()
    H = (300 + 3 * H).bfloat16()
    numbers = H.double().numpy()
    fit = LinearRegression().fit(numbers, Y.numpy()).predict(numbers)
    expected = r2_score(Y.numpy(), fit, multioutput="variance_weighted")
    assert gramlin.target_linearity(H, Y).item() == pytest.approx(expected, abs=1e-10)  # two solvers
    batches = TargetLinearity()
    for part in zip(H.split(7), Y.split(7), strict=True):
        batches.update(*part)
    assert batches.compute().item() == pytest.approx(expected, abs=1e-10)


def test_features_of_eight_bits_are_measured_too():
    H, _, Y, _, _ = drawn()
    H = H.to(torch.float8_e4m3fn)
    assert torch.equal(gramlin.target_linearity(H, Y), gramlin.target_linearity(H.double(), Y))
    bad = torch.tensor([[float("nan")], [1.0]]).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="features: 1 NaN or infinite entries of 2"):
        gramlin.target_linearity(bad, Y[:2])


# ---- the ends of float64 ----


def refused(call):
    """The value, or the words of the error."""
    try:
        return call()
    except ValueError as error:
        return str(error)


GROWS = {"surrogate, classes": (2, 2, 0), "surrogate, real": (2, 2, 2)}  # with features, weight, targets


@pytest.mark.parametrize("at", range(3), ids=["features", "weight", "targets"])
@pytest.mark.parametrize("scale", [1e139, 1e60, 1e-60, 1e-138, 1e200, 1e-200, 1e307, 1e-310, 5e-324])
@pytest.mark.parametrize("name", MEASURES)
def test_a_scale_changes_the_value_as_it_must_or_is_an_error(name, scale, at):
    H, y, Y, W, M = drawn()
    expected = MEASURES[name](H, y, Y, W, M)
    factors = [1.0, 1.0, 1.0]
    factors[at] = scale
    given = (factors[0] * H, y, factors[2] * Y, factors[1] * W, factors[0] * M)
    value = refused(lambda: MEASURES[name](*given))
    if isinstance(value, str):
        assert "float64" in value
        assert "rescale" in value
        assert not 1e-139 < scale < 1e139, "so much is within the range"
        return
    if scale == 5e-324:
        return  # the smallest number has no digits: another matrix, whose value may be another
    power = GROWS.get(name, (0, 0, 0))[at]
    # Subnormal numbers, in what takes them, have fewer digits: 1e-310 has 14 of 16.
    tolerance = 1e-9 if scale > 1e-300 else 1e-4
    assert value.isfinite().all()
    assert torch.allclose(value / scale ** (power / 2), expected * scale ** (power / 2), rtol=tolerance, atol=0)


@pytest.mark.parametrize("scale", [1e130, 1e-130])
def test_a_surrogate_beyond_float64_is_an_error(scale, unchecked):
    H, _, Y, W, _ = drawn()
    with pytest.raises(ValueError, match="the surrogate leaves the range of float64: rescale"):
        unchecked.surrogate(scale * H, scale * W, scale * Y)
    # CKA knows no scale.
    value = unchecked.normalized_surrogate(scale * H, scale * W, scale * Y)
    assert value.item() == pytest.approx(unchecked.normalized_surrogate(H, W, Y).item(), rel=1e-12)


def test_ridge_at_the_ends_of_float64():
    H, y, _, _, _ = drawn()
    expected = gramlin.target_linearity(H, y, ridge=2.0).item()
    for scale in (1e130, 1e-130):
        assert gramlin.target_linearity(scale * H, y, ridge=2 * scale**2).item() == pytest.approx(expected, rel=1e-12)
    assert gramlin.target_linearity(H, y, ridge=1e308).item() < 1e-300


def test_features_too_small_to_be_squared_count_as_constant():
    H, y, _, _, _ = drawn()
    for rows in (4, N):
        dead = torch.cat([H, 1e-160 * H[:, :2]], dim=1)[:rows]
        value, without = (gramlin.target_linearity(each, y[:rows]) for each in (dead, H[:rows]))
        assert value.item() == pytest.approx(without.item(), rel=1e-12)


# ---- labels ----

WIDTHS = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("n", [4, N], ids=["rows", "sums"])
def test_labels_of_any_width(n, dtype):
    H, y, Y, W, M = drawn(n)
    for name, measure in MEASURES.items():
        assert torch.equal(measure(H, y.to(dtype), Y, W, M), measure(H, y, Y, W, M)), name


@pytest.mark.parametrize("n", [2, 20], ids=["rows", "sums"])
@pytest.mark.parametrize(
    ("largest", "dtype"), [(2**31, torch.int64), (2**32 - 1, torch.uint32), (2**62, torch.int64)], ids=str
)
def test_labels_that_are_no_counted_classes_are_refused_before_anything_is_allocated(largest, dtype, n, unchecked):
    H, y = torch.randn(n, 5), torch.zeros(n, dtype=torch.int64)
    y[1] = largest
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"{largest + 1} classes .* GiB: pass classes counted from 0 without gaps"):
        unchecked.target_linearity(H, y.to(dtype))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_labels_beyond_int64_are_named(unchecked):
    y = torch.tensor([0, 2**63 + 5], dtype=torch.uint64)
    with pytest.raises(ValueError, match=rf"class {2**63 + 5}; pass classes counted from 0"):
        unchecked.target_linearity(torch.randn(2, 5), y)


def test_booleans_are_no_classes(unchecked):
    H, y = torch.randn(4, 2), torch.tensor([True, False, True, True])
    with pytest.raises(TypeError, match=r"torch.bool; pass real numbers, or classes as integers \(targets.long\(\)\)"):
        unchecked.target_linearity(H, y)
    with pytest.raises(TypeError, match=r"torch.bool .*; pass integer classes"):
        unchecked.neural_collapse(H, y)


# ---- many classes ----


@pytest.mark.parametrize("sizes", [(300,), (7, 200, 93), (1,) * 300], ids=["whole", "batches", "one by one"])
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_class_sums_without_one_hot_targets_are_those_with_them(sizes, mean):
    n, d, classes = 300, 5, 40
    (H,) = tensors(2, (n, d))
    y = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(0))
    H = H + mean + y[:, None]  # classes apart, so that what is within them is a small part
    one_hot = torch.nn.functional.one_hot(y, classes).double()
    moments = Moments(classes)
    for rows, labels in zip(H.split(sizes), y.split(sizes), strict=True):
        moments.update(rows, labels)
    counts = one_hot.sum(dim=0)
    means = one_hot.mT @ (H - mean) / counts.clamp_min(1)[:, None] + mean * (counts > 0)[:, None]
    within = H - means[y]
    tolerance = 1e-12 * (1 + mean)  # of means; squares of what is left have the square root of that to lose
    assert torch.equal(moments.class_counts, counts)
    assert torch.allclose(moments.class_means, means, atol=tolerance)
    eye = torch.eye(d, dtype=torch.float64)
    assert torch.allclose(moments.within_products(eye), within.mT @ within, rtol=1e-8, atol=1e-8)
    centred = H - H.mean(dim=0), one_hot - one_hot.mean(dim=0)
    assert torch.allclose(moments.cross, centred[0].mT @ centred[1], rtol=1e-8, atol=1e-7)
    assert torch.allclose(moments.scatter, centred[0].mT @ centred[0], rtol=1e-8)
    assert moments.class_scatter_norm.item() == pytest.approx((centred[1].mT @ centred[1]).norm().item(), rel=1e-12)


def test_the_size_of_a_class_scatter_keeps_its_digits_where_one_class_has_nearly_all():
    counts = torch.tensor([10**9, 1, 0, 2], dtype=torch.float64)
    moments = Moments(4)
    moments.num_features, moments.num_targets, moments.are_classes = 2, 4, True
    moments.sums = ClassSums(counts, torch.zeros(4, 2).double(), torch.zeros(2, 2).double())
    exact = [[int(a * (sum(counts) - a)) if i == j else -int(a * b) for j, b in enumerate(counts)] for i, a in
             enumerate(counts)]  # fmt: skip
    n = int(sum(counts))
    expected = sum(entry**2 for row in exact for entry in row) ** 0.5 / n
    assert moments.class_scatter_norm.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("measure", ["target_linearity", "surrogate", "cka", "collapse", "metric", "held out"])
def test_no_matrix_of_samples_by_classes_is_formed(measure, monkeypatch):
    """With n, d and K all apart, no tensor has n · K numbers, nor n · n: largest allowed is a chunk of rows."""
    n, d, classes = 6000, 8, 500
    H, y = torch.randn(n, d), torch.arange(n) % classes
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in torch.utils._pytree.tree_leaves(out):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    W = torch.randn(3, d)
    fit = gramlin.fit_linear(H, y)
    with Watch():
        if measure == "target_linearity":
            gramlin.target_linearity(H, y)
        elif measure == "surrogate":
            gramlin.surrogate(H, W, y)
        elif measure == "cka":
            gramlin.normalized_surrogate(H, W, y)
        elif measure == "collapse":
            gramlin.neural_collapse(H, y)
        elif measure == "metric":
            metric = NeuralCollapse(classes)
            metric.update(H, y)
            metric.compute()
        else:
            HeldOut(fit).update(H, y)
    # A chunk of predictions is the one product with classes that a held-out score needs.
    assert largest <= (513 * 2 * classes if measure == "held out" else n * d + classes * 256)


def test_alignment_from_sums_is_the_function():
    H, y, _, W, _ = drawn()
    moments = Moments()
    moments.update(H @ W.mT, y)
    value = alignment_of(moments.cross, moments.scatter, moments.class_scatter_norm)
    assert value.item() == pytest.approx(gramlin.normalized_surrogate(H, W, y).item(), rel=1e-12)
