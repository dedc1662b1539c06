"""Chapter 4's runs on small data, what is read off stored ones, and its drawings."""

import json

import matplotlib as mpl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import orthogonal_procrustes

from gramlin import data, fit_linear, nearest_class_mean_disagreement, neural_collapse, simplex_etf
from gramlin.chapters import run_once
from gramlin.chapters.collapse import (
    COLLAPSE,
    bound_points,
    bound_violations,
    collapse_panels,
    collapse_settings,
    collapse_table,
    collapse_verdicts,
    direction_table,
    experiment,
    figures,
    readout_panels,
    readout_paths,
    readout_table,
    rest_table,
)
from gramlin.chapters.collapse.experiment import decay_groups, shares_by_direction
from gramlin.models import MLP
from gramlin.moments import Moments
from gramlin.results import Run
from tests.looks import check_axes_and_legend

TERMINAL = {"width": 32, "lr": 0.1, "epochs": 150, "batch_size": 64, "weight_decay": 2e-3}


def collapse_run(**changes) -> dict:
    return run_once(COLLAPSE, collapse_settings("digits", [0])[0] | TERMINAL | changes).metrics


def test_chapter_4_measures_what_its_parts_measure():
    metrics = collapse_run(epochs=3, width=16, train_size=500)
    # The same run by hand, without decay of biases, the learning rate falling after epochs 1 and 2.
    split = data.standardize(data.load("digits"))
    by_class = [(split.train_targets == each).nonzero().flatten()[:50] for each in range(10)]
    x, y = split.train_inputs[torch.cat(by_class)], split.train_targets[torch.cat(by_class)]
    torch.manual_seed(0)
    model = MLP([64, 16, 16, 16, 16, 10], "gelu")
    weights = [each for each in model.parameters() if each.ndim == 2]
    biases = [each for each in model.parameters() if each.ndim == 1]
    generator = torch.Generator().manual_seed(0)
    velocities = [torch.zeros_like(each) for each in weights + biases]
    for lr in (0.1, 0.01, 0.001):
        for batch in torch.randperm(500, generator=generator).split(64):
            model.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            with torch.no_grad():
                for each, velocity in zip(weights + biases, velocities, strict=True):
                    velocity.mul_(0.9).add_(each.grad + (2e-3 * each if each.ndim == 2 else 0))
                    each.sub_(lr * velocity)
    with torch.no_grad():
        logits = model(x)
        features = x.flatten(1)
        for layer in list(model)[1:-1]:
            features = layer(features)
        expected = neural_collapse(features, y, model.linear5.weight)
        means = torch.stack([features[50 * each : 50 * (each + 1)].mean(dim=0) for each in range(10)])
        # Two runs of float32 training.
        assert metrics["nc3"][-1] == pytest.approx(expected["nc3"].item(), rel=1e-2)
        M, W = ((each / each.norm()).T.numpy() for each in (means - means.mean(dim=0), model.linear5.weight))
        turn, _ = orthogonal_procrustes(W, M)
        assert metrics["nc3_rotated"][-1] == pytest.approx(np.linalg.norm(W @ turn - M).item(), rel=1e-2)
        assert metrics["nc3_rotated"][-1] < metrics["nc3"][-1]
        measured = metrics["layers"]["linear5"]
        assert measured["tl"][-1] == pytest.approx(expected["target_linearity"].item(), rel=1e-2)
        for name in ("nc1", "nc2_equinorm", "nc2_equiangular", "nc2_etf"):
            assert measured[name][-1] == pytest.approx(expected[name].item(), rel=1e-2)
        nc4 = nearest_class_mean_disagreement(features, logits.argmax(dim=1), means).item()
        assert metrics["nc4"][-1] == pytest.approx(nc4, abs=0.02)
        centred = means - means.mean(dim=0)
        gram = centred @ centred.T
        # By autograd, as the part of the weight's gradient that features have at their class means.
        at_means = model.linear5.weight.new_zeros(10, 16).requires_grad_()
    with torch.enable_grad():
        shifted = features @ model.linear5.weight.T + model.linear5.bias + centred[y] @ at_means.T
        F.cross_entropy(shifted, y).backward()
    with torch.no_grad():
        W = model.linear5.weight
        duality = ((W + at_means.grad / 2e-3).norm() / W.norm()).item()
        assert metrics["rest"]["duality"][-1] == pytest.approx(duality, rel=1e-2)
        held_out = split.test_inputs.flatten(1)
        for layer in list(model)[1:-1]:
            held_out = layer(held_out)
        decided = model.linear5(held_out).argmax(dim=1)
        nc4 = nearest_class_mean_disagreement(held_out, decided, means).item()
        assert metrics["nc4_test"][-1] == pytest.approx(nc4, abs=0.02)
        score = fit_linear(features, y).score(held_out, split.test_targets).item()
        assert measured["tl_test"][-1] == pytest.approx(score, rel=1e-2)
        assert np.trace(np.array(metrics["cosines"]["3"])) == pytest.approx(10)
        assert metrics["cosines"]["3"][0][1] == pytest.approx(
            (gram[0, 1] / (gram[0, 0] * gram[1, 1]).sqrt()).item(), abs=0.02
        )
        assert sum(metrics["nc1_shares"][-1]) == pytest.approx(metrics["layers"]["linear5"]["nc1"][-1])
        assert metrics["variances"][-1][0] == pytest.approx(
            (torch.linalg.eigvalsh(gram)[-1] / gram.trace()).item(), rel=1e-2
        )
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    gradient, W = model.linear5.weight.grad, model.linear5.weight.detach()
    rest = ((gradient + 2e-3 * W).norm() / (2e-3 * W).norm()).item()
    assert metrics["rest"]["stationarity"][-1] == pytest.approx(rest, rel=1e-2)


def test_features_collapse_and_respect_the_bound():
    metrics = collapse_run()
    assert metrics["epoch"] == [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 150]
    assert metrics["train_accuracy"][-1] == 1
    top = metrics["layers"]["linear5"]
    assert top["nc1"][-1] < 0.1 * top["nc1"][0]
    assert top["nc1"][-1] < metrics["layers"]["linear2"]["nc1"][-1]
    g = metrics["class_spread"]
    assert 0.899 < g < 0.9  # the digits' classes are nearly balanced
    for layer in metrics["layers"].values():
        assert all(tl > g / (g + nc1) for tl, nc1 in zip(layer["tl"], layer["nc1"], strict=True))
    assert metrics["nc3"][-1] < metrics["nc3"][0]
    assert metrics["nc4"][-1] < 0.01
    rest = metrics["rest"]
    assert rest["stationarity"][-1] < 0.3 < rest["stationarity"][1]
    assert rest["in_span"][-1] > 0.9 > rest["in_span"][1]
    assert len(json.dumps(metrics)) < 60_000


def test_at_rest_with_collapsed_features_the_readout_is_dual_to_class_means():
    # Features at the corners M of a simplex, and the readout W = sM that is stationary there. The gradient of its loss
    # is −(1 − p)/(K − 1)·M, with p the softmax of the right class, so that s = (1 − p(s))/((K − 1)λ).
    K, decay = 4, 1e-2
    M = simplex_etf(K, 6)
    scale = 1.0
    for _ in range(200):  # damped, or it would swing to and fro
        wrong = (torch.softmax(scale * M @ M.T, dim=1) - torch.eye(K)).diagonal().mean().item()
        scale += 0.1 * (-wrong / (K - 1) / decay - scale)
    residuals = (torch.softmax(scale * M @ M.T, dim=1) - torch.eye(K)) / K
    rest = experiment._at_rest(scale * M, residuals.T @ M, residuals.T, M + 3, decay)
    assert rest["stationarity"] < 1e-6
    assert rest["duality"] < 1e-6
    assert rest["in_span"] == pytest.approx(1)
    assert rest["simplex"] == pytest.approx(1)
    elsewhere = experiment._at_rest(2 * scale * M, residuals.T @ M, residuals.T, M + 3, decay)
    assert elsewhere["stationarity"] > 0.1
    assert elsewhere["duality"] > 0.1


def test_without_weight_decay_there_is_no_rest():
    assert "rest" not in collapse_run(weight_decay=0.0, epochs=1)


def test_neither_biases_nor_normalisation_is_decayed():
    model = MLP([4, 3, 2], batch_norm=True)
    decayed, free = decay_groups(model, 0.1)
    assert [decayed["weight_decay"], free["weight_decay"]] == [0.1, 0]
    assert {id(each) for each in decayed["params"]} == {id(model.linear1.weight), id(model.linear2.weight)}
    assert len(free["params"]) == len(list(model.parameters())) - 2


@pytest.mark.parametrize(("K", "d"), [(3, 8), (3, 2), (5, 3)])
def test_shares_by_direction_add_up(K, d):
    torch.manual_seed(0)
    y = torch.arange(40 * K) % K
    H = torch.randn(K, d, dtype=torch.float64)[y] + 0.1 * torch.randn(40 * K, d, dtype=torch.float64)
    moments = Moments()
    moments.update(H, y)
    shares = shares_by_direction(moments)
    assert len(shares["variances"]) == min(K - 1, d)
    assert sum(shares["variances"]) == pytest.approx(1)
    assert sum(shares["nc1_shares"]) == pytest.approx(neural_collapse(H, y)["nc1"].item())


def test_batch_normalisation_helps_collapse():
    plain, normal = collapse_run(epochs=30), collapse_run(epochs=30, model="mlp-bn")
    assert list(normal["layers"]) == list(plain["layers"])
    assert normal["layers"]["linear5"]["nc2_etf"][-1] < plain["layers"]["linear5"]["nc2_etf"][-1]


@pytest.mark.parametrize(("model", "width", "layers"), [("cnn", 8, 4), ("resnet18", 64, 10)])
def test_convolutional_networks_are_measured_at_every_stage(model, width, layers):
    metrics = collapse_run(model=model, width=width, epochs=1, train_size=100)
    assert len(metrics["layers"]) == layers
    assert all(0 <= each["tl"][-1] < 1 + 1e-9 for each in metrics["layers"].values())  # 1, if features are many


def test_an_unknown_network_is_refused():
    with pytest.raises(ValueError, match="'resnet18' of width 64"):
        collapse_run(model="resnet18", width=32)


@pytest.mark.parametrize("size", [5, 10**6])
def test_a_size_that_classes_cannot_fill_is_refused(size):
    with pytest.raises(ValueError, match=rf"train_size is {size}; pass 10 to \d+, as many images of each class"):
        collapse_run(train_size=size, epochs=1)


def test_settings_of_chapter_4_repeat_nothing():
    assert len({str(each) for each in collapse_settings("mnist", [0, 1, 2])}) == 9
    assert [each["model"] for each in collapse_settings("cifar10-jpeg", [0, 1])] == ["cnn", "resnet18"] * 2


def collapsed(courses: list[dict], **changes) -> list[Run]:
    """Runs of two layers: what enters the first stays, what enters the second has the given TL and NC1 over time."""
    runs = []
    for seed, course in enumerate(courses):
        n = len(course["tl"])

        def layer(tl, nc1, n=n):
            rest = {key: [0.5] * n for key in ("tl_test", "nc2_equinorm", "nc2_equiangular", "nc2_etf")}
            return {"tl": tl, "nc1": nc1, **rest}

        keys = ("train_accuracy", "test_accuracy", "nc3", "nc3_rotated", "nc4", "nc4_test")
        metrics = {
            "epoch": list(range(n)),
            **{key: [0.5] * (n - 1) + [0.0] for key in keys},
            "class_spread": 0.9,
            "variances": [[0.75, 0.25]] * n,
            "nc1_shares": [[0.01 * (seed + 1), 0.2]] * n,
            "rest": {key: [1.0] * n for key in ("stationarity", "duality", "in_span", "simplex")},
            "layers": {"linear1": layer([0.5] * n, [2.0] * n), "linear2": layer(course["tl"], course["nc1"])},
        }
        settings = {**collapse_settings("digits", [seed])[0], **changes}
        runs.append(Run("collapse", settings, metrics, wall_seconds=1.0, device="cpu"))
    return runs


def test_the_verdict_on_collapse_follows_its_rule():
    together = {"tl": [0.4, 0.9, 0.95, 0.99], "nc1": [3.0, 0.5, 0.1, 0.01]}
    row = collapse_verdicts(collapsed([together, together])).loc["digits, MLP, λ = 0.0005"]
    assert row.tolist() == [2, "1.00", "1.00", "0.9900", "0.0033", "–", "1.00", "reproduced"]  # ends before the drop
    apart = {"tl": [0.4, 0.9, 0.95, 0.99], "nc1": [3.0, 0.1, 0.2, 0.25]}
    row = collapse_verdicts(collapsed([together, apart])).iloc[0]
    assert (row["C7"], row["NC1, end/least"]) == ("not reproduced", "2.50")  # of the worse seed
    row = collapse_verdicts(collapsed([together, apart], epochs=6)).iloc[0]  # the rate drops after epoch 2
    assert (row["over time"], row["from the drop"]) == ("-1.00", "-1.00")
    assert collapse_verdicts(collapsed([together]))["C7"].tolist() == ["not decided by one seed"]
    assert collapse_verdicts(collapsed([apart]))["C7"].tolist() == ["not reproduced"]  # one seed is enough to fail
    early = {"tl": [0.4, 0.6, 0.7, 0.9], "nc1": [3.0, 0.5, 0.1, 0.01]}
    assert collapse_verdicts(collapsed([early, early]))["C7"].tolist() == ["not reproduced"]


def test_tables_of_collapse():
    runs = collapsed(
        [{"tl": [0.5, 0.8, 0.9], "nc1": [2.0, 0.4, 0.1]}, {"tl": [0.5, 0.8, 0.94], "nc1": [2.0, 0.4, 0.1]}]
    )
    table = collapse_table(runs).loc["digits, MLP, λ = 0.0005"]
    assert table.loc["h1", "TL"] == "0.9200 ± 0.0283"
    assert table.loc["h1", "1 − TL over its bound"] == "1.00"  # (1 − 0.9)(0.9 + 0.1)/0.1
    assert table.loc["h1", "90% by epoch"] == "2"
    assert table.loc["pixels", "90% by epoch"] == "–"
    assert bound_violations(runs) == 0
    runs[0].metrics["layers"]["linear2"]["tl"][-1] = 0.89
    assert bound_violations(runs) == 1
    nc1, nonlinear = bound_points(runs)["h1"]
    assert (nc1.tolist(), nonlinear.round(2).tolist()) == ([0.4, 0.1, 0.4, 0.1], [0.2, 0.11, 0.2, 0.06])
    panel = readout_panels(runs)["digits, MLP, λ = 0.0005"]
    assert np.isnan(panel["NC4"][1][:, -1]).all()  # no place for 0 on a logarithmic axis
    epochs, rows = collapse_panels(runs, "nonlinear")["digits, MLP, λ = 0.0005"]["h1"]
    assert (epochs.tolist(), rows.round(2).tolist()) == ([0, 1, 2], [[0.5, 0.2, 0.11], [0.5, 0.2, 0.06]])
    assert table.loc["h1", "NC1, end/least"] == "1.00"
    readout = readout_table(runs).loc["digits, MLP, λ = 0.0005"]
    assert readout["train accuracy"] == "0.00 ± 0.00"
    assert readout["last training error, epoch"] == "2"
    runs[0].metrics["train_accuracy"] = [0.5, 1.0, 1.0]
    assert readout_table(runs)["last training error, epoch"].tolist() == ["0–2"]
    epochs, nc1, nonlinear = readout_paths(runs)["digits"]["MLP, λ = 0.0005"]
    assert (epochs.tolist(), nc1[1].tolist()) == ([0, 1, 2], [2.0, 0.4, 0.1])
    assert nonlinear[1].round(2).tolist() == [0.5, 0.2, 0.06]
    # g = 0.9, two directions with 0.01 or 0.02, and 0.2: 0.9/1.11 or 0.9/1.12; the mean of 0.45/0.46 or 0.45/0.47
    # and 0.45/0.65.
    assert readout["TL at least, by NC1"] == "0.8072 ± 0.0051"
    assert readout["TL at least, by direction"] == "0.8301 ± 0.0074"
    assert rest_table(runs).shape == (1, 4)
    by_direction = direction_table(runs).loc["digits, MLP, λ = 0.0005"]
    assert by_direction.loc["variance, %"].tolist() == ["75", "25"]
    assert by_direction.loc["NC1"].tolist() == ["0.015", "0.2"]
    plain = collapsed([{"tl": [0.5], "nc1": [1.0]}], weight_decay=0.0)
    del plain[0].metrics["rest"]
    assert rest_table(plain).empty
    assert list(collapse_panels(plain, "tl")) == ["digits, MLP, no decay"]
    assert all(table([]).empty for table in (collapse_table, readout_table, collapse_verdicts))


# ---- drawings ----

x = np.linspace(0.1, 1, 5)
roll = np.random.default_rng(0).normal(size=(20, 2))
# By data set and network: epochs, and of two runs NC1 and 1 − TL.
COURSES = np.array([[9, 1.6, 0.8, 0.4], [9, 0.4, 0.2, 0.1]]), np.array([[1, 0.2, 0.1, 0.05]] * 2)
PATHS = {"digits": {"MLP": (np.arange(4), *COURSES)}}
FIGURES = {
    "measures": lambda: figures.plot_measures(
        {"one": {"NC1": (x, [x, x]), "1 − TL": (x, [x])}, "b": {"NC1": (x, [x])}}
    ),
    "bound": lambda: figures.plot_bound({"pixels": (x, x / 3), "h1": (x / 2, x / 4)}, PATHS, 0.9, mark=2.0),
    "features in the plane": lambda: figures.plot_features_in_the_plane(
        {"start": (roll[:4], np.eye(2)), "end": (roll[4:8], np.eye(2))}, [0, 1, 0, 1], ["cat", "dog"]
    ),
    "shear": lambda: figures.plot_shear({"before": roll, "after": 2 * roll}, np.arange(20) % 2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])


def test_cosines_of_class_means_are_on_one_scale():
    figure = figures.plot_class_means({"start": np.eye(4), "end": -np.eye(4)})
    images = [axes.get_images()[0] for axes in figure.axes if axes.get_images()]
    assert {image.get_clim() for image in images} == {(-1 / 3 - 0.5, -1 / 3 + 0.5)}
    white = images[0].to_rgba(np.array([[-1 / 3]]), norm=True)  # a simplex
    assert (white[0, 0, :3] > 0.95).all()
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["class", "class"]
    mpl.pyplot.close(figure)


def test_the_bound_is_above_what_it_bounds():
    figure = figures.plot_bound({"h1": (np.array([0.5]), np.array([0.1]))}, PATHS, 0.9, mark=2.0)
    for axes in figure.axes:
        curve = next(line for line in axes.get_lines() if line.get_label() == "bound")
        assert np.interp(0.5, *curve.get_data()) == pytest.approx(0.5 / 1.4, rel=1e-2)
    mpl.pyplot.close(figure)


def test_a_path_leaves_out_the_start_and_marks_the_last_moment_before_the_drop_and_the_end():
    figure = figures.plot_bound({"h1": (np.array([0.5]), np.array([0.1]))}, PATHS, 0.9, mark=2.0)
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[1].get_lines()}
    path = lines["MLP"]
    assert path == pytest.approx(np.array([[0.8, 0.2], [0.4, 0.1], [0.2, 0.05]]))  # geometric means over two runs
    assert lines["_ring"] == pytest.approx(path[[0]])
    assert lines["_end"] == pytest.approx(path[[2]])
    mpl.pyplot.close(figure)
