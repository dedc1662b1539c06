"""The paper's claims that chapter 3 puts to the test, and the rules that decide them."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from gramlin.chapters.claims import Claim, Finding, last_date
from gramlin.chapters.linearity.tables import by_title, growth_table, linearity_table, profile
from gramlin.chapters.summaries import grouped, paired_interval, select
from gramlin.results import Json, ResultsStore, Run


def linearity_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 3's claims C5 (SGD) and C5b (Adam), a row a group.

    By Student's 95% intervals over seeds, "with training" is "rises" if Target Linearity is larger at the end than at
    the start for every hidden layer; "with depth" is "rises" if at the end it is larger at each layer than at the one
    before, from the input to the last hidden layer. "falls" is the opposite everywhere, "mixed" if one of them falls;
    else, with intervals that hold 0, it is "open". The verdict is "reproduced" if both rise on the training data, "not
    reproduced" if one falls or is mixed, else "undecided".
    """
    rows = {}
    for title, group in by_title(runs).items():
        row: dict[str, int | str] = {"seeds": len(group)}
        for suffix, measure in (("", "tl"), (", held-out", "tl_test")):
            start, end = (np.array([profile(run, measure, share) for run in group]) for share in (0.0, 1.0))
            row["with training" + suffix] = _direction(end[:, 1:], start[:, 1:])
            row["with depth" + suffix] = _direction(end[:, 1:], end[:, :-1])
        both = {row["with training"], row["with depth"]}
        decided = "reproduced" if both == {"rises"} else "undecided" if both <= {"rises", "open"} else "not reproduced"
        row["verdict"] = decided if len(group) > 1 else "not decided by one seed"
        rows[title] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _direction(larger: np.ndarray, smaller: np.ndarray) -> str:
    """How the columns of the first array, over runs, compare with those of the second."""
    if len(larger) < 2:
        return "–"
    intervals = [paired_interval(list(a), list(b)) for a, b in zip(larger.T, smaller.T, strict=True)]
    if all(low > 0 for low, _ in intervals):
        return "rises"
    fallen = [high < 0 for _, high in intervals]
    return "falls" if all(fallen) else "mixed" if any(fallen) else "open"


def growth_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 3's claim C6, a row a group: "reproduced" if in every layer both laws fit with an R² of at least 0.9.

    The exponential law in the rise of the surrogate, and the logarithmic one for Target Linearity after it: the least
    R² over layers of each, as in ``growth_table``. They are means over seeds: of one seed, "not decided by one seed".
    """
    columns = ["R² exp, rise", "R² log"]
    least = growth_table(runs).groupby(level="runs", sort=False)[columns].min().add_prefix("least ")
    least["C6"] = np.where((least >= 0.9).all(axis=1), "reproduced", "not reproduced")
    alone = [title for title, group in by_title(runs).items() if len(group) < 2]
    least.loc[alone, "C6"] = "not decided by one seed"
    return least


def _linearity(method: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        for (dataset,), runs in grouped(_mlps(store, method=method), "dataset").items():
            row, table = linearity_verdicts(runs).iloc[0], linearity_table(runs).droplevel(0)
            first, last = table.loc["end"].iloc[1], table.loc["end"].iloc[-1]
            held_out = row["with depth, held-out"].partition(":")[0]
            here = f"TL at the end: h1 {first}, {table.columns[-1]} {last}; held-out with depth: {held_out}"
            yield Finding(dataset, here, row["seeds"], row["verdict"], last_date(runs))

    return findings


def _growth(store: ResultsStore) -> Iterable[Finding]:
    for _, runs in grouped(_mlps(store), "dataset", "method").items():
        row = growth_verdicts(runs)
        exponential, logarithmic = (row[name].iloc[0] for name in row.columns[:2])
        here = f"least R²: exponential law {exponential:.2f}, logarithmic law {logarithmic:.2f}"
        yield Finding(row.index[0], here, len(runs), row["C6"].iloc[0], last_date(runs))


def _mlps(store: ResultsStore, **settings: Json) -> list[Run]:
    return select(store.runs("linearity"), model="mlp", width=256, **settings)


CLAIMS = (
    Claim(
        "C5",
        "Target Linearity rises with depth and training, under SGD.",
        "curves",
        "the 95% intervals of all rises lie above 0: from layer to layer, pixels to last hidden layer, at the end; and "
        "from start to end in each hidden layer; on training images, and beside it what held-out ones say. An interval "
        "that holds 0 counted as a failure until the first Adam runs on MNIST were in",
        _linearity("sgd"),
    ),
    Claim("C5b", "The same under Adam.", "curves", "as C5", _linearity("adam")),
    Claim(
        "C6",
        "The surrogate grows exponentially, Target Linearity logarithmically.",
        "in words",
        "each run is cut where the surrogate S reaches half of its largest value; in every layer, in the mean over "
        "seeds, R² of at least 0.9, of a straight line for ln S over time before the cut, and for TL over ln t after "
        "it; fixed when one run on Fashion-MNIST had been seen",
        _growth,
    ),
)
