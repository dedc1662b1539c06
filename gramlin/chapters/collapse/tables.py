"""What is read off chapter 4's stored runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gramlin.chapters.features import features_name
from gramlin.chapters.summaries import grouped, mean_and_spread
from gramlin.results import JsonObject, Run


def by_title(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart; perceptrons first."""
    groups = {}
    found = grouped(runs, "dataset", "model", "weight_decay").items()
    for (dataset, model, decay), group in sorted(found, key=lambda each: not each[0][1].startswith("mlp")):
        groups[f"{dataset}, {model.upper()}, {f'λ = {decay:g}' if decay else 'no decay'}"] = group
    return groups


def collapse_panels(runs: Sequence[Run], measure: str) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A measure of what enters each layer, for ``figures.plot_layers_over_training``: the epochs, and a row a run.

    Args:
        runs: of chapter 4.
        measure: a key of a layer's metrics, or "nonlinear" for 1 − TL.
    """

    def values(layer: JsonObject) -> np.ndarray:
        return 1 - np.array(layer["tl"]) if measure == "nonlinear" else np.array(layer[measure])

    return {
        title: {
            features_name(index): (
                np.array(group[0].metrics["epoch"]),
                np.array([values(run.metrics["layers"][name]) for run in group]),
            )
            for index, name in enumerate(group[0].metrics["layers"])
        }
        for title, group in by_title(runs).items()
    }


def readout_panels(runs: Sequence[Run]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """All measures of the features that enter the readout, for ``figures.plot_measures``: the epochs, and a row a run.

    NC4 of 0 is NaN here: a logarithmic axis has no place for it.
    """
    panels = {}
    for title, group in by_title(runs).items():
        of_layer = [list(run.metrics["layers"].values())[-1] for run in group]
        rows = {"1 − TL": 1 - np.array([layer["tl"] for layer in of_layer])}
        rows |= {label: np.array([layer[key] for layer in of_layer]) for key, label in _LABELS.items()}
        rows["NC3"] = np.array([run.metrics["nc3"] for run in group])
        disagreement = np.array([run.metrics["nc4"] for run in group])
        rows["NC4"] = np.where(disagreement > 0, disagreement, np.nan)
        epochs = np.array(group[0].metrics["epoch"])
        panels[title] = {label: (epochs, values) for label, values in rows.items()}
    return panels


_LABELS = {
    "nc1": "NC1",
    "nc2_equinorm": "NC2 equinorm",
    "nc2_equiangular": "NC2 equiangular",
    "nc2_etf": "NC2 simplex",
}


def collapse_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Collapse at the end of training, a row a group and layer: mean ± standard deviation over seeds.

    "TL" and "NC1" of the features that enter the layer, on the training data; "1 − TL over its bound" by NC1,
    (1 − TL)(g + NC1)/NC1, which is at most 1, and 1 where the bound is tight (the largest over seeds); "NC2 simplex";
    "90% by epoch": when ln NC1 has made nine tenths of its way from the start to its least value; and "NC1, end/least",
    means over seeds. Nothing for the pixels, which do not move.
    """
    rows = {}
    for title, group in by_title(runs).items():
        for index, name in enumerate(group[0].metrics["layers"]):
            layers = [run.metrics["layers"][name] for run in group]
            rows[title, features_name(index)] = {
                "TL": mean_and_spread([layer["tl"][-1] for layer in layers], 4),
                "TL, held-out": mean_and_spread([layer["tl_test"][-1] for layer in layers], 3),
                "NC1": mean_and_spread([layer["nc1"][-1] for layer in layers], 4),
                "1 − TL over its bound": f"{max(_tightness(run, name)[-1] for run in group):.2f}",
                "NC2 simplex": mean_and_spread([layer["nc2_etf"][-1] for layer in layers], 3),
                "90% by epoch": f"{np.mean([_settles(run, name) for run in group]):.0f}" if index else "–",
                "NC1, end/least": f"{np.mean([layer['nc1'][-1] / min(layer['nc1']) for layer in layers]):.2f}"
                if index
                else "–",
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "features"])
    return pd.DataFrame(list(rows.values()), index=index)


def _tightness(run: Run, layer: str) -> np.ndarray:
    linearity, nc1 = (np.array(run.metrics["layers"][layer][key]) for key in ("tl", "nc1"))
    tightness: np.ndarray = (1 - linearity) * (run.metrics["class_spread"] + nc1) / nc1
    return tightness


def _settles(run: Run, layer: str) -> int:
    course = np.log(run.metrics["layers"][layer]["nc1"])
    way = (course[0] - course) / (course[0] - course.min())
    epoch: int = run.metrics["epoch"][int(np.argmax(way >= 0.9))]
    return epoch


def bound_points(runs: Sequence[Run]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """NC1 and 1 − TL of every run and moment after the start, by the features' name, for ``figures.plot_bound``."""
    points: dict[str, list[np.ndarray]] = {}
    for run in runs:
        for index, layer in enumerate(run.metrics["layers"].values()):
            pair = np.array([layer["nc1"][1:], 1 - np.array(layer["tl"][1:])])
            points.setdefault(features_name(index), []).append(pair)
    return {name: tuple(np.concatenate(pairs, axis=1)) for name, pairs in points.items()}


def readout_paths(runs: Sequence[Run]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """NC1 and 1 − TL of what enters the readout over training, for ``figures.plot_bound``.

    By data set, by network: the epochs, and of either a row a run.
    """
    paths: dict[str, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for title, group in by_title(runs).items():
        dataset = group[0].settings["dataset"]
        network = title.removeprefix(f"{dataset}, ")
        top = [list(run.metrics["layers"].values())[-1] for run in group]
        nc1, nonlinear = np.array([each["nc1"] for each in top]), 1 - np.array([each["tl"] for each in top])
        paths.setdefault(dataset, {})[network] = (np.array(group[0].metrics["epoch"]), nc1, nonlinear)
    return paths


def bound_violations(runs: Sequence[Run]) -> int:
    """How often, over runs, layers and moments, Target Linearity is less than the bound by NC1 says: it must be 0."""
    # Not "exceeds": a value that is not a number must count.
    return sum(int((~(_tightness(run, name) <= 1 + 1e-9)).sum()) for run in runs for name in run.metrics["layers"])


def readout_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The end of training, a row a group: accuracies in percent, and what enters the readout; mean ± sd over seeds.

    "last training error, epoch" is the last moment of measuring at which there was one. Target Linearity stands beside
    the bounds that NC1 puts on it, as a whole and direction by direction (the classes taken to
    be of equal size). "NC3" is the distance between weight and class means, "but for a rotation" the least that a left
    rotation of the weight could make of it.
    """
    rows = {}
    for title, group in by_title(runs).items():
        top = [list(run.metrics["layers"].values())[-1] for run in group]
        metrics = [run.metrics for run in group]
        rows[title] = {
            "seeds": len(group),
            "train accuracy": mean_and_spread([100 * each["train_accuracy"][-1] for each in metrics], 2),
            "test accuracy": mean_and_spread([100 * each["test_accuracy"][-1] for each in metrics], 2),
            "last training error, epoch": _range([_last_error(each) for each in metrics]),
            "TL": mean_and_spread([layer["tl"][-1] for layer in top], 4),
            "TL at least, by NC1": mean_and_spread([_bounds(each)[0] for each in metrics], 4),
            "TL at least, by direction": mean_and_spread([_bounds(each)[1] for each in metrics], 4),
            **{label: mean_and_spread([layer[key][-1] for layer in top], 3) for key, label in _LABELS.items()},
            "NC3": mean_and_spread([each["nc3"][-1] for each in metrics], 3),
            "NC3 but for a rotation": mean_and_spread([each["nc3_rotated"][-1] for each in metrics], 3),
            "NC4, %": mean_and_spread([100 * each["nc4"][-1] for each in metrics], 2),
            "NC4 held-out, %": mean_and_spread([100 * each["nc4_test"][-1] for each in metrics], 2),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _last_error(metrics: JsonObject) -> int:
    """The last epoch at which accuracy on the training data was measured and was not 1; 0 if there is none."""
    shares = zip(metrics["epoch"], metrics["train_accuracy"], strict=True)
    return max((epoch for epoch, share in shares if share < 1), default=0)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


def _bounds(metrics: JsonObject) -> tuple[float, float]:
    """g/(g + NC1), and the mean over directions of q/(q + NC1_k) with q = g/(K − 1)."""
    g, shares = metrics["class_spread"], np.array(metrics["nc1_shares"][-1])
    q = g / len(shares)
    return g / (g + shares.sum()), float(np.mean(q / (q + shares)))


def direction_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Collapse of what enters the readout at the end of training, by principal direction of the class means.

    Two rows a group, means over seeds: the direction's share of the class means' variance in percent, from the largest
    on, and what it adds to NC1.
    """
    rows = {}
    for title, group in by_title(runs).items():
        for label, key, scale in (("variance, %", "variances", 100), ("NC1", "nc1_shares", 1)):
            mean = scale * np.mean([run.metrics[key][-1] for run in group], axis=0)
            rows[title, label] = {index: f"{value:.2g}" for index, value in enumerate(mean, start=1)}
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "direction"])
    return pd.DataFrame(list(rows.values()), index=index)


def rest_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The readout's weight W at the end of training with weight decay, a row a group: mean ± sd over seeds.

    "‖∂L/∂W + λW‖/λ‖W‖" is 0 at rest; the share of ‖W‖² in the span of M and "‖W − AM/λ‖/‖W‖" are 1 and 0 at rest and
    collapse; "cos(A, I − 11ᵀ/K)" is then 1 where weight and class means are dual.
    """
    columns = {
        "stationarity": "‖∂L/∂W + λW‖/λ‖W‖",
        "in_span": "share of ‖W‖² in the span of M",
        "duality": "‖W − AM/λ‖/‖W‖",
        "simplex": "cos(A, I − 11ᵀ/K)",
    }
    rows = {
        title: {
            label: mean_and_spread([run.metrics["rest"][key][-1] for run in group], 3) for key, label in columns.items()
        }
        for title, group in by_title([run for run in runs if "rest" in run.metrics]).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")
