"""What is read off chapter 5's stored runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from gramlin.chapters.summaries import grouped, mean_and_spread
from gramlin.results import Run


def by_beta(runs: Sequence[Run]) -> dict[str, dict[float, list[Run]]]:
    """The runs of each data set and network, by β from the smallest; the seeds of each."""
    found: dict[str, dict[float, list[Run]]] = {}
    for (dataset, model, beta), group in grouped(runs, "dataset", "model", "beta").items():
        found.setdefault(f"{dataset}, {model.upper()}", {})[beta] = group
    return found


def course(run: Run, measure: str) -> np.ndarray:
    """A measure over epochs; "ceiling" is TL of inputs over what no linear map exceeds, "gap" the mean over pairs."""
    metrics = run.metrics
    if measure == "ceiling":
        shares: np.ndarray = np.array(metrics["tl_inputs"]) / metrics["pca_ceiling"]
        return shares
    if measure == "gap":
        return np.array([np.nan if gap is None else gap["mean"] for gap in metrics["gap"]])
    return np.array([np.nan if value is None else value for value in metrics[measure]], dtype=float)


def beta_panels(runs: Sequence[Run], measure: str) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A measure over epochs, by data set and β, for ``figures.plot_over_beta``: the epochs, and a row a run.

    Args:
        runs: of chapter 5.
        measure: a key of their metrics over epochs, "ceiling" (TL of inputs over the PCA ceiling) or "gap" (its mean
            over pairs).
    """
    return {
        title: {
            f"β = {beta:g}": (np.array(group[0].metrics["epoch"]), np.array([course(run, measure) for run in group]))
            for beta, group in betas.items()
        }
        for title, betas in by_beta(runs).items()
    }


def tradeoff_panels(
    runs: Sequence[Run], measures: dict[str, str]
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Measures at the end of training over β, for ``figures.plot_tradeoff``: the values of β, and a row a seed.

    Args:
        runs: of chapter 5; of a data set, those seeds count that all values of β have.
        measures: by title, as in ``beta_panels``.
    """
    panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for title, measure in measures.items():
        panels[title] = {}
        for name, betas in by_beta(runs).items():
            chosen = with_all_seeds(betas)
            ends = [[course(run, measure)[-1] for run in group] for group in chosen.values()]
            panels[title][name] = np.array(list(chosen)), np.array(ends).T
    return panels


def with_all_seeds(betas: dict[float, list[Run]]) -> dict[float, list[Run]]:
    """Of each β the runs with a seed that all have, in the order of the seeds."""
    seeds = set.intersection(*({run.settings["seed"] for run in group} for group in betas.values()))
    return {
        beta: sorted((run for run in group if run.settings["seed"] in seeds), key=lambda run: run.settings["seed"])
        for beta, group in betas.items()
    }


def gap_points(runs: Sequence[Run]) -> dict[str, dict[str, np.ndarray]]:
    """What the theorem ties together, by β, a value a run and epoch after the start.

    ``nonlinear``: 1 − TL of latents against decodings (of the test images, under the fit to the training images);
    ``gap``: pooled; ``ratio``: κ; ``inputs``: 1 − TL against the training images.
    """
    points: dict[str, dict[str, np.ndarray]] = {}
    for (beta,), group in grouped(runs, "beta").items():
        courses = {
            "nonlinear": [1 - course(run, "tl_decodings_test")[1:] for run in group],
            "inputs": [1 - course(run, "tl_inputs")[1:] for run in group],
            "gap": [course(run, "pooled_gap")[1:] for run in group],
            "ratio": [course(run, "residual_ratio")[1:] for run in group],
        }
        points[f"β = {beta:g}"] = {name: np.concatenate(values) for name, values in courses.items()}
    return points


def interpolation_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The end of training, a row a data set and β, mean ± standard deviation over seeds.

    Target Linearity of latents against the training images, the same over the PCA ceiling, and against decodings;
    the mean gap of pairs of test images; how many pairs broke the bound, over all epochs and seeds; reconstruction
    and KL in nats an image; active units.
    """
    rows = {}
    for title, betas in by_beta(runs).items():
        for beta, group in betas.items():

            def end(measure: str, digits: int, group: Sequence[Run] = group) -> str:
                return mean_and_spread([course(run, measure)[-1] for run in group], digits)

            rows[title, beta] = {
                "seeds": len(group),
                "TL, inputs": end("tl_inputs", 3),
                "of the ceiling": end("ceiling", 2),
                "TL, decodings": end("tl_decodings", 3),
                "gap": end("gap", 3),
                "violations": sum(sum(run.metrics["violations"]) for run in group),
                "reconstruction": end("reconstruction", 1),
                "KL": end("kl", 1),
                "explained": end("explained", 2),
                "active": end("active_units", 0),
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "β"])
    return pd.DataFrame(list(rows.values()), index=index)
