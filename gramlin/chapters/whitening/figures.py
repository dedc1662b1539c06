"""Chapter 2's drawings."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import ArrayLike

from gramlin.figures import COLORS, LABELS, draw_mean_and_spread, gram_ellipse, grid_of_panels


def plot_step_in_the_plane(before: ArrayLike, after: ArrayLike, kept: ArrayLike) -> Figure:
    """Draw one step of a 2×2 weight: its columns as arrows, the rotations of the step's result, the Gram ellipses.

    A rotation of the outputs turns the columns, which are the images of the unit vectors, all by the same angle.

    Args:
        before: W.
        after: W⁺.
        kept: R* W⁺.
    """
    before, after, kept = (np.asarray(each) for each in (before, after, kept))
    figure, (images, distance, ellipses) = plt.subplots(1, 3, figsize=(9, 3.3))
    names = {"$W$": (before, "#999999"), "$W^+$": (after, COLORS["sgd"]), "$R_*W^+$": (kept, COLORS["whitened"])}
    for label, (weight, color) in names.items():
        for column, style in zip(weight.T, ("-", (0, (3, 1.5))), strict=True):
            images.annotate(
                "", column, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linestyle": style, "lw": 2}
            )
        images.plot([], [], color=color, label=label)
    columns = np.concatenate([each.T for each in (before, after, kept)])
    margin = 0.15 * np.abs(columns).max()
    images.set(xlim=(min(0, columns[:, 0].min()) - margin, columns[:, 0].max() + margin))
    images.set(ylim=(columns[:, 1].min() - margin, columns[:, 1].max() + margin), aspect="equal")
    images.set(title="where the two unit vectors go", xlabel="$z_1$", ylabel="$z_2$")

    angles = np.linspace(-np.pi, np.pi, 721)
    turns = np.array([[np.cos(angles), -np.sin(angles)], [np.sin(angles), np.cos(angles)]]).transpose(2, 0, 1)
    distances = np.linalg.norm(turns @ after - before, axis=(1, 2))
    distance.plot(np.degrees(angles), distances, color=COLORS["control"])
    at_zero, nearest = np.linalg.norm(after - before), np.linalg.norm(kept - before)
    turn = kept @ np.linalg.inv(after)
    distance.plot(0, at_zero, "o", color=COLORS["sgd"])
    distance.plot(np.degrees(np.arctan2(turn[1, 0], turn[0, 0])), nearest, "o", color=COLORS["whitened"])
    distance.set(xlabel="angle of R, degrees", ylabel="$\\Vert RW^+ - W\\Vert_F$", title="distance to W of $RW^+$")
    distance.set_xticks([-180, -90, 0, 90, 180])

    for weight, color, width, style in ((before, "#999999", 2, "-"), (after, COLORS["sgd"], 4, "-")):
        ellipses.plot(*gram_ellipse(weight.T @ weight), color=color, linewidth=width, linestyle=style)
    ellipses.plot(*gram_ellipse(kept.T @ kept), color=COLORS["whitened"], linestyle="--")
    ellipses.set(title="Gram matrices, as ellipses", xlabel="$h_1$", ylabel="$h_2$", aspect="equal")
    figure.legend(*images.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def plot_solver_curve(values: ArrayLike, reached: ArrayLike, layers: dict[str, ArrayLike]) -> Figure:
    """Draw what an approximate solver makes of a singular value, above the singular values that layers have.

    Args:
        values: singular values of M over ‖M‖_F, in (0, 1].
        reached: what the solver makes of each; an exact one makes 1 of all.
        layers: a name, and the singular values of its M over ‖M‖_F.
    """
    values = np.asarray(values)
    figure, (curve, rug) = plt.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=[2, 0.4 + 0.28 * len(layers)]
    )
    curve.semilogx(values, reached, color=COLORS["newton-schulz"], label="ten steps of Newton–Schulz")
    curve.axhline(1, color=COLORS["whitened"], label="exact")
    for axes in (curve, rug):
        axes.axvline((8 / 15) ** 10, color=COLORS["theory"], linestyle=":", linewidth=1.2)
    curve.annotate(" $(8/15)^{10}$", ((8 / 15) ** 10, 0.02), color=COLORS["theory"])
    curve.set(ylabel="singular value of R")
    curve.legend(loc="center left")
    for height, singular in enumerate(layers.values()):
        shown = np.clip(np.asarray(singular), values.min(), None)
        rug.plot(shown, np.full(len(shown), height), "|", color=COLORS["gram"], markersize=11, markeredgewidth=0.8)
    rug.set_yticks(range(len(layers)), list(layers))
    rug.set_ylim(len(layers) - 0.4, -0.6)
    rug.set(xlabel="singular value of $M = WW^{+\\top}$ over $\\Vert M\\Vert_F$ (smaller ones at the left edge)")
    return figure


def plot_accuracy_curves(panels: dict[str, dict[str, ArrayLike]]) -> Figure:
    """Draw accuracy over epochs from 1: a panel a title, in it a line a method, mean ± 2 sd over its runs.

    Args:
        panels: by title, by method (a key of ``LABELS``, or any other text), a row of accuracies in [0, 1] a seed.
    """
    figure, grid = grid_of_panels(len(panels))
    labels: dict[str, Artist] = {}
    for axes, (title, methods) in zip(grid.flat, panels.items(), strict=False):
        for method, rows in methods.items():
            percent = 100 * np.asarray(rows)
            color = COLORS.get(method, COLORS["control"])
            draw_mean_and_spread(axes, np.arange(1, percent.shape[1] + 1), percent, color, LABELS.get(method, method))
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        labels |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy, %")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=2)
    return figure


def plot_gram_errors(errors: dict[str, tuple[ArrayLike, ArrayLike]], singular: dict[str, ArrayLike]) -> Figure:
    """Draw Gram errors over steps, and the singular values that training leaves.

    Args:
        errors: by label, the steps and the errors relative to the step's Gram shift, a row a run.
        singular: by label, quantiles of the singular values of the trained weight, from the smallest, a row a run.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.7))
    styles = {
        "ten-step Newton–Schulz": (COLORS["newton-schulz"], "o-"),
        "exact": (COLORS["whitened"], "o-"),
        "rounding of the stored weight": (COLORS["gram"], ":"),
        "SGD": (COLORS["sgd"], "--"),
    }
    for label, (steps, rows) in errors.items():
        color, style = styles[label]
        for index, row in enumerate(np.atleast_2d(rows)):
            left.loglog(steps, row, style, color=color, label=None if index else label, markersize=4)
    left.axhline(1, color=COLORS["theory"], linewidth=1)
    left.set(xlabel="step", ylabel="Gram error / Gram shift of the step", title="is the Gram shift kept?")
    for label, rows in singular.items():
        color, style = styles[label]
        for index, row in enumerate(np.atleast_2d(rows)):
            share = np.linspace(0, 100, len(row))
            right.semilogy(share, row, style, color=color, label=None if index else label, markersize=4)
    right.set(xlabel="percentile", ylabel="singular value", title="singular values of the trained weight")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=1)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=1)
    return figure


def plot_halves(accuracies: dict[str, Sequence[float]]) -> Figure:
    """Draw the last error of each method, a point a seed; a dashed line marks the mean of the first method.

    Args:
        accuracies: by method, values in [0, 1].
    """
    figure, axes = plt.subplots(figsize=(7.4, 0.8 + 0.36 * len(accuracies)))
    for height, (method, values) in enumerate(accuracies.items()):
        color = COLORS.get(method, COLORS["control"])
        errors = 100 - 100 * np.asarray(values)
        axes.semilogx(errors, np.full(len(values), height), "o", color=color, alpha=0.8)
    first = next(iter(accuracies.values()))
    axes.axvline(100 - 100 * float(np.mean(first)), color=COLORS["theory"], linestyle="--", linewidth=1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(accuracies)), [LABELS.get(method, method) for method in accuracies])
    axes.invert_yaxis()
    axes.set(xlabel="test error after the last epoch, % (log scale)", ylabel="kept of each step")
    return figure
