"""Chapter 5's runs on small data, what is read off stored ones, and its drawings."""

import json
import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from gramlin import VAE, data, interpolation_gap
from gramlin.chapters import run_once
from gramlin.chapters.interpolation import (
    INTERPOLATION,
    beta_panels,
    experiment,
    figures,
    gap_points,
    interpolation_settings,
    interpolation_table,
    interpolation_verdicts,
    tradeoff_panels,
)
from gramlin.results import Run
from gramlin.training import train
from tests.looks import check_axes_and_legend

FAST = {"latent": 4, "hidden": 16, "lr": 1e-2, "batch_size": 16, "epochs": 8, "beta": 0.1}


def interpolation_run(**changes) -> dict:
    return run_once(INTERPOLATION, interpolation_settings("digits", [0])[0] | FAST | changes).metrics


def test_chapter_5_measures_what_its_parts_measure():
    metrics = interpolation_run(epochs=2)
    # The same run by hand, with scikit-learn's fits.
    split = data.load("digits")
    torch.manual_seed(0)
    model = VAE((1, 8, 8), 4, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = split.train_inputs

    def loss(outputs, images):
        logits, mean, log_variance = outputs
        pixels = images * F.logsigmoid(logits) + (1 - images) * F.logsigmoid(-logits)
        return (0.05 * (log_variance.exp() + mean**2 - 1 - log_variance).sum(1) - pixels.sum((1, 2, 3))).mean()

    train(model, optimizer, x, x, epochs=2, batch_size=16, loss=loss)
    with torch.no_grad():
        z, z_test = model.encode(x)[0], model.encode(split.test_inputs)[0]
        rows = {"inputs": (x, split.test_inputs), "decodings": (model.decode(z), model.decode(z_test))}
        for name, (Y, Y_test) in rows.items():
            Y, Y_test = Y.flatten(1).double(), Y_test.flatten(1).double()
            fit = LinearRegression().fit(z.double(), Y)
            for suffix, H, targets in (("", z, Y), ("_test", z_test, Y_test)):
                score = r2_score(targets, fit.predict(H.double()), multioutput="variance_weighted")
                # Two runs of float32 training.
                assert metrics[f"tl_{name}{suffix}"][-1] == pytest.approx(score, abs=1e-3)
        order = torch.randperm(360, generator=torch.Generator().manual_seed(0))
        gaps = interpolation_gap(model.decode, z_test[order[:180]], z_test[order[180:]])
        same = (split.test_targets[order[:180]] == split.test_targets[order[180:]]).double()
        error = (split.test_inputs - rows["decodings"][1]).square().sum() / len(order)
    assert metrics["gap"][-1]["mean"] == pytest.approx(gaps.mean().item(), rel=1e-2)
    assert metrics["gap"][-1]["median"] == pytest.approx(gaps.median().item(), rel=0.05)
    assert metrics["gap_within"][-1] == pytest.approx(((gaps @ same) / same.sum()).item(), rel=1e-2)
    assert metrics["gap_across"][-1] == pytest.approx(((gaps @ (1 - same)) / (1 - same).sum()).item(), rel=1e-2)
    spread = split.test_inputs.var(dim=0, correction=0).sum()
    assert metrics["explained"][-1] == pytest.approx(1 - (error / spread).item(), abs=1e-3)


def test_a_trained_autoencoder_keeps_the_laws_of_chapter_5():
    metrics = interpolation_run()
    lists = {key: values for key, values in metrics.items() if isinstance(values, list)}
    assert {len(values) for key, values in lists.items() if key != "train_loss"} == {9}
    assert len(metrics["train_loss"]) == 8
    assert metrics["epoch"] == list(range(9))
    assert set(metrics["violations"]) == {0}
    assert all(g["mean"] <= b["mean"] for g, b in zip(metrics["gap"], metrics["bound"], strict=True))
    for suffix in ("", "_test"):
        assert max(metrics[f"tl_inputs{suffix}"]) <= metrics[f"pca_ceiling{suffix}"] + 1e-6
        assert metrics[f"tl_inputs{suffix}"][-1] > 0.5 * metrics[f"pca_ceiling{suffix}"]
    assert metrics["reconstruction"][-1] < metrics["reconstruction"][0]
    assert metrics["active_units"][-1] >= 3
    assert 0.3 < metrics["explained"][-1] < 1
    # The statement on the mean, with pairs in place of all pairs: but for the sampling of 180.
    ratio = metrics["pooled_gap"][-1] / math.sqrt((1 - metrics["tl_decodings_test"][-1]) / 2)
    assert 0.9 * (metrics["residual_ratio"][-1] - math.sqrt(2 / 3)) < ratio
    assert ratio < 1.1 * (metrics["residual_ratio"][-1] + math.sqrt(2 / 3))
    assert len(json.dumps(metrics)) < 60_000


def test_a_large_beta_empties_the_latents():
    metrics = interpolation_run(beta=30.0)
    assert metrics["active_units"][-1] == 0
    assert metrics["kl"][-1] < 0.1
    assert metrics["decoded_variance"][-1] < 0.01
    assert interpolation_run()["decoded_variance"][-1] > 0.1


def test_the_convolutional_autoencoder_runs_and_runs_repeat():
    metrics = interpolation_run(model="conv", epochs=1)
    assert metrics == interpolation_run(model="conv", epochs=1)
    assert metrics["violations"] == [0, 0]


def test_without_pairs_that_decode_apart_there_is_no_gap(monkeypatch):
    monkeypatch.setattr(experiment, "decodes_apart", lambda decoder, z0, z1: torch.zeros(len(z0), dtype=torch.bool))
    metrics = interpolation_run(epochs=1)
    assert metrics["pairs"] == [0, 0]
    assert metrics["gap"] == metrics["pooled_gap"] == [None, None]


def test_settings_of_chapter_5_repeat_nothing_and_are_fewer_for_cifar():
    assert len({str(each) for each in interpolation_settings("mnist", [0, 1, 2])}) == 18
    for name in ("cifar10", "cifar10-jpeg"):
        settings = interpolation_settings(name, [3, 4])
        assert [(each["beta"], each["seed"], each["epochs"]) for each in settings] == [
            (0.1, 3, 30),
            (1.0, 3, 30),
            (10.0, 3, 30),
        ]


def encoded(ends: dict[float, list[tuple[float, float]]], **changes) -> list[Run]:
    """Runs by β and seed: TL against inputs at the end, and against decodings; both start at 0.4 and 1.

    The gap is √((1 − TL)/2) of the decodings, as for κ = s = 1/2.
    """
    runs = []
    for beta, seeds in ends.items():
        for seed, (inputs, decodings) in enumerate(seeds):
            course = [1.0, 0.99, decodings]
            gap = [math.sqrt((1 - each) / 2) for each in course]
            metrics = {
                "epoch": [0, 1, 2],
                "tl_inputs": [0.4, 0.41, inputs],
                "tl_decodings": course,
                "tl_decodings_test": course,
                "pca_ceiling": 0.8,
                "gap": [None, *({"mean": each} for each in gap[1:])],
                "pooled_gap": [None, *gap[1:]],
                "residual_ratio": [None, 0.5, 0.5],
                "violations": [0, 0, 1 if beta == 99 else 0],
                **{key: [1.0, 2.0, 3.0] for key in ("reconstruction", "kl", "explained", "active_units")},
            }
            settings = {**interpolation_settings("digits", [seed])[0], "beta": beta, **changes}
            runs.append(Run("interpolation", settings, metrics, wall_seconds=1.0, device="cpu"))
    return runs


def test_the_verdicts_on_interpolation_follow_their_rules():
    falls = {0.1: [(0.7, 0.8), (0.71, 0.81)], 1.0: [(0.6, 0.9), (0.61, 0.91)], 10.0: [(0.5, 0.97), (0.51, 0.98)]}
    row = interpolation_verdicts(encoded(falls)).loc["digits, MLP"]
    assert row[["seeds", "TL rises with training", "TL falls with β", "violations"]].tolist() == [2, "yes", "yes", 0]
    assert row["gap follows 1 − TL, decodings"] == "yes (+1.00)"
    assert row["at the end, decodings"] == "+1.00"
    assert row["gap follows 1 − TL, inputs"].startswith("no (-")
    rises = {0.1: [(0.5, 0.8), (0.51, 0.8)], 10.0: [(0.7, 0.9), (0.71, 0.9)]}
    assert interpolation_verdicts(encoded(rises))["TL falls with β"].tolist() == ["no"]
    wavers = {0.1: [(0.7, 0.8), (0.71, 0.8)], 10.0: [(0.41, 0.9), (0.39, 0.9)]}
    assert interpolation_verdicts(encoded(wavers))["TL rises with training"].tolist() == ["open"]
    sinks = {0.1: [(0.5, 0.8), (0.51, 0.8)], 10.0: [(0.3, 0.9), (0.31, 0.9)]}
    assert interpolation_verdicts(encoded(sinks))["TL rises with training"].tolist() == ["no"]
    one = {0.1: [(0.7, 0.8)], 99.0: [(0.6, 0.9), (0.6, 0.9)]}  # one seed in common
    row = interpolation_verdicts(encoded(one)).loc["digits, MLP"]
    assert row[["seeds", "TL rises with training", "violations"]].tolist() == [1, "–", 2]
    assert interpolation_verdicts([]).empty


def test_tables_and_panels_of_interpolation():
    runs = encoded({0.1: [(0.7, 0.8), (0.8, 0.8)], 10.0: [(0.6, 0.9)]})
    table = interpolation_table(runs).loc["digits, MLP"]
    assert table.loc[0.1, "TL, inputs"] == "0.750 ± 0.071"
    assert table.loc[0.1, "of the ceiling"] == "0.94 ± 0.09"
    assert table.loc[10.0, "seeds"] == 1
    epochs, rows = beta_panels(runs, "gap")["digits, MLP"]["β = 0.1"]
    assert epochs.tolist() == [0, 1, 2]
    assert np.isnan(rows[:, 0]).all()  # no pair decoded apart
    assert beta_panels(runs, "tl_inputs")["digits, MLP"]["β = 10"][1].tolist() == [[0.4, 0.41, 0.6]]
    points = gap_points(runs)["β = 0.1"]
    assert points["nonlinear"].round(2).tolist() == [0.01, 0.2, 0.01, 0.2]
    betas, ends = tradeoff_panels(runs, {"TL": "tl_inputs"})["TL"]["digits, MLP"]
    assert (betas.tolist(), ends.tolist()) == ([0.1, 10.0], [[0.7, 0.6]])
    assert interpolation_table([]).empty


# ---- drawings ----

x = np.linspace(0.1, 1, 5)
FIGURES = {
    "over beta": lambda: figures.plot_over_beta({"one": {"β = 1": (x, [x, x]), "β = 4": (x, [x])}}, ylabel="TL"),
    "gap": lambda: figures.plot_gap(
        {"digits": {"β = 1": dict.fromkeys(("nonlinear", "inputs", "gap", "ratio"), x / 4)}}, 0.8
    ),
    "gap bounds": lambda: figures.plot_gap_bounds(x / 2, x),
    "tradeoff": lambda: figures.plot_tradeoff({"TL": {"one": (x, [x, x]), "b": (x, [x])}, "KL": {"one": (x, [x])}}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])


def test_strips_are_rows_of_images_from_left_to_right():
    steps = np.stack([np.full((1, 4, 5), value) for value in (0.0, 0.5, 1.0)])
    figure = figures.plot_strips({"pixels": steps, "β = 1": steps})
    rows = [axes.get_images()[0].get_array() for axes in figure.axes]
    assert [row.shape[:2] for row in rows] == [(4, 15)] * 2
    assert rows[0][0, ::5].ravel().tolist() == [0.0, 0.5, 1.0]
    assert [axes.get_yticklabels()[0].get_text() for axes in figure.axes] == ["pixels", "β = 1"]
    mpl.pyplot.close(figure)
