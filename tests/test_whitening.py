import importlib.util
import itertools
import math

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramlin import whitening
from gramlin.gram import weight_gram
from gramlin.whitening import nearest_with_same_gram, newton_schulz_polar, polar_factor, whiten

F32, F64 = torch.float32, torch.float64
# |R Rᵀ − I| entry by entry. Computed in float64; float32 adds the rounding of R's entries.
ORTHOGONAL = {F32: 1e-6, F64: 1e-13}
# Gram error over the shift's norm in float64. (In float32 it is measured against the weights' own rounding.)
GRAM_F64 = 1e-8

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small lose more by waiting for a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def unchecked_whitening():
    """The module without the tests' shape checks, which would speak before its own errors do."""
    spec = importlib.util.spec_from_file_location("unchecked_whitening", whitening.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator(seed):
    return torch.Generator().manual_seed(seed)


def orthonormal(rows, columns, seed):
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator(seed), dtype=F64)).Q


def with_singular_values(m, n, values, seed=0):
    k = min(m, n)
    return orthonormal(m, k, seed) @ torch.diag(values) @ orthonormal(n, k, seed + 1).mT


def decay(k, log_condition):
    return torch.logspace(0, -log_condition, k, dtype=F64) if k > 1 else torch.ones(1, dtype=F64)


def orthogonality_error(R):
    R = R.double()
    R = R if R.shape[-2] <= R.shape[-1] else R.mT
    return float((R @ R.mT - torch.eye(R.shape[-2], dtype=F64, device=R.device)).abs().max())


def by_products(M):
    return whitening._polar_by_products(M.double()).to(M.dtype)


SOLVERS = {"polar_factor": polar_factor, "products": by_products}  # the second is CUDA's, here on any device
solvers = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
properties = settings(deadline=None, max_examples=60, derandomize=True)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**20)


# ---- polar_factor ----------------------------------------------------------------------------------------------------


@solvers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@given(
    m=sizes, n=sizes, batch=st.sampled_from([(), (3,), (2, 3)]), log_condition=st.floats(0, 8), rank=sizes, seed=seeds
)
@properties
def test_polar_factor_is_orthonormal_for_any_matrix(solve, device, dtype, m, n, batch, log_condition, rank, seed):
    k = min(m, n)
    values = decay(k, log_condition) * (torch.arange(k) < rank)
    count = math.prod(batch)
    M = torch.stack([with_singular_values(m, n, values, seed + 2 * i) for i in range(count)]).view(*batch, m, n)
    R = solve(M.to(device, dtype))
    assert R.shape == M.shape
    assert R.dtype == dtype
    assert R.device.type == device
    assert orthogonality_error(R) < ORTHOGONAL[dtype]


@solvers
@given(m=sizes, n=sizes, log_condition=st.floats(0, 8), log_scale=st.integers(-150, 150), seed=seeds)
@properties
def test_polar_factor_is_scipys(solve, m, n, log_condition, log_scale, seed):
    M = with_singular_values(m, n, decay(min(m, n), log_condition), seed) * 10.0**log_scale
    expected = torch.from_numpy(scipy.linalg.polar((M / M.abs().max()).numpy())[0])
    # A relative error of the input turns R by that times ‖M‖/σ_min at most (Higham, Functions of Matrices, thm 8.9).
    assert (solve(M) - expected).abs().max() < 1e-14 * 10**log_condition * 10


@solvers
@given(m=sizes, n=sizes, rank=st.integers(0, 5), seed=seeds)
@properties
def test_trace_against_rank_deficient_matrix_is_the_nuclear_norm(solve, m, n, rank, seed):
    k = min(m, n)
    M = with_singular_values(m, n, decay(k, 2) * (torch.arange(k) < rank), seed)
    R = solve(M)
    # R is an optimum of tr(RᵀM), whichever completion it has.
    assert (R * M).sum() == pytest.approx(float(torch.linalg.svdvals(M).sum()), abs=1e-12)
    assert orthogonality_error(R) < ORTHOGONAL[F64]


@solvers
@given(m=sizes, n=sizes, seed=seeds)
@properties
def test_polar_factor_turns_with_its_matrix(solve, m, n, seed):
    M = with_singular_values(m, n, decay(min(m, n), 1), seed)
    P, Q = orthonormal(m, m, seed + 5), orthonormal(n, n, seed + 6)
    torch.testing.assert_close(solve(P @ M @ Q), P @ solve(M) @ Q, rtol=0, atol=1e-11)
    torch.testing.assert_close(solve(M.mT), solve(M).mT, rtol=0, atol=1e-11)
    torch.testing.assert_close(solve(3e-7 * M), solve(M), rtol=0, atol=1e-11)


@solvers
def test_a_batch_is_solved_matrix_by_matrix(solve):
    batch = torch.stack([with_singular_values(5, 7, decay(5, 4), 2 * i) for i in range(6)]).view(2, 3, 5, 7)
    one_by_one = torch.stack([solve(M) for M in batch.flatten(0, 1)]).view(2, 3, 5, 7)
    torch.testing.assert_close(solve(batch), one_by_one, rtol=0, atol=1e-9)


@solvers
@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (6, 4), (1, 5), (5, 1), (1, 1), (2, 3, 4)])
def test_zero_has_an_orthonormal_polar_factor(solve, shape):
    assert orthogonality_error(solve(torch.zeros(shape))) < ORTHOGONAL[F32]


@solvers
def test_polar_factor_of_a_row_is_its_direction(solve):
    row = torch.tensor([[3.0, 0.0, -4.0]], dtype=F64)
    torch.testing.assert_close(solve(row), row / 5, rtol=0, atol=1e-14)


@solvers
@pytest.mark.parametrize("log_condition", [8, 12, 16])
def test_polar_factor_is_orthonormal_at_full_size(solve, log_condition):
    M = with_singular_values(96, 96, decay(96, log_condition))
    assert orthogonality_error(solve(M)) < ORTHOGONAL[F64]
    assert orthogonality_error(solve(M.float())) < ORTHOGONAL[F32]


@pytest.mark.parametrize("M", [[[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [-1.0, 0.0]], [[-1.0, 0.0], [0.0, -1.0]]])
def test_products_complete_what_the_identity_cannot(M):
    assert orthogonality_error(by_products(torch.tensor(M, dtype=F64))) < ORTHOGONAL[F64]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gives_float32(dtype):
    M = with_singular_values(5, 8, decay(5, 1)).to(dtype)
    R = polar_factor(M)
    assert R.dtype == F32
    torch.testing.assert_close(R, polar_factor(M.float()), rtol=0, atol=0)


def test_polar_factor_ignores_autograd():
    assert not polar_factor(torch.eye(3).requires_grad_()).requires_grad


@pytest.mark.parametrize("solve", ["polar_factor", "newton_schulz_polar"])
@pytest.mark.parametrize(
    ("M", "kind", "words"),
    [
        (torch.ones(3), ValueError, r"got shape \(3,\); pass \(\.\.\., m, n\)"),
        (torch.ones(0, 3), ValueError, r"shape \(0, 3\).*no empty axis"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"M: got a torch.int64 tensor; pass a floating-point"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, r"got a torch.complex64 tensor; pass a floating"),
    ],
)
def test_errors_say_what_is_wrong_with_the_matrix(unchecked_whitening, solve, M, kind, words):
    with pytest.raises(kind, match=words):
        getattr(unchecked_whitening, solve)(M)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_errors(device, bad):
    M = torch.ones(3, 4, device=device)
    M[1, 2] = bad
    with pytest.raises(ValueError, match=r"M: 1 NaN or infinite entries of 12, shape \(3, 4\)"):
        polar_factor(M)
    assert whitening._polar_by_products(M.double()) is None
    with pytest.raises(ValueError, match="the weight after the step: 1 NaN"):
        nearest_with_same_gram(before=torch.ones(3, 4), after=M.cpu())


# ---- the approximate solver ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 6), (4, 7), (7, 4), (2, 5, 3)])
def test_newton_schulz_is_the_books_iteration(shape):
    M = torch.randn(shape, generator=generator(0), dtype=F64)
    X = M / M.pow(2).sum((-2, -1), keepdim=True).sqrt()
    for _ in range(4):
        G = X.mT @ X
        X = X @ (15 * torch.eye(shape[-1], dtype=F64) - 10 * G + 3 * G @ G) / 8
    torch.testing.assert_close(newton_schulz_polar(M, steps=4), X, rtol=0, atol=1e-12)


def test_newton_schulz_reaches_well_conditioned_matrices_and_no_others():
    def error(log_condition, k=24):
        return orthogonality_error(newton_schulz_polar(with_singular_values(k, k, decay(k, log_condition))))

    assert error(0.5) < 1e-12
    assert error(4) > 0.5
    assert orthogonality_error(polar_factor(with_singular_values(24, 24, decay(24, 4)))) < ORTHOGONAL[F64]


def test_newton_schulz_leaves_zero_at_zero():
    assert not newton_schulz_polar(torch.zeros(3, 3)).any()


# ---- the nearest weight with the same Gram ---------------------------------------------------------------------------


def layer(k, d, seed=0, dtype=F64):
    """A weight as nn.Linear starts it."""
    return ((torch.rand(k, d, generator=generator(seed), dtype=F64) * 2 - 1) / d**0.5).to(dtype)


def step_of(W, relative, rank=64, seed=1):
    """A gradient-like step of the given size over ‖W‖."""
    k, d = W.shape
    G = torch.randn(k, rank, generator=generator(seed), dtype=F64) @ torch.randn(
        rank, d, generator=generator(seed + 1), dtype=F64
    )
    return (W.double() - relative * float(W.double().norm()) * G / G.norm()).to(W.dtype)


def gram(W):
    W = W.detach().double().flatten(1)
    return W.mT @ W


def rounding_floor(W_plus, W):
    """Gram error of a float32 rounding of the exact R* W⁺, over the shift's norm."""
    exact = nearest_with_same_gram(before=W.double().flatten(1), after=W_plus.double().flatten(1))
    return float((gram(exact.float()) - gram(exact)).norm() / (gram(W_plus) - gram(W)).norm())


@pytest.mark.parametrize("relative", [1e-6, 1e-2, 1.0])
@given(k=sizes, d=sizes, seed=seeds)
@properties
def test_nearest_is_scipys_procrustes(relative, k, d, seed):
    W = layer(k, d, seed)
    W_plus = step_of(W, relative, seed=seed + 1)
    X = nearest_with_same_gram(before=W, after=W_plus)
    # scipy solves ‖A Q − B‖ over orthogonal Q on the right: the transposed problem.
    Q, _ = scipy.linalg.orthogonal_procrustes(W_plus.mT.numpy(), W.mT.numpy())
    expected = torch.from_numpy(Q.T) @ W_plus
    assert (X - W).norm() == pytest.approx(float((expected - W).norm()), rel=1e-6, abs=1e-11)
    assert (gram(X) - gram(W_plus)).norm() < 1e-13


def test_nearest_has_a_positive_product_with_the_weight_before():
    W = layer(20, 30)
    X = nearest_with_same_gram(before=W, after=step_of(W, 0.3))
    product = X @ W.mT
    torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-11)
    assert torch.linalg.eigvalsh(product).min() > 0


def test_no_other_rotation_and_not_the_transposed_one_comes_as_near():
    W = layer(20, 30)
    W_plus = step_of(W, 0.1)
    R = polar_factor(W @ W_plus.mT)
    best = (nearest_with_same_gram(before=W, after=W_plus) - W).norm()
    assert best == pytest.approx(float((R @ W_plus - W).norm()), rel=1e-9)
    assert (R.mT @ W_plus - W).norm() > 1.2 * best
    assert (W_plus - W).norm() > 1.01 * best
    for seed, size in itertools.product(range(10), (1e-3, 1e-2, 1e-1)):
        A = torch.randn(20, 20, generator=generator(seed), dtype=F64) * size
        assert (torch.linalg.matrix_exp(A - A.mT) @ R @ W_plus - W).norm() > best
    # Acting on the other side loses the Gram.
    other = W_plus @ polar_factor(W.mT @ W_plus)
    assert (gram(other) - gram(W_plus)).norm() > 0.1 * (gram(W_plus) - gram(W)).norm()


@pytest.mark.parametrize("shape", [(128, 128), (96, 200)])
@pytest.mark.parametrize("relative", [1e-6, 1e-5, 1e-4, 1e-3, 3e-3])
def test_small_rotation_keeps_the_gram_and_the_distance(shape, relative):
    W = layer(*shape, dtype=F32)
    W_plus = step_of(W, relative)
    turn = whitening._small_rotation(W @ W_plus.mT, W @ (W_plus - W).mT).double()
    X = W_plus.double() + turn @ W_plus.double()
    exact = nearest_with_same_gram(before=W.double(), after=W_plus.double())
    assert orthogonality_error(turn + torch.eye(len(turn))) < 1e-8
    assert (X - W).norm() < (1 + 1e-3) * (exact - W).norm()
    assert (X - exact).norm() < 0.03 * (W_plus.double() - W).norm()
    # The rotation itself is seen: the plain step is farther away.
    assert (W_plus.double() - W).norm() > (1 + 5e-3) * (exact - W).norm()


def test_small_rotation_sees_the_skew_part_that_float32_products_lose():
    W = layer(128, 128, dtype=F32)
    W_plus = step_of(W, 1e-6)
    exact = nearest_with_same_gram(before=W.double(), after=W_plus.double())
    step = (W_plus.double() - W).norm()
    floor = (exact.float() - exact).norm()
    assert (nearest_with_same_gram(before=W, after=W_plus) - exact).norm() < 1.1 * floor
    U, _, Vh = torch.linalg.svd(W @ W_plus.mT)
    assert ((U @ Vh).double() @ W_plus.double() - exact).norm() > 5 * floor
    lost = whitening._small_rotation(W @ W_plus.mT, W @ W_plus.mT).double()
    assert (W_plus + lost @ W_plus.double() - exact).norm() > 0.1 * step


@pytest.mark.parametrize("angle", [0.001, 0.01, 0.08, 0.14])
def test_small_rotation_is_orthogonal_as_far_as_it_is_accepted(angle):
    # Turns of one plane, the worst case for a bound on ‖Ω²‖: all of it in one pair of directions.
    Q = orthonormal(160, 160, 0)  # ‖Ω²‖ = √2 angle²
    H = Q @ torch.diag(torch.linspace(0.5, 1, 160, dtype=F64)) @ Q.mT
    A = torch.zeros(160, 160, dtype=F64)
    A[3, 60], A[60, 3] = angle, -angle
    M = torch.matrix_exp(A) @ H
    turn = whitening._small_rotation(M.float(), ((M - M.mT) / 2).float()).double()
    assert orthogonality_error(turn + torch.eye(160)) < 1e-8
    torch.testing.assert_close(turn, torch.matrix_exp(A) - torch.eye(160), rtol=0, atol=1e-7 + angle**3 / 5)


def test_small_rotation_declines_a_large_turn_of_weak_directions():
    H = torch.linspace(0.5, 1, 160, dtype=F64)
    H[3] = H[60] = 1e-3
    A = torch.zeros(160, 160, dtype=F64)
    A[3, 60], A[60, 3] = 0.5, -0.5
    M = torch.matrix_exp(A) * H
    assert (M - M.mT).norm() < 1e-3 * M.norm()  # small, looked at as a whole
    assert whitening._small_rotation(M.float(), ((M - M.mT) / 2).float()) is None


@pytest.mark.parametrize("log_condition", [2, 4, 6])
@pytest.mark.parametrize("relative", [1e-5, 1e-3, 1e-2])
def test_an_ill_conditioned_float32_weight_keeps_gram_and_distance(log_condition, relative):
    W = with_singular_values(96, 96, decay(96, log_condition)).float()
    W_plus = step_of(W, relative)
    X = nearest_with_same_gram(before=W, after=W_plus)
    exact = nearest_with_same_gram(before=W.double(), after=W_plus.double())
    shift = (gram(W_plus) - gram(W)).norm()
    assert (gram(X) - gram(W_plus)).norm() < 1.5 * rounding_floor(W_plus, W) * shift
    assert (X.double() - W).norm() < (1 + 2e-3) * (exact - W).norm() + (exact.float() - exact).norm()


@pytest.mark.parametrize("shape", [(96, 96), (96, 200)])
def test_large_rotations_do_not_take_the_shortcut(shape):
    W = layer(*shape, dtype=F32)
    for W_plus in (step_of(W, 0.3), -W, W.flip(0), torch.zeros_like(W)):
        assert whitening._small_rotation(W @ W_plus.mT, W @ (W_plus - W).mT) is None
        X = nearest_with_same_gram(before=W, after=W_plus).double()
        exact = nearest_with_same_gram(before=W.double(), after=W_plus.double())
        assert (X - W).norm() == pytest.approx(float((exact - W).norm()), rel=1e-6, abs=1e-6)
        assert (gram(X) - gram(W_plus)).norm() <= 1e-6 * gram(W_plus).norm()


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_many_rows_go_through_the_smaller_side(dtype, monkeypatch):
    W = layer(70, 9, dtype=dtype)
    W_plus = step_of(W, 1e-2)
    R = polar_factor(W.double() @ W_plus.double().mT + 1e-12 * torch.eye(70))
    sizes = []
    monkeypatch.setattr(whitening, "polar_factor", lambda M: sizes.append(M.shape) or polar_factor(M))
    X = nearest_with_same_gram(before=W, after=W_plus)
    assert sizes == [(18, 18)]
    torch.testing.assert_close(X.double(), R @ W_plus.double(), rtol=0, atol=1e-7 if dtype == F32 else 1e-9)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (30, 4), (80, 90)])
def test_what_a_zero_weight_leaves_open_stays_as_the_step_made_it(shape, dtype):
    step = layer(*shape, dtype=dtype)
    X = nearest_with_same_gram(before=torch.zeros_like(step), after=step)
    torch.testing.assert_close(X, step, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_new_directions_of_a_singular_weight_stay_as_the_step_made_them(size):
    rows = orthonormal(8, 4, 0).mT
    W = torch.cat([rows[:2], torch.zeros(3, 8, dtype=F64)])
    W_plus = torch.cat([rows[:2], size * rows[2:], torch.zeros(1, 8, dtype=F64)])
    # W W⁺ᵀ is diag(1, 1, 0, 0, 0): any turn among the last three rows is as near to W.
    torch.testing.assert_close(nearest_with_same_gram(before=W, after=W_plus), W_plus, rtol=0, atol=1e-3 * size)


def test_a_square_weight_is_not_taken_through_a_singular_one():
    W = with_singular_values(8, 8, torch.tensor([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1e-3], dtype=F64))
    U, _, Vh = torch.linalg.svd(W)
    W_plus = W - 3e-3 * torch.outer(U[:, -1], Vh[-1])
    X = nearest_with_same_gram(before=W, after=W_plus)
    assert torch.det(W) * torch.det(W_plus) < 0 < torch.det(W) * torch.det(X)


def test_nearest_says_which_shapes_disagree(unchecked_whitening):
    with pytest.raises(ValueError, match=r"before has shape \(3, 4\), after \(4, 3\): they must agree"):
        unchecked_whitening.nearest_with_same_gram(before=torch.ones(3, 4), after=torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"before is torch\.float32, after torch\.float64: they must agree"):
        unchecked_whitening.nearest_with_same_gram(before=torch.ones(3, 4), after=torch.ones(3, 4).double())


SCALES = [1e-310, 1e-200, 1e-160, 1e160, 1e200, 1e300]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", [(7, 9), (9, 7), (20, 4)])
def test_rotations_do_not_depend_on_the_scale(shape, scale):
    W = layer(*shape)
    W_plus = step_of(W, 1e-2)
    # What is left of the digits of 1e-310.
    close = dict(rtol=0, atol=1e-8 if scale < 1e-300 else 1e-12)
    torch.testing.assert_close(polar_factor(scale * W), polar_factor(W), **close)
    torch.testing.assert_close(newton_schulz_polar(scale * W), newton_schulz_polar(W), **close)
    expected = nearest_with_same_gram(before=W, after=W_plus)
    assert (expected - W_plus).norm() > 1e-4  # something is turned
    for other in (scale, 1.0):  # each of the two by itself has no part in the rotation
        rotated = nearest_with_same_gram(before=other * W, after=scale * W_plus)
        torch.testing.assert_close(rotated / scale, expected, **close)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-16, 1e-12, 1e16, 1e25])
def test_float32_rotations_do_not_depend_on_the_scale(scale):
    W = layer(70, 90, dtype=F32)
    W_plus = step_of(W, 1e-4)
    expected = nearest_with_same_gram(before=W.double() * scale, after=W_plus.double() * scale) / scale
    rotated = nearest_with_same_gram(before=W * scale, after=W_plus * scale).double() / scale
    assert (rotated - expected).norm() < 0.03 * (W_plus.double() - W).norm()
    assert (gram(rotated) - gram(W_plus)).norm() < 1e-6 * gram(W_plus).norm()


def test_a_rotated_weight_that_overflows_is_named():
    largest = torch.finfo(F64).max
    before, after = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=F64), torch.tensor([[0.9, 0.0], [0.0, 0.0]], dtype=F64)
    before[1, 0] = 0.5
    assert nearest_with_same_gram(before=before, after=after * largest).isfinite().all()
    # A turn by 45° brings two large entries of a column into one.
    before, after = torch.eye(2, dtype=F64), torch.tensor([[0.9, 0.9], [-0.9, 0.9]], dtype=F64).mT
    with pytest.raises(ValueError, match="the rotated weight, which overflows: 2 NaN or infinite"):
        nearest_with_same_gram(before=before, after=after * largest)


def test_whitening_far_from_one_keeps_the_gram_too():
    for scale in (1e-150, 1e150):
        W = scale * layer(6, 8)
        p = nn.Parameter(W.clone())
        p.grad = (W - step_of(W / scale, 1e-2) * scale) / scale
        optimizer = torch.optim.SGD([p], lr=scale)
        whiten(optimizer)
        optimizer.step()
        expected = nearest_with_same_gram(before=W / scale, after=step_of(W / scale, 1e-2))
        torch.testing.assert_close(p.detach() / scale, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_matmul_precision_does_not_reach_the_rotation(precision, monkeypatch):
    W = layer(96, 100, dtype=F32)
    W_plus = step_of(W, 1e-3)
    used = []
    monkeypatch.setattr(whitening, "_small_rotation", lambda *a: used.append(a))
    torch.set_float32_matmul_precision(precision)
    try:
        X = nearest_with_same_gram(before=W, after=W_plus)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not used
    assert (gram(X) - gram(W_plus)).norm() < 1.5 * rounding_floor(W_plus, W) * (gram(W_plus) - gram(W)).norm()


# ---- whiten: over training -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Conv (6, 2·3·2), square hidden layer, a wide one, norm and biases; no two axes alike where it matters."""

    def __init__(self, dtype=F64, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(2, 6, (3, 2), dtype=dtype)
            self.norm = nn.LayerNorm(6 * 3 * 4, dtype=dtype)
            self.first = nn.Linear(6 * 3 * 4, 11, dtype=dtype)
            self.square = nn.Linear(11, 11, dtype=dtype)
            self.last = nn.Linear(11, 3, dtype=dtype)

    def forward(self, x):
        x = self.norm(self.conv(x).flatten(1))
        return self.last(torch.tanh(self.square(torch.tanh(self.first(x)))))

    def weights(self):
        return [p for p in self.parameters() if p.ndim > 1]


def batch(t, dtype=F64, n=9):
    g = generator(1000 + t)
    return torch.randn(n, 2, 5, 5, generator=g, dtype=F64).to(dtype), torch.randint(0, 3, (n,), generator=g)


def loss_of(model, t):
    x, y = batch(t, next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(x), y)


class Watch:
    """Each step's weights: before, after the plain step, after whitening."""

    def __init__(self, optimizer, weights, attach):
        self.steps = []
        optimizer.register_step_pre_hook(lambda *_: self.before.__setitem__(slice(None), self.copies(weights)))
        optimizer.register_step_post_hook(lambda *_: self.plain.__setitem__(slice(None), self.copies(weights)))
        self.before, self.plain = [], []
        self.handle = attach()
        optimizer.register_step_post_hook(
            lambda *_: self.steps.append(list(zip(self.before, self.plain, self.copies(weights), strict=True)))
        )

    @staticmethod
    def copies(weights):
        return [w.detach().clone() for w in weights]

    def check_gram(self):
        """Gram kept and rotation taken out, for every layer at every step."""
        for step in self.steps:
            for before, plain, after in step:
                shift = (gram(plain) - gram(before)).norm()
                assert (gram(after) - gram(plain)).norm() <= GRAM_F64 * shift + 1e-15
                assert (after - before).norm() <= (plain - before).norm() * (1 + 1e-6) + 1e-15
        assert any((after != plain).any() for step in self.steps for before, plain, after in step)


def muon(net):
    return torch.optim.Muon(net.weights()[1:], lr=1e-2)


def grouped(net):
    return torch.optim.SGD(
        [
            {"params": [net.conv.weight, net.square.weight], "lr": 0.2, "weight_decay": 1e-3},
            {"params": [net.first.weight, *net.last.parameters(), *net.norm.parameters()], "momentum": 0.5},
        ],
        lr=0.05,
    )


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd-foreach": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2),
    "adam-foreach": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, foreach=True),
    "adam-fused": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, fused=True),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1),
    "muon": muon,
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-3),
    "groups": grouped,
    "lbfgs": lambda net: torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def train(model, optimizer, steps, start=0, scheduler=None):
    for t in range(start, start + steps):

        def closure(t=t):
            optimizer.zero_grad()
            loss = loss_of(model, t)
            loss.backward()
            return loss

        optimizer.step(closure)
        if scheduler:
            scheduler.step()


@optimizers
def test_every_step_keeps_the_gram_of_the_plain_step(make):
    net, twin = Net(), Net()
    optimizer = make(net)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    train(net, optimizer, 12)
    watch.check_gram()
    # The plain step inside is the optimizer's own.
    train(twin, make(twin), 1)
    for (_, plain, _), expected in zip(watch.steps[0], twin.weights(), strict=True):
        torch.testing.assert_close(plain, expected.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("solver", [polar_factor, newton_schulz_polar])
def test_gram_in_float32_is_exact_up_to_the_rounding_of_the_stored_weights(solver):
    def run():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(100, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.95)
        watch = Watch(optimizer, [net[i].weight for i in (0, 2, 4)], lambda: whiten(optimizer, solver=solver))
        for t in range(40):
            g = generator(t)
            y = torch.randint(0, 10, (64,), generator=g)
            x = torch.randn(64, 100, generator=g) + 2 * nn.functional.one_hot(y, 100)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return watch.steps

    worst = [0.0, 0.0, 0.0]
    for step in run():
        for i, (before, plain, after) in enumerate(step):
            error = float((gram(after) - gram(plain)).norm() / (gram(plain) - gram(before)).norm())
            worst[i] = max(worst[i], error / rounding_floor(plain, before))
    print(f"\n{solver.__name__}: Gram error over its float32 floor, worst step, by layer: {worst}")
    if solver is polar_factor:
        assert max(worst) < 1.5
    else:  # the usual solver loses the square layer's Gram altogether
        assert worst[1] > 1000


def test_gram_of_the_usual_solver_is_lost_on_a_square_layer():
    W = layer(64, 64)
    W_plus = step_of(W, 1e-3)
    shift = (gram(W_plus) - gram(W)).norm()
    approximate = newton_schulz_polar(W @ W_plus.mT) @ W_plus
    assert (gram(approximate) - gram(W_plus)).norm() > 0.5 * shift
    assert (gram(nearest_with_same_gram(before=W, after=W_plus)) - gram(W_plus)).norm() < GRAM_F64 * shift


def test_bfloat16_weights_keep_the_gram_up_to_their_rounding():
    W = layer(80, 90).bfloat16()
    W_plus = step_of(W, 0.1)
    p = nn.Parameter(W.clone())
    optimizer = torch.optim.SGD([p], lr=1.0)
    whiten(optimizer)
    p.grad = W - W_plus
    optimizer.step()
    plain = W - (W - W_plus)
    exact = nearest_with_same_gram(before=W.double(), after=plain.double())
    torch.testing.assert_close(p.detach(), exact.bfloat16(), rtol=0, atol=0)


# ---- whiten: beside the rest of torch.optim --------------------------------------------------------------------------


def test_learning_rate_schedule_goes_on():
    net = Net()
    optimizer = OPTIMIZERS["momentum"](net)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    rates = []
    for t in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        train(net, optimizer, 1, start=t, scheduler=scheduler)
    assert len(set(rates)) == 8
    watch.check_gram()


def test_gradient_clipping_bounds_the_whitened_step_too():
    net = Net()
    optimizer = OPTIMIZERS["sgd"](net)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    for t in range(4):
        optimizer.zero_grad()
        loss_of(net, t).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        optimizer.step()
    watch.check_gram()
    for step in watch.steps:
        assert sum((after - before).norm() ** 2 for before, _, after in step) <= (0.1 * 1e-2) ** 2 * (1 + 1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["momentum", "adam-fused"])
def test_a_step_that_the_gradient_scaler_skips_changes_nothing(name, device):
    net = Net(F32).to(device)
    optimizer = OPTIMIZERS[name](net)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for t in range(6):
        optimizer.zero_grad()
        x, y = batch(t, F32)
        loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
        scaler.scale(loss * (math.inf if t == 3 else 1)).backward()
        old = watch.copies(net.parameters())
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(old, net.parameters(), strict=True)]
        assert all(same) if t == 3 else not any(same)
    for before, plain, after in itertools.chain.from_iterable(watch.steps):
        shift = (gram(plain) - gram(before)).norm()
        assert (gram(after) - gram(plain)).norm() <= 1e-5 * gram(plain).norm()
        assert shift == 0 or (after - before).norm() <= (plain - before).norm() * (1 + 1e-3)


def test_a_closure_of_several_evaluations_is_one_step():
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=7, line_search_fn="strong_wolfe")
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    calls = []

    def closure():
        calls.append(0)
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    returned = optimizer.step(closure)
    assert len(calls) > 3
    assert len(watch.steps) == 1
    assert returned.requires_grad  # step's own return value, untouched
    watch.check_gram()


@optimizers
def test_training_goes_on_bit_for_bit_after_loading(make):
    def start():
        net = Net()
        optimizer = make(net)
        return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    net, optimizer, scheduler = start()
    whiten(optimizer)
    train(net, optimizer, 3, scheduler=scheduler)
    saved = [{k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict(), scheduler.state_dict()]
    saved[1] = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, saved[1])
    train(net, optimizer, 3, start=3, scheduler=scheduler)

    other, optimizer, scheduler = start()
    whiten(optimizer)
    for part, state in zip((other, optimizer, scheduler), saved, strict=True):
        part.load_state_dict(state)
    train(other, optimizer, 3, start=3, scheduler=scheduler)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_frozen_unused_and_one_dimensional_parameters_are_left_alone():
    net, plain = Net(), Net()
    for n in (net, plain):
        n.square.weight.requires_grad_(False)
        n.extra = nn.Linear(4, 5, dtype=F64)  # in the optimizer, never used: no gradient
    plain.load_state_dict(net.state_dict())
    extra = net.extra.weight.detach().clone()
    frozen = net.square.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    whiten(optimizer)
    train(net, optimizer, 1)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1), 1)
    assert torch.equal(net.square.weight, frozen)
    assert torch.equal(net.extra.weight, extra)
    for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b) == (a.ndim < 2 or name in ("square.weight", "extra.weight")), name


def test_an_unchanged_weight_is_bit_for_bit_the_same():
    net = Net(F32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    whiten(optimizer)
    old = Watch.copies(net.parameters())
    train(net, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(old, net.parameters(), strict=True))


def test_a_tied_weight_is_turned_once():
    first, last = nn.Linear(7, 5, bias=False, dtype=F64), nn.Linear(7, 5, bias=False, dtype=F64)
    last.weight = first.weight
    optimizer = torch.optim.SGD(nn.ModuleList([first, last]).parameters(), lr=0.1)
    watch = Watch(optimizer, [first.weight], lambda: whiten(optimizer, [first.weight, last.weight]))
    for t in range(3):
        optimizer.zero_grad()
        x = torch.randn(9, 7, generator=generator(t), dtype=F64)
        (first(x).tanh() @ last.weight).square().mean().backward()
        versions = first.weight._version
        optimizer.step()
        assert first.weight._version == versions + 2  # the step's and ours
    watch.check_gram()


def test_a_convolution_is_its_matrix_of_output_channels():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    watch = Watch(optimizer, [net.conv.weight], lambda: whiten(optimizer))
    train(net, optimizer, 1)
    before, plain, after = (w.reshape(6, 2 * 3 * 2) for w in watch.steps[0][0])
    R = polar_factor(before @ plain.mT)
    torch.testing.assert_close(after, R @ plain, rtol=0, atol=1e-13)
    assert (gram(after) - gram(plain)).norm() < 1e-13
    # Another matrix of the same weight, (in, out·kh·kw), does not keep its Gram: the axis matters.
    turned = [w.view(6, 2, 3, 2).transpose(0, 1).reshape(2, -1) for w in (after, plain)]
    assert (gram(turned[0]) - gram(turned[1])).norm() > 1e-4


def test_params_restrict_and_remove_detaches():
    net, plain = Net(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = whiten(optimizer, [net.first.weight])
    train(net, optimizer, 1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, plain_optimizer, 1)
    different = [
        name for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True) if (a != b).any()
    ]
    assert different == ["first.weight"]
    handle.remove()
    handle.remove()
    plain.load_state_dict(net.state_dict())
    train(net, optimizer, 2, start=1)
    train(plain, plain_optimizer, 2, start=1)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_groups_added_later_are_whitened_too():
    net = Net()
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer))
    optimizer.add_param_group({"params": list(net.square.parameters())})
    train(net, optimizer, 1)
    changed = [(after != plain).any().item() for _, plain, after in watch.steps[0]]
    assert changed == [False, True, True, False]


@pytest.mark.parametrize("shape", [(5, 7), (7, 7), (9, 4), (3, 2, 3, 2)])
def test_the_two_halves_of_a_step_make_up_the_step(shape):
    """Keeping the rotation gives QW with the old Gram, keeping the Gram shift gives X, and the step itself is QX."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    results = {}
    for keep in ("gram", "rotation", "both"):
        weight = nn.Parameter(start.clone())
        weight.grad = gradient
        optimizer = torch.optim.SGD([weight], lr=0.3)
        if keep != "both":
            whiten(optimizer, keep=keep)
        optimizer.step()
        results[keep] = weight.detach().flatten(1)
    before, after = start.flatten(1), results["both"]
    # Tolerance: float64 and matrices of size 10.
    torch.testing.assert_close(weight_gram(results["rotation"]), weight_gram(before), rtol=0, atol=1e-12)
    torch.testing.assert_close(weight_gram(results["gram"]), weight_gram(after), rtol=0, atol=1e-12)
    if before.shape[0] <= before.shape[1]:  # with more rows than columns Q is not unique off their span
        turn = polar_factor(after @ before.mT)
        torch.testing.assert_close(turn @ before, results["rotation"], rtol=0, atol=1e-9)
        torch.testing.assert_close(turn @ results["gram"], after, rtol=0, atol=1e-9)
    assert (weight_gram(results["gram"]) - weight_gram(before)).norm() > 0.1
    assert (results["rotation"] - before).norm() > 0.1


def test_what_to_keep_is_one_of_two(unchecked_whitening):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1)
    with pytest.raises(ValueError, match="keep is 'left'; pass 'gram' or 'rotation'"):
        unchecked_whitening.whiten(optimizer, keep="left")


def test_another_solver_is_applied_plainly():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = Watch(optimizer, net.weights(), lambda: whiten(optimizer, solver=newton_schulz_polar))
    train(net, optimizer, 1)
    for before, plain, after in watch.steps[0]:
        W, W_plus = before.flatten(1), plain.flatten(1)
        torch.testing.assert_close(after.flatten(1), newton_schulz_polar(W @ W_plus.mT) @ W_plus, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (lambda net: [net.square.weight, torch.ones(2, 3)], r"shape \(2, 3\) that is not in the optimizer"),
        (lambda net: [net.square.bias], r"shape \(11,\): a weight to whiten has 2 or more axes"),
    ],
)
def test_errors_say_which_parameter_cannot_be_whitened(params, words):
    net = Net()
    with pytest.raises(ValueError, match=words):
        whiten(torch.optim.SGD(net.parameters(), lr=0.1), params(net))


def test_complex_weights_sparse_gradients_and_divergence_are_errors():
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"shape \(2, 3\) is torch.complex64: only real"):
        whiten(torch.optim.SGD([p], lr=0.1))

    table = nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    whiten(optimizer)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"shape \(7, 3\) has a sparse gradient, and a rotation changes every row"):
        optimizer.step()

    p = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    whiten(optimizer)
    p.grad = torch.full((2, 3), math.nan)
    words = (
        r"the gradient of parameter 0 of group 0: 6 NaN or infinite entries of 6, shape \(2, 3\): lower the learning"
    )
    with pytest.raises(FloatingPointError, match=words):
        optimizer.step()
    assert p.equal(torch.ones(2, 3))


def test_whitened_step_descends_with_the_bias_left_alone_and_need_not_with_it_turned():
    # A linear loss ⟨A, W⟩ + ⟨c, b⟩: its change is what the first order of any loss would be.
    W, A = layer(4, 6), layer(4, 6, seed=1)
    rate = 1e-4
    W_plus = W - rate * A
    R = polar_factor(W @ W_plus.mT)
    c = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=F64)
    # A bias that Ω turns up the gradient: (R − I) b ∝ c.
    b = torch.linalg.solve(R - torch.eye(4, dtype=F64), c)
    b = 100 * b / b.norm()
    b_plus = b - rate * c

    def change(W_new, b_new):
        return float((A * (W_new - W)).sum() + c @ (b_new - b))

    assert change(W_plus, b_plus) < 0
    assert change(R @ W_plus, b_plus) < 0
    assert change(R @ W_plus, R @ b_plus) > 0
    # Turning it would keep the Gram of [W b], which leaving it does not; WᵀW is the same either way.
    augmented = [
        torch.cat([w, v[:, None]], 1) for w, v in ((W_plus, b_plus), (R @ W_plus, R @ b_plus), (R @ W_plus, b_plus))
    ]
    assert (gram(augmented[1]) - gram(augmented[0])).norm() < 1e-9
    assert (gram(augmented[2]) - gram(augmented[0])).norm() > 1e-5
    # To first order the whitened step is the projection of −ηA off the rotations: Pythagoras.
    removed = R @ W_plus - W_plus
    kept = R @ W_plus - W
    assert abs(float((removed * kept).sum())) < 1e-3 * float(removed.norm() * kept.norm())


@cuda
def test_whitening_on_cuda_is_that_on_the_cpu():
    for k, d in ((96, 96), (96, 200), (70, 9)):
        W = layer(k, d, dtype=F32)
        W_plus = step_of(W, 1e-3)
        X = nearest_with_same_gram(before=W.cuda(), after=W_plus.cuda())
        assert X.is_cuda
        exact = nearest_with_same_gram(before=W.double(), after=W_plus.double())
        torch.testing.assert_close(X.cpu().double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), "real matrices"),
        (torch.ones(2, 3, 1), torch.ones(2, 3, 1), "real matrices"),
        (torch.ones(2, 3), torch.ones(2, 3, device="meta"), "before is cpu, after meta"),
    ],
)
def test_weights_are_matrices_in_one_place(unchecked_whitening, before, after, words):
    with pytest.raises(ValueError, match=words):
        unchecked_whitening.nearest_with_same_gram(before=before, after=after)


def test_an_iterator_of_parameters_that_was_used_up_is_refused():
    params = iter(nn.Linear(3, 2).parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    with pytest.raises(ValueError, match="used up"):
        whiten(optimizer, params)
