"""The book's one look; every figure is a function of results, and returns the figure it drew."""

import itertools
import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from matplotlib.typing import ColorType
from numpy.typing import ArrayLike

# Okabe and Ito's colours, which people with colour-blindness tell apart; the same thing has the same colour throughout.
COLORS = {
    "gram": "#000000",
    "virtual": "#0072B2",
    "agop": "#D55E00",
    "agop_sqrt": "#E69F00",
    "gap": "#CC79A7",
    "theory": "#767676",
    "control": "#56B4E9",
    "sgd": "#000000",
    "whitened": "#009E73",
    "newton-schulz": "#E69F00",
    "rotation": "#CC79A7",
    "1 − TL": "#0072B2",
    "NC1": "#000000",
    "NC2 equinorm": "#E69F00",
    "NC2 equiangular": "#D55E00",
    "NC2 simplex": "#F0E442",
    "NC3": "#009E73",
    "NC4": "#CC79A7",
}
LABELS = {
    "virtual": "virtual covariance shift",
    "agop": "AGOP",
    "agop_sqrt": "square root of AGOP",
    "sgd": "SGD",
    "whitened": "whitened: the Gram shift only",
    "newton-schulz": "whitened by ten-step Newton–Schulz",
    "rotation": "the rotation only",
    "rotation and length": "the rotation and the length only",
    "gram in hidden layers only": "Gram shift in hidden layers, rotation in the readout",
    "rotation in hidden layers": "rotation in hidden layers, plain readout",
    "readout and biases": "biases only in hidden layers, plain readout",
    "shortened": "plain steps of the whitened ones' length",
}
TARGET_MAP = "viridis"
DEPTH_MAP = "viridis"
BETA_MAP = "plasma"


def use_style() -> None:
    """Set matplotlib to the book's look; in a notebook, two pixels drawn for one shown, for sharp screens and print."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if hasattr(shell, "kernel"):
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance(parent=shell).figure_formats = {"retina"}
    plt.rcParams.update(
        {
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 10,
            "figure.constrained_layout.use": True,
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "font.size": 10,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.8,
            "savefig.facecolor": "white",
        }
    )


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


def _mean_and_spread(
    axes: Axes, x: ArrayLike, rows: ArrayLike, color: ColorType, label: str, *, marker: str = "o", log: bool = False
) -> None:
    """Draw the mean ± 2 sd over rows, with ``log`` of their logarithm; of one row, the row."""
    rows, shown = (np.log(rows), np.exp) if log else (np.asarray(rows), np.asarray)
    mean = rows.mean(axis=0)
    axes.plot(x, shown(mean), marker=marker, color=color, label=label, markersize=3)
    if len(rows) > 1:
        spread = 2 * rows.std(axis=0, ddof=1)
        axes.fill_between(x, shown(mean - spread), shown(mean + spread), color=color, alpha=0.2, linewidth=0)


def plot_correlations(panels: dict[str, Sequence[dict]]) -> Figure:
    """Draw correlations with the Gram shift over epochs: a panel a title, mean ± 2 sd over its runs' metrics."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.2 * columns + 0.4, 2.9 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axes, (title, metrics) in zip(grid.flat, panels.items(), strict=False):
        for name in ("virtual", "agop", "agop_sqrt"):
            values = [run[f"rho_{name}"] for run in metrics]
            _mean_and_spread(axes, metrics[0]["epoch"], values, COLORS[name], LABELS[name])
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


def _gram_ellipse(gram: ArrayLike) -> np.ndarray:
    """The points h = G^{1/2}u, |u| = 1: long where the weight stretches features most."""
    values, vectors = np.linalg.eigh(np.asarray(gram))
    angle = np.linspace(0, 2 * np.pi, 200)
    return vectors @ (np.sqrt(values)[:, None] * (vectors.T @ np.stack([np.cos(angle), np.sin(angle)])))


def _scatter_roll(axes: Axes, points: ArrayLike, target: ArrayLike, title: str):
    points = np.asarray(points)
    drawn = axes.scatter(*points.T, c=np.ravel(target), s=5, cmap=TARGET_MAP)
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
        panels[-1].plot(*_gram_ellipse(gram), color=shade, label=label)
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
        ellipses.plot(*_gram_ellipse(weight.T @ weight), color=color, linewidth=width, linestyle=style)
    ellipses.plot(*_gram_ellipse(kept.T @ kept), color=COLORS["whitened"], linestyle="--")
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
    figure, grid = _grid(len(panels))
    labels: dict = {}
    for axes, (title, methods) in zip(grid.flat, panels.items(), strict=False):
        for method, rows in methods.items():
            percent = 100 * np.asarray(rows)
            color = COLORS.get(method, COLORS["control"])
            _mean_and_spread(axes, np.arange(1, percent.shape[1] + 1), percent, color, LABELS.get(method, method))
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
    axes.axvline(100 - 100 * np.mean(first), color=COLORS["theory"], linestyle="--", linewidth=1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(accuracies)), [LABELS.get(method, method) for method in accuracies])
    axes.invert_yaxis()
    axes.set(xlabel="test error after the last epoch, % (log scale)", ylabel="kept of each step")
    return figure


def _colors_in_order(names: Sequence[str], colormap: str = DEPTH_MAP) -> dict[str, tuple]:
    """Colours from the first (dark) to the last (light): layers from the input, or β from the smallest."""
    shades = plt.get_cmap(colormap)(np.linspace(0, 0.88, len(names)))
    return {name: tuple(shade) for name, shade in zip(names, shades, strict=True)}


def _grid(panels: int, *, share: bool = False) -> tuple[Figure, np.ndarray]:
    """Axes for so many panels, three in a row unless one, two or four; with ``share``, one vertical scale a row."""
    columns, width, height = (min(2, panels), 3.5, 2.7) if panels in (1, 2, 4) else (3, 2.6, 2.2)
    rows = -(-panels // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(width * columns + 0.4, height * rows + 0.6),
        squeeze=False,
        sharey="row" if share else False,
    )
    for axes in grid.flat[panels:]:
        axes.set_visible(False)
    return figure, grid


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
    surrogate = np.asarray(surrogate)
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


def plot_layers_over_training(
    panels: dict[str, dict[str, tuple[ArrayLike, ArrayLike]]],
    dashed: dict[str, dict[str, tuple[ArrayLike, ArrayLike]]] | None = None,
    *,
    ylabel: str,
    log_values: bool = False,
    log_epochs: bool = False,
    marks: Sequence[float] = (),
    colormap: str = DEPTH_MAP,
) -> Figure:
    """Draw a measure of every layer over epochs, mean ± 2 sd over runs: a panel a title, a colour a layer.

    On a logarithmic axis mean and sd are those of the logarithm, and epoch 0 has no place. Panels in a row share the
    vertical axis if it is logarithmic.

    Args:
        panels: by title, by layer from the input on: the epochs, and a row of values a run.
        dashed: more of the same, for a second kind of line in the same panels; without spread.
        ylabel: what is drawn.
        log_values: whether the vertical axis is logarithmic.
        log_epochs: whether the horizontal one is.
        marks: epochs to be marked by dotted lines.
        colormap: from the first layer to the last.
    """
    figure, grid = _grid(len(panels), share=log_values)
    labels: dict = {}
    # A panel that lacks some of the lines keeps the colours of the fullest.
    fullest = max(panels.values(), key=len, default={})
    for axes, (title, layers) in zip(grid.flat, panels.items(), strict=False):
        colors = _colors_in_order(list(fullest if set(layers) <= set(fullest) else layers), colormap)
        for name, (epochs, rows) in layers.items():
            epochs, rows = _after_the_start(epochs, rows) if log_epochs else (epochs, rows)
            _mean_and_spread(axes, epochs, rows, colors[name], name, marker="", log=log_values)
            if dashed:
                epochs, rows = dashed[title][name]
                axes.plot(epochs, np.mean(rows, axis=0), "--", color=colors[name], linewidth=1.2)
        axes.set(title=title, xlabel="epoch")
        _mark(axes, marks)
        if log_values:
            axes.set_yscale("log")
        if log_epochs:
            axes.set_xscale("log")
        labels |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    labels = {name: labels[name] for name in [*fullest, *labels] if name in labels}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=min(6, len(labels)))
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
    figure, grid = _grid(len(panels), share=share)
    for axes, (title, moments) in zip(grid.flat, panels.items(), strict=False):
        shades = plt.get_cmap("Greys")(np.linspace(0.35, 1, len(moments)))
        for shade, (moment, rows) in zip(shades, moments.items(), strict=True):
            _mean_and_spread(axes, np.arange(len(layers)), rows, tuple(shade), moment)
        axes.set_xticks(range(len(layers)), layers)
        axes.set(title=title, xlabel="features")
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _after_the_start(epochs: ArrayLike, rows: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The course without epoch 0, for which a logarithmic axis has no place."""
    epochs, rows = np.asarray(epochs), np.asarray(rows)
    return epochs[epochs > 0], rows[:, epochs > 0]


def _plain_ticks(axes: Axes) -> None:
    """Label logarithmic axes at powers of ten, and at 2 and 5 times them where fewer than two decades are shown."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _mark(axes: Axes, epochs: Sequence[float]) -> None:
    for epoch in epochs:
        axes.axvline(epoch, color=COLORS["theory"], linestyle=":", linewidth=1)


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
    figure, grid = _grid(len(panels), share=True)
    for axes, (title, measures) in zip(grid.flat, panels.items(), strict=False):
        for name, (epochs, rows) in measures.items():
            _mean_and_spread(axes, *_after_the_start(epochs, rows), COLORS[name], name, marker="", log=True)
            axes.lines[-1].set_linewidth(2.4 if name in list(measures)[:2] else 1.1)
        axes.set(title=title, xlabel="epoch", xscale="log", yscale="log")
        _mark(axes, marks)
    for axes in grid[:, 0]:
        axes.set(ylabel="0 at collapse", ylim=(max(axes.get_ylim()[0], floor), None))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


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
    colors = _colors_in_order(list(points))
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
    simplex = -1 / (len(next(iter(cosines.values()))) - 1)
    figure, row = plt.subplots(1, len(cosines), figsize=(2.7 * len(cosines) + 0.8, 3), sharey=True, squeeze=False)
    for axes, (title, matrix) in zip(row.flat, cosines.items(), strict=True):
        drawn = axes.imshow(np.asarray(matrix), vmin=simplex - 0.5, vmax=simplex + 0.5, cmap="PuOr")
        axes.set(title=title, xlabel="class")
        axes.grid(visible=False)
        axes.set_xticks(range(0, len(matrix), 3))
    row[0, 0].set(ylabel="class", yticks=range(0, len(cosines[title]), 3))
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
    colors = _colors_in_order(list(fullest | {beta: None for betas in points.values() for beta in betas}), BETA_MAP)
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
    height, width = next(iter(strips.values())).shape[-2:]
    figure, rows = plt.subplots(len(strips), 1, figsize=(7.6, 0.3 + 0.82 * len(strips)), squeeze=False)
    for axes, (label, images) in zip(rows.flat, strips.items(), strict=True):
        images = np.asarray(images)
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
    figure, grid = _grid(len(panels))
    palette = (COLORS["virtual"], COLORS["agop"], COLORS["whitened"])
    for axes, (measure, sets) in zip(grid.flat, panels.items(), strict=False):
        for (name, (betas, rows)), color in zip(sets.items(), itertools.cycle(palette), strict=False):
            _mean_and_spread(axes, betas, rows, color, name)
        axes.set(title=measure, xlabel="β", xscale="log")
    grid[0, 0].set_ylabel("at the end of training")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
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
    right.plot(*_gram_ellipse(before), color="#999999", label="$W^\\top W$ before training")
    right.plot(*_gram_ellipse(after), color=COLORS["gram"], linewidth=3, label="$W^\\top W$ after training")
    right.plot(*_gram_ellipse(virtual), "--", color=COLORS["agop_sqrt"], label="before + virtual covariance shift")
    right.set(title="the Gram matrix moves as if they had", xlabel="$h_1$", ylabel="$h_2$", aspect="equal")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    return figure
