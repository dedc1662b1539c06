"""Chapter 5's drawings."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gramlin.figures import (
    BETA_MAP,
    COLORS,
    colors_in_order,
    draw_mean_and_spread,
    grid_of_panels,
    plot_layers_over_training,
)


def plot_over_beta(panels: dict[str, dict[str, tuple[ArrayLike, ArrayLike]]], *, ylabel: str) -> Figure:
    """Draw a measure over epochs for every β, mean ± 2 sd over runs: a panel a title, a colour a β.

    Args:
        panels: by title, by β from the smallest: the epochs, and a row of values a run.
        ylabel: what is drawn.
    """
    return plot_layers_over_training(panels, ylabel=ylabel, colormap=BETA_MAP)


def plot_gap(points: dict[str, dict[str, dict[str, ArrayLike]]], spread: float) -> Figure:
    """Draw the pooled gap as the theorem has it, over κ between κ ± s; and over 1 − TL against decodings and inputs.

    Args:
        points: by data set, by β: ``nonlinear`` and ``inputs``, 1 − TL against decodings and inputs; ``gap``;
            ``ratio``, κ.
        spread: s.
    """
    figure, (theorem, decodings, inputs) = plt.subplots(1, 3, figsize=(9.6, 3.9))
    fullest = max(points.values(), key=len)
    colors = colors_in_order(list(fullest | {beta: None for betas in points.values() for beta in betas}), BETA_MAP)
    largest = 0.0
    for marker, (name, betas) in zip("osv^", points.items(), strict=False):
        decodings.plot([], [], marker, color="#444444", markersize=4, label=name)
        for beta, each in betas.items():
            style = {"color": colors[beta], "markersize": 3.5, "alpha": 0.8}
            nonlinear, gap, kappa = (np.asarray(each[key]) for key in ("nonlinear", "gap", "ratio"))
            theorem.plot(kappa, gap / np.sqrt(nonlinear / 2), marker, **style)
            decodings.plot(nonlinear, gap, marker, **style)
            inputs.plot(each["inputs"], gap, marker, **style)
            largest = max(largest, np.nanmax(kappa))
    for beta, color in colors.items():
        decodings.plot([], [], "-", linewidth=4, color=color, label=beta)
    kappas = np.linspace(0, 1.05 * largest, 100)
    theorem.plot(kappas, kappas + spread, "-", color=COLORS["theory"], linewidth=1.2)
    theorem.plot(kappas, abs(kappas - spread), "--", color=COLORS["theory"], linewidth=1.2)
    theorem.set(xlabel="κ", ylabel="pooled gap / $\\sqrt{(1-\\mathrm{TL})/2}$", title="between κ − s and κ + s")
    decodings.set(xlabel="1 − TL, decodings (held-out)", ylabel="pooled gap", title="against decodings")
    inputs.set(xlabel="1 − TL, inputs (training)", ylabel="pooled gap", title="against inputs")
    figure.legend(*decodings.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def plot_gap_bounds(gap: ArrayLike, bound: ArrayLike) -> Figure:
    """Draw the gap of every pair over its bound, on logarithmic axes, with the line that none may cross."""
    figure, axes = plt.subplots(figsize=(4.8, 4))
    gap, bound = np.asarray(gap), np.asarray(bound)
    axes.loglog(bound, gap, ".", color=COLORS["virtual"], markersize=4, alpha=0.6, label="a pair of held-out images")
    reach = [gap.min() / 1.2, bound.max() * 1.2]
    axes.loglog(reach, reach, color=COLORS["theory"], linewidth=1.2, label="gap = bound")
    axes.set(xlabel="bound by the affine fit's residual", ylabel="gap of the segment")
    axes.legend()
    return figure


def plot_strips(strips: dict[str, ArrayLike]) -> Figure:
    """Draw rows of images, a strip a label: (steps, channels, height, width), values in [0, 1]."""
    arrays = [np.asarray(images) for images in strips.values()]
    height, width = arrays[0].shape[-2:]
    figure, rows = plt.subplots(len(strips), 1, figsize=(7.6, 0.3 + 0.82 * len(strips)), squeeze=False)
    for axes, label, images in zip(rows.flat, strips, arrays, strict=True):
        row = images.transpose(2, 0, 3, 1).reshape(height, len(images) * width, -1)
        axes.imshow(row.clip(0, 1), cmap="gray_r", vmin=0, vmax=1)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([height / 2], [label])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    rows[-1, 0].set_xticks([width / 2, (len(images) - 0.5) * width], ["λ = 0", "λ = 1"])
    return figure


def plot_tradeoff(panels: dict[str, dict[str, tuple[ArrayLike, ArrayLike]]]) -> Figure:
    """Draw what β trades: a panel a measure, in it a line a data set over β, mean ± 2 sd over runs.

    Args:
        panels: by measure, by data set: the values of β, and a row of values a run.
    """
    figure, grid = grid_of_panels(len(panels))
    palette = (COLORS["virtual"], COLORS["agop"], COLORS["whitened"])
    for axes, (measure, sets) in zip(grid.flat, panels.items(), strict=False):
        for (name, (betas, rows)), color in zip(sets.items(), itertools.cycle(palette), strict=False):
            draw_mean_and_spread(axes, betas, rows, color, name)
        axes.set(title=measure, xlabel="β", xscale="log")
    grid[0, 0].set_ylabel("at the end of training")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
