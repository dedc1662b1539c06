"""Chapter 3's runs on small data, what is read off stored ones, and its drawings."""

import numpy as np
import pytest
import torch

from gramlin import data, fit_linear, normalized_surrogate, surrogate, target_linearity
from gramlin.chapters import run_once
from gramlin.chapters.linearity import (
    LINEARITY,
    depth_profiles,
    figures,
    growth_table,
    growth_verdicts,
    linearity_panels,
    linearity_settings,
    linearity_table,
    linearity_verdicts,
)
from gramlin.models import MLP
from gramlin.results import Run
from gramlin.training import accuracy, train
from tests.looks import check_axes_and_legend

SHALLOW = linearity_settings("digits", [0])[0] | {"width": 12, "depth": 2, "lr": 0.01, "epochs": 2}


def test_layers_are_measured_as_by_the_functions():
    metrics = run_once(LINEARITY, SHALLOW).metrics
    steps_an_epoch = 23  # 1,437 samples in batches of 64
    assert metrics["step"] == [0, 1, 2, 4, 8, 16, steps_an_epoch, 2 * steps_an_epoch]
    assert len(metrics["train_loss"]) == 2
    # The same run by hand.
    split = data.standardize(data.load("digits"))
    torch.manual_seed(0)
    model = MLP([64, 12, 12, 10], "gelu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)
    train(model, optimizer, split.train_inputs, split.train_targets, epochs=2, batch_size=64)
    assert metrics["test_accuracy"][-1] == accuracy(model, split.test_inputs, split.test_targets)
    with torch.no_grad():
        first, other = torch.nn.Sequential(*list(model)[:3]), torch.nn.Sequential(*list(model)[3:])
        H, Y = first(split.train_inputs), split.train_targets
        held_out = fit_linear(H, Y).score(first(split.test_inputs), split.test_targets)
        W = model.linear2.weight
    layer = metrics["layers"]["linear2"]
    # Tolerance: sums in another order.
    assert layer["tl"][-1] == pytest.approx(target_linearity(H, Y).item(), rel=1e-6)
    assert layer["tl_test"][-1] == pytest.approx(held_out.item(), rel=1e-6)
    assert layer["surrogate"][-1] == pytest.approx(surrogate(H, W, Y).item() * 10 / len(Y) ** 2, rel=1e-5)
    assert layer["cka"][-1] == pytest.approx(normalized_surrogate(H, W, Y).item(), rel=1e-5)
    output = metrics["layers"]["output"]
    assert output["tl"][-1] == pytest.approx(target_linearity(other(H).detach(), Y).item(), rel=1e-6)
    assert set(metrics["layers"]["linear1"]["tl"]) == {metrics["layers"]["linear1"]["tl"][0]}  # pixels do not train


def test_maps_of_convolutions_enter_by_their_averages():
    settings = SHALLOW | {"model": "cnn", "width": 4, "depth": 3, "epochs": 1}
    layers = run_once(LINEARITY, settings).metrics["layers"]
    assert list(layers) == ["conv1", "conv2", "conv3", "linear", "output"]
    assert "surrogate" not in layers["conv2"]
    assert "surrogate" in layers["linear"]
    with pytest.raises(ValueError, match="model is 'cnn' with depth 4; pass 'mlp', or 'cnn' with depth 3"):
        LINEARITY.measure(**settings | {"depth": 4})


def trained(profiles: list[tuple[list[float], list[float]]], **changes) -> list[Run]:
    """Runs of chapter 3 with this Target Linearity of each layer at the start and at the end, a seed each."""
    return [
        Run(
            "linearity",
            linearity_settings("digits", [seed])[0] | changes,
            {
                "step": [0, 5, 10],
                "layers": {
                    f"linear{i + 1}": {"tl": [a, a, b], "tl_test": [a, a, a], "surrogate": [1.0, 2.0, 4.0]}
                    for i, (a, b) in enumerate(zip(start, end, strict=True))
                },
            },
            wall_seconds=1.0,
            device="cpu",
        )
        for seed, (start, end) in enumerate(profiles)
    ]


def test_the_verdict_on_linearity_follows_its_rule():
    falling, rising = [0.5, 0.4, 0.3], [0.5, 0.6, 0.8]
    rises = [(falling, [x * (1 + 0.01 * seed) for x in rising]) for seed in range(3)]
    row = linearity_verdicts(trained(rises)).loc["digits, SGD"]
    assert row.tolist() == [3, "rises", "rises", "open", "falls", "reproduced"]
    shrinks = [(rising, [x * (1 - 0.01 * seed) for x in falling]) for seed in range(3)]
    row = linearity_verdicts(trained(shrinks, method="adam")).loc["digits, Adam"]
    assert row[["with training", "with depth", "verdict"]].tolist() == ["falls", "falls", "not reproduced"]
    assert linearity_verdicts(trained(rises[:1]))["verdict"].tolist() == ["not decided by one seed"]
    wavers = [(falling, [0.5, 0.6, 0.61]), (falling, [0.5, 0.6, 0.59])]
    assert linearity_verdicts(trained(wavers))[["with depth", "verdict"]].values.tolist() == [["open", "undecided"]]
    one_falls = [(falling, [0.5, 0.6 + x, 0.55 + x]) for x in (0.01, 0.02)]
    assert linearity_verdicts(trained(one_falls))["verdict"].tolist() == ["not reproduced"]


def test_tables_of_linearity_hold_every_layer_and_moment():
    runs = trained([([0.5, 0.4], [0.5, 0.6]), ([0.5, 0.4], [0.5, 0.8])])
    table = linearity_table(runs).loc["digits, SGD"]
    assert table.columns.tolist() == ["pixels", "h1"]
    assert table.loc["end", "h1"] == "0.700 ± 0.141"
    assert table.loc["highest, held-out", "h1"] == table.loc["end, held-out", "h1"]
    assert np.array(depth_profiles(runs, "tl")["digits, SGD"]["end"]).tolist() == [[0.5, 0.6], [0.5, 0.8]]
    epochs, rows = linearity_panels(runs, "surrogate")["digits, SGD"]["linear2"]
    assert epochs.tolist() == [0, 50, 100]
    assert rows.tolist() == [[1.0, 2.0, 4.0]] * 2
    assert linearity_panels(runs, "surrogate", until=60)["digits, SGD"]["linear2"][0].tolist() == [0, 50]
    assert list(linearity_panels(runs, "tl")["digits, SGD"]) == ["pixels", "h1"]
    assert linearity_panels(runs, "cka") == {"digits, SGD": {}}


def test_laws_of_growth_are_told_apart():
    epochs = np.arange(101)
    rises = epochs <= 10
    S = np.where(rises, np.exp(0.7 * epochs), np.exp(7) * (1.1 + 0.001 * epochs))
    linearity = np.where(rises, 0.3, 0.3 + 0.1 * np.log(np.maximum(epochs, 10) / 10))
    run = trained([([0.5], [0.5])])[0]
    run.metrics["step"] = (23 * epochs).tolist()
    run.metrics["layers"] = {
        "linear1": {"tl": [0.5] * 101, "surrogate": (2.0**epochs).tolist()},
        "linear2": {"tl": linearity.tolist(), "surrogate": S.tolist()},
    }
    table = growth_table([run]).loc["digits, SGD"]
    row = table.loc["linear2"]
    # Half of the largest value, e⁷ · 1.2, comes at epoch 10 (0.83 of it), not yet at 9 (0.41).
    assert row["until epoch"] == 10
    assert row["S grows by"] == pytest.approx(np.exp(7))
    assert row["TL still to come"] == pytest.approx(1)
    assert row["first rate"] == pytest.approx(0.7)
    assert row["R² exp, rise"] == pytest.approx(1)
    assert row["R² exp, run"] < 0.6
    assert row["R² log"] == pytest.approx(1)
    assert row["R² power"] < 1 - 1e-4
    assert row["R² line"] == pytest.approx(np.corrcoef(epochs[10:], linearity[10:])[0, 1] ** 2)
    assert table.loc["linear1", "R² exp, run"] == pytest.approx(1)
    assert growth_verdicts([run, run])["C6"].tolist() == ["reproduced"]
    assert growth_verdicts([run])["C6"].tolist() == ["not decided by one seed"]
    run.metrics["layers"]["linear2"]["tl"] = np.where(rises, 0.3, 0.3 + 4e-9 * epochs**4).tolist()
    assert growth_verdicts([run, run])["C6"].tolist() == ["not reproduced"]
    assert np.isnan(table.loc["linear1", "R² log"])


def test_tables_of_no_runs_are_empty():
    assert all(table([]).empty for table in (growth_table, growth_verdicts, linearity_table, linearity_verdicts))


def test_settings_of_chapter_3_repeat_nothing():
    settings = linearity_settings("mnist", [0, 1, 2])
    assert len({str(each) for each in settings}) == len(settings) == 9


# ---- drawings ----

x = np.linspace(0.1, 1, 5)
FIGURES = {
    "growth": lambda: figures.plot_growth(x, x, {"exponential": x, "logistic": x}, x, 0.5, 1.0),
    "depth profiles": lambda: figures.plot_depth_profiles(
        {title: {"start": [x, x], "end": [x]} for title in "abc"}, list("input"), ylabel="TL"
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])
