"""All claims of the paper on one page: what is said, what was found here, and the verdict by each claim's rule."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from gramlin.experiments.chapter1 import gram_shift_table
from gramlin.experiments.chapter2 import accuracy_difference, whitening_table
from gramlin.experiments.chapter3 import growth_verdicts, linearity_table, linearity_verdicts
from gramlin.experiments.chapter4 import collapse_verdicts
from gramlin.experiments.chapter5 import interpolation_verdicts
from gramlin.experiments.summaries import grouped, select
from gramlin.results import ResultsStore, Run

NOT_RUN = "not yet run"


@dataclass(frozen=True)
class Finding:
    """What one set of runs says of a claim.

    Attributes:
        data: the data set, and what else tells the runs apart.
        here: the figure found, with its spread or interval.
        seeds: how many runs.
        verdict: by the claim's rule.
        date: of the last of the runs, ISO 8601.
    """

    data: str
    here: str
    seeds: int
    verdict: str
    date: str


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        name: C1 to C12.
        says: the claim, in our words.
        paper: the paper's figure or where it is shown.
        chapter: number of the chapter that puts it to the test; None if none does yet.
        findings: of the stored runs; None for a claim that its chapter decides live.
    """

    name: str
    says: str
    paper: str
    chapter: int | None
    findings: Callable[[ResultsStore], Iterable[Finding]] | None = None


def _date(runs: Sequence[Run]) -> str:
    return max(run.finished for run in runs)[:10]


def _gram_shift(store: ResultsStore) -> Iterable[Finding]:
    for (dataset,), runs in grouped(store.runs("gram-shift"), "dataset").items():
        for title, row in gram_shift_table(runs).iterrows():
            here = f"ρ {row['ρ(shift, virtual)']}, AGOP {row['ρ(shift, AGOP)']}"
            verdict = {"holds": "reproduced", "reversed": "not reproduced"}.get(row["C2"], row["C2"])
            yield Finding(f"{dataset}, {title}", here, row["seeds"], verdict, _date(runs))


def _whitening(model: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        runs = select(store.runs("whitening"), model=model, lr=0.01)
        runs = [run for run in runs if run.settings["method"] in ("sgd", "whitened")]
        for (dataset, _, _), row in whitening_table(runs).iterrows():
            own = select(runs, dataset=dataset)
            difference = accuracy_difference(own, "whitened", "sgd")
            yield Finding(dataset, f"{difference} points", row["seeds"], row["verdict"], _date(own))

    return findings


def _linearity(method: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        for (dataset,), runs in grouped(_mlps(store, method=method), "dataset").items():
            row, table = linearity_verdicts(runs).iloc[0], linearity_table(runs).droplevel(0)
            first, last = table.loc["end"].iloc[1], table.loc["end"].iloc[-1]
            here = f"h1 {first}, {table.columns[-1]} {last}"
            yield Finding(dataset, here, row["seeds"], row["verdict"], _date(runs))

    return findings


def _growth(store: ResultsStore) -> Iterable[Finding]:
    for _, runs in grouped(_mlps(store), "dataset", "method").items():
        row = growth_verdicts(runs)
        here = ", ".join(f"{name.removeprefix('least ')} {row[name].iloc[0]:.2f}" for name in row.columns[:2])
        yield Finding(row.index[0], here, len(runs), row["C6"].iloc[0], _date(runs))


def _mlps(store: ResultsStore, **settings) -> list[Run]:
    return select(store.runs("linearity"), model="mlp", width=256, **settings)


def _collapse(store: ResultsStore) -> Iterable[Finding]:
    for _, runs in grouped(store.runs("collapse"), "dataset", "model", "weight_decay").items():
        row = collapse_verdicts(runs)
        here = f"TL {row['TL'].iloc[0]}, NC1 fell to {row['NC1 fell to'].iloc[0]}"
        yield Finding(row.index[0], here, len(runs), row["C7"].iloc[0], _date(runs))


def _interpolation(column: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        for _, runs in grouped(store.runs("interpolation"), "dataset", "model").items():
            for title, row in interpolation_verdicts(runs).iterrows():
                word = row[column].split()[0]
                verdict = {"yes": "reproduced", "no": "not reproduced"}.get(word, "not decided by one seed")
                yield Finding(title, row[column], row["seeds"], verdict, _date(runs))

    return findings


CLAIMS = (
    Claim("C1", "The Feature Learning Equation holds exactly, for any layer.", "identity", 1),
    Claim(
        "C2",
        "The virtual covariance shift tracks the Gram shift better than AGOP.",
        "0.98 against 0.71",
        1,
        _gram_shift,
    ),
    Claim("C3", "The virtual update unrolls the Swiss roll along its target.", "picture", 1),
    Claim(
        "C4", "An MLP trained by whitened updates does as well as by SGD, or better.", "curves", 2, _whitening("mlp")
    ),
    Claim("C4b", "So does a CNN.", "curves", 2, _whitening("cnn")),
    Claim("C5", "Target Linearity rises with depth and training, under SGD.", "curves", 3, _linearity("sgd")),
    Claim("C5b", "The same under Adam.", "curves", 3, _linearity("adam")),
    Claim("C6", "The surrogate grows exponentially, Target Linearity logarithmically.", "in words", 3, _growth),
    Claim("C7", "Neural Collapse is the end point of linearization.", "in words", 4, _collapse),
    Claim(
        "C8",
        "A VAE's latents: Target Linearity against inputs rises with training.",
        "curves",
        5,
        _interpolation("TL rises with training"),
    ),
    Claim(
        "C8",
        "A VAE's latents: Target Linearity against inputs falls with β.",
        "curves",
        5,
        _interpolation("TL falls with β"),
    ),
    Claim(
        "C8",
        "Target Linearity against inputs explains how straight a VAE interpolates.",
        "pictures",
        5,
        _interpolation("gap follows 1 − TL, inputs"),
    ),
    Claim(
        "C8",
        "Target Linearity against decodings explains it (our reading).",
        "–",
        5,
        _interpolation("gap follows 1 − TL, decodings"),
    ),
    Claim("C9", "Staircase target: what width does to features and readout.", "curves", None),
    Claim("C10", "BERT: the profile of Target Linearity depends on the task.", "curves", None),
    Claim("C11", "Random labels: Target Linearity by layer and share of noise.", "curves", None),
    Claim("C12", "Grokking: Target Linearity of the last layers beside the generalisation gap.", "curves", None),
)


def scorecard(store: ResultsStore, live: dict[str, bool]) -> pd.DataFrame:
    """A row a claim and set of runs: what the paper says, what was found, and the verdict.

    Args:
        store: of finished runs.
        live: for claims that a chapter decides as it runs, whether all that it checks of them holds.

    Returns:
        The columns ``claim``, ``says``, ``paper``, ``data``, ``here``, ``seeds``, ``profile`` ("paper" for stored runs,
        "quick" for live ones), ``date``, ``verdict`` ("reproduced", "not reproduced", "undecided", "not decided by one
        seed" or "not yet run"), ``chapter``, and ``command``, what runs the claim where it has not been run.
    """
    rows = []
    for claim in CLAIMS:
        common = {
            "claim": claim.name,
            "says": claim.says,
            "paper": claim.paper,
            "chapter": claim.chapter,
            "command": "",
        }
        found = list(claim.findings(store)) if claim.findings else []
        for finding in found:
            rows.append({**common, **vars(finding), "profile": "paper"})
        if found:
            continue
        row = {**common, "data": "–", "here": "–", "seeds": "–", "profile": "–", "date": "–", "verdict": NOT_RUN}
        if claim.findings is None and claim.name in live:
            verdict = "reproduced" if live[claim.name] else "not reproduced"
            row |= {"here": "checked as the chapter runs", "profile": "quick", "verdict": verdict}
        elif claim.chapter is not None:
            row["command"] = f"gramlin run {claim.chapter}" + (" --profile paper" if claim.findings else "")
        rows.append(row)
    order = ["claim", "says", "paper", "data", "here", "seeds", "profile", "date", "verdict", "chapter", "command"]
    return pd.DataFrame(rows)[order]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The scorecard in a row a claim: how many sets of runs say what."""
    rows = []
    for (name, says), group in table.groupby(["claim", "says"], sort=False):
        counts = group["verdict"].value_counts(sort=False)
        alone = len(group) == 1
        found = ", ".join(verdict if alone else f"{count} × {verdict}" for verdict, count in counts.items())
        rows.append({"claim": name, "says": says, "found": found})
    return pd.DataFrame(rows)
