"""Chapter 4's drawings."""

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import ArrayLike

from gramlin.figures import COLORS, after_the_start, colors_in_order, draw_mean_and_spread, grid_of_panels, mark_epochs


def plot_measures(
    panels: dict[str, dict[str, tuple[ArrayLike, ArrayLike]]], *, marks: Sequence[float] = (), floor: float = 1e-3
) -> Figure:
    """Draw several measures over epochs, both on logarithmic axes, mean ± 2 sd of the logarithm over runs.

    The first two are drawn thick: those that are compared.

    Args:
        panels: by title, by measure (a key of ``COLORS``): the epochs, and a row of values a run; NaN is left out.
        marks: epochs to be marked by dotted lines.
        floor: where a vertical axis ends at the latest; lines leave the panel there.
    """
    figure, grid = grid_of_panels(len(panels), share=True)
    for axes, (title, measures) in zip(grid.flat, panels.items(), strict=False):
        for name, (epochs, rows) in measures.items():
            draw_mean_and_spread(axes, *after_the_start(epochs, rows), COLORS[name], name, marker="", log=True)
            axes.lines[-1].set_linewidth(2.4 if name in list(measures)[:2] else 1.1)
        axes.set(title=title, xlabel="epoch", xscale="log", yscale="log")
        mark_epochs(axes, marks)
    for axes in grid[:, 0]:
        axes.set(ylabel="0 at collapse", ylim=(max(axes.get_ylim()[0], floor), None))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _plain_ticks(axes: Axes) -> None:
    """Label logarithmic axes at powers of ten, and at 2 and 5 times them where fewer than two decades are shown."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def plot_bound(
    points: dict[str, tuple[ArrayLike, ArrayLike]],
    paths: dict[str, dict[str, tuple[ArrayLike, ArrayLike, ArrayLike]]],
    class_spread: float,
    *,
    mark: float,
) -> Figure:
    """Draw 1 − TL over NC1 below the bound that NC1 puts on it, logarithmically: every layer, then paths of networks.

    A path is the geometric mean over runs of the moments after the start. It ends in a large point, and a ring stands
    at its last moment before ``mark``.

    Args:
        points: by layer, from the input on: NC1 and 1 − TL.
        paths: by data set (a panel), by network (a colour): the epochs, and rows a run of NC1 and of 1 − TL.
        class_spread: g, 1 less the sum of squares of the classes' shares.
        mark: an epoch.
    """
    columns = 2
    rows = -(-(1 + len(paths)) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False)
    for axes in grid.flat[1 + len(paths) :]:
        axes.set_visible(False)
    colors = colors_in_order(list(points))
    for name, (nc1, nonlinear) in points.items():
        grid[0, 0].plot(nc1, nonlinear, "o", color=colors[name], label=name, markersize=3.5, alpha=0.7)
    networks = list(dict.fromkeys(name for courses in paths.values() for name in courses))
    palette = dict(zip(networks, itertools.cycle(("virtual", "agop", "whitened", "gram", "gap", "control"))))
    for axes, courses in zip(grid.flat[1:], paths.values(), strict=False):
        for name, (epochs, *measured) in courses.items():
            later = np.asarray(epochs) > 0
            course = np.exp(np.log(np.array(measured)[:, :, later]).mean(axis=1))
            drop = np.asarray(epochs)[later].searchsorted(mark) - 1
            color = COLORS[palette[name]]
            axes.plot(*course, color=color, marker=".", markersize=5, linewidth=1.3, label=name)
            axes.plot(*course[:, drop], "o", color=color, markerfacecolor="white", markersize=7, label="_ring")
            axes.plot(*course[:, -1], "o", color=color, markeredgecolor="white", markersize=9, label="_end")
    for axes, title in zip(
        grid.flat, ("every layer", *(f"{dataset}: into the readout" for dataset in paths)), strict=False
    ):
        drawn = np.concatenate([line.get_xdata() for line in axes.get_lines()])
        nc1 = np.geomspace(drawn.min() / 1.3, drawn.max() * 1.3, 100)
        axes.plot(nc1, nc1 / (class_spread + nc1), color=COLORS["theory"], label="bound", zorder=1)
        axes.set(title=title, xlabel="NC1", xscale="log", yscale="log")
        _plain_ticks(axes)
        axes.legend(loc="lower right")
    for axes in grid[:, 0]:
        axes.set_ylabel("1 − TL")
    return figure


def plot_class_means(cosines: dict[str, ArrayLike]) -> Figure:
    """Draw matrices of cosines between class means about their mean, a panel a moment, on one colour scale.

    White are those of a simplex, −1/(K − 1); beyond half a unit from it colours do not change.
    """
    matrices = [np.asarray(matrix) for matrix in cosines.values()]
    simplex = -1 / (len(matrices[0]) - 1)
    figure, row = plt.subplots(1, len(cosines), figsize=(2.7 * len(cosines) + 0.8, 3), sharey=True, squeeze=False)
    for axes, title, matrix in zip(row.flat, cosines, matrices, strict=True):
        drawn = axes.imshow(matrix, vmin=simplex - 0.5, vmax=simplex + 0.5, cmap="PuOr")
        axes.set(title=title, xlabel="class")
        axes.grid(visible=False)
        axes.set_xticks(range(0, len(matrix), 3))
    row[0, 0].set(ylabel="class", yticks=range(0, len(matrices[-1]), 3))
    figure.colorbar(drawn, ax=row, label="cosine", shrink=0.8, extend="both")
    return figure


def plot_features_in_the_plane(
    moments: dict[str, tuple[ArrayLike, ArrayLike]], classes: ArrayLike, names: Sequence[str]
) -> Figure:
    """Draw features in two dimensions and the readout's weight, each class in its colour, a panel a moment.

    Each panel has a scale of its own; weights are drawn from the centre of the class means, as long as fits.

    Args:
        moments: by title, the features (n, 2) and the weight (K, 2).
        classes: of the features, (n,), from 0.
        names: of the classes.
    """
    columns = min(2, len(moments))
    rows = -(-len(moments) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.1 * rows + 0.5), squeeze=False)
    classes = np.asarray(classes)
    palette = [COLORS[name] for name in ("virtual", "agop", "whitened", "gap", "agop_sqrt", "control")]
    for axes, (title, (features, weight)) in zip(grid.flat, moments.items(), strict=True):
        features, weight = np.asarray(features), np.asarray(weight)
        means = np.stack([features[classes == each].mean(axis=0) for each in range(len(names))])
        centre = means.mean(axis=0)
        arrows = weight - weight.mean(axis=0)
        arrows *= np.linalg.norm(means - centre) / np.linalg.norm(arrows)
        for each, (name, color) in enumerate(zip(names, palette, strict=False)):
            axes.plot(*features[classes == each].T, ".", color=color, markersize=2.5, alpha=0.5)
            axes.plot(*means[each], "o", color=color, markeredgecolor="white", markersize=9, label=name, zorder=4)
            arrow = {"arrowstyle": "-|>", "facecolor": color, "edgecolor": "black", "linewidth": 1.2, "shrinkB": 0}
            axes.annotate("", centre + arrows[each], centre, arrowprops=arrow | {"mutation_scale": 14}, zorder=5)
        axes.set(title=title, aspect="equal", xlabel="$h_1$", ylabel="$h_2$")
        axes.set_adjustable("datalim")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    return figure


def plot_shear(panels: dict[str, ArrayLike], classes: ArrayLike) -> Figure:
    """Draw two classes of points in the plane, before and after a linear map: a panel a title, class means large."""
    figure, row = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.4), sharex=True, sharey=True)
    classes = np.asarray(classes)
    for axes, (title, points) in zip(row, panels.items(), strict=True):
        points = np.asarray(points)
        for each, name in ((0, "virtual"), (1, "agop")):
            own = points[classes == each]
            axes.plot(*own.T, ".", color=COLORS[name], markersize=4, alpha=0.6)
            mean = own.mean(axis=0)
            axes.plot(*mean, "o", color=COLORS[name], markeredgecolor="white", markersize=9, label=f"class {each}")
        axes.set(title=title, xlabel="$h_1$")
    row[0].set_ylabel("$h_2$")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
