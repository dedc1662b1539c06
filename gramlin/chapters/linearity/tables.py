"""What is read off chapter 3's stored runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gramlin.chapters.features import features_name
from gramlin.chapters.summaries import grouped, mean_and_spread
from gramlin.results import Run

_METHODS = {"sgd": "SGD", "adam": "Adam"}

_MOMENTS = {"start": 0.0, "after a tenth": 0.1, "halfway": 0.5, "end": 1.0}


def by_title(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart."""
    keys = ("dataset", "model", "width", "method", "lr")
    several = {key for key in ("model", "width") if len({run.settings[key] for run in runs}) > 1}
    groups = {}
    for (dataset, model, width, method, lr), group in grouped(runs, *keys).items():
        title = f"{dataset}, {_METHODS[method]}"
        if several:
            title += f", {model.upper()} of width {width}"
        if title in groups:
            title += f", η = {lr:g}"
        groups[title] = group
    return dict(sorted(groups.items(), key=lambda item: "Adam" in item[0]))


def _epochs(run: Run) -> np.ndarray:
    steps = np.array(run.metrics["step"])
    epochs: np.ndarray = steps * run.settings["epochs"] / steps[-1]
    return epochs


def linearity_panels(
    runs: Sequence[Run], measure: str, *, until: float | int = np.inf
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A measure of every layer that has it, for ``figures.plot_layers_over_training``: the epochs, and a row a run.

    Target Linearity is of features, which have their own names: "pixels", "h1", "h2" and so on, and "output".

    Args:
        runs: of chapter 3.
        measure: "tl", "tl_test", "surrogate" or "cka".
        until: the last epoch.
    """
    panels = {}
    for title, group in by_title(runs).items():
        epochs = _epochs(group[0])
        shown = epochs <= until
        panels[title] = {
            (features_name(index) if measure in ("tl", "tl_test") and name != "output" else name): (
                epochs[shown],
                np.array([run.metrics["layers"][name][measure] for run in group])[:, shown],
            )
            for index, (name, layer) in enumerate(group[0].metrics["layers"].items())
            if measure in layer
        }
    return panels


def _entering_courses(run: Run, measure: str) -> np.ndarray:
    """The measure of what enters each layer over training: (layers, moments), from the input on."""
    return np.array([each[measure] for name, each in run.metrics["layers"].items() if name != "output"])


def profile(run: Run, measure: str, share: float) -> np.ndarray:
    """The measure of what enters each layer, at this share of the run: (layers,), from the input on."""
    at = int(np.argmin(np.abs(_epochs(run) - share * run.settings["epochs"])))
    return _entering_courses(run, measure)[:, at]


def depth_profiles(runs: Sequence[Run], measure: str) -> dict[str, dict[str, list[np.ndarray]]]:
    """A measure over depth at four moments of training, for ``figures.plot_depth_profiles``: a row a run."""
    return {
        title: {moment: [profile(run, measure, share) for run in group] for moment, share in _MOMENTS.items()}
        for title, group in by_title(runs).items()
    }


def linearity_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Target Linearity of what enters each layer, mean ± standard deviation over seeds: rows a group and moment.

    "highest, held-out" is the largest value of each run in the course of training.
    """
    rows = {}
    for title, group in by_title(runs).items():
        profiles = {
            "start": [profile(run, "tl", 0.0) for run in group],
            "end": [profile(run, "tl", 1.0) for run in group],
            "start, held-out": [profile(run, "tl_test", 0.0) for run in group],
            "end, held-out": [profile(run, "tl_test", 1.0) for run in group],
            "highest, held-out": [_entering_courses(run, "tl_test").max(axis=1) for run in group],
        }
        for moment, values in profiles.items():
            rows[title, moment] = {
                features_name(index): mean_and_spread(list(column)) for index, column in enumerate(np.transpose(values))
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "moment"])
    return pd.DataFrame(list(rows.values()), index=index)


def growth_table(runs: Sequence[Run]) -> pd.DataFrame:
    """By what law the surrogate and Target Linearity grow, a row a group and layer: means over seeds.

    The run is cut where the surrogate first reaches half of its largest value: the rise before, the rest after. Of the
    rise: its last epoch; the factor by which the surrogate has grown; the rate d ln S/dt, an epoch, in the first epoch
    and at its largest; and R² of ln S over time, which is 1 for exponential growth. Then the same R² for the whole run.
    Of the time after the rise, for Target Linearity of the features which enter the layer: the share of its change
    over the whole run that is still to come; R² over ln t, which is 1 for logarithmic growth, t counting from the start
    of training; R² of ln(1 − TL) over ln t, 1 for a power law; and R² over t, which tells how much a high one over ln t
    says: over a short stretch ln t is nearly straight. The input's is constant, so it has none of these.
    """
    rows = {}
    for title, group in by_title(runs).items():
        for name, layer in group[0].metrics["layers"].items():
            if "surrogate" in layer:
                rows[title, name] = np.mean([_laws(run, name) for run in group], axis=0)
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "layer"])
    return pd.DataFrame(list(rows.values()), index=index, columns=_LAWS)


_LAWS = [
    "until epoch",
    "S grows by",
    "first rate",
    "largest rate",
    "R² exp, rise",
    "R² exp, run",
    "TL still to come",
    "R² log",
    "R² power",
    "R² line",
]


def _laws(run: Run, name: str) -> list[float]:
    layer, epochs = run.metrics["layers"][name], _epochs(run)
    S, linearity = np.array(layer["surrogate"]), np.array(layer["tl"])
    cut = int(np.argmax(S / S.max() >= 0.5))
    rise, after = slice(cut + 1), slice(max(cut, 1), None)
    whole = np.isin(epochs, np.arange(epochs[-1] + 1))
    rates = np.diff(np.log(S[whole])) / np.diff(epochs[whole])
    varies = np.ptp(linearity) > 0
    return [
        epochs[cut],
        S[cut] / S[0],
        rates[0],
        rates.max(),
        _r_squared(epochs[rise], np.log(S[rise])),
        _r_squared(epochs, np.log(S)),
        (linearity[-1] - linearity[cut]) / (linearity[-1] - linearity[0]) if varies else np.nan,
        _r_squared(np.log(epochs[after]), linearity[after]) if varies else np.nan,
        _r_squared(np.log(epochs[after]), np.log1p(-linearity[after])) if varies else np.nan,
        _r_squared(epochs[after], linearity[after]) if varies else np.nan,
    ]


def _r_squared(x: np.ndarray, y: np.ndarray) -> float:
    """R² of the regression line; NaN for fewer than three points, where it says nothing."""
    return float(np.corrcoef(x, y)[0, 1] ** 2) if len(x) > 2 else np.nan
