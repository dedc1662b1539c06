"""Every figure says what its axes are, and tells its lines apart: those that several chapters draw."""

import numpy as np
import pytest

from gramlin import figures
from tests.looks import check_axes_and_legend

x = np.linspace(0.1, 1, 5)
FIGURES = {
    "layers over training": lambda: figures.plot_layers_over_training(
        {"one": {"h1": (x, [x, x]), "h2": (x, [x])}}, {"one": {"h1": (x, [x]), "h2": (x, [x])}}, ylabel="TL"
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    check_axes_and_legend(FIGURES[name])


def test_the_ellipse_of_a_gram_matrix_has_its_axes():
    points = figures.gram_ellipse(np.diag([4.0, 9.0]))
    assert np.abs(points).max(axis=1) == pytest.approx([2, 3], rel=1e-3)
