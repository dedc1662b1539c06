"""Metrics in inference mode, copied, merged, loaded and drawn: nothing that was added or counted is lost."""

import copy
import itertools
import pickle
from contextlib import nullcontext

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

import gramlin
from gramlin import Moments, NeuralCollapse, TargetLinearity
from gramlin.linearity import HeldOut
from tests.drawing import tensors

N, D, K = 40, 5, 3
METRICS = {"linearity": lambda: TargetLinearity(num_classes=K), "collapse": lambda: NeuralCollapse(K)}
CLOSE = 1e-9  # two orders of the same float64 sums


def data(n: int = N):
    (H,) = tensors(3, (n, D))
    return H, torch.arange(n) % K


def value(metric) -> float:
    figures = metric.compute()
    return (figures["nc1"] if isinstance(figures, dict) else figures).item()


def merged(metric, fresh):
    other = fresh()
    other.merge_state(metric)
    return other


def started_again(metric, fresh):
    rows, labels = data()
    metric.reset()
    metric.update(rows[:10], labels[:10])
    return metric


def loaded(metric, fresh):
    metric.persistent(True)
    other = fresh()
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    return other


BETWEEN = {
    "nothing": lambda metric, fresh: metric,
    "deepcopy": lambda metric, fresh: copy.deepcopy(metric),
    "clone": lambda metric, fresh: metric.clone(),
    "pickle": lambda metric, fresh: pickle.loads(pickle.dumps(metric)),
    "merge": merged,
    "reset": started_again,
    "load": loaded,
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", METRICS)
def test_inference_mode_may_come_and_go_at_any_point(name, between):
    fresh, (H, y) = METRICS[name], data()
    whole = fresh()
    whole.update(H, y)
    expected = value(whole)
    parts = list(zip(H.split([10, N - 10]), y.split([10, N - 10]), strict=True))
    for inside in itertools.product([False, True], repeat=5):
        made, first, middle, second, last = (torch.inference_mode if each else nullcontext for each in inside)
        with made():
            metric = fresh()
        with first():
            metric.update(*(each.clone() for each in parts[0]))
        with middle():
            metric = BETWEEN[between](metric, fresh)
        with second():
            metric.update(*(each.clone() for each in parts[1]))
        with last():
            assert value(metric) == pytest.approx(expected, abs=CLOSE), inside
        assert metric.update_count == 2


def test_moments_and_held_out_scores_may_leave_inference_mode():
    H, y = data()
    fit = gramlin.fit_linear(H, y)
    with torch.inference_mode():
        moments, held_out = Moments(), HeldOut(fit)
        moments.update(H[:25].clone(), y[:25].clone())
        held_out.update(H[:25].clone(), y[:25].clone())
        moments = copy.deepcopy(moments)
    other = Moments()
    other.merge(moments)
    for each in (moments, other, held_out):
        each.update(H[25:], y[25:])
    assert held_out.score().item() == pytest.approx(fit.score(H, y).item(), abs=CLOSE)
    for each in (moments, other):
        assert gramlin.linearity.linearity_of(each).item() == pytest.approx(gramlin.target_linearity(H, y).item())


# ---- counting ----


@pytest.mark.parametrize("name", METRICS)
def test_updates_are_counted_through_merging_loading_and_what_is_refused(name, unchecked):
    fresh, (H, y) = METRICS[name], data()
    one, two = fresh(), fresh()
    for rows, labels in zip(H.split(8), y.split(8), strict=True):
        one.update(rows, labels)
    two(H, y)
    assert (one.update_count, two.update_count) == (5, 1)
    two.merge_state(one.metric_state)
    assert two.update_count == 6
    two.merge_state(one)
    assert two.update_count == 11
    assert loaded(two, fresh).update_count == 11
    assert loaded(loaded(two, fresh), fresh).update_count == 11
    assert loaded(fresh(), fresh).update_count == 0
    checked = {"linearity": unchecked.TargetLinearity, "collapse": unchecked.NeuralCollapse}[name](num_classes=K)
    checked.update(H, y)
    for refused in (y.double()[:3], y + 1, [1, 2], None):
        with pytest.raises((ValueError, TypeError)):
            checked.update(H, refused)
    assert checked.update_count == 1
    assert checked.compute()


# ---- what does not fit ----


def test_merging_refuses_by_name_what_does_not_fit(unchecked):
    g, (H, y) = unchecked, data()
    ours, other = g.TargetLinearity(num_classes=3), g.TargetLinearity(num_classes=4)
    ours.update(H, y)
    other.update(H, y)
    with pytest.raises(ValueError, match="num_classes is 4 there, 3 here: they must agree"):
        ours.merge_state(other)
    with pytest.raises(ValueError, match="num_classes is 4 there, 3 here"):
        g.NeuralCollapse(3).merge_state(g.NeuralCollapse(4))
    free = g.TargetLinearity()
    free.update(H, y + 2)
    with pytest.raises(ValueError, match="there are 5 classes to be added, num_classes is 3"):
        ours.merge_state(free.metric_state)
    wide = g.TargetLinearity(num_classes=3)
    wide.update(torch.cat([H, H], dim=1), y)
    with pytest.raises(ValueError, match="features have width 10, earlier ones 5"):
        ours.merge_state(wide)
    real = g.TargetLinearity()
    real.update(H, H)
    with pytest.raises(ValueError, match="targets are real numbers, earlier ones classes"):
        ours.merge_state(real.metric_state)
    with pytest.raises(ValueError, match="TargetLinearity"):
        ours.merge_state(g.NeuralCollapse(3))
    assert ours.update_count == 1
    assert value(ours) == pytest.approx(g.target_linearity(H, y).item())


def test_merging_refuses_a_state_that_is_not_one(unchecked):
    H, y = data()
    ours = unchecked.TargetLinearity()
    ours.update(H, y)
    state = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in ours.metric_state.items()}
    with pytest.raises(ValueError, match="the state lacks within; pass the metric, or its metric_state"):
        ours.merge_state({name: each for name, each in state.items() if name != "within"})
    with pytest.raises(ValueError, match=r"the state 'within' is torch.float32; pass it as it was, torch.float64"):
        ours.merge_state(state | {"within": state["within"].float()})
    with pytest.raises(ValueError, match="the state 'counts' is list"):
        ours.merge_state(state | {"counts": [1, 2]})
    assert value(ours) == pytest.approx(unchecked.target_linearity(H, y).item())


def test_a_state_of_another_version_is_not_loaded(unchecked):
    metric = unchecked.TargetLinearity()
    metric.persistent(True)
    state = metric.state_dict()
    state["layout"] = state["layout"][:3]
    with pytest.raises(ValueError, match="saved by another version of gramlin; add the data up again"):
        metric.load_state_dict(state)


def test_moments_of_different_classes_do_not_merge(unchecked):
    H, y = data()
    three, four = unchecked.Moments(3), unchecked.Moments(4)
    for each in (three, four):
        each.update(H, y)
    with pytest.raises(ValueError, match="num_classes is 4 there, 3 here"):
        three.merge(four)
    assert three.count == N


# ---- drawing ----


@pytest.fixture
def _no_screen():
    before = mpl.get_backend()
    mpl.use("agg")
    yield
    plt.close("all")
    mpl.use(before)


@pytest.mark.usefixtures("_no_screen")
@pytest.mark.parametrize("name", METRICS)
def test_metrics_draw_one_value_and_a_sequence_over_epochs(name):
    metric, (H, y) = METRICS[name](), data()
    values = [metric(H + epoch, y) for epoch in range(3)]
    figure, axes = metric.plot()
    shown = [line.get_ydata() for line in axes.get_lines()]
    assert figure.axes == [axes]
    assert any(value(metric) == pytest.approx(float(y[0])) for y in shown if len(y) == 1)
    _, axes = metric.plot(values)
    curves = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) == 3]
    assert len(curves) == (1 if name == "linearity" else len(values[0]))
    _, given = plt.subplots()
    assert metric.plot(values, ax=given)[1] is given


@pytest.mark.usefixtures("_no_screen")
def test_the_values_of_several_outputs_are_drawn():
    metric, (H, _) = TargetLinearity(per_output=True), data()
    metric.update(H, H[:, :2].square())
    _, axes = metric.plot()
    assert len([line for line in axes.get_lines() if len(line.get_ydata()) == 1]) == 2
