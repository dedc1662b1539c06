"""Finished runs, put together: which belong to one another, and what they say over seeds."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from gramlin.results import Json, Run


def finished(run: Run) -> bool:
    """Whether the run did not diverge."""
    return "diverged" not in run.metrics


def grouped(runs: Sequence[Run], *keys: str) -> dict[tuple[Json, ...], list[Run]]:
    """The runs by the values of these settings, in the order of the values.

    Raises:
        ValueError: a run has no such setting; names both.
    """
    groups: dict[tuple[Json, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(_setting(run, key) for key in keys), []).append(run)
    return dict(sorted(groups.items()))


def select(runs: Sequence[Run], **settings: Json) -> list[Run]:
    """The runs that have these settings; errors as in ``grouped``."""
    return [run for run in runs if all(_setting(run, key) == value for key, value in settings.items())]


def _setting(run: Run, key: str) -> object:
    if key not in run.settings:
        raise ValueError(f"a run of {run.experiment} has no setting {key!r}; its settings are {run.settings}")
    return run.settings[key]


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean ± standard deviation over repetitions, in words; ``ValueError`` if there are none."""
    if not len(values):
        raise ValueError("got no values; pass at least one")
    mean, n = sum(values) / len(values), len(values)
    if n == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Student's 95% interval of the mean of first − second, over paired repetitions.

    Raises:
        ValueError: fewer than two pairs.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"got {len(first)} and {len(second)} values; pass at least two pairs")
    differences = np.subtract(first, second)
    mean, error = differences.mean(), stats.sem(differences)
    reach = stats.t.ppf(0.975, len(differences) - 1) * error
    return float(mean - reach), float(mean + reach)
