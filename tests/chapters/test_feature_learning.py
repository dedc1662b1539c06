"""Chapter 1's runs on small data, what is read off stored ones, and its drawings."""

import numpy as np
import pytest
import torch

from gramlin import agop, data, gram_shift, matrix_correlation
from gramlin.chapters import run_once
from gramlin.chapters.feature_learning import (
    GRAM_SHIFT,
    figures,
    gram_shift_panels,
    gram_shift_settings,
    gram_shift_table,
)
from gramlin.models import MLP
from gramlin.results import Run
from gramlin.training import accuracy, train
from tests.looks import check_axes_and_legend

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


# ---- drawings ----

x = np.linspace(0.1, 1, 5)
roll = np.random.default_rng(0).normal(size=(20, 2))
run = {"epoch": [1, 2], "rho_virtual": [1.0, 0.9], "rho_agop": [0.5, 0.6], "rho_agop_sqrt": [0.4, 0.5]}
FIGURES = {
    "one step": lambda: figures.plot_one_step(x, x, x**2, x**2),
    "fixed time": lambda: figures.plot_fixed_time(x, x),
    "correlations": lambda: figures.plot_correlations({"one": [run, run], "other": [run], "a": [run], "b": [run]}),
    "unrolling": lambda: figures.plot_unrolling(
        {"start": roll, "end": roll}, roll[:, 0], {"start": np.eye(2), "end": np.diag([1.0, 2.0])}
    ),
    "unrolling over time": lambda: figures.plot_unrolling_over_time(x, [x, x], [x, x], [x, x], {"one": x, "two": x}),
    "stationarity": lambda: figures.plot_stationarity(x, {"linear1": x}, {"linear1": x}),
    "idea": lambda: figures.plot_idea(roll, roll, roll[:, 0], np.eye(2), np.eye(2), np.eye(2)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])
