"""All claims of the paper on one page: what is said, what was found here, and the verdict by each claim's rule."""

import pandas as pd

from gramlin.chapters import all_chapters
from gramlin.chapters.claims import Claim
from gramlin.results import ResultsStore

NOT_RUN = "not yet run"
NOT_TAKEN_UP = "not taken up yet"

# Of no chapter yet; one that takes a claim up brings its own row.
_WITHOUT_CHAPTER = (
    Claim("C9", "Staircase target: what width does to features and readout.", "curves", "–"),
    Claim("C10", "BERT: the profile of Target Linearity depends on the task.", "curves", "–"),
    Claim("C11", "Random labels: Target Linearity by layer and share of noise.", "curves", "–"),
    Claim("C12", "Grokking: Target Linearity of the last layers and the generalisation gap.", "curves", "–"),
)


def all_claims() -> list[tuple[int | None, Claim]]:
    """The claims with the numbers of their chapters, in the order of the book; then those of no chapter."""
    taken_up = [(chapter.number, claim) for chapter in all_chapters().values() for claim in chapter.claims]
    names = {claim.name for _, claim in taken_up}
    return [*taken_up, *((None, claim) for claim in _WITHOUT_CHAPTER if claim.name not in names)]


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
    for chapter, claim in all_claims():
        common = {
            "claim": claim.name,
            "says": claim.says,
            "paper": claim.paper,
            "rule": claim.rule,
            "chapter": chapter,
            "command": "",
        }
        words = {"reproduced": claim.holds, "not reproduced": claim.fails}
        found = list(claim.findings(store)) if claim.findings else []
        for finding in found:
            verdict = words.get(finding.verdict, finding.verdict)
            rows.append({**common, **vars(finding), "profile": "paper", "verdict": verdict})
        if found:
            continue
        verdict = NOT_RUN if chapter else NOT_TAKEN_UP
        row = {**common, "data": "–", "here": "–", "seeds": "–", "profile": "–", "date": "–", "verdict": verdict}
        if claim.findings is None and claim.name in live:
            verdict = claim.holds if live[claim.name] else claim.fails
            row |= {"here": "checked as the chapter runs", "profile": "quick", "verdict": verdict}
        elif chapter is not None:
            row["command"] = f"gramlin run {chapter}" + (" --profile paper" if claim.findings else "")
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
    claims = [claim for _, claim in all_claims()]
    order = [*(claim.holds for claim in claims), *(claim.fails for claim in claims), "undecided"]
    rows = []
    for (name, says), group in table.groupby(["claim", "says"], sort=False):
        counts = group["verdict"].value_counts(sort=False)
        counts = dict(sorted(counts.items(), key=lambda each: order.index(each[0]) if each[0] in order else len(order)))
        alone = len(group) == 1
        found = ", ".join(verdict if alone else f"{count} × {verdict}" for verdict, count in counts.items())
        rows.append({"claim": name, "says": says, "found": found})
    return pd.DataFrame(rows)
