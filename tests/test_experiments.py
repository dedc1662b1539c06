"""The chapters' experiments on small data, and the tables that are made of stored runs."""

import json
import math

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import orthogonal_procrustes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from gramlin import (
    VAE,
    agop,
    costs,
    data,
    fit_linear,
    gram_shift,
    interpolation_gap,
    matrix_correlation,
    nearest_class_mean_disagreement,
    nearest_with_same_gram,
    neural_collapse,
    normalized_surrogate,
    simplex_etf,
    surrogate,
    target_linearity,
)
from gramlin.experiments import (
    COLLAPSE,
    GRAM_SHIFT,
    INTERPOLATION,
    LINEARITY,
    UPDATES,
    WHITENING,
    accuracy_difference,
    accuracy_panels,
    beta_panels,
    bound_points,
    bound_violations,
    chapter4,
    chapter5,
    collapse_panels,
    collapse_settings,
    collapse_table,
    collapse_verdicts,
    compare_solvers,
    depth_profiles,
    direction_table,
    gap_points,
    gram_shift_panels,
    gram_shift_settings,
    gram_shift_table,
    growth_table,
    growth_verdicts,
    halves_table,
    interpolation_settings,
    interpolation_table,
    interpolation_verdicts,
    kept_table,
    linearity_panels,
    linearity_settings,
    linearity_table,
    linearity_verdicts,
    paired_interval,
    readout_panels,
    readout_paths,
    readout_table,
    rest_table,
    run_once,
    scorecard,
    summary,
    tradeoff_panels,
    whitening_settings,
    whitening_table,
)
from gramlin.experiments.chapter2 import split_steps
from gramlin.experiments.chapter4 import decay_groups, shares_by_direction
from gramlin.models import MLP
from gramlin.moments import Moments
from gramlin.results import ResultsStore, Run
from gramlin.training import accuracy, train

# ---- Chapter 1 ----------------------------------------------------------------------------------------------------

SMALL = {**gram_shift_settings("digits", [0])[0], "hidden": 12, "epochs": 2}


def test_the_experiment_measures_what_its_parts_measure():
    metrics = GRAM_SHIFT.measure(**SMALL)
    assert metrics["epoch"] == [1, 2]
    # The same run by hand, with AGOP of the whole network in place of the chain rule's shortcut.
    split = data.standardize(data.load("digits"))
    torch.manual_seed(0)
    model = MLP([64, 12, 10], "relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model.linear1.weight.detach().clone()
    train(model, optimizer, split.train_inputs, split.train_targets, epochs=2, batch_size=128)
    shift = gram_shift(before, model.linear1.weight.detach())
    whole = agop(model, split.train_inputs)
    values, vectors = torch.linalg.eigh(whole.double())
    root = (vectors * values.clamp(min=0).sqrt() @ vectors.T).float()
    # Two ways through float32 products of 1,437 samples: equal to about five digits.
    assert metrics["rho_agop"][-1] == pytest.approx(matrix_correlation(shift, whole), abs=1e-4)
    assert metrics["rho_agop_sqrt"][-1] == pytest.approx(matrix_correlation(shift, root), abs=1e-3)
    assert metrics["test_accuracy"][-1] == accuracy(model, split.test_inputs, split.test_targets)
    assert metrics["rho_virtual"][-1] > 0.999


def test_the_same_settings_give_the_same_metrics():
    assert run_once(GRAM_SHIFT, SMALL).metrics == run_once(GRAM_SHIFT, SMALL).metrics


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'sgd', or 'adam' with momentum 0"):
        GRAM_SHIFT.measure(**{**SMALL, "method": "adam", "momentum": 0.9})


def stored(dataset: str, virtual: list[float], agop_: list[float], **changes) -> list[Run]:
    keys = ("rho_agop_sqrt", "rho_gram_agop_sqrt", "gap", "test_accuracy")
    return [
        Run(
            "gram-shift",
            {**gram_shift_settings(dataset, [seed])[0], **changes},
            {"epoch": [1], "rho_virtual": [v], "rho_agop": [a], **{key: [0.5] for key in keys}},
            wall_seconds=1.0,
            device="cpu",
        )
        for seed, (v, a) in enumerate(zip(virtual, agop_, strict=True))
    ]


@pytest.mark.parametrize(
    ("virtual", "rival", "verdict"),
    [
        ([0.9, 0.91, 0.92], [0.5, 0.52, 0.51], "holds"),
        ([0.5, 0.52, 0.51], [0.9, 0.91, 0.92], "reversed"),
        ([0.9, 0.5, 0.7], [0.5, 0.9, 0.69], "undecided"),
        ([0.9], [0.5], "not decided by one seed"),
    ],
)
def test_the_verdict_follows_its_rule(virtual, rival, verdict):
    assert gram_shift_table(stored("digits", virtual, rival))["C2"].tolist() == [verdict]


def test_stored_runs_are_grouped_by_all_but_their_seed():
    runs = stored("digits", [0.9, 0.8], [0.5, 0.5]) + stored("digits", [0.7], [0.5], momentum=0.9)
    assert {title: len(group) for title, group in gram_shift_panels(runs).items()} == {
        "SGD, η = 0.01": 2,
        "SGD, η = 0.01, momentum 0.9": 1,
    }
    assert gram_shift_table(runs).loc["SGD, η = 0.01", "ρ(shift, virtual)"] == "0.850 ± 0.071"
    assert any(title.startswith("mnist: ") for title in gram_shift_panels(runs + stored("mnist", [0.9], [0.5])))


def test_paired_interval_is_students():
    # By hand: differences 1, 2, 3 have mean 2, standard error 1/√3, and t(0.975, 2) = 4.3026527.
    low, high = paired_interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.3026527 / 3**0.5, 2 + 4.3026527 / 3**0.5))
    with pytest.raises(ValueError, match="two pairs"):
        paired_interval([1.0], [2.0])


# ---- Chapter 2 -----------------------------------------------------------------------------------------------------


def whitening_run(method: str, **changes):
    settings = whitening_settings("digits", [0])[0] | {"method": method, "epochs": 1} | changes
    return run_once(WHITENING, settings).metrics


@pytest.mark.parametrize("method", UPDATES)
def test_each_method_keeps_what_it_says(method):
    layers = whitening_run(method)["layers"]
    *hidden, readout = layers
    for names, half in zip((hidden, [readout]), UPDATES[method], strict=True):
        for name in names:
            change = layers[name]["gram_change"][-1]
            assert ("kept" in layers[name]) == (half != "frozen")
            assert ("gram_error" in layers[name]) == (half == "gram")
            if half == "frozen":
                assert change == 0
            elif half == "rotation":
                assert change < 1e-6  # float32 weights, 23 steps: rounding adds up to some 1e-7 of the Gram matrix
            else:
                assert change > 1e-3
            if half == "scaled rotation":  # the shape of the Gram matrix stays: so do the ratios of singular values
                last = torch.tensor(layers[name]["singular_values"])
                first = torch.tensor(whitening_run("rotation")["layers"][name]["singular_values"])
                torch.testing.assert_close(last / last[-1], first / first[-1], rtol=1e-4, atol=1e-6)
            if half == "gram" and method != "newton-schulz":
                errors, floors = layers[name]["gram_error"], layers[name]["gram_error_floor"]
                assert all(error < 1.1 * floor for error, floor in zip(errors, floors, strict=True))
            if half != "frozen":
                assert layers[name]["steps"] == [1, 2, 4, 8, 16, 23]
    if method == "newton-schulz":
        assert max(layers["linear2"]["gram_error"]) > 0.1  # the square layer, of which it loses the shift


def test_an_unknown_method_of_chapter_2_is_refused():
    with pytest.raises(ValueError, match="method is 'whiten'; pass one of 'sgd', 'whitened'"):
        whitening_run("whiten")


def test_the_cnn_is_whitened_too():
    layers = whitening_run("whitened", model="cnn")["layers"]
    assert list(layers) == ["conv1", "conv2", "conv3", "linear"]
    assert all(max(layer["gram_error"]) < 1e-3 for layer in layers.values())


def test_a_run_that_diverges_says_so():
    for method in ("sgd", "whitened"):
        assert "lower the learning rate" in whitening_run(method, lr=1e4)["diverged"]


def one_step(method: str, start: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A step of this method from these weights of a readout, and what was watched of it."""
    torch.manual_seed(5)
    layer, hidden = torch.nn.Linear(9, 6), torch.nn.Linear(1, 1)
    layer.weight.data.copy_(start)
    optimizer = torch.optim.SGD([layer.weight, hidden.weight], lr=1.0)
    watch = split_steps(optimizer, {"hidden": hidden, "readout": layer}, method, last=1)
    layer.weight.grad = torch.linspace(-1, 1, 54).view(6, 9) ** 3
    optimizer.step()
    return (layer.weight.detach() - start).double(), watch["readout"]


def test_steps_are_projected_on_and_off_the_random_rotations():
    """The two projections of one step add up to the step, are orthogonal, and the kept one has the stated form ΩV."""
    start = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    methods = ("random directions only", "random directions dropped", "sgd")
    only, off, full = (one_step(method, start)[0] for method in methods)
    # Tolerances: float32 with numbers of order 1.
    torch.testing.assert_close(only + off, full, rtol=0, atol=1e-5)
    assert abs((only * off).sum()) < 1e-5
    assert only.norm() > 0.1
    # ΩV for skew Ω: with V⁺ its pseudo-inverse, (step V⁺) is Ω, and leaves nothing over.
    torch.manual_seed(5)
    torch.nn.Linear(9, 6), torch.nn.Linear(1, 1)
    torch.randn(1, 1)  # the hidden layer's is drawn first
    random = torch.randn(6, 9).double()
    generator = only @ torch.linalg.pinv(random)
    torch.testing.assert_close(generator, -generator.mT, rtol=0, atol=1e-5)
    torch.testing.assert_close(generator @ random, only, rtol=0, atol=1e-5)


def test_the_shortened_step_is_as_long_as_the_whitened_one():
    start = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    shortened, whitened, plain = (one_step(method, start)[0] for method in ("shortened", "whitened", "sgd"))
    assert shortened.norm() == pytest.approx(whitened.norm().item(), rel=1e-5)
    torch.testing.assert_close(shortened / shortened.norm(), plain / plain.norm(), rtol=0, atol=1e-6)
    kept = one_step("sgd", start)[1]["kept"]
    assert kept == pytest.approx([(whitened.norm() / plain.norm()).item()], rel=1e-5)
    assert kept[0] < 0.99


def test_solvers_are_compared_by_what_they_keep():
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(4, 9, generator=generator)
    after = before + 0.1 * torch.randn(4, 9, generator=generator)
    solvers = {
        "plain": lambda W, W_plus: W_plus,
        "exact": lambda W, W_plus: nearest_with_same_gram(before=W, after=W_plus),
        "none": lambda W, W_plus: W,
    }
    table = compare_solvers({"4×9": (before, after)}, solvers).loc["4×9"]
    # The plain step is R = I: it keeps the Gram matrix, and is longer than need be. Tolerances: float32.
    assert table.loc["plain", ["orthogonality", "Gram error", "length"]].tolist() == pytest.approx([0, 0, 1], abs=1e-6)
    assert table.loc["plain", "excess length"] > 0.01
    assert table.loc["exact", ["orthogonality", "excess length"]].tolist() == pytest.approx([0, 0], abs=1e-6)
    assert 0 < table.loc["exact", "Gram error"] < 1.5 * table.loc["exact", "float32 floor"] < 1e-5
    assert table.loc["exact", "length"] == pytest.approx(1 / (1 + table.loc["plain", "excess length"]), rel=1e-6)
    assert table.loc["none", "Gram error"] == pytest.approx(1, abs=1e-6)


def test_settings_of_chapter_2_start_with_the_claim_and_repeat_nothing():
    settings = whitening_settings("mnist", [0, 1, 2, 3, 4])
    assert [each["method"] for each in settings[:2]] == ["sgd", "whitened"]
    assert len({str(each) for each in settings}) == len(settings) == 10 + 6 + 3 * (len(UPDATES) - 2) + 2 * 8
    assert all(len(whitening_settings("mnist", range(n))) > 0 for n in (1, 2))


def finished(accuracies: dict[str, list[float]], **changes) -> list[Run]:
    """Runs of chapter 2 that ended at these test accuracies, in percent; None for one that diverged."""
    layer = {"gram_change": [1.0], "shape": [4, 8], "kept": [0.6, 0.8], "steps": [1, 1024]}

    def metrics(percent: float | None) -> dict:
        if percent is None:
            return {"diverged": "the loss became nan"}
        return {"train_accuracy": [1.0], "test_accuracy": [percent / 100], "layers": {"linear1": layer}}

    return [
        Run(
            "whitening",
            whitening_settings("digits", [seed])[0] | {"method": method} | changes,
            metrics(percent),
            wall_seconds=1.0,
            device="cpu",
        )
        for method, values in accuracies.items()
        for seed, percent in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("sgd", "whitened", "difference", "verdict"),
    [
        ([90.0, 91.0, 92.0], [90.1, 91.0, 92.2], "+0.10", "reproduced"),
        ([90.0, 91.0, 92.0], [87.0, 88.1, 89.0], "-2.97", "not reproduced"),
        ([90.0, 91.0, 92.0], [90.0, 91.0, 89.0], "-1.00", "undecided"),
        ([90.0], [95.0], "+5.00", "not decided by one seed"),
        ([90.0, 91.0], [None, 91.0], "–", "–"),
    ],
)
def test_the_verdict_on_whitening_follows_its_rule(sgd, whitened, difference, verdict):
    table = whitening_table(finished({"sgd": sgd, "whitened": whitened}))
    row = table.loc["digits", "MLP", 0.01]
    assert (row["difference"], row["verdict"]) == (difference, verdict)
    assert row["whitened"].endswith("1 diverged") == (None in whitened)


def test_seeds_without_their_twin_do_not_count():
    table = whitening_table(finished({"sgd": [90.0, 91.0, 50.0], "whitened": [90.0, 91.0]}))
    assert table.loc["digits", "MLP", 0.01]["SGD"] == "90.50 ± 0.71"
    assert whitening_table(finished({"sgd": [90.0]})).empty


def test_differences_are_paired_by_seed():
    runs = finished({"sgd": [90.0, 91.0, 92.0], "rotation": [89.0, 88.0, None], "shortened": [80.0]})
    difference = accuracy_difference(runs, "rotation", "sgd")
    # By hand: −1 and −3, mean −2, standard error 1, t(0.975, 1) = 12.7062.
    assert difference.mean == pytest.approx(-2)
    assert difference.interval == pytest.approx((-2 - 12.7062, -2 + 12.7062), rel=1e-5)
    assert str(difference) == "-2.00 [-14.71, +10.71]"
    assert str(accuracy_difference(runs, "shortened", "sgd")) == "-10.00"
    assert accuracy_difference(runs, "whitened", "sgd") is None


def test_tables_of_the_halves_and_of_what_is_kept():
    runs = finished({"rotation": [60.0], "sgd": [90.0, 92.0], "whitened": [91.0, None]})
    halves = halves_table(runs)
    assert halves.index.tolist() == ["sgd", "whitened", "rotation"]
    assert halves["test accuracy"].tolist() == ["91.00 ± 1.41", "91.00", "60.00"]
    assert halves["against SGD"].tolist() == ["–", "+1.00", "-30.00"]
    row = kept_table(runs).loc["digits", "MLP", "linear1"]
    # 4×8: 6 of 32 directions are rotations; 0.6² of the first step, 0.8² of the later one.
    assert row.tolist() == ["4×8", "0.81", "0.36", "0.64", "0.64"]
    assert all(table([]).empty for table in (kept_table, halves_table, whitening_table))


def test_accuracy_panels_leave_out_what_diverged_or_was_not_asked_for():
    runs = finished({"sgd": [90.0, 91.0], "whitened": [None], "rotation": [60.0]}) + finished(
        {"sgd": [80]}, model="cnn"
    )
    assert accuracy_panels(runs, ["sgd", "whitened"]) == {
        "digits, CNN, 1 seed": {"sgd": [[0.8]]},
        "digits, MLP, 2 seeds": {"sgd": [[0.9], [0.91]]},
    }
    assert accuracy_panels(runs, ["whitened"]) == {}


# ---- Chapter 3 -----------------------------------------------------------------------------------------------------

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


# ---- Chapter 4 -----------------------------------------------------------------------------------------------------

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
    rest = chapter4._at_rest(scale * M, residuals.T @ M, residuals.T, M + 3, decay)
    assert rest["stationarity"] < 1e-6
    assert rest["duality"] < 1e-6
    assert rest["in_span"] == pytest.approx(1)
    assert rest["simplex"] == pytest.approx(1)
    elsewhere = chapter4._at_rest(2 * scale * M, residuals.T @ M, residuals.T, M + 3, decay)
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


# ---- Chapter 5 -----------------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(chapter5, "decodes_apart", lambda decoder, z0, z1: torch.zeros(len(z0), dtype=torch.bool))
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


# ---- All claims ----------------------------------------------------------------------------------------------------


def test_the_scorecard_has_every_claim_and_says_how_to_run_what_was_not(tmp_path):
    table = scorecard(ResultsStore(tmp_path), {})
    assert table["claim"].drop_duplicates().tolist() == [
        *(
            "C1",
            "C2",
            "C3",
            "C4",
            "C4b",
            "C5",
            "C5b",
            "C6",
            "C7",
            "C8a",
            "C8b",
            "C8c",
            "C8d",
            "C9",
            "C10",
            "C11",
            "C12",
        ),
    ]
    assert set(table["verdict"][:13]) == {"not yet run"}
    assert set(table["verdict"][13:]) == {"not taken up yet"}
    commands = table.drop_duplicates("claim").set_index("claim")["command"]
    assert commands[["C1", "C2", "C8a", "C9"]].tolist() == [
        *("gramlin run 1", "gramlin run 1 --profile paper", "gramlin run 5 --profile paper", ""),
    ]


def test_the_scorecard_judges_as_the_chapters_do(tmp_path):
    store = ResultsStore(tmp_path)
    for run in [
        *stored("digits", [0.9, 0.91, 0.92], [0.5, 0.52, 0.51]),
        *(collapsed([{"tl": [0.4, 0.9, 0.99], "nc1": [3.0, 0.5, 0.01]}])),
        *encoded({0.1: [(0.7, 0.8), (0.71, 0.81)], 10.0: [(0.5, 0.97), (0.51, 0.98)]}),
    ]:
        store.save(run)
    table = scorecard(store, {"C1": True, "C3": False}).set_index("claim")
    assert table.loc["C1", "verdict"] == "reproduced"
    assert table.loc["C3", "verdict"] == "not reproduced"
    row = table.loc["C2"]
    assert (row["verdict"], row["seeds"], row["profile"]) == ("reproduced", 3, "paper")
    assert row["here"] == "virtual 0.910 ± 0.010, AGOP 0.510 ± 0.010"
    assert table.loc["C7", "verdict"] == "not decided by one seed"
    verdicts = table.loc[["C8a", "C8b", "C8c", "C8d"], "verdict"].tolist()
    assert verdicts == ["reproduced", "reproduced", "not reproduced", "holds"]
    assert table.loc["C8a", "here"] == "TL by +0.305, +0.105 for β = 0.1, 10"
    assert table.loc["C8b", "here"] == "TL 0.705, 0.505 for β = 0.1, 10"
    found = summary(table.reset_index()).set_index("claim")["found"]
    assert found["C2"] == "reproduced"
    assert found["C4"] == "not yet run"


def test_the_summary_counts_sets_of_runs():
    words = ("undecided", "not reproduced", "reproduced", "reproduced")
    table = pd.DataFrame([("C2", "x", word) for word in words], columns=["claim", "says", "verdict"])
    assert summary(table)["found"].tolist() == ["2 × reproduced, 1 × not reproduced, 1 × undecided"]


def test_costs_are_those_of_the_stored_runs(tmp_path):
    store = ResultsStore(tmp_path)
    for chapter, seconds in ((1, 30.0), (4, 50.0)):
        metrics = {"peak_mebibytes": 1536}
        store.save(Run("cost", {"chapter": chapter}, metrics, wall_seconds=seconds, device="cpu, 1 threads"))
    for seed, minutes in enumerate((2, 4, 9)):
        run = Run("whitening", {"seed": seed}, {}, wall_seconds=60.0 * minutes, device="cpu, 1 threads")
        store.save(run)
    store.save(Run("whitening", {"seed": 9}, {}, wall_seconds=30.0, device="NVIDIA X"))
    table = costs.cost_table(store)
    assert table.loc[1, "quick, CPU: seconds"] == "30"
    assert table.loc[4, "quick, CPU: GiB"] == "1.5"
    assert table.loc[2, "quick, CPU: GiB"] == "–"
    columns = [f"paper, {kind}: {what}" for kind in ("CPU", "GPU") for what in ("runs stored", "median minutes")]
    assert table.loc[2, columns].tolist() == [3, "4", 1, "0"]
    assert table.loc[2, "paper, CPU: hours in all"] == "0.2"
    assert table.loc[3, columns].tolist() == ["–"] * 4
    assert table.loc[5, "paper: runs on mnist, 3 seeds"] == 18
    assert table.loc[4, "paper: runs on cifar10, 3 seeds"] == 6
    assert len(costs.cost_settings()) == 5


def test_the_cost_of_a_chapter_is_measured_by_running_it(monkeypatch, tmp_path):
    chapter = tmp_path / "01_held.ipynb"
    cells = [
        nbformat.v4.new_code_cell("device = 'cpu'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("held = bytearray(200 * 2**20)"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), chapter)
    monkeypatch.setattr(costs.book, "find_chapter", lambda name: chapter)
    assert costs.measure_cost(chapter=1)["peak_mebibytes"] > 200


def test_costs_of_a_gpu_stand_beside_those_of_a_cpu():
    assert costs.cost_settings("cuda")[0] == {"chapter": 1, "gpu": True}
    assert costs.cost_settings()[0] == {"chapter": 1}
