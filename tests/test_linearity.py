"""Chapter 3's laws: Target Linearity, its held-out and streaming forms, and the surrogate."""

import copy
import io
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from torchmetrics import MetricCollection

from gramlin import TargetLinearity, fit_linear, normalized_surrogate, surrogate, target_linearity
from tests.drawing import few, seeds, tensors

# Eigenvectors of float64 sums of well-conditioned features.
TIGHT = 1e-10

sizes = st.integers(1, 7)
ridges = st.sampled_from([0.0, 0.03, 2.0, 100.0])


def data(seed: int, n: int, d: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features off centre, and targets that follow them in part."""
    H, B, noise = tensors(seed, (n, d), (d, K), (n, K))
    return H + 3, torch.tanh(H @ B) + noise - 2


def reference(H, Y, ridge: float = 0.0, held_out=None) -> float:
    """Scikit-learn's coefficient of determination."""
    model = LinearRegression() if ridge == 0 else Ridge(ridge)
    H, Y = (np.asarray(a, dtype=float) for a in (H, Y))
    model.fit(H, Y)
    H, Y = (H, Y) if held_out is None else held_out
    return r2_score(np.asarray(Y), model.predict(np.asarray(H)), multioutput="variance_weighted")


# ---- against scikit-learn ----


@few
@given(n=st.integers(3, 60), d=st.integers(1, 12), K=st.integers(1, 5), ridge=ridges, seed=seeds)
def test_linearity_is_scikit_learns_score(n, d, K, ridge, seed):
    H, Y = data(seed, n, d, K)
    assert target_linearity(H, Y, ridge).item() == pytest.approx(reference(H, Y, ridge), abs=TIGHT)


@few
@given(n=st.integers(3, 40), d=st.integers(1, 12), K=st.integers(1, 4), ridge=ridges, seed=seeds)
def test_held_out_score_and_fit_are_scikit_learns(n, d, K, ridge, seed):
    H, Y = data(seed, n, d, K)
    new = data(seed + 1, 9, d, K)
    fit = fit_linear(H, Y, ridge)
    model = (LinearRegression() if ridge == 0 else Ridge(ridge)).fit(H.numpy(), Y.numpy())
    # Nearly as many features as samples make large coefficients.
    scale = 1 + float(np.abs(model.coef_).max()) ** 2
    assert np.allclose(fit.predict(new[0]), model.predict(new[0].numpy()).reshape(9, K), rtol=1e-6, atol=1e-9 * scale)
    expected = reference(H, Y, ridge, held_out=new)
    assert fit.score(*new).item() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert fit.score(H, Y).item() == pytest.approx(target_linearity(H, Y, ridge).item(), abs=1e-8)


@few
@given(n=st.integers(4, 40), d=st.integers(1, 12), seed=seeds)
def test_per_output_scores_are_scikit_learns_and_average_by_variance(n, d, seed):
    H, Y = data(seed, n, d, 3)
    Y[:, 1] *= 5
    each = target_linearity(H, Y, per_output=True)
    model = LinearRegression().fit(H.numpy(), Y.numpy())
    assert np.allclose(each, r2_score(Y, model.predict(H.numpy()), multioutput="raw_values"), atol=TIGHT)
    weights = Y.var(dim=0)
    assert (each @ weights / weights.sum()).item() == pytest.approx(target_linearity(H, Y).item(), abs=TIGHT)


def degenerate(kind: str, n: int) -> torch.Tensor:
    H, mix = tensors(4, (n, 6), (6, 3))
    if kind == "duplicated":
        return torch.cat([H, H[:, :3]], dim=1)
    if kind == "constant":
        return torch.cat([H, torch.full((n, 2), 7.1, dtype=H.dtype), torch.zeros(n, 1, dtype=H.dtype)], dim=1)
    if kind == "dependent":
        return torch.cat([H, H @ mix + 1], dim=1)
    if kind == "scaled":
        return torch.cat([H, H @ mix], dim=1) * torch.logspace(-5, 5, 9, dtype=H.dtype)
    return torch.cat([H, H.sum(1, keepdim=True), H[:, :1] + 1e4], dim=1)


@pytest.mark.parametrize("n", [5, 8, 40], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("kind", ["duplicated", "constant", "dependent", "scaled", "far"])
def test_dependent_features_are_exact_and_the_fit_has_least_norm(kind, n):
    H, (Y,) = degenerate(kind, n), tensors(5, (n, 2))
    Y = Y + H[:, :1]
    # Scaled columns are beyond scikit-learn's own cut-off; the six that all follow from are not.
    span = H[:, :6] / H[:, :6].std(dim=0) if kind == "scaled" else H
    assert target_linearity(H, Y).item() == pytest.approx(reference(span, Y), abs=1e-9)
    fit = fit_linear(H, Y)
    assert fit.rank == min(n - 1, 6)
    if kind == "scaled":
        return
    centred = H - H.mean(0)
    least = torch.linalg.pinv(centred, rtol=1e-9) @ (Y - Y.mean(0))
    assert torch.allclose(fit.coefficients, least, atol=1e-8)


def test_a_large_mean_costs_no_accuracy_and_uncentred_sums_lose_it():
    H, Y = data(0, 2000, 8, 3)
    far = (H - 3 + 1e4).float()
    exact = reference(far.double(), Y)
    assert target_linearity(far, Y).item() == pytest.approx(exact, abs=1e-9)
    gram = far.T @ far - len(far) * torch.outer(far.mean(0), far.mean(0))
    assert (gram.double() - torch.cov(far.double().T) * 1999).norm() > 0.1 * gram.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [6, 300], ids=["rows", "sums"])
def test_low_precision_features_are_taken_as_they_are(dtype, n):
    H, Y = data(0, n, 20, 3)
    H, Y = H.to(dtype), Y.to(dtype)
    assert target_linearity(H, Y, 0.1).item() == pytest.approx(reference(H.double(), Y.double(), 0.1), abs=TIGHT)


def test_features_scaled_apart_are_as_good_as_before():
    H, Y = data(0, 200, 6, 2)
    scales = torch.logspace(-9, 9, 6, dtype=H.dtype)
    assert target_linearity(H * scales, Y).item() == pytest.approx(target_linearity(H, Y).item(), abs=TIGHT)


def test_nearly_dependent_features_keep_their_digits():
    H, Y = data(0, 500, 5, 2)
    H = torch.cat([H, H[:, :1] + 1e-5 * tensors(9, (500, 1))[0]], dim=1)
    assert target_linearity(H, Y).item() == pytest.approx(reference(H, Y), abs=1e-9)


# ---- laws ----


@few
@given(n=st.integers(10, 60), d=sizes, K=st.integers(1, 4), seed=seeds)
def test_linearity_is_invariant_to_invertible_affine_maps_of_features(n, d, K, seed):
    H, Y = data(seed, n, d, K)
    square, shift, rotation = tensors(seed + 1, (d, d), (d,), (d, d))
    U, V = torch.linalg.qr(square).Q, torch.linalg.qr(rotation).Q
    mapped = H @ (U * torch.linspace(0.1, 10, d, dtype=H.dtype)) @ V + 5 * shift
    assert target_linearity(mapped, Y).item() == pytest.approx(target_linearity(H, Y).item(), abs=TIGHT)


def test_a_singular_map_of_features_loses_linearity():
    H, Y = data(0, 60, 4, 4)
    singular = H @ torch.diag(torch.tensor([1.0, 1, 1, 0], dtype=H.dtype))
    assert target_linearity(singular, Y) < target_linearity(H, Y) - 0.01


@few
@given(n=st.integers(10, 60), d=sizes, K=st.integers(1, 5), ridge=ridges, scale=st.floats(0.01, 100), seed=seeds)
def test_linearity_is_invariant_to_rotation_scale_and_shift_of_targets(n, d, K, ridge, scale, seed):
    H, Y = data(seed, n, d, K)
    (square,) = tensors(seed + 1, (K, K))
    rotated = scale * Y @ torch.linalg.qr(square).Q + 7
    assert target_linearity(H, rotated, ridge).item() == pytest.approx(target_linearity(H, Y, ridge).item(), abs=TIGHT)


def test_other_maps_of_targets_change_linearity():
    H, Y = data(0, 60, 4, 3)
    assert target_linearity(H, Y * torch.tensor([1, 1, 10.0])) != pytest.approx(target_linearity(H, Y).item(), abs=1e-2)


@few
@given(n=st.integers(10, 60), d=sizes, ridge=ridges, seed=seeds)
def test_linearity_is_invariant_to_the_order_of_samples(n, d, ridge, seed):
    H, Y = data(seed, n, d, 2)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert target_linearity(H[order], Y[order], ridge).item() == pytest.approx(
        target_linearity(H, Y, ridge).item(), abs=TIGHT
    )


def test_shuffled_targets_lose_linearity():
    H, Y = data(0, 400, 5, 2)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert target_linearity(H, Y[order]) < 0.1 < 0.2 < target_linearity(H, Y)


@few
@given(n=st.integers(3, 40), d=st.integers(1, 12), K=sizes, seed=seeds)
def test_affine_targets_have_linearity_one(n, d, K, seed):
    H, B, b = tensors(seed, (n, d), (d, K), (K,))
    assert target_linearity(H, H @ B + b).item() == pytest.approx(1, abs=TIGHT)


def test_independent_targets_have_the_linearity_of_chance():
    # In expectation d/(n − 1) for Gaussian noise, whatever the features.
    H, Y = tensors(0, (2000, 20), (2000, 50))
    assert target_linearity(H, Y).item() == pytest.approx(20 / 1999, rel=0.1)


@few
@given(n=st.integers(5, 50), d=st.integers(2, 12), seed=seeds)
def test_linearity_grows_with_features_and_falls_with_ridge(n, d, seed):
    H, Y = data(seed, n, d, 3)
    growing = [target_linearity(H[:, :k], Y).item() for k in range(1, d + 1)]
    falling = [target_linearity(H, Y, ridge).item() for ridge in (0.0, 1e-3, 0.1, 3.0, 1e3, 1e9)]
    assert all(b >= a - TIGHT for a, b in pairwise(growing))
    assert all(b <= a + TIGHT for a, b in pairwise(falling))
    assert -TIGHT < growing[0] < growing[-1] < 1 + TIGHT or d >= n - 1
    assert falling[-1] == pytest.approx(0, abs=1e-5)


def test_as_many_features_as_samples_interpolate_anything():
    H, Y = tensors(0, (10, 9), (10, 3))
    assert target_linearity(H, Y).item() == pytest.approx(1, abs=TIGHT)
    assert target_linearity(H[:, :8], Y) < 0.99
    assert fit_linear(H, Y).score(*tensors(1, (10, 9), (10, 3))) < 0


def test_constant_features_explain_nothing():
    H, Y = torch.full((50, 3), 0.1), data(0, 50, 3, 2)[1]
    for n in (3, 50):
        assert target_linearity(H[:n], Y[:n]) == 0
        assert fit_linear(H[:n], Y[:n]).rank == 0
        assert torch.allclose(fit_linear(H[:n], Y[:n]).predict(H[:1])[0], Y[:n].mean(0))


def test_classes_are_one_hot_targets():
    H, _ = data(0, 90, 5, 1)
    labels = torch.arange(90) % 3
    expected = reference(H, torch.eye(3)[labels])
    assert target_linearity(H, labels).item() == pytest.approx(expected, abs=TIGHT)
    assert target_linearity(H, labels, num_classes=7).item() == pytest.approx(expected, abs=TIGHT)
    each = target_linearity(H, labels, num_classes=4, per_output=True)
    assert each[:3].isfinite().all()
    assert each[3].isnan()


def test_linearity_of_balanced_classes_is_the_pillai_trace():
    # For Σ_T = Σ_W + Σ_B: tr(Σ_T⁺ Σ_B)/(K − 1), by class means and loops.
    H, _ = data(0, 80, 6, 1)
    labels = torch.arange(80) % 4
    H[:, 0] += labels
    means = torch.stack([H[labels == c].mean(0) for c in range(4)])
    between = sum(torch.outer(m, m) for m in means - H.mean(0)) / 4
    total = torch.cov(H.T, correction=0)
    expected = torch.trace(torch.linalg.pinv(total) @ between) / 3
    assert target_linearity(H, labels).item() == pytest.approx(expected.item(), abs=TIGHT)


def test_vector_targets_are_one_output():
    H, Y = data(0, 30, 4, 1)
    assert target_linearity(H, Y[:, 0]) == target_linearity(H, Y)
    assert target_linearity(H, Y[:, 0], per_output=True).shape == (1,)


def test_gradients_do_not_flow():
    H, Y = data(0, 30, 4, 1)
    assert not target_linearity(H.requires_grad_(), Y.requires_grad_()).requires_grad


def test_held_out_baseline_is_the_mean_of_the_held_out_targets():
    H, Y = data(0, 50, 3, 2)
    fit = fit_linear(H, Y)
    shifted = Y + 100
    residual = (shifted - fit.predict(H)).square().sum()
    expected = 1 - residual / (shifted - shifted.mean(0)).square().sum()
    assert fit.score(H, shifted).item() == pytest.approx(expected.item(), rel=1e-9)
    assert expected < -1


def test_held_out_data_may_lack_a_class():
    H, _ = data(0, 60, 3, 1)
    labels = torch.arange(60) % 3
    fit = fit_linear(H, labels)
    two = labels < 2
    Y = torch.eye(3, dtype=H.dtype)[labels[two]]
    expected = 1 - (Y - fit.predict(H[two])).square().sum() / (Y - Y.mean(0)).square().sum()
    assert fit.score(H[two], labels[two]).item() == pytest.approx(expected.item(), abs=TIGHT)
    assert fit.score(H[two], labels[two], per_output=True)[2].isnan()


def test_wide_features_go_by_the_smaller_side():
    H, Y = data(0, 60, 3000, 2)
    H[:, 40:] = H[:, :1]  # rank 40
    fit = fit_linear(H, Y)
    assert fit.rank == 40
    assert target_linearity(H, Y).item() == pytest.approx(reference(H[:, :40], Y), abs=1e-9)
    assert target_linearity(H, Y, 5.0).item() == pytest.approx(reference(H, Y, 5.0), abs=1e-9)


# ---- the metric ----


def batches(H, Y, *sizes):
    return zip(H.split(sizes), Y.split(sizes), strict=True)


def filled(parts, **kwargs) -> TargetLinearity:
    metric = TargetLinearity(**kwargs)
    for H, Y in parts:
        metric.update(H, Y)
    return metric


@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("d", [4, 35, 60, 90], ids=["sums", "switch", "rows", "rows with room"])
def test_batches_merges_and_forward_give_the_whole(d, ridge):
    H, Y = data(0, 60, d, 3)
    H[:, 0] += 1e3
    whole = target_linearity(H, Y, ridge).item()
    near = pytest.approx(whole, abs=1e-9)
    assert filled(batches(H, Y, 13, 1, 26, 20), ridge=ridge).compute().item() == near
    left, right = filled(batches(H[:25], Y[:25], 10, 15)), filled(batches(H[25:], Y[25:], 35), ridge=ridge)
    right.merge_state(left)
    assert right.compute().item() == near
    assert left.compute().item() == pytest.approx(target_linearity(H[:25], Y[:25]).item(), abs=1e-9)
    forward = TargetLinearity(ridge)
    for batch in batches(H, Y, 40, 20):
        assert forward(*batch).item() == pytest.approx(target_linearity(*batch, ridge).item(), abs=1e-9)
    assert forward.compute().item() == near
    assert forward.update_count == 2


def test_states_merge_as_dictionaries_and_a_computed_value_is_renewed():
    H, Y = data(0, 60, 4, 2)
    metric, other = filled(batches(H[:30], Y[:30], 30)), filled(batches(H[30:], Y[30:], 30))
    metric.compute()
    metric.merge_state(other.metric_state)
    assert metric.compute().item() == pytest.approx(target_linearity(H, Y).item(), abs=TIGHT)


def test_classes_that_come_late_or_never():
    H, _ = data(0, 60, 4, 1)
    labels = torch.cat([torch.zeros(20), torch.ones(20), torch.full((20,), 3)]).long()
    whole = target_linearity(H, labels).item()
    assert filled(batches(H, labels, 20, 20, 20)).compute().item() == pytest.approx(whole, abs=TIGHT)
    ten = filled(batches(H, labels, 20, 40), num_classes=10, per_output=True)
    assert ten.compute().isnan().tolist() == [False, False, True, False] + 6 * [True]


def test_memory_is_that_of_the_sums_whatever_the_number_of_samples():
    H, Y = data(0, 3000, 12, 3)
    metric = filled(zip(H.split(100), Y.split(100), strict=True))
    numbers = sum(s.numel() for s in [metric.products, metric.mean, metric.squares, *metric.rows])
    assert numbers == 12 * 15 + 15 + 3


def test_fit_scores_other_data():
    H, Y = data(0, 60, 4, 2)
    new = data(1, 30, 4, 2)
    metric = filled(batches(H, Y, 25, 35), ridge=0.3)
    assert metric.fit().score(*new).item() == pytest.approx(fit_linear(H, Y, 0.3).score(*new).item(), abs=TIGHT)


def test_reset_forgets_everything():
    H, Y = data(0, 60, 4, 2)
    metric = filled(batches(H, Y, 60))
    metric.reset()
    wide = data(1, 20, 30, 1)
    metric.update(*wide)
    assert metric.compute() == target_linearity(*wide)
    metric.reset()
    assert metric.rows == []


@pytest.mark.parametrize("d", [4, 90], ids=["sums", "rows"])
def test_copies_pickles_and_state_dictionaries_go_on_by_themselves(d):
    H, Y = data(0, 60, d, 2)
    metric = filled(batches(H[:40], Y[:40], 40), ridge=0.1)
    loaded = TargetLinearity(0.1)
    metric.persistent(True)
    loaded.persistent(True)
    file = io.BytesIO()
    torch.save(metric.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))
    assert loaded.compute() == metric.compute()
    part = metric.compute().item()
    for other in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), loaded):
        other.update(H[40:], Y[40:])
        assert other.compute().item() == pytest.approx(target_linearity(H, Y, 0.1).item(), abs=1e-9)
    metric._computed = None
    assert metric.compute().item() == part


def test_a_fresh_metric_loads_no_state():
    metric = TargetLinearity()
    metric.load_state_dict(TargetLinearity().state_dict())
    assert metric.update_count == 0


@pytest.mark.parametrize("d", [4, 90], ids=["sums", "rows"])
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.set_dtype(torch.float16),
        lambda m: torch.nn.ModuleList([m]).half()[0],
    ],
    ids=["half", "float", "to", "to-device", "set_dtype", "parent"],
)
def test_casts_do_not_lose_digits(cast, d):
    H, Y = data(0, 60, d, 2)
    metric = cast(filled(batches(H[:30], Y[:30], 30)))
    metric.update(H[30:], Y[30:])
    assert metric.compute().item() == pytest.approx(target_linearity(H, Y).item(), abs=1e-9)
    cast(metric)
    metric.reset()
    metric.update(H, Y)
    assert metric.compute().dtype == torch.float64


def test_states_follow_the_device():
    H, Y = data(0, 60, 4, 2)
    for metric in (filled(batches(H, Y, 60)), filled(batches(H[:3], Y[:3], 3))):
        moved = metric.to("meta")
        assert {s.device.type for s in [moved.products, moved.count, *moved.rows]} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sums_on_a_gpu_are_those_on_the_cpu():
    H, Y = data(0, 60, 4, 2)
    metric = filled(batches(H.cuda(), Y.cuda(), 20, 40))
    assert metric.compute().is_cuda
    assert metric.to("cpu").compute().item() == pytest.approx(target_linearity(H, Y).item(), abs=TIGHT)


def test_collections_share_and_compute():
    H, Y = data(0, 60, 4, 2)
    collection = MetricCollection({"plain": TargetLinearity(), "ridge": TargetLinearity(5.0)})
    for batch in batches(H, Y, 20, 40):
        collection.update(*batch)
    assert len(collection.compute_groups) == 1  # one set of sums for both
    for name, ridge in (("plain", 0.0), ("ridge", 5.0)):
        assert collection.compute()[name].item() == pytest.approx(target_linearity(H, Y, ridge).item(), abs=TIGHT)
    collection.reset()
    values = collection(H[:20], Y[:20])
    assert values["ridge"].item() == pytest.approx(target_linearity(H[:20], Y[:20], 5.0).item(), abs=TIGHT)


def _process(rank: int, init: str, parts: list, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    values = []
    for per_rank in parts:
        metric = filled(per_rank[rank])
        if not per_rank[rank]:
            metric._update_count = 1  # a process without data joins in all the same
        before = len(metric.rows), int(metric.count)
        values.append((metric.compute().item(), metric.fit().intercept))
        assert (len(metric.rows), int(metric.count)) == before  # its own sums come back
    failing = filled([(torch.randn(5, 2), torch.ones(5))])
    with pytest.raises(ValueError, match="constant"):
        failing.compute()
    assert int(failing.count) == 5
    torch.save(values, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_are_one(tmp_path):
    H, Y = data(0, 60, 4, 2)
    wide, labels = data(0, 60, 50, 1)[0], torch.cat([torch.arange(40) % 2, torch.full((20,), 3)])
    parts = [
        [list(batches(H[:35], Y[:35], 20, 15)), list(batches(H[35:], Y[35:], 25))],  # sums and sums
        [[(H[:3], Y[:3])], list(batches(H[3:], Y[3:], 7, 50))],  # rows and sums
        [[(wide[:20], labels[:20])], [(wide[20:40], labels[20:40])]],  # rows and rows
        [[(wide[:40], labels[:40])], [(wide[40:], labels[40:])]],  # become sums; a class that one process lacks
        [[(H, Y)], []],  # a process without data
    ]
    torch.multiprocessing.spawn(_process, (f"file://{tmp_path}/init", parts, str(tmp_path)), nprocs=2, join=True)
    for rank in range(2):
        for (value, intercept), per_rank in zip(torch.load(tmp_path / f"{rank}.pt"), parts, strict=True):
            joint = [
                torch.cat(tensors) for tensors in zip(*(batch for part in per_rank for batch in part), strict=True)
            ]
            assert value == pytest.approx(target_linearity(*joint).item(), abs=1e-10)
            assert torch.allclose(intercept, fit_linear(*joint).intercept, atol=1e-8)
    # The mean of the processes' values is something else.
    mean = (target_linearity(H[:35], Y[:35]) + target_linearity(H[35:], Y[35:])) / 2
    assert (mean - target_linearity(H, Y)).abs() > 0.01


# ---- the surrogate ----


def kernel_alignment(Z: torch.Tensor, Y: torch.Tensor) -> tuple[float, float]:
    """HSIC and CKA of the linear kernels, by (n, n) matrices as they are defined."""
    n = len(Z)
    centring = torch.eye(n, dtype=Z.dtype) - 1 / n

    def hsic(K, L):
        return torch.trace(K @ centring @ L @ centring) / (n - 1) ** 2

    K, L = Z @ Z.T, Y @ Y.T
    return hsic(K, L).item(), (hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()).item()


@few
@given(n=st.integers(3, 30), d=sizes, k=sizes, K=st.integers(1, 5), seed=seeds)
def test_surrogate_is_the_independence_criterion_and_alignment_of_kernels(n, d, k, K, seed):
    (W,) = tensors(seed + 1, (k, d))
    H, Y = data(seed, n, d, K)
    hsic, cka = kernel_alignment(H @ W.T + 4, Y)
    assert K * surrogate(H, W, Y).item() / (n - 1) ** 2 == pytest.approx(hsic, rel=1e-9)
    assert normalized_surrogate(H, W, Y).item() == pytest.approx(cka, rel=1e-9)
    assert 0 <= normalized_surrogate(H, W, Y).item() <= 1 + TIGHT


def test_surrogate_is_its_formula_by_loops_with_the_factor_of_the_outputs():
    (W,) = tensors(1, (5, 4))
    H, Y = data(0, 30, 4, 3)
    hc, yc = H - H.mean(0), Y - Y.mean(0)
    total = 0.0
    for c in range(3):
        for j in range(5):
            total += sum((yc[i, c] * (W[j] @ hc[i]) for i in range(30)), torch.tensor(0.0)).item() ** 2
    assert surrogate(H, W, Y).item() == pytest.approx(total / 3, rel=1e-9)
    trace = torch.trace(yc.T @ hc @ W.T @ W @ hc.T @ yc) / 3
    assert surrogate(H, W, Y).item() == pytest.approx(trace.item(), rel=1e-9)
    assert surrogate(H, W, Y).item() != pytest.approx((W @ H.T @ Y).square().sum().item() / 3, rel=0.1)  # not centred


@few
@given(a=st.floats(0.1, 10), b=st.floats(0.1, 10), c=st.floats(0.1, 10), seed=seeds)
def test_surrogate_scales_as_a_square_and_alignment_does_not(a, b, c, seed):
    W, left, right = tensors(seed, (5, 4), (5, 5), (3, 3))
    H, Y = data(seed, 30, 4, 3)
    R, Q = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
    value, aligned = surrogate(H, W, Y).item(), normalized_surrogate(H, W, Y).item()
    mapped = (a * H + 2, b * R @ W, c * Y @ Q - 3)
    assert surrogate(*mapped).item() == pytest.approx((a * b * c) ** 2 * value, rel=1e-8)
    assert normalized_surrogate(*mapped).item() == pytest.approx(aligned, rel=1e-8)


def test_surrogate_depends_on_the_weight_by_its_gram_alone_and_alignment_on_more_than_its_span():
    W, mix = tensors(0, (4, 4), (4, 4))
    H, Y = data(0, 30, 4, 3)
    root = torch.linalg.cholesky(W.T @ W).T  # another weight with the same Gram matrix
    assert surrogate(H, root, Y).item() == pytest.approx(surrogate(H, W, Y).item(), rel=1e-9)
    assert normalized_surrogate(H, mix @ W, Y).item() != pytest.approx(normalized_surrogate(H, W, Y).item(), rel=0.02)


def test_alignment_of_targets_with_themselves_is_one():
    _, Y = data(0, 30, 4, 3)
    assert normalized_surrogate(Y, torch.eye(3), Y).item() == pytest.approx(1, abs=TIGHT)


def test_surrogate_of_classes_counts_empty_ones_in_its_factor():
    H, _ = data(0, 30, 4, 1)
    (W,) = tensors(1, (5, 4))
    labels = torch.arange(30) % 3
    value = surrogate(H, W, torch.eye(3)[labels])
    assert surrogate(H, W, labels).item() == pytest.approx(value.item(), rel=1e-12)
    assert surrogate(H, W, labels, num_classes=6).item() == pytest.approx(value.item() / 2, rel=1e-12)


def test_early_growth_of_a_linear_head_is_exponential_at_twice_the_top_singular_value():
    # P = WMᵀ with P″ = P MMᵀ/n² for W′ = UᵀM/n, U′ = MWᵀ/n at small weights, M = YᵀH, prediction HWᵀUᵀ.
    H, Y, W, U = tensors(0, (50, 6), (50, 3), (4, 6), (3, 4))
    H, Y = H - H.mean(0), Y - Y.mean(0)
    M, n = Y.T @ H, 50
    W, U, dt = 1e-9 * W, 1e-9 * U, 0.01
    top = torch.linalg.svdvals(M)[0].item() / n
    values = []
    for _ in range(2000):
        error = Y - H @ W.T @ U.T
        W, U = W + dt * U.T @ (error.T @ H) / n, U + dt * (error.T @ H) @ W.T / n
        values.append(surrogate(H, W, Y).log().item())
    rates = np.diff(values) / dt
    assert rates[700:900].mean() == pytest.approx(2 * top, rel=0.1)


# ---- errors: what was wrong, what was got, what to pass ----

H5, Y5, C5, W5 = (
    torch.arange(15.0).reshape(5, 3).cos(),
    torch.arange(10.0).reshape(5, 2),
    torch.arange(5),
    torch.ones(4, 3),
)
ERRORS = {
    "integer features": (
        lambda g: g.target_linearity(H5.long(), Y5),
        TypeError,
        "torch.int64 tensor; pass a floating-point",
    ),
    "nan": (lambda g: g.target_linearity(H5 / 0, Y5), ValueError, "features: 15 NaN or infinite entries"),
    "empty": (lambda g: g.target_linearity(H5[:0], Y5[:0]), ValueError, "batch is empty"),
    "devices": (lambda g: g.target_linearity(H5, Y5.to("meta")), ValueError, "move them to one device"),
    "one class": (lambda g: g.target_linearity(H5, C5 * 0 + 2), ValueError, "all 5 samples are of one class"),
    "one sample": (lambda g: g.target_linearity(H5[:1], Y5[:1]), ValueError, "all 1 samples are constant"),
    "constant": (
        lambda g: g.target_linearity(H5, Y5 * 0 + 0.1),
        ValueError,
        "all 5 samples are constant: there is no variance",
    ),
    "ridge kind": (lambda g: g.target_linearity(H5, Y5, "1"), TypeError, "ridge is a str; pass a number"),
    "ridge sign": (
        lambda g: g.target_linearity(H5, Y5, -1.0),
        ValueError,
        r"ridge is -1.0; pass a finite number, 0 or",
    ),
    "ridge nan": (lambda g: g.TargetLinearity(float("nan")), ValueError, "ridge is nan; pass a finite number"),
    "overflow": (
        lambda g: g.target_linearity(H5.double() * 1e200, Y5),
        ValueError,
        r"features: the largest entry is 1e\+200, .* leave float64; rescale",
    ),
    "predict width": (
        lambda g: g.fit_linear(H5, Y5).predict(W5.T),
        ValueError,
        "have width 4, the fit 3: they must agree",
    ),
    "predict device": (
        lambda g: g.fit_linear(H5, Y5).predict(H5.to("meta")),
        ValueError,
        "on meta, the fit is on cpu; move",
    ),
    "score kind": (
        lambda g: g.fit_linear(H5, Y5).score(H5, C5),
        ValueError,
        r"int64 of shape \(5,\), the fit is to real \(n, 2\)",
    ),
    "score width": (
        lambda g: g.fit_linear(H5, Y5).score(H5, Y5[:, 0]),
        ValueError,
        r"shape \(5,\), the fit is to real \(n, 2\)",
    ),
    "score classes": (
        lambda g: g.fit_linear(H5, C5).score(H5, Y5),
        ValueError,
        "the fit is to 5 classes: they must agree",
    ),
    "score new class": (lambda g: g.fit_linear(H5, C5).score(H5, C5 + 1), ValueError, "class 5 with num_classes=5"),
    "score constant": (lambda g: g.fit_linear(H5, Y5).score(H5[:1], Y5[:1]), ValueError, "all 1 samples are constant"),
    "weight kind": (
        lambda g: g.surrogate(H5, W5.long(), Y5),
        TypeError,
        "weight: got a torch.int64 tensor; pass a floating",
    ),
    "weight width": (
        lambda g: g.surrogate(H5, W5.T, Y5),
        ValueError,
        r"\(5, 3\), weight \(3, 4\): expected \(n, d\) and \(k, d\)",
    ),
    "weight nan": (lambda g: g.surrogate(H5, W5 / 0, Y5), ValueError, r"weight: 12 NaN or infinite .*, shape \(4, 3\)"),
    "weight device": (lambda g: g.surrogate(H5, W5.to("meta"), Y5), ValueError, "weight on meta; move them"),
    "surrogate constant": (lambda g: g.surrogate(H5, W5, Y5 * 0), ValueError, "all 5 samples are constant"),
    "alignment rounding": (
        lambda g: g.normalized_surrogate(
            torch.tensor([[0.1, 0.3], [0.7, 0.9], [0.2, 0.4]], dtype=torch.float64), torch.tensor([[1.0, -1.0]]), Y5[:3]
        ),
        ValueError,
        "are equal: alignment is undefined",
    ),
    "alignment constant": (
        lambda g: g.normalized_surrogate(H5 * 0 + 0.1, W5, Y5),
        ValueError,
        "pre-activations of all 5 samples are equal",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, unchecked):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


def test_a_metric_without_data_says_so(unchecked):
    with (
        pytest.warns(UserWarning, match="before the ``update``"),
        pytest.raises(ValueError, match="no samples yet; call"),
    ):
        unchecked.TargetLinearity().compute()


def test_a_refused_batch_changes_nothing(unchecked):
    H, Y = data(0, 30, 4, 2)
    metric = unchecked.TargetLinearity()
    metric.update(H, Y)
    with pytest.raises(ValueError, match="constant"):
        metric(H, Y * 0)  # forward's value of this batch alone is undefined
    with pytest.raises(ValueError, match="NaN"):
        metric.update(H, Y * torch.nan)
    with pytest.raises(ValueError, match="width 3, earlier ones 4"):
        metric.merge_state(filled([(H[:, :3], Y)]).metric_state)
    metric._computed = None
    assert metric.compute() == target_linearity(H, Y)


@pytest.mark.parametrize("n", [3, 30])
def test_metrics_loaded_from_one_state_do_not_share_it(n):
    torch.manual_seed(0)
    H, Y = torch.randn(n, 4), torch.randn(n, 2)
    metric = TargetLinearity()
    metric.persistent(True)
    metric.update(H, Y)
    state = metric.state_dict()
    first, second = TargetLinearity(), TargetLinearity()
    for each in (first, second):
        each.load_state_dict(state)
    first.update(H + 1, Y.flip(0))
    assert second.compute() == metric.compute()
    with pytest.raises(ValueError, match="compute_on_cpu"):
        TargetLinearity(compute_on_cpu=True)
