"""The book's one look, and what several chapters draw with; every figure is a function of results, and is returned."""

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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


def grid_of_panels(panels: int, *, share: bool = False) -> tuple[Figure, np.ndarray]:
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


def draw_mean_and_spread(
    axes: Axes, x: ArrayLike, rows: ArrayLike, color: ColorType, label: str, *, marker: str = "o", log: bool = False
) -> None:
    """Draw the mean ± 2 sd over rows, with ``log`` of their logarithm; of one row, the row."""
    rows, shown = (np.log(rows), np.exp) if log else (np.asarray(rows), np.asarray)
    mean = rows.mean(axis=0)
    axes.plot(x, shown(mean), marker=marker, color=color, label=label, markersize=3)
    if len(rows) > 1:
        spread = 2 * rows.std(axis=0, ddof=1)
        axes.fill_between(x, shown(mean - spread), shown(mean + spread), color=color, alpha=0.2, linewidth=0)


def colors_in_order(names: Sequence[str], colormap: str = DEPTH_MAP) -> dict[str, tuple[float, float, float, float]]:
    """Colours from the first (dark) to the last (light): layers from the input, or β from the smallest."""
    shades = plt.get_cmap(colormap)(np.linspace(0, 0.88, len(names)))
    return {name: tuple(shade) for name, shade in zip(names, shades, strict=True)}


def gram_ellipse(gram: ArrayLike) -> np.ndarray:
    """The points h = G^{1/2}u, |u| = 1: long where the weight stretches features most."""
    values, vectors = np.linalg.eigh(np.asarray(gram))
    angle = np.linspace(0, 2 * np.pi, 200)
    points: np.ndarray = vectors @ (np.sqrt(values)[:, None] * (vectors.T @ np.stack([np.cos(angle), np.sin(angle)])))
    return points


def after_the_start(epochs: ArrayLike, rows: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The course without epoch 0, for which a logarithmic axis has no place."""
    epochs, rows = np.asarray(epochs), np.asarray(rows)
    return epochs[epochs > 0], rows[:, epochs > 0]


def mark_epochs(axes: Axes, epochs: Sequence[float]) -> None:
    """Mark epochs by dotted lines."""
    for epoch in epochs:
        axes.axvline(epoch, color=COLORS["theory"], linestyle=":", linewidth=1)


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
    figure, grid = grid_of_panels(len(panels), share=log_values)
    labels: dict[str, Artist] = {}
    # A panel that lacks some of the lines keeps the colours of the fullest.
    fullest = max(panels.values(), key=len, default={})
    for axes, (title, layers) in zip(grid.flat, panels.items(), strict=False):
        colors = colors_in_order(list(fullest if set(layers) <= set(fullest) else layers), colormap)
        for name, (epochs, rows) in layers.items():
            epochs, rows = after_the_start(epochs, rows) if log_epochs else (epochs, rows)
            draw_mean_and_spread(axes, epochs, rows, colors[name], name, marker="", log=log_values)
            if dashed:
                epochs, rows = dashed[title][name]
                axes.plot(epochs, np.mean(np.asarray(rows), axis=0), "--", color=colors[name], linewidth=1.2)
        axes.set(title=title, xlabel="epoch")
        mark_epochs(axes, marks)
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
