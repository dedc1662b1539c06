"""What is read off chapter 2's stored runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from gramlin.chapters.summaries import finished, grouped, mean_and_spread, paired_interval, select
from gramlin.chapters.whitening.steps import UPDATES
from gramlin.results import Run


def accuracy_panels(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, dict[str, list[list[float]]]]:
    """Test accuracies over epochs by data set and network, then by method, a row a run: for ``plot_accuracy_curves``.

    A panel has those of the methods that have a run which did not diverge; one without any is left out.
    """
    panels = {}
    for (dataset, model), group in grouped(runs, "dataset", "model").items():
        curves = {
            method: [run.metrics["test_accuracy"] for run in select(group, method=method) if finished(run)]
            for method in methods
        }
        seeds = len({run.settings["seed"] for run in group if run.settings["method"] in methods})
        title = f"{dataset}, {model.upper()}, {seeds} seed{'s' if seeds > 1 else ''}"
        panels[title] = {method: rows for method, rows in curves.items() if rows}
    return {title: curves for title, curves in panels.items() if curves}


def whitening_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's claims C4 and C4b: SGD against whitened steps after the last epoch, a row a network and setting.

    Test accuracies in percent, mean ± standard deviation over the seeds that did not diverge; the paired difference
    whitened − SGD in points with Student's 95% interval over the seeds that both have; and the verdict by the claims'
    rule: "reproduced" if the interval excludes a loss of more than 1 point, "not reproduced" if it holds nothing but
    such losses.
    """
    columns = ["seeds", "SGD", "whitened", "difference", "95% interval", "verdict"]
    rows = {}
    for (dataset, model, lr), group in grouped(runs, "dataset", "model", "lr").items():
        sgd, whitened = _pairs(group, "sgd", "whitened")
        if not sgd:
            continue
        row = dict.fromkeys(columns, "–") | {"seeds": len(sgd)}
        row |= {"SGD": _reached(sgd), "whitened": _reached(whitened)}
        ended = all(finished(run) for run in (*sgd, *whitened))
        difference = accuracy_difference(group, "whitened", "sgd") if ended else None
        if difference is not None:
            row["difference"] = f"{difference.mean:+.2f}"
            row["verdict"] = "not decided by one seed"
            if difference.interval is not None:
                low, high = difference.interval
                row["95% interval"] = f"[{low:+.2f}, {high:+.2f}]"
                row["verdict"] = "reproduced" if low > -1 else "not reproduced" if high < -1 else "undecided"
        rows[dataset, model.upper(), lr] = row
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "η"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs of runs, and Student's 95% interval of it; without one for a single pair."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.interval[0]:+.2f}, {self.interval[1]:+.2f}]"


def accuracy_difference(runs: Sequence[Run], method: str, other: str) -> Difference | None:
    """Last test accuracy of one method − another, in points, over the seeds that both have; None if there are none.

    Runs that diverged do not count. The runs must not differ in anything but method and seed.
    """
    pairs = [each for each in zip(*_pairs(runs, method, other), strict=True) if all(map(finished, each))]
    if not pairs:
        return None
    first, second = (_final(each) for each in zip(*pairs, strict=True))
    mean = sum(first) / len(first) - sum(second) / len(second)
    return Difference(mean, paired_interval(first, second) if len(pairs) > 1 else None)


def _pairs(runs: Sequence[Run], *methods: str) -> list[list[Run]]:
    """The runs of each method, for the seeds that all of them have, in the order of the seeds."""
    by_seed = [{run.settings["seed"]: run for run in select(runs, method=method)} for method in methods]
    seeds = sorted(set.intersection(*(set(each) for each in by_seed)))
    return [[each[seed] for seed in seeds] for each in by_seed]


def _reached(runs: Sequence[Run]) -> str:
    """The final accuracies of the runs that did not diverge, and how many did."""
    accuracies = _final([run for run in runs if finished(run)])
    words = [mean_and_spread(accuracies, 2)] if accuracies else []
    if len(accuracies) < len(runs):
        words.append(f"{len(runs) - len(accuracies)} diverged")
    return ", ".join(words)


def _final(runs: Sequence[Run]) -> list[float]:
    return [100 * run.metrics["test_accuracy"][-1] for run in runs]


def halves_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's controls, for one network and setting: what is reached with which part of the steps.

    A row a method, in the order of ``UPDATES``: train and test accuracy after the last epoch in percent, mean ±
    standard deviation over seeds; the difference of the test accuracy to SGD's with its 95% interval
    (`accuracy_difference`); and how far the Gram matrix G of the first layer has moved since initialisation, relative
    to the initial one.
    """
    groups = grouped(runs, "method")
    rows: dict[str, dict[str, int | str]] = {}
    for method in UPDATES:
        group = [run for run in groups.get((method,), []) if finished(run)]
        if group:
            rows[method] = {"seeds": len(group)}
            for name in ("train_accuracy", "test_accuracy"):
                values = [100 * run.metrics[name][-1] for run in group]
                rows[method][name.replace("_", " ")] = mean_and_spread(values, 2)
            difference = accuracy_difference(runs, method, "sgd")
            rows[method]["against SGD"] = "–" if method == "sgd" or difference is None else str(difference)
            first = next(iter(group[0].metrics["layers"]))
            moved = [run.metrics["layers"][first]["gram_change"][-1] for run in group]
            rows[method]["change of G"] = f"{sum(moved) / len(moved):.2g}"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="kept of each step")


def kept_table(runs: Sequence[Run]) -> pd.DataFrame:
    """How much of a step is Gram shift, a row a layer and data set: the share of directions, and what is measured.

    "of the directions" is the share of the weight's dimensions that are no rotations, 1 − (k−1)/(2d) for k ≤ d. The
    other columns are means over runs of ‖R* W⁺ − W‖²/‖W⁺ − W‖² for the steps that SGD proposes: at the first step, and
    from the 1,024th on, in plain and in whitened runs.
    """
    rows = {}
    for (dataset, model), group in grouped(runs, "dataset", "model").items():
        methods = {method: [run for run in select(group, method=method) if finished(run)] for method in _TWINS}
        if not methods["sgd"]:
            continue
        for name, layer in methods["sgd"][0].metrics["layers"].items():
            k, d = layer["shape"]
            rotations = k * (k - 1) / 2 if k <= d else k * d - d * (d + 1) / 2
            row = {"weight": f"{k}×{d}", "of the directions": f"{1 - rotations / (k * d):.2f}"}
            for method, twins in methods.items():
                layers = [run.metrics["layers"][name] for run in twins]
                first = [layer["kept"][0] ** 2 for layer in layers]
                late = [
                    x**2
                    for layer in layers
                    for x, step in zip(layer["kept"], layer["steps"], strict=True)
                    if step >= 1024
                ]
                if method == "sgd":
                    row["of the first step"] = _mean(first)
                row[f"late, {_TWINS[method]}"] = _mean(late)
            rows[dataset, model.upper(), name] = row
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "layer"])
    return pd.DataFrame(list(rows.values()), index=index)


_TWINS = {"sgd": "SGD", "whitened": "whitened"}


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else "–"
