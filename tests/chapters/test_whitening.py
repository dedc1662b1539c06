"""Chapter 2's runs on small data, what is read off stored ones, and its drawings."""

import numpy as np
import pytest
import torch

from gramlin import nearest_with_same_gram
from gramlin.chapters import run_once
from gramlin.chapters.whitening import (
    UPDATES,
    WHITENING,
    accuracy_difference,
    accuracy_panels,
    compare_solvers,
    figures,
    halves_table,
    kept_table,
    split_steps,
    whitening_settings,
    whitening_table,
)
from gramlin.results import Run
from tests.looks import check_axes_and_legend


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


# ---- drawings ----

x = np.linspace(0.1, 1, 5)
FIGURES = {
    "step in the plane": lambda: figures.plot_step_in_the_plane(np.eye(2), 2 * np.eye(2), 2 * np.eye(2)),
    "solver curve": lambda: figures.plot_solver_curve(x, x, {"10×256": x, "256×256": x**9}),
    "accuracy curves": lambda: figures.plot_accuracy_curves(
        {"one": {"sgd": [x, x], "whitened": [x]}, "b": {"sgd": [x]}}
    ),
    "Gram errors": lambda: figures.plot_gram_errors({"exact": (x, [x, x])}, {"SGD": [x], "exact": [x, x]}),
    "halves": lambda: figures.plot_halves({"sgd": [0.9, 0.91], "rotation": [0.5], "readout only": [0.4]}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])
