"""The paper's claims that chapter 5 puts to the test, and the rules that decide them."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from gramlin.chapters.claims import Claim, Finding, last_date
from gramlin.chapters.interpolation.tables import by_beta, course, gap_points, with_all_seeds
from gramlin.chapters.summaries import grouped, paired_interval
from gramlin.results import ResultsStore, Run


def interpolation_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 5's claim C8, a row a data set: what is claimed of Target Linearity, and the gap, each by its rule.

    - "TL rises with training": "yes" if for every β Student's 95% interval over seeds of TL against inputs at the end
      less that at the start lies above 0, "no" if one lies below 0, else "open".
    - "TL falls with β": "yes" if at the end of training the rank correlation of TL against inputs with β is at most
      −0.9 in every seed, and the interval of TL at the smallest β less that at the largest lies above 0; "open" if only
      the interval fails, holding 0; else "no".
    - "gap follows 1 − TL": the rank correlation of the pooled gap with 1 − TL, over β and the epochs after the start,
      is at least 0.9 in every seed; of TL against decodings, of which there is a theorem, and against inputs, of which
      there is none without more. In brackets the least over seeds and the largest. "at the end" is the same over β
      alone, after the last epoch, without a rule.

    For a single seed the first two are "–". One seed can fail the last, which asks something of each; else it is "–".
    """
    rows = {}
    for title, betas in by_beta(runs).items():
        chosen = with_all_seeds(betas)
        seeds = len(next(iter(chosen.values())))
        if not seeds:
            continue
        row = {"seeds": seeds, "TL rises with training": "–", "TL falls with β": "–"}
        ends = {beta: [course(run, "tl_inputs")[-1] for run in group] for beta, group in chosen.items()}
        if seeds > 1:
            starts = {beta: [course(run, "tl_inputs")[0] for run in group] for beta, group in chosen.items()}
            intervals = [paired_interval(ends[beta], starts[beta]) for beta in chosen]
            row["TL rises with training"] = _word(intervals)
            orders = [stats.spearmanr(list(chosen), values).statistic for values in zip(*ends.values(), strict=True)]
            fall = paired_interval(ends[min(chosen)], ends[max(chosen)])
            row["TL falls with β"] = _word([fall]) if max(orders) <= -0.9 else "no"
        by_seed = [gap_points([group[index] for group in chosen.values()]) for index in range(seeds)]
        for label, key in (("decodings", "nonlinear"), ("inputs", "inputs")):
            correlations = [_rank_correlation(points, key) for points in by_seed]
            word = "no" if min(correlations) < 0.9 else "yes" if seeds > 1 else "–"
            row[f"gap follows 1 − TL, {label}"] = f"{word} ({_range(correlations)})"
            row[f"at the end, {label}"] = _range([_rank_correlation(points, key, last=True) for points in by_seed])
        row["violations"] = sum(sum(run.metrics["violations"]) for group in betas.values() for run in group)
        rows[title] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _word(intervals: Sequence[tuple[float, float]]) -> str:
    if all(low > 0 for low, _ in intervals):
        return "yes"
    return "no" if any(high < 0 for _, high in intervals) else "open"


def _rank_correlation(points: dict[str, dict[str, np.ndarray]], key: str, *, last: bool = False) -> float:
    chosen = slice(-1, None) if last else slice(None)
    nonlinear, gap = (np.concatenate([each[name][chosen] for each in points.values()]) for name in (key, "gap"))
    return float(stats.spearmanr(nonlinear, gap, nan_policy="omit").statistic)


def _range(values: Sequence[float]) -> str:
    ends = [f"{end:+.2f}" for end in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


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
                yield Finding(title, figure, row["seeds"], verdict, last_date(runs))

    return findings


def _ends_by_beta(runs: Sequence[Run]) -> dict[float, tuple[float, float]]:
    """Target Linearity against inputs at the start and the end, means over seeds."""
    return {
        beta: tuple(np.mean([[run.metrics["tl_inputs"][at] for at in (0, -1)] for run in group], axis=0))
        for (beta,), group in grouped(runs, "beta").items()
    }


def _rises(runs: Sequence[Run]) -> str:
    means = _ends_by_beta(runs)
    rises = ", ".join(f"{end - start:+.3f}" for start, end in means.values())
    return f"TL by {rises} for β = {', '.join(f'{beta:g}' for beta in means)}"


def _falls(runs: Sequence[Run]) -> str:
    means = _ends_by_beta(runs)
    return (
        f"TL {', '.join(f'{end:.3f}' for _, end in means.values())} for β = {', '.join(f'{beta:g}' for beta in means)}"
    )


CLAIMS = (
    Claim(
        "C8a",
        "Target Linearity of a VAE's latents against inputs rises with training.",
        "curves",
        "for every β the 95% interval of end − start lies above 0; fixed, as those of C8b and C8c, when one seed on "
        "MNIST had been seen",
        _interpolation("TL rises with training", _rises),
    ),
    Claim(
        "C8b",
        "It falls with β.",
        "curves",
        "rank correlation with β of at most −0.9 in every seed, and the 95% interval of the difference between the "
        "smallest and the largest β above 0",
        _interpolation("TL falls with β", _falls),
    ),
    Claim(
        "C8c",
        "It explains how straight the VAE interpolates.",
        "pictures",
        "rank correlation of the pooled gap with 1 − TL, over β and epochs, of at least 0.9 in every seed",
        _interpolation("gap follows 1 − TL, inputs"),
    ),
    Claim(
        "C8d",
        "Target Linearity against decodings explains it (our reading).",
        "not claimed",
        "as C8c, with held-out decodings; fixed at the same time, when a theorem had bounded the gap by this Target "
        "Linearity and a second number",
        _interpolation("gap follows 1 − TL, decodings"),
        holds="holds",
        fails="does not hold",
    ),
)
