"""A claim of the paper, and what finished runs say of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gramlin.results import ResultsStore, Run


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
        findings: of the stored runs; None for a claim that its chapter decides live.
        holds: the word for "reproduced", where another fits better.
        fails: the word for "not reproduced", likewise.
    """

    name: str
    says: str
    paper: str
    rule: str
    findings: Callable[[ResultsStore], Iterable[Finding]] | None = None
    holds: str = "reproduced"
    fails: str = "not reproduced"


def last_date(runs: Sequence[Run]) -> str:
    """The day on which the last of the runs was finished."""
    return max(run.finished for run in runs)[:10]
