"""All claims of the paper on one page: what is said, what was found here, and the verdict by each claim's rule."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gramlin.experiments.chapter1 import gram_shift_table
from gramlin.experiments.chapter2 import accuracy_difference, whitening_table
from gramlin.experiments.chapter3 import growth_verdicts, linearity_table, linearity_verdicts
from gramlin.experiments.chapter4 import collapse_verdicts
from gramlin.experiments.chapter5 import interpolation_verdicts
from gramlin.experiments.summaries import grouped, select
from gramlin.results import ResultsStore, Run

NOT_RUN = "not yet run"
NOT_TAKEN_UP = "not taken up yet"


@dataclass(frozen=True)
class Finding:
    """What one set of runs says of a claim.

    Attributes:
        data: the data set, and what else tells the runs apart.
        here: the figure found, with its spread or interval.
        seeds: how many runs.
        verdict: by the claim's rule: "reproduced", "not reproduced", or why it is neither.
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
        paper: the paper's figure, or how it shows the claim.
        rule: when a set of runs reproduces it.
        chapter: number of the chapter that puts it to the test; None if none does yet.
        findings: of the stored runs; None for a claim that its chapter decides live.
        holds: the word for "reproduced", where another fits better.
        fails: the word for "not reproduced", likewise.
    """

    name: str
    says: str
    paper: str
    rule: str
    chapter: int | None
    findings: Callable[[ResultsStore], Iterable[Finding]] | None = None
    holds: str = "reproduced"
    fails: str = "not reproduced"


def _date(runs: Sequence[Run]) -> str:
    return max(run.finished for run in runs)[:10]


def _gram_shift(store: ResultsStore) -> Iterable[Finding]:
    for (dataset,), runs in grouped(store.runs("gram-shift"), "dataset").items():
        for title, row in gram_shift_table(runs).iterrows():
            here = f"virtual {row['ρ(shift, virtual)']}, AGOP {row['ρ(shift, AGOP)']}"
            verdict = {"holds": "reproduced", "reversed": "not reproduced"}.get(row["C2"], row["C2"])
            yield Finding(f"{dataset}, {title}", here, row["seeds"], verdict, _date(runs))


def _whitening(model: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        runs = select(store.runs("whitening"), model=model, lr=0.01)
        runs = [run for run in runs if run.settings["method"] in ("sgd", "whitened")]
        for (dataset, _, _), row in whitening_table(runs).iterrows():
            own = select(runs, dataset=dataset)
            difference = accuracy_difference(own, "whitened", "sgd")
            data = f"{dataset}, {model.upper()}"
            yield Finding(data, f"whitened − SGD: {difference} points", row["seeds"], row["verdict"], _date(own))

    return findings


def _linearity(method: str) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        for (dataset,), runs in grouped(_mlps(store, method=method), "dataset").items():
            row, table = linearity_verdicts(runs).iloc[0], linearity_table(runs).droplevel(0)
            first, last = table.loc["end"].iloc[1], table.loc["end"].iloc[-1]
            held_out = row["with depth, held-out"].partition(":")[0]
            here = f"TL at the end: h1 {first}, {table.columns[-1]} {last}; held-out with depth: {held_out}"
            yield Finding(dataset, here, row["seeds"], row["verdict"], _date(runs))

    return findings


def _growth(store: ResultsStore) -> Iterable[Finding]:
    for _, runs in grouped(_mlps(store), "dataset", "method").items():
        row = growth_verdicts(runs)
        exponential, logarithmic = (row[name].iloc[0] for name in row.columns[:2])
        here = f"least R²: exponential law {exponential:.2f}, logarithmic law {logarithmic:.2f}"
        yield Finding(row.index[0], here, len(runs), row["C6"].iloc[0], _date(runs))


def _mlps(store: ResultsStore, **settings) -> list[Run]:
    return select(store.runs("linearity"), model="mlp", width=256, **settings)


def _collapse(store: ResultsStore) -> Iterable[Finding]:
    for _, runs in grouped(store.runs("collapse"), "dataset", "model", "weight_decay").items():
        row = collapse_verdicts(runs)
        here = (
            f"TL {row['TL'].iloc[0]}, NC1 {row['NC1 fell to'].iloc[0]} of its start ({row['NC1, end/least'].iloc[0]}); "
            f"rank correlations {row['over time'].iloc[0]} over time, {row['over layers'].iloc[0]} over layers"
        )
        yield Finding(row.index[0], here, len(runs), row["C7"].iloc[0], _date(runs))


def _interpolation(
    column: str, here: Callable[[Sequence[Run]], str] | None = None
) -> Callable[[ResultsStore], Iterable[Finding]]:
    def findings(store: ResultsStore) -> Iterable[Finding]:
        for _, runs in grouped(store.runs("interpolation"), "dataset", "model").items():
            for title, row in interpolation_verdicts(runs).iterrows():
                word, _, correlation = row[column].partition(" ")
                words = {"yes": "reproduced", "no": "not reproduced", "open": "undecided"}
                verdict = words.get(word, "not decided by one seed")
                figure = here(runs) if here else f"rank correlation {correlation.strip('()')}"
                yield Finding(title, figure, row["seeds"], verdict, _date(runs))

    return findings


def _by_beta(runs: Sequence[Run]) -> dict[float, tuple[float, float]]:
    """Target Linearity against inputs at the start and the end, means over seeds."""
    return {
        beta: tuple(np.mean([[run.metrics["tl_inputs"][at] for at in (0, -1)] for run in group], axis=0))
        for (beta,), group in grouped(runs, "beta").items()
    }


def _rises(runs: Sequence[Run]) -> str:
    means = _by_beta(runs)
    rises = ", ".join(f"{end - start:+.3f}" for start, end in means.values())
    return f"TL by {rises} for β = {', '.join(f'{beta:g}' for beta in means)}"


def _falls(runs: Sequence[Run]) -> str:
    means = _by_beta(runs)
    return (
        f"TL {', '.join(f'{end:.3f}' for _, end in means.values())} for β = {', '.join(f'{beta:g}' for beta in means)}"
    )


CLAIMS = (
    Claim(
        "C1",
        "The Feature Learning Equation holds exactly, for any linear layer.",
        "a theorem",
        "both sides agree to rounding in every layer",
        1,
    ),
    Claim(
        "C2",
        "The virtual covariance shift tracks the Gram shift better than AGOP.",
        "correlation 0.98 against 0.71",
        "the 95% interval of the difference of the two correlations lies above 0; “reversed”: below 0. The paper's "
        "settings are not known; the rule was fixed for SGD, η = 0.01, and put to the other rows once they had run",
        1,
        _gram_shift,
        fails="reversed",
    ),
    Claim(
        "C3",
        "The virtual update unrolls the Swiss roll along its target.",
        "a picture",
        "while the network learns, R² of the target from the moved points rises by 0.2, and lies 0.2 above that of a "
        "network that learns shuffled targets; set when the first runs had been seen",
        1,
        holds="in part, early in training",
    ),
    Claim(
        "C4",
        "An MLP trained by whitened updates matches SGD or exceeds it.",
        "curves",
        "the 95% interval of whitened − SGD, at η = 0.01, excludes a loss of more than a point of test accuracy, so a "
        "smaller loss passes; other learning rates, with two seeds, are in the chapter",
        2,
        _whitening("mlp"),
    ),
    Claim("C4b", "So does a CNN.", "curves", "as C4", 2, _whitening("cnn")),
    Claim(
        "C5",
        "Target Linearity rises with depth and training, under SGD.",
        "curves",
        "the 95% intervals of all rises lie above 0: from layer to layer, pixels to last hidden layer, at the end; and "
        "from start to end in each hidden layer; on training images, and beside it what held-out ones say. An interval "
        "that holds 0 counted as a failure until the first Adam runs on MNIST were in",
        3,
        _linearity("sgd"),
    ),
    Claim("C5b", "The same under Adam.", "curves", "as C5", 3, _linearity("adam")),
    Claim(
        "C6",
        "The surrogate grows exponentially, Target Linearity logarithmically.",
        "in words",
        "each run is cut where the surrogate S reaches half of its largest value; in every layer, in the mean over "
        "seeds, R² of at least 0.9, of a straight line for ln S over time before the cut, and for TL over ln t after "
        "it; fixed when one run on Fashion-MNIST had been seen",
        3,
        _growth,
    ),
    Claim(
        "C7",
        "Neural Collapse is the end point of linearization.",
        "in words",
        "in every seed rank correlations of TL and −NC1 of at least 0.9 over time and over layers, at the end a TL of "
        "at least 0.95 and an NC1 of at most a tenth of its start, of the features that enter the readout; fixed after "
        "a pilot on scikit-learn's digits. (In brackets, not asked for: NC1 over its least value on the way)",
        4,
        _collapse,
    ),
    Claim(
        "C8a",
        "Target Linearity of a VAE's latents against inputs rises with training.",
        "curves",
        "for every β the 95% interval of end − start lies above 0; fixed, as those of C8b and C8c, when one seed on "
        "MNIST had been seen",
        5,
        _interpolation("TL rises with training", _rises),
    ),
    Claim(
        "C8b",
        "It falls with β.",
        "curves",
        "rank correlation with β of at most −0.9 in every seed, and the 95% interval of the difference between the "
        "smallest and the largest β above 0",
        5,
        _interpolation("TL falls with β", _falls),
    ),
    Claim(
        "C8c",
        "It explains how straight the VAE interpolates.",
        "pictures",
        "rank correlation of the pooled gap with 1 − TL, over β and epochs, of at least 0.9 in every seed",
        5,
        _interpolation("gap follows 1 − TL, inputs"),
    ),
    Claim(
        "C8d",
        "Target Linearity against decodings explains it (our reading).",
        "not claimed",
        "as C8c, with held-out decodings; fixed at the same time, when a theorem had bounded the gap by this Target "
        "Linearity and a second number",
        5,
        _interpolation("gap follows 1 − TL, decodings"),
        holds="holds",
        fails="does not hold",
    ),
    Claim("C9", "Staircase target: what width does to features and readout.", "curves", "–", None),
    Claim("C10", "BERT: the profile of Target Linearity depends on the task.", "curves", "–", None),
    Claim("C11", "Random labels: Target Linearity by layer and share of noise.", "curves", "–", None),
    Claim("C12", "Grokking: Target Linearity of the last layers and the generalisation gap.", "curves", "–", None),
)


def scorecard(store: ResultsStore, live: dict[str, bool]) -> pd.DataFrame:
    """A row a claim and set of runs: what the paper says, what was found, and the verdict.

    Args:
        store: of finished runs.
        live: for claims that a chapter decides as it runs, whether all that it checks of them holds.

    Returns:
        The columns ``claim``, ``says``, ``paper``, ``rule``, ``data``, ``here``, ``seeds``, ``profile`` ("paper" for
        stored runs, "quick" for live ones), ``date``, ``verdict``, ``chapter``, and ``command``, what runs the claim
        where it has not been run. Verdicts are "reproduced" (of C3 "in part, early in training"), "not reproduced",
        for a claim that is not the paper's "holds", "does not hold", of C2 also "reversed"; "undecided", "not decided
        by one seed"; "not yet run", and "not taken up yet" for a claim without a chapter.
    """
    rows = []
    for claim in CLAIMS:
        common = {
            "claim": claim.name,
            "says": claim.says,
            "paper": claim.paper,
            "rule": claim.rule,
            "chapter": claim.chapter,
            "command": "",
        }
        words = {"reproduced": claim.holds, "not reproduced": claim.fails}
        found = list(claim.findings(store)) if claim.findings else []
        for finding in found:
            verdict = words.get(finding.verdict, finding.verdict)
            rows.append({**common, **vars(finding), "profile": "paper", "verdict": verdict})
        if found:
            continue
        verdict = NOT_RUN if claim.chapter else NOT_TAKEN_UP
        row = {**common, "data": "–", "here": "–", "seeds": "–", "profile": "–", "date": "–", "verdict": verdict}
        if claim.findings is None and claim.name in live:
            verdict = claim.holds if live[claim.name] else claim.fails
            row |= {"here": "checked as the chapter runs", "profile": "quick", "verdict": verdict}
        elif claim.chapter is not None:
            row["command"] = f"gramlin run {claim.chapter}" + (" --profile paper" if claim.findings else "")
        rows.append(row)
    order = [
        "claim",
        "says",
        "paper",
        "rule",
        "data",
        "here",
        "seeds",
        "profile",
        "date",
        "verdict",
        "chapter",
        "command",
    ]
    return pd.DataFrame(rows)[order]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The scorecard in a row a claim: how many sets of runs say what, what is decided first."""
    # The words of a claim that holds, of one that fails, and the rest.
    order = [*(claim.holds for claim in CLAIMS), *(claim.fails for claim in CLAIMS), "undecided"]
    rows = []
    for (name, says), group in table.groupby(["claim", "says"], sort=False):
        counts = group["verdict"].value_counts(sort=False)
        counts = dict(sorted(counts.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))
        alone = len(group) == 1
        found = ", ".join(verdict if alone else f"{count} × {verdict}" for verdict, count in counts.items())
        rows.append({"claim": name, "says": says, "found": found})
    return pd.DataFrame(rows)
