"""Chapter 1's drawings, and that of the book's idea."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from gramlin.figures import COLORS, LABELS, TARGET_MAP, draw_mean_and_spread, gram_ellipse
from gramlin.results import JsonObject


def plot_one_step(lrs: ArrayLike, shift: ArrayLike, gap: ArrayLike, predicted: ArrayLike) -> Figure:
    """Draw the norm of the Gram shift and of its gap to the virtual covariance shift, over the learning rate."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    axes.loglog(lrs, shift, "o-", color=COLORS["gram"], label="Gram shift")
    axes.loglog(lrs, gap, "o-", color=COLORS["gap"], label="Gram shift − virtual covariance shift")
    axes.loglog(lrs, predicted, "--", color=COLORS["theory"], label="second-order gap, as derived")
    axes.set(xlabel="learning rate η", ylabel="Frobenius norm")
    axes.legend()
    return figure


def plot_fixed_time(lrs: ArrayLike, gap: ArrayLike) -> Figure:
    """Draw the relative gap after a fixed stretch of training time over the learning rate, with a line of slope 1."""
    lrs, gap = np.asarray(lrs), np.asarray(gap)
    figure, axes = plt.subplots(figsize=(6, 3.4))
    axes.loglog(lrs, gap, "o-", color=COLORS["gap"], label="measured")
    axes.loglog(lrs, gap[-1] * lrs / lrs[-1], "--", color=COLORS["theory"], label="slope 1")
    axes.set(xlabel="learning rate η (steps × η is fixed)", ylabel="relative gap")
    axes.legend()
    return figure


def plot_correlations(panels: dict[str, Sequence[JsonObject]]) -> Figure:
    """Draw correlations with the Gram shift over epochs: a panel a title, mean ± 2 sd over its runs' metrics."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.2 * columns + 0.4, 2.9 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axes, (title, metrics) in zip(grid.flat, panels.items(), strict=False):
        for name in ("virtual", "agop", "agop_sqrt"):
            values = [run[f"rho_{name}"] for run in metrics]
            draw_mean_and_spread(axes, metrics[0]["epoch"], values, COLORS[name], LABELS[name])
        axes.set_title(title)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("correlation ρ")
    for index, axes in enumerate(grid.flat[: len(panels)]):
        if index + columns >= len(panels):
            axes.set_xlabel("epoch")
            axes.tick_params(labelbottom=True)
    grid[0, 0].set_ylim(min(0, grid[0, 0].get_ylim()[0]), 1.03)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _scatter_roll(axes: Axes, points: ArrayLike, target: ArrayLike, title: str) -> PathCollection:
    x, y = np.asarray(points).T
    drawn = axes.scatter(x, y, c=np.ravel(target), s=5, cmap=TARGET_MAP)
    axes.set(title=title, xlabel="$h_1$", ylabel="$h_2$", aspect="equal")
    return drawn


def plot_unrolling(snapshots: dict[str, ArrayLike], target: ArrayLike, grams: dict[str, ArrayLike]) -> Figure:
    """Draw the virtually moved roll at three moments, and the ellipses of the Gram matrices in a fourth panel."""
    figure, grid = plt.subplots(2, 2, figsize=(7.6, 6.4))
    panels = grid.flat
    for axes, (title, points) in zip(panels, snapshots.items(), strict=False):
        drawn = _scatter_roll(axes, points, target, title)
    figure.colorbar(drawn, ax=grid[:, 1], label="target y", shrink=0.6)
    shades = plt.get_cmap("Greys")(np.linspace(0.35, 1, len(grams)))
    for shade, (label, gram) in zip(shades, grams.items(), strict=True):
        panels[-1].plot(*gram_ellipse(gram), color=shade, label=label)
    panels[-1].set(title="Gram matrix, as an ellipse", xlabel="$h_1$", ylabel="$h_2$", aspect="equal")
    panels[-1].legend(loc="center")
    return figure


def plot_unrolling_over_time(
    steps: ArrayLike,
    losses: ArrayLike,
    linearity: ArrayLike,
    residual: ArrayLike,
    controls: dict[str, ArrayLike],
) -> Figure:
    """Draw R² of the target from the moved points over steps beside the loss: rows are seeds, each control is one."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.0))
    for row in np.atleast_2d(losses):
        left.semilogy(steps, row, color=COLORS["gram"], alpha=0.8)
    left.set(xlabel="step", ylabel="mean squared error", title="training loss, a line a seed")
    for index, (points, summed) in enumerate(zip(np.atleast_2d(linearity), np.atleast_2d(residual), strict=True)):
        label = None if index else "target from the moved points"
        right.plot(steps, points, color=COLORS["virtual"], label=label)
        label = None if index else "target from the summed residuals"
        right.plot(steps, summed, "--", color=COLORS["agop_sqrt"], label=label)
    for style, (label, values) in zip((":", "-."), controls.items(), strict=False):
        right.plot(steps, values, style, color=COLORS["control"], label=label)
    right.set(xlabel="step", ylabel="R² of linear regression", title="how linear the target has become")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return figure


def plot_stationarity(gradient_norms: ArrayLike, errors: dict[str, ArrayLike], bounds: dict[str, ArrayLike]) -> Figure:
    """Draw the relative error of the features-at-convergence identity over the norm of the gradient, and its bound."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    colors = dict(zip(errors, (COLORS["virtual"], COLORS["agop"], COLORS["gap"]), strict=False))
    for name, values in errors.items():
        axes.loglog(gradient_norms, values, "o", color=colors[name], label=name, markersize=4)
        axes.loglog(gradient_norms, bounds[name], "--", color=colors[name], linewidth=1, label=f"bound for {name}")
    axes.set(xlabel="norm of the gradient, weight decay included", ylabel="relative error of the identity")
    axes.invert_xaxis()
    axes.legend()
    return figure


def plot_idea(
    points: ArrayLike, gradient: ArrayLike, target: ArrayLike, before: ArrayLike, after: ArrayLike, virtual: ArrayLike
) -> Figure:
    """Draw the book's idea: features under a virtual update, and the Gram matrix that moves as they would.

    Args:
        points: (n, 2) features.
        gradient: (n, 2) the loss's gradient with respect to them, as long as it is to be drawn.
        target: (n,) the colours.
        before: (2, 2) the Gram matrix before a stretch of real training.
        after: (2, 2) the Gram matrix after it.
        virtual: (2, 2) ``before`` plus the summed virtual covariance shift.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.1))
    points, gradient = np.asarray(points), np.asarray(gradient)
    drawn = _scatter_roll(left, points, target, "the step the features do not take: $-\\eta\\,\\partial L/\\partial H$")
    some = np.argsort(target)[:: max(1, len(points) // 40)]  # more arrows would hide each other
    arrows = {"color": "#444444", "angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006}
    left.quiver(*points[some].T, *-gradient[some].T, **arrows)
    left.update_datalim((points - gradient)[some])
    left.autoscale_view()
    figure.colorbar(drawn, ax=left, label="target", shrink=0.85)
    right.plot(*gram_ellipse(before), color="#999999", label="$W^\\top W$ before training")
    right.plot(*gram_ellipse(after), color=COLORS["gram"], linewidth=3, label="$W^\\top W$ after training")
    right.plot(*gram_ellipse(virtual), "--", color=COLORS["agop_sqrt"], label="before + virtual covariance shift")
    right.set(title="the Gram matrix moves as if they had", xlabel="$h_1$", ylabel="$h_2$", aspect="equal")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    return figure
