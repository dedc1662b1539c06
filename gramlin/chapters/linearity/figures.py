"""Chapter 3's drawings."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gramlin.figures import COLORS, draw_mean_and_spread, grid_of_panels


def plot_growth(
    times: ArrayLike,
    surrogate: ArrayLike,
    laws: dict[str, ArrayLike],
    linearity: ArrayLike,
    stop: float,
    ceiling: float,
) -> Figure:
    """Draw the surrogate of a linear network over time with the laws that it should follow, and Target Linearity.

    Args:
        times: of the measurements.
        surrogate: measured.
        laws: by label, what theory says; the first dashed, the second solid.
        linearity: Target Linearity of the hidden features.
        stop: when exponential growth should end.
        ceiling: the largest Target Linearity that the hidden features could have.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.5))
    times, surrogate = np.asarray(times), np.asarray(surrogate)
    for (label, values), style in zip(laws.items(), ("--", "-"), strict=True):
        left.semilogy(times, values, style, color=COLORS["theory"], label=label)
    left.semilogy(times[::3], surrogate[::3], "o", color=COLORS["gram"], markersize=3.5, label="measured")
    left.set(ylim=(surrogate.min() / 3, surrogate.max() * 10), xlabel="time t", ylabel="surrogate S")
    right.plot(times, linearity, color=COLORS["virtual"], label="hidden features")
    right.axhline(ceiling, color=COLORS["theory"], linestyle="--", linewidth=1, label="input")
    right.set(ylim=(0, 1), xlabel="time t", ylabel="Target Linearity")
    for axes in (left, right):
        axes.axvline(stop, color=COLORS["theory"], linestyle=":", linewidth=1.2)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=1)
    right.legend(loc="lower right")
    return figure


def plot_depth_profiles(
    panels: dict[str, dict[str, ArrayLike]], layers: Sequence[str], *, ylabel: str, share: bool = False
) -> Figure:
    """Draw a measure over depth at several moments of training, mean ± 2 sd over runs: a panel a title.

    Args:
        panels: by title, by moment, a row of values (one a layer) a run.
        layers: names on the horizontal axis, from the input on.
        ylabel: what is drawn.
        share: whether panels in a row have one vertical scale.
    """
    figure, grid = grid_of_panels(len(panels), share=share)
    for axes, (title, moments) in zip(grid.flat, panels.items(), strict=False):
        shades = plt.get_cmap("Greys")(np.linspace(0.35, 1, len(moments)))
        for shade, (moment, rows) in zip(shades, moments.items(), strict=True):
            draw_mean_and_spread(axes, np.arange(len(layers)), rows, tuple(shade), moment)
        axes.set_xticks(range(len(layers)), layers)
        axes.set(title=title, xlabel="features")
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
