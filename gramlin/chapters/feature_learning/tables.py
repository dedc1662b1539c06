"""What is read off chapter 1's stored runs."""

from collections.abc import Sequence

import pandas as pd

from gramlin.chapters.summaries import mean_and_spread, paired_interval
from gramlin.results import Json, JsonObject, Run


def _by_title(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart; plain SGD first."""

    def rank(run: Run) -> tuple[Json, ...]:
        chosen = run.settings
        return chosen["dataset"], chosen["method"] != "sgd", not chosen["standardize"], chosen["momentum"], chosen["lr"]

    several = len({run.settings["dataset"] for run in runs}) > 1
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=rank):
        chosen = run.settings
        title = f"{chosen['dataset']}: " if several else ""
        title += f"{_METHOD_NAMES[chosen['method']]}, η = {chosen['lr']:g}"
        title += f", momentum {chosen['momentum']:g}" if chosen["momentum"] else ""
        title += "" if chosen["standardize"] else ", raw inputs"
        groups.setdefault(title, []).append(run)
    return groups


_METHOD_NAMES = {"sgd": "SGD", "adam": "Adam"}


def gram_shift_panels(runs: Sequence[Run]) -> dict[str, list[JsonObject]]:
    """The metrics of chapter 1's stored runs, grouped for ``figures.plot_correlations``."""
    return {title: [run.metrics for run in group] for title, group in _by_title(runs).items()}


def gram_shift_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 1's stored runs after their last epoch: mean ± standard deviation over seeds, a row a group.

    The index has the name of the data set, or of the data sets, and then each row's title begins with its own.

    The column "C2" judges each group by the rule of the claim: the 95% interval over seeds of the paired difference of
    the first two correlations lies above 0 ("holds"), below 0 ("reversed") or on both sides ("undecided"); a group of
    one seed is "not decided by one seed". The relative gap is given for plain SGD only: with momentum or Adam the two
    matrices have different scales.
    """
    columns = {
        "ρ(shift, virtual)": "rho_virtual",
        "ρ(shift, AGOP)": "rho_agop",
        "ρ(shift, √AGOP)": "rho_agop_sqrt",
        "ρ(G, √AGOP)": "rho_gram_agop_sqrt",
        "relative gap": "gap",
        "test accuracy": "test_accuracy",
    }
    rows: dict[str, dict[str, int | str]] = {}
    for title, group in _by_title(runs).items():
        rows[title] = {"seeds": len(group)}
        for name, key in columns.items():
            rows[title][name] = mean_and_spread([run.metrics[key][-1] for run in group])
        if group[0].settings["method"] != "sgd" or group[0].settings["momentum"]:
            rows[title]["relative gap"] = "–"
        rows[title]["C2"] = _verdict(group)
    titles = pd.Index(list(rows), dtype=object, name=", ".join(sorted({run.settings["dataset"] for run in runs})))
    return pd.DataFrame(list(rows.values()), index=titles, columns=["seeds", *columns, "C2"])


def _verdict(group: Sequence[Run]) -> str:
    if len(group) < 2:
        return "not decided by one seed"
    virtual, rival = ([run.metrics[key][-1] for run in group] for key in ("rho_virtual", "rho_agop"))
    low, high = paired_interval(virtual, rival)
    return "holds" if low > 0 else "reversed" if high < 0 else "undecided"
