"""Laws of running moments: independent of how data are split, of large means, of the order of merges."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramlin import Moments
from gramlin.moments import Sums, target_matrix, target_values
from tests.drawing import few, seeds, tensors

# Sums of a few hundred float64 numbers of size 1.
TIGHT = 1e-12


def data(seed: int, n: int, d: int, K: int, mean: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    H, Y = tensors(seed, (n, d), (n, K))
    return H + mean, Y + H[:, :1]


def moments_of(*batches) -> Moments:
    moments = Moments()
    for H, Y in batches:
        moments.update(H, Y)
    return moments


def figures(moments: Moments) -> dict[str, torch.Tensor]:
    names = ("mean", "target_mean", "scatter", "cross", "squares", "target_squares")
    return {name: getattr(moments, name) for name in names} | {"count": torch.tensor(moments.count)}


def assert_same(a: Moments, b: Moments, tolerance: float = TIGHT) -> None:
    theirs = figures(b)
    for name, ours in figures(a).items():
        assert ours.shape == theirs[name].shape, name
        scale = 1 + theirs[name].double().norm()
        assert (ours - theirs[name]).double().norm() <= tolerance * scale, name


@few
@given(n=st.integers(1, 40), d=st.integers(1, 12), K=st.integers(1, 5), seed=seeds)
def test_moments_are_those_of_numpy(n, d, K, seed):
    H, Y = data(seed, n, d, K, mean=3.0)
    moments = moments_of((H, Y))
    joint = np.cov(torch.cat([H, Y], dim=1).numpy(), rowvar=False, bias=True).reshape(d + K, d + K) * n
    assert moments.count == n
    assert np.allclose(moments.mean, H.mean(0), atol=TIGHT)
    assert np.allclose(moments.target_mean, Y.mean(0), atol=TIGHT)
    assert np.allclose(moments.scatter, joint[:d, :d], rtol=TIGHT, atol=1e-10)
    assert np.allclose(moments.cross, joint[:d, d:], rtol=TIGHT, atol=1e-10)
    assert np.allclose(moments.squares, np.diag(joint)[:d], rtol=TIGHT, atol=1e-10)
    assert np.allclose(moments.target_squares, np.diag(joint)[d:], rtol=TIGHT, atol=1e-10)


@few
@given(cuts=st.lists(st.integers(1, 39), max_size=6, unique=True), d=st.integers(1, 50), seed=seeds)
def test_moments_do_not_depend_on_the_split(cuts, d, seed):
    H, Y = data(seed, 40, d, 3, mean=100.0)
    edges = [0, *sorted(cuts), 40]
    batches = [(H[a:b], Y[a:b]) for a, b in itertools.pairwise(edges)]
    whole = moments_of((H, Y))
    assert_same(moments_of(*batches), whole)
    merged = Moments()
    for batch in reversed(batches):
        merged.merge(moments_of(batch))
    assert_same(merged, whole)


@pytest.mark.parametrize("d", [300, 70, 5], ids=["rows", "strips of which the last is narrow", "sums"])
def test_several_chunks_are_one_sum(d):
    H, Y = data(0, 1300, d, 3)
    assert_same(moments_of((H, Y)), moments_of(*zip(H.split(13), Y.split(13), strict=True)))


def test_rows_are_kept_up_to_as_many_as_features_and_sums_from_then_on():
    H, Y = data(0, 30, 10, 2)
    moments = moments_of((H[:6], Y[:6]), (H[6:10], Y[6:10]))
    assert moments.sums is None
    assert moments.nbytes == 8 * 10 * 12
    kept = figures(moments)
    moments.update(H[10:], Y[10:])
    assert moments.rows == []
    assert moments.nbytes == 8 * (10 * 12 + 12 + 2)
    assert_same(moments, moments_of((H, Y)))
    turned = moments_of((H[:10], Y[:10]))
    turned._turn_to_sums(turned.device)
    for name, value in figures(turned).items():
        assert torch.allclose(value, kept[name], atol=TIGHT), name


@pytest.mark.parametrize("sizes", [(3, 4), (3, 20), (20, 3), (20, 25), (6, 6)], ids=str)
def test_merging_leaves_the_other_alone_whatever_the_two_hold(sizes):
    H, Y = data(1, sum(sizes), 10, 2)
    ours, theirs = (moments_of(batch) for batch in zip(H.split(sizes), Y.split(sizes), strict=True))
    before = {name: value.clone() for name, value in figures(theirs).items()}
    ours.merge(theirs)
    assert (ours.sums is None) == (sum(sizes) <= 10)
    assert_same(ours, moments_of((H, Y)))
    ours.update(H, Y)
    for name, value in figures(theirs).items():
        assert torch.equal(value, before[name]), name
    fresh = Moments()
    fresh.merge(theirs)
    fresh.update(H, Y)
    for name, value in figures(theirs).items():
        assert torch.equal(value, before[name]), name


def test_merging_nothing_changes_nothing():
    moments = moments_of(data(0, 20, 4, 2))
    before = figures(moments)
    moments.merge(Moments())
    assert all(torch.equal(value, before[name]) for name, value in figures(moments).items())


def test_a_large_mean_costs_no_digits_and_uncentred_sums_lose_them():
    H, Y = data(0, 3000, 4, 2)
    near = moments_of((H, Y))
    moved = H + 1e6
    far = moments_of(*zip(moved.split(100), Y.split(100), strict=True))
    assert torch.allclose(far.scatter, near.scatter, rtol=1e-8, atol=1e-6)
    naive = moved.T @ moved - len(H) * torch.outer(moved.mean(0), moved.mean(0))
    assert not torch.allclose(naive, near.scatter, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_summed_in_double(dtype):
    H, Y = data(0, 5000, 3, 1, mean=30.0)
    H, Y = H.to(dtype), Y.to(dtype)
    assert_same(moments_of((H, Y)), moments_of((H.double(), Y.double())))
    assert moments_of((H, Y)).scatter.dtype == torch.float64


@pytest.mark.parametrize("value", [0.1, 1e4, -3e-7])
def test_constant_columns_have_exactly_no_variance(value):
    H, Y = data(0, 1000, 5, 2)
    H[:, 2], Y[:, 1] = value, value
    for n in (4, 1000):
        moments = moments_of(*zip(H[:n].split(33), Y[:n].split(33), strict=True))
        assert moments.squares[2] == 0
        assert moments.target_squares[1] == 0
        assert (moments.squares > 0).sum() == 4


def test_a_small_spread_about_a_large_mean_is_no_constant():
    H, Y = data(0, 1000, 2, 1)
    H[:, 1] = 1e4 + 1e-4 * H[:, 1]
    assert (moments_of((H, Y)).squares > 0).all()


# ---- classes ----


def test_cross_moments_with_classes_are_class_means():
    H, _ = data(0, 60, 7, 1, mean=5.0)
    labels = torch.arange(60) % 4
    moments = moments_of((H[:20], labels[:20]), (H[20:], labels[20:]))
    counts = moments.count * moments.target_mean
    means = moments.mean[:, None] + moments.cross / counts
    for c in range(4):
        assert counts[c].item() == pytest.approx(15)
        assert torch.allclose(means[:, c], H[labels == c].mean(0), atol=TIGHT)
    between = (moments.cross / counts) @ moments.cross.T
    within = sum(torch.cov(H[labels == c].T, correction=0) * 15 for c in range(4))
    assert torch.allclose(moments.scatter - between, within, atol=1e-10)


@pytest.mark.parametrize("d", [3, 100], ids=["sums", "rows"])
def test_a_class_that_comes_late_or_misses_a_batch_counts_as_zeros(d):
    H, _ = data(0, 60, d, 1)
    labels = torch.cat([torch.zeros(20), torch.ones(20), torch.full((20,), 3)]).long()
    whole = moments_of((H, labels))
    assert whole.num_targets == 4
    parts = list(zip(H.split(20), labels.split(20), strict=True))
    assert_same(moments_of(*parts), whole)
    assert_same(moments_of(*reversed(parts)), whole)
    merged = moments_of(parts[0])
    merged.merge(moments_of(parts[2]))
    merged.merge(moments_of(parts[1]))
    assert_same(merged, whole)


def test_targets_become_a_matrix():
    assert target_matrix(*target_values(torch.tensor([0, 2]))).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert target_matrix(*target_values(torch.tensor([0, 2], dtype=torch.uint8), 4)).shape == (2, 4)
    assert target_matrix(*target_values(torch.tensor([0.5, 2]))).tolist() == [[0.5], [2]]
    assert target_matrix(*target_values(torch.ones(2, 3))).dtype == torch.float64


def test_sums_without_features_are_those_of_the_targets():
    _, Y = data(0, 30, 2, 3)
    sums = Sums.zeros(0, 3, Y.device)
    for rows in Y.split(7):
        sums.add_rows(rows)
    assert torch.allclose(sums.target_squares(), torch.var(Y, dim=0, correction=0) * 30, atol=TIGHT)


# ---- errors: what was wrong, what was got, what to pass ----

H, Y, C = torch.ones(5, 3), torch.ones(5, 2), torch.arange(5)
ERRORS = {
    "features are integers": (lambda m: m.update(H.long(), Y), TypeError, r"torch.int64 tensor; pass a floating-point"),
    "features are a list": (lambda m: m.update([1.0], Y), TypeError, r"features: got a list"),
    "features are a map": (
        lambda m: m.update(torch.ones(5, 2, 3), Y),
        ValueError,
        r"\(5, 2, 3\).*features.flatten\(1\)",
    ),
    "features are a vector": (lambda m: m.update(torch.ones(5), Y), ValueError, r"shape \(5,\); pass \(n, d\)"),
    "no features": (lambda m: m.update(torch.ones(5, 0), Y), ValueError, r"shape \(5, 0\); pass \(n, d\)"),
    "empty batch": (lambda m: m.update(H[:0], Y[:0]), ValueError, r"batch is empty.*\(0, 3\).*at least one sample"),
    "lengths": (lambda m: m.update(H, Y[:4]), ValueError, r"\(5, 3\), targets \(4, 2\): the first axes must agree"),
    "nan": (lambda m: m.update(H * torch.nan, Y), ValueError, r"features: 15 NaN or infinite .*, shape \(5, 3\)"),
    "inf": (
        lambda m: m.update(H, Y.index_fill(0, C[:1], -torch.inf)),
        ValueError,
        r"targets: 2 NaN or infinite",
    ),
    "devices": (lambda m: m.update(H, Y.to("meta")), ValueError, r"on cpu, targets on meta; move them to one device"),
    "targets are a list": (lambda m: m.update(H, [1] * 5), TypeError, r"targets: got a list; pass a torch.Tensor"),
    "targets are booleans": (lambda m: m.update(H, C > 2), TypeError, r"torch.bool; pass .*targets.long\(\)"),
    "targets are complex": (lambda m: m.update(H, Y + 0j), TypeError, r"complex64; pass real numbers"),
    "integer matrix": (
        lambda m: m.update(H, Y.long()),
        TypeError,
        r"\(5, 2\): integers are classes.*targets.float\(\)",
    ),
    "target cube": (lambda m: m.update(H, Y[:, :, None]), ValueError, r"targets have shape \(5, 2, 1\); pass \(n, K\)"),
    "negative class": (lambda m: m.update(H, C - 3), ValueError, r"have class -3; pass classes counted from 0"),
    "width changes": (
        lambda m: (m.update(H, Y), m.update(H[:, :2], Y)),
        ValueError,
        r"features have width 2, earlier ones 3",
    ),
    "targets change": (
        lambda m: (m.update(H, Y), m.update(H, Y[:, 0])),
        ValueError,
        r"targets have width 1, earlier ones 2",
    ),
    "kind changes": (lambda m: (m.update(H, Y), m.update(H, C)), ValueError, r"are classes, earlier ones real numbers"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, unchecked):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call(unchecked.Moments())


def test_a_class_beyond_the_given_number_is_named(unchecked):
    with pytest.raises(ValueError, match=r"class 4 with num_classes=3; pass a larger num_classes"):
        unchecked.Moments(3).update(H, C)
    with pytest.raises(ValueError, match=r"num_classes is 1; pass an integer of at least 2"):
        unchecked.Moments(1)


@pytest.mark.parametrize("n", [2, 40], ids=["rows", "sums"])
def test_a_refused_batch_adds_nothing(n, unchecked):
    H, Y = data(0, n, 3, 2)
    moments = unchecked.Moments()
    moments.update(H, Y)
    before = {name: value.clone() for name, value in figures(moments).items()}
    Y[-1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        moments.update(H, Y)
    assert all(torch.equal(value, before[name]) for name, value in figures(moments).items())


@pytest.mark.parametrize("n", [3, 30])
def test_real_targets_have_no_classes_and_what_is_read_is_a_copy(n):
    torch.manual_seed(0)
    moments = Moments()
    moments.update(torch.randn(n, 4), torch.randn(n, 2))
    with pytest.raises(ValueError, match="pass integer labels"):
        _ = moments.class_means
    mean, cross = moments.mean, moments.cross
    kept = mean.clone(), cross.clone()
    moments.update(torch.randn(n, 4), torch.randn(n, 2))
    assert mean.equal(kept[0])
    assert cross.equal(kept[1])
