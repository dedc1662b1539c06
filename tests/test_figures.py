"""Every figure says what its axes are, and tells its lines apart."""

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

from gramlin import figures

x = np.linspace(0.1, 1, 5)
roll = np.random.default_rng(0).normal(size=(20, 2))
run = {"epoch": [1, 2], "rho_virtual": [1.0, 0.9], "rho_agop": [0.5, 0.6], "rho_agop_sqrt": [0.4, 0.5]}
# By data set and network: epochs, and of two runs NC1 and 1 − TL.
COURSES = np.array([[9, 1.6, 0.8, 0.4], [9, 0.4, 0.2, 0.1]]), np.array([[1, 0.2, 0.1, 0.05]] * 2)
PATHS = {"digits": {"MLP": (np.arange(4), *COURSES)}}
FIGURES = {
    "one step": lambda: figures.plot_one_step(x, x, x**2, x**2),
    "fixed time": lambda: figures.plot_fixed_time(x, x),
    "correlations": lambda: figures.plot_correlations({"one": [run, run], "other": [run], "a": [run], "b": [run]}),
    "unrolling": lambda: figures.plot_unrolling(
        {"start": roll, "end": roll}, roll[:, 0], {"start": np.eye(2), "end": np.diag([1.0, 2.0])}
    ),
    "unrolling over time": lambda: figures.plot_unrolling_over_time(x, [x, x], [x, x], [x, x], {"one": x, "two": x}),
    "stationarity": lambda: figures.plot_stationarity(x, {"linear1": x}, {"linear1": x}),
    "step in the plane": lambda: figures.plot_step_in_the_plane(np.eye(2), 2 * np.eye(2), 2 * np.eye(2)),
    "solver curve": lambda: figures.plot_solver_curve(x, x, {"10×256": x, "256×256": x**9}),
    "accuracy curves": lambda: figures.plot_accuracy_curves(
        {"one": {"sgd": [x, x], "whitened": [x]}, "b": {"sgd": [x]}}
    ),
    "Gram errors": lambda: figures.plot_gram_errors({"exact": (x, [x, x])}, {"SGD": [x], "exact": [x, x]}),
    "halves": lambda: figures.plot_halves({"sgd": [0.9, 0.91], "rotation": [0.5], "readout only": [0.4]}),
    "growth": lambda: figures.plot_growth(x, x, {"exponential": x, "logistic": x}, x, 0.5, 1.0),
    "layers over training": lambda: figures.plot_layers_over_training(
        {"one": {"h1": (x, [x, x]), "h2": (x, [x])}}, {"one": {"h1": (x, [x]), "h2": (x, [x])}}, ylabel="TL"
    ),
    "depth profiles": lambda: figures.plot_depth_profiles(
        {title: {"start": [x, x], "end": [x]} for title in "abc"}, list("input"), ylabel="TL"
    ),
    "measures": lambda: figures.plot_measures(
        {"one": {"NC1": (x, [x, x]), "1 − TL": (x, [x])}, "b": {"NC1": (x, [x])}}
    ),
    "bound": lambda: figures.plot_bound({"pixels": (x, x / 3), "h1": (x / 2, x / 4)}, PATHS, 0.9, mark=2.0),
    "features in the plane": lambda: figures.plot_features_in_the_plane(
        {"start": (roll[:4], np.eye(2)), "end": (roll[4:8], np.eye(2))}, [0, 1, 0, 1], ["cat", "dog"]
    ),
    "shear": lambda: figures.plot_shear({"before": roll, "after": 2 * roll}, np.arange(20) % 2),
    "over beta": lambda: figures.plot_over_beta({"one": {"β = 1": (x, [x, x]), "β = 4": (x, [x])}}, ylabel="TL"),
    "gap": lambda: figures.plot_gap(
        {"digits": {"β = 1": dict.fromkeys(("nonlinear", "inputs", "gap", "ratio"), x / 4)}}, 0.8
    ),
    "gap bounds": lambda: figures.plot_gap_bounds(x / 2, x),
    "tradeoff": lambda: figures.plot_tradeoff({"TL": {"one": (x, [x, x]), "b": (x, [x])}, "KL": {"one": (x, [x])}}),
    "idea": lambda: figures.plot_idea(roll, roll, roll[:, 0], np.eye(2), np.eye(2), np.eye(2)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_labelled_and_lines_are_in_a_legend(name):
    figures.use_style()
    figure = FIGURES[name]()
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


def test_the_ellipse_of_a_gram_matrix_has_its_axes():
    points = figures._gram_ellipse(np.diag([4.0, 9.0]))
    assert np.abs(points).max(axis=1) == pytest.approx([2, 3], rel=1e-3)


def test_cosines_of_class_means_are_on_one_scale():
    figure = figures.plot_class_means({"start": np.eye(4), "end": -np.eye(4)})
    images = [axes.get_images()[0] for axes in figure.axes if axes.get_images()]
    assert {image.get_clim() for image in images} == {(-1 / 3 - 0.5, -1 / 3 + 0.5)}
    white = images[0].to_rgba(np.array([[-1 / 3]]), norm=True)  # a simplex
    assert (white[0, 0, :3] > 0.95).all()
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["class", "class"]
    mpl.pyplot.close(figure)


def test_the_bound_is_above_what_it_bounds():
    figure = figures.plot_bound({"h1": (np.array([0.5]), np.array([0.1]))}, PATHS, 0.9, mark=2.0)
    for axes in figure.axes:
        curve = next(line for line in axes.get_lines() if line.get_label() == "bound")
        assert np.interp(0.5, *curve.get_data()) == pytest.approx(0.5 / 1.4, rel=1e-2)
    mpl.pyplot.close(figure)


def test_a_path_leaves_out_the_start_and_marks_the_last_moment_before_the_drop_and_the_end():
    figure = figures.plot_bound({"h1": (np.array([0.5]), np.array([0.1]))}, PATHS, 0.9, mark=2.0)
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[1].get_lines()}
    path = lines["MLP"]
    assert path == pytest.approx(np.array([[0.8, 0.2], [0.4, 0.1], [0.2, 0.05]]))  # geometric means over two runs
    assert lines["_ring"] == pytest.approx(path[[0]])
    assert lines["_end"] == pytest.approx(path[[2]])
    mpl.pyplot.close(figure)


def test_strips_are_rows_of_images_from_left_to_right():
    steps = np.stack([np.full((1, 4, 5), value) for value in (0.0, 0.5, 1.0)])
    figure = figures.plot_strips({"pixels": steps, "β = 1": steps})
    rows = [axes.get_images()[0].get_array() for axes in figure.axes]
    assert [row.shape[:2] for row in rows] == [(4, 15)] * 2
    assert rows[0][0, ::5].ravel().tolist() == [0.0, 0.5, 1.0]
    assert [axes.get_yticklabels()[0].get_text() for axes in figure.axes] == ["pixels", "β = 1"]
    mpl.pyplot.close(figure)
