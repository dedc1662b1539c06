"""What every figure of the book must have."""

import matplotlib as mpl

mpl.use("Agg")

from collections.abc import Callable

from matplotlib.figure import Figure

from gramlin import figures


def check_axes_and_legend(draw: Callable[[], Figure]) -> None:
    """The figure says what its axes are, and tells its lines apart."""
    figures.use_style()
    figure = draw()
    figure.canvas.draw()
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]
    assert panels
    for axes in panels:
        if axes.get_lines():
            assert axes.get_xlabel() or axes.get_shared_x_axes().get_siblings(axes) != [axes]
    assert any(axes.get_xlabel() for axes in panels)
    assert any(axes.get_ylabel() for axes in panels)
    named = [label for axes in panels for label in axes.get_yticklabels() if "only" in label.get_text()]
    assert figure.legends or named or any(axes.get_legend() for axes in panels)
    mpl.pyplot.close(figure)
