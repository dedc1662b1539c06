"""Chapter 1's laws: the Feature Learning Equation, Gram and virtual covariance shifts, AGOP."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gramlin import (
    VirtualCovariance,
    agop,
    feature_learning_sides,
    gram_shift,
    matrix_correlation,
    second_order_gap,
    virtual_covariance_shift,
    virtual_update,
    weight_gram,
)
from gramlin.gram import relative_error
from gramlin.hooks import input_rows, output_rows, record, weight_matrix
from tests.drawing import few, seeds, tensors

# Identities are checked in float64 against the norm of the sides: a few hundred roundings of 1e-16.
TIGHT = 1e-12

sizes = st.integers(1, 7)


def assert_equation_holds(model: nn.Module, inputs: torch.Tensor, loss_of) -> None:
    """Left from autograd's weight.grad, right from what the layers saw, for every layer of the model."""
    model.zero_grad()
    with record(model) as seen:
        loss_of(model(inputs)).backward()
    for name, each in seen.items():
        left, right = feature_learning_sides(each)
        scale = left.norm() + right.norm()
        assert scale > 0, name
        assert (left - right).norm() <= TIGHT * scale, name


ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Tanh, nn.Identity]


@few
@given(
    n=sizes,
    d=sizes,
    k=sizes,
    classes=st.integers(2, 5),
    bias=st.booleans(),
    act=st.sampled_from(ACTIVATIONS),
    seed=seeds,
)
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_equation_holds_in_any_mlp(loss, n, d, k, classes, bias, act, seed):
    torch.manual_seed(seed)
    # The leading linear map keeps ReLU from switching every unit off.
    model = nn.Sequential(nn.Linear(d, k, bias), act(), nn.Linear(k, classes, bias)).double()
    inputs, targets = tensors(seed, (n, d), (n, classes))
    model.zero_grad()
    with record(model) as seen:
        out = model(inputs)
        (F.mse_loss(out, targets) if loss == "mse" else F.cross_entropy(out, targets.argmax(1))).backward()
    for each in seen.values():
        left, right = feature_learning_sides(each)
        assert torch.allclose(left, right, rtol=TIGHT, atol=TIGHT)


@few
@given(
    groups=st.integers(1, 3),
    per_group=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    mode=st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
    bias=st.booleans(),
    seed=seeds,
)
def test_equation_holds_in_any_convolution(groups, per_group, kernel, stride, padding, dilation, mode, bias, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(
        groups * per_group[0], groups * per_group[1], kernel, stride, padding, dilation, groups, bias, mode
    ).double()
    (inputs,) = tensors(seed, (3, groups * per_group[0], 9, 8))
    assert_equation_holds(nn.Sequential(conv, nn.Tanh()), inputs, lambda out: out.square().mean())


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_equation_holds_with_named_padding(padding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, (2, 3), padding=padding, dilation=2)).double()
    assert_equation_holds(model, tensors(0, (4, 2, 7, 8))[0], lambda out: out.square().mean())


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(6, 4, (2, 3), stride=2, padding=1, dilation=(1, 2), groups=2, bias=False), nn.Linear(5, 3, bias=False)],
    ids=["grouped-convolution", "linear"],
)
def test_rows_times_weight_is_the_layer(layer):
    # Otherwise the features would not be what the layer multiplies.
    layer = layer.double()
    (inputs,) = tensors(1, (3, 6, 8, 9) if isinstance(layer, nn.Conv2d) else (2, 3, 5))
    with torch.no_grad():
        product = input_rows(layer, inputs) @ weight_matrix(layer.weight, getattr(layer, "groups", 1)).mT
        assert torch.allclose(product, output_rows(layer, layer(inputs)), atol=TIGHT)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x + torch.tanh(self.inner(x))
        return self.head(x + F.relu(self.inner(x), inplace=True))


def test_equation_holds_in_a_residual_block_that_uses_a_layer_twice():
    torch.manual_seed(0)
    assert_equation_holds(Residual().double(), tensors(0, (6, 4))[0], lambda out: out.logsumexp(1).mean())


def test_total_gradient_of_a_skip_connection_breaks_the_equation():
    # The twin that must fail: with x + f(x), the total gradient of the features has the skip's term as well.
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    (inputs,) = tensors(0, (6, 4))
    inputs.requires_grad_()
    (inputs + torch.tanh(layer(inputs))).square().mean().backward()
    left = layer.weight.detach().T @ layer.weight.grad
    assert relative_error(inputs.grad.T @ inputs.detach(), left) > 0.1


def test_wrong_transpose_breaks_the_equation():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    with record(nn.Sequential(layer)) as seen:
        torch.tanh(layer(tensors(0, (6, 4))[0])).mean().backward()
    left, right = feature_learning_sides(seen["0"])
    assert relative_error(right.mT, left) > 0.1


def test_several_backward_passes_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    with record(model) as seen:
        out = model(tensors(0, (6, 4))[0])
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()
    left, right = feature_learning_sides(seen["0"])
    assert torch.allclose(left, right, rtol=TIGHT, atol=TIGHT)


def test_an_unused_call_has_zero_gradient():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    a, b = tensors(0, (2, 4), (5, 4))
    with record(nn.Sequential(layer)) as seen:
        layer(a)
        layer(b).sum().backward()
    assert seen["0"].features.shape == (7, 4)
    assert torch.equal(seen["0"].deltas[:2], torch.zeros(2, 3, dtype=torch.float64))


@few
@given(n=sizes, d=sizes, k=sizes, lr=st.floats(1e-3, 2), seed=seeds)
def test_gram_shift_minus_virtual_shift_is_the_second_order_gap(n, d, k, lr, seed):
    features, deltas, weight = tensors(seed, (n, d), (n, k), (k, d))
    gradient = deltas @ weight
    actual = gram_shift(weight, weight - lr * deltas.T @ features)
    virtual = virtual_covariance_shift(features, gradient, lr)
    gap = second_order_gap(features, deltas, weight, lr)
    scale = 1 + actual.norm() + virtual.norm()
    assert (actual - virtual - gap).norm() <= TIGHT * scale


@few
@given(n=sizes, d=sizes, lr=st.floats(1e-3, 2), seed=seeds)
def test_virtual_shift_is_that_of_the_virtual_update(n, d, lr, seed):
    features, gradient = tensors(seed, (n, d), (n, d))
    moved = virtual_update(features, gradient, lr)
    expected = moved.T @ moved - features.T @ features
    assert torch.allclose(virtual_covariance_shift(features, gradient, lr), expected, rtol=1e-10, atol=1e-10)


def test_gap_falls_as_the_square_of_the_learning_rate():
    features, deltas, weight = tensors(0, (8, 5), (8, 3), (3, 5))
    gaps = []
    for lr in (1e-2, 1e-3):
        actual = gram_shift(weight, weight - lr * deltas.T @ features)
        gaps.append((actual - virtual_covariance_shift(features, deltas @ weight, lr)).norm().item())
    assert math.isclose(gaps[0] / gaps[1], 100, rel_tol=1e-6)


@few
@given(k=sizes, d=sizes, seed=seeds)
def test_gram_is_invariant_to_left_rotation(k, d, seed):
    weight, square = tensors(seed, (k, d), (k, k))
    rotation = torch.linalg.qr(square).Q
    assert torch.allclose(
        weight_gram(rotation @ weight), weight_gram(weight), atol=TIGHT * (1 + weight.norm().item() ** 2)
    )


def test_gram_of_a_convolution_is_that_of_its_patches():
    (weight,) = tensors(0, (6, 2, 3, 4))
    assert weight_gram(weight).shape == (24, 24)
    grouped = weight_gram(weight, groups=3)
    assert grouped.shape == (3, 24, 24)
    assert torch.allclose(grouped.sum(0), weight_gram(weight), atol=TIGHT)


def test_gram_shift_keeps_a_small_step_that_a_difference_loses():
    (weight,) = tensors(0, (30, 20))
    weight, step = weight.float() * 100, 1e-4 * torch.ones(30, 20)
    after = weight + step
    exact = weight_gram(after.double()) - weight_gram(weight.double())
    naive = weight_gram(after) - weight_gram(weight)
    assert relative_error(gram_shift(weight, after), exact) < 1e-3 < relative_error(naive, exact)


# ---- AGOP ----


@few
@given(n=sizes, d=sizes, k=sizes, outputs=st.integers(1, 4), chunk=st.integers(1, 9), seed=seeds)
def test_agop_is_the_mean_of_jacobian_products(n, d, k, outputs, chunk, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(d, k), nn.Tanh(), nn.Linear(k, outputs)).double()
    (inputs,) = tensors(seed, (n, d))
    expected = torch.zeros(d, d, dtype=torch.float64)
    for point in inputs:  # one output at a time, by plain backward passes
        for output in range(outputs):
            leaf = point.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(leaf[None])[0, output], leaf)
            expected += torch.outer(gradient, gradient) / n
    assert torch.allclose(agop(model, inputs, chunk_size=chunk), expected, rtol=1e-10, atol=1e-12)


def test_agop_of_a_linear_map_is_its_gram():
    weight, inputs = tensors(0, (3, 5), (7, 5))
    assert torch.allclose(agop(lambda x: x @ weight.T, inputs), weight_gram(weight), atol=TIGHT)


def test_agop_of_the_input_is_that_of_the_preactivation_between_the_weight():
    torch.manual_seed(0)
    first, rest = nn.Linear(5, 4).double(), nn.Sequential(nn.GELU(), nn.Linear(4, 3)).double()
    (inputs,) = tensors(0, (9, 5))
    weight = first.weight.detach()
    inner = agop(rest, first(inputs))
    assert torch.allclose(agop(nn.Sequential(first, rest), inputs), weight.T @ inner @ weight, atol=TIGHT)


def test_agop_takes_images_and_scalar_functions():
    (images,) = tensors(0, (4, 2, 3, 3))
    result = agop(lambda x: x.square().sum(dim=(1, 2, 3)), images)
    rows = 2 * images.flatten(1)
    assert torch.allclose(result, rows.T @ rows / 4, atol=TIGHT)


@pytest.mark.parametrize("mixer", [nn.BatchNorm1d(3), nn.Dropout(0.5)], ids=["batch-norm", "dropout"])
def test_agop_refuses_a_function_that_mixes_samples_or_draws(mixer):
    with pytest.raises(ValueError, match=r"each sample by itself.*\.eval\(\)"):
        agop(nn.Sequential(nn.Linear(5, 3), mixer), torch.randn(4, 5))


class Replacing(nn.Module):
    """Running statistics that are replaced, not changed in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


class Counting(nn.Module):
    """Changes a tensor that is no buffer, through a view."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(2, 2)

    def forward(self, x):
        self.counts[0] += 1
        return x * self.counts[0, 0]


def ways_to_call(module):
    """A function of samples around a module, from the nearest to the most hidden."""
    holder = type("Holder", (), {})()
    holder.inner = {"net": module}
    return {
        "module": module,
        "compiled": torch.compile(module, backend="eager"),
        "method": module.forward,
        "partial": functools.partial(lambda net, x: net(x), module),
        "closure": lambda x: module(x).tanh(),
        "hidden": lambda x: holder.inner["net"](x),
    }


WRITERS = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "batch norm with mean": lambda: nn.BatchNorm1d(3, momentum=None, affine=False),
    "replacing": Replacing,
    "counting": Counting,
}


def traces(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors |= {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().clone() for name, value in tensors.items()}


@pytest.mark.parametrize("way", ways_to_call(nn.Identity()))
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_refused_agop_leaves_the_model_as_it_was(writer, way, n):
    if (writer, way) == ("replacing", "hidden"):
        pytest.skip("a module that the function does not name, and no write to see")
    module = WRITERS[writer]()
    inputs = tensors(0, (n, 3))[0].float()
    before, kept, state = traces(module), inputs.clone(), torch.get_rng_state()
    function = ways_to_call(module)[way]
    with contextlib.suppress(ValueError):  # where there is one sample only, not all can be told
        agop(function, inputs)
        assert n == 1 or writer == "replacing"
    after = traces(module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(inputs, kept)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_agop_takes_a_scripted_module_and_leaves_it():
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    scripted, inputs = torch.jit.script(module), torch.randn(4, 5)
    before = traces(module)
    with pytest.raises(ValueError, match="each sample by itself"):
        agop(scripted, inputs)
    assert all(torch.equal(before[name], value) for name, value in traces(module).items())
    torch.testing.assert_close(agop(scripted.eval(), inputs), agop(module.eval(), inputs))


def test_what_agop_gives_back_would_have_changed():
    # The twin: the same calls by themselves leave traces.
    for make in WRITERS.values():
        module = make()
        before = traces(module)
        module(torch.ones(4, 3))
        after = traces(module)
        assert not all(torch.equal(before[name], after[name]) for name in before)


def test_agop_keeps_what_the_function_makes_for_itself():
    made = {}

    def function(x):
        if not made:
            made["scale"] = torch.empty(3)
            made["scale"].fill_(2.0)
        return x * made["scale"]

    assert torch.equal(agop(function, torch.ones(4, 3)), 4 * torch.eye(3))
    assert torch.equal(made["scale"], torch.full((3,), 2.0))


def test_agop_draws_nothing_from_the_callers_random_numbers():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="draw no random numbers"):
        agop(lambda x: F.dropout(x, 0.5), torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_in_place_modules_work_and_leave_the_inputs():
    torch.manual_seed(0)
    (inputs,) = tensors(0, (6, 5))
    kept = inputs.clone()
    linear = nn.Linear(5, 3).double()
    in_place = nn.Sequential(nn.ReLU(inplace=True), linear, nn.ELU(inplace=True))
    plain = nn.Sequential(nn.ReLU(), linear, nn.ELU())
    torch.testing.assert_close(agop(in_place, inputs), agop(plain, inputs))
    assert torch.equal(inputs, kept)


@pytest.mark.parametrize("way", ways_to_call(nn.Identity()))
def test_agop_does_not_depend_on_how_the_function_is_reached(way):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    inputs = torch.randn(6, 3)
    function = ways_to_call(module)[way]
    expected = agop(lambda x: function(x), inputs)
    torch.testing.assert_close(agop(function, inputs), expected)
    assert expected.norm() > 0


# ---- extremes of the number range ----

EXTREME = {
    "gram": lambda g, W, V, s: g.weight_gram(s * W),
    "gram shift": lambda g, W, V, s: g.gram_shift(s * W, s * V),
    "virtual shift": lambda g, W, V, s: g.virtual_covariance_shift(s * W, s * V, 0.1),
    "gap": lambda g, W, V, s: g.second_order_gap(s * W, s * V[:, :2], s * W[:2], 0.1),
    "agop": lambda g, W, V, s: g.agop(lambda h: s * (h @ V.mT), W),
}


@pytest.mark.parametrize("measure", EXTREME)
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (1e200, "overflows float64; scale .* down"),
        (1e-200, "underflows float64 to zero; scale .* up"),
        (5e-322, "underflows float64 to zero"),
    ],
)
def test_products_out_of_range_are_named(measure, scale, words, unchecked):
    W, V = tensors(0, (4, 5), (4, 5))
    with pytest.raises(ValueError, match=words):
        EXTREME[measure](unchecked, W, V, scale)
    # The twin: near the ends of the range the same call gives numbers, those of the matrices near one.
    for power, near in ((4 if measure == "gap" else 2, 1e-60), (4 if measure == "gap" else 2, 1e60)):
        expected = EXTREME[measure](unchecked, W, V, 1.0)
        assert relative_error(EXTREME[measure](unchecked, W, V, near) / near**power, expected) < TIGHT


def test_zeros_are_exact_where_nothing_underflows():
    zero, (weight,) = torch.zeros(3, 4), tensors(0, (3, 4))
    assert not weight_gram(zero).any()
    assert not gram_shift(weight, weight).any()
    assert not gram_shift(torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])).any()
    assert not virtual_covariance_shift(weight, weight, 0.0).any()
    assert not virtual_covariance_shift(torch.eye(2), 2 * torch.eye(2), 1.0).any()  # a virtual update to −H
    assert not second_order_gap(weight, weight @ weight.mT, torch.zeros(3, 4).double(), 0.0).any()
    assert not agop(lambda x: 0 * x, weight).any()


def test_a_rate_and_gradient_far_apart_are_not_lost_in_the_squared_rate():
    gradient = torch.tensor([[1e170, 0.0]], dtype=torch.float64)
    shift = virtual_covariance_shift(torch.zeros(1, 2).double(), gradient, 1e-170)  # lr² alone is zero
    torch.testing.assert_close(shift, torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    gap = second_order_gap(torch.ones(1, 1).double(), gradient[:, :1], torch.zeros(1, 1).double(), 1e-170)
    torch.testing.assert_close(gap, torch.ones(1, 1).double())


def test_half_precision_that_overflows_is_named():
    with pytest.raises(ValueError, match="the Gram matrix overflows float16; scale weight down, or pass a wider"):
        weight_gram(torch.full((3, 2), 300.0, dtype=torch.float16))


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-150, 1e150, 1e200, 1e307])
def test_ratios_do_not_depend_on_the_scale(scale):
    W, V = tensors(0, (4, 5), (4, 5))
    digits = 1e-8 if scale < 1e-300 else TIGHT
    assert relative_error(scale * V, scale * W) == pytest.approx(relative_error(V, W), rel=digits)
    assert relative_error(V, W) == pytest.approx(float((V - W).norm() / W.norm()), rel=1e-15)
    assert matrix_correlation(scale * V, scale * W) == pytest.approx(matrix_correlation(V, W), abs=digits)
    assert matrix_correlation(scale * V, W) == pytest.approx(matrix_correlation(V, W), abs=digits)
    assert matrix_correlation(scale * V, W / scale if scale > 1e-300 else W) == pytest.approx(
        matrix_correlation(V, W), abs=1e-8
    )


def test_relative_errors_far_apart_are_numbers_or_named():
    tiny, huge = (torch.full((2,), x, dtype=torch.float64) for x in (1e-200, 1e200))
    assert relative_error(tiny, huge) == 1
    assert relative_error(-huge * 1e108, huge * 1e108) == 2
    with pytest.raises(ValueError, match="relative error overflows"):
        relative_error(huge, tiny)
    with pytest.raises(ValueError, match="value: 2 NaN"):
        relative_error(huge * math.nan, huge)


def test_sides_out_of_range_are_named():
    for scale, words in ((1e200, "overflows float64; scale weight and loss down"), (1e-200, "underflows float64")):
        model = nn.Sequential(nn.Linear(5, 4, bias=False)).double()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        with record(model) as seen:
            (model(tensors(0, (6, 5))[0]) * scale).sum().backward()
        with pytest.raises(ValueError, match=words):
            feature_learning_sides(seen["0"])


# ---- correlation ----


@few
@given(seed=seeds, scale=st.floats(0.1, 10), offset=st.floats(-3, 3))
def test_correlation_is_pearsons_and_blind_to_scale_and_offset(seed, scale, offset):
    a, b = tensors(seed, (4, 6), (4, 6))
    expected = np.corrcoef(a.flatten(), b.flatten())[0, 1]
    assert matrix_correlation(a, b) == pytest.approx(expected, abs=1e-12)
    assert matrix_correlation(scale * a + offset, b) == pytest.approx(expected, abs=1e-10)
    assert matrix_correlation(a, a) == pytest.approx(1, abs=1e-12)


# ---- VirtualCovariance ----


def loss_of(model, inputs):
    return model(inputs).square().mean()


def test_virtual_covariance_sums_single_steps_and_follows_the_schedule():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    virtual = VirtualCovariance(model[0], optimizer)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for step in range(6):
        (inputs,) = tensors(step, (8, 5))
        optimizer.zero_grad()
        with record(model, ["0"]) as seen:
            loss_of(model, inputs).backward()
        lr = optimizer.param_groups[0]["lr"]
        gradient = seen["0"].feature_gradients
        exact = virtual_covariance_shift(seen["0"].features, gradient, lr)
        expected += exact - lr**2 * gradient.T @ gradient
        optimizer.step()
        scheduler.step()
    assert virtual.steps == 6
    assert relative_error(virtual.shift, expected) < TIGHT


def test_plain_descent_differs_from_the_virtual_sum_by_its_squared_gradients():
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    virtual = VirtualCovariance(layer, optimizer)
    before, squares = layer.weight.detach().clone(), torch.zeros(5, 5, dtype=torch.float64)
    for step in range(5):
        optimizer.zero_grad()
        torch.tanh(layer(tensors(step, (8, 5))[0])).square().mean().backward()
        squares += 0.3**2 * layer.weight.grad.T @ layer.weight.grad
        optimizer.step()
    assert relative_error(virtual.shift + squares, gram_shift(before, layer.weight.detach())) < TIGHT


def test_weight_decay_shrinks_the_gram_beside_following_the_loss():
    features, deltas, weight = tensors(0, (8, 5), (8, 3), (3, 5))
    lr, decay = 0.1, 0.3
    gradient = deltas.T @ features
    cross = (deltas @ weight).T @ features
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    torch.optim.SGD([parameter], lr=lr, weight_decay=decay).step()
    shrink = 1 - lr * decay
    expected = shrink**2 * weight_gram(weight) - lr * shrink * (cross + cross.T) + lr**2 * gradient.T @ gradient
    assert relative_error(weight_gram(parameter.detach()), expected) < TIGHT


def test_momentum_moves_the_shifted_weight_as_derived():
    torch.manual_seed(0)
    layer, lr, mu = nn.Linear(5, 4, bias=False).double(), 0.2, 0.8
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=mu)
    rate, velocity = lr / (1 - mu), torch.zeros(4, 5, dtype=torch.float64)
    for step in range(4):
        weight = layer.weight.detach().clone()
        optimizer.zero_grad()
        with record(nn.Sequential(layer)) as seen:
            torch.tanh(layer(tensors(step, (8, 5))[0])).square().mean().backward()
        gradient = layer.weight.grad.clone()
        cross, stale = seen["0"].feature_gradients.T @ seen["0"].features, velocity.T @ gradient
        optimizer.step()
        shifted = [weight - rate * mu * velocity]
        velocity = mu * velocity + gradient
        shifted.append(layer.weight.detach() - rate * mu * velocity)
        expected = -rate * (cross + cross.T) + rate**2 * (mu * (stale + stale.T) + gradient.T @ gradient)
        assert relative_error(gram_shift(*shifted), expected) < TIGHT


@pytest.mark.parametrize("groups", [1, 2])
def test_virtual_covariance_of_a_convolution(groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (2, 3), stride=2, padding=1, groups=groups).double()
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    virtual = VirtualCovariance(conv, optimizer)
    with record(nn.Sequential(conv)) as seen:
        loss_of(conv, tensors(0, (3, 4, 7, 6))[0]).backward()
    expected = virtual_covariance_shift(seen["0"].features, seen["0"].feature_gradients, 0.1)
    expected -= 0.01 * seen["0"].feature_gradients.mT @ seen["0"].feature_gradients
    optimizer.step()
    assert relative_error(virtual.shift, expected) < TIGHT


def test_virtual_covariance_works_inside_a_residual_block():
    torch.manual_seed(0)
    model = Residual().double()
    optimizer = torch.optim.Adam(
        [{"params": model.head.parameters()}, {"params": model.inner.parameters(), "lr": 0.02}]
    )
    virtual = VirtualCovariance(model.inner, optimizer)
    with record(model, ["inner"]) as seen:
        loss_of(model, tensors(0, (6, 4))[0]).backward()
    cross = seen["inner"].feature_gradients.T @ seen["inner"].features
    optimizer.step()
    assert relative_error(virtual.shift, -0.02 * (cross + cross.T)) < TIGHT


def test_virtual_covariance_detaches_and_resets():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    virtual = VirtualCovariance(layer, optimizer)
    loss_of(layer, torch.ones(4, 3)).backward()
    optimizer.step()
    kept = virtual.shift
    virtual.remove()
    optimizer.step()
    assert torch.equal(virtual.shift, kept)
    assert kept.norm() > 0
    assert not optimizer._optimizer_step_pre_hooks
    virtual.reset()
    assert virtual.steps == 0
    assert virtual.shift.norm() == 0


def test_virtual_covariance_skips_a_layer_without_gradient():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    virtual = VirtualCovariance(model[1], optimizer)
    loss_of(model[0], torch.ones(4, 3)).backward()
    optimizer.step()
    assert virtual.steps == 0


@pytest.mark.parametrize("fused", [False, True])
def test_virtual_covariance_reads_true_gradients_under_a_gradient_scaler(fused):
    shifts = []
    for scaled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
        virtual = VirtualCovariance(layer, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        scaler.scale(loss_of(layer, torch.ones(4, 3))).backward()
        scaler.step(optimizer)
        shifts.append(virtual.shift)
    # A power of two scales exactly; only the order of roundings can differ.
    assert torch.allclose(shifts[0], shifts[1], rtol=1e-6)


def test_a_skipped_overflow_step_adds_nothing():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    virtual = VirtualCovariance(layer, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(layer, torch.full((4, 3), 1e30))).backward()
    scaler.step(optimizer)
    assert virtual.steps == 0


def test_maximize_turns_the_sign():
    shifts = []
    for maximize in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, maximize=maximize)
        virtual = VirtualCovariance(layer, optimizer)
        loss_of(layer, torch.ones(4, 3)).backward()
        optimizer.step()
        shifts.append(virtual.shift)
    assert torch.equal(shifts[0], -shifts[1])


def test_half_precision_weights_are_summed_in_single():
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    virtual = VirtualCovariance(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert virtual.shift.dtype == torch.float32


# ---- errors: what was wrong, what was got, what to pass ----

ones = torch.ones(3, 4)
BAD_CALLS = {
    "gram of a vector": (lambda g: g.weight_gram(torch.ones(3)), ValueError, r"two axes.*\(3,\)"),
    "gram of integers": (
        lambda g: g.weight_gram(torch.ones(3, 4, dtype=torch.int64)),
        TypeError,
        "torch.int64.*floating",
    ),
    "gram of a list": (lambda g: g.weight_gram([[1.0]]), TypeError, "list.*floating"),
    "gram with nan": (lambda g: g.weight_gram(ones * math.nan), ValueError, "weight.*NaN"),
    "groups that do not divide": (lambda g: g.weight_gram(ones, groups=2), ValueError, "groups=2"),
    "shift of two shapes": (lambda g: g.gram_shift(ones, ones.T), ValueError, r"\(3, 4\).*\(4, 3\)"),
    "virtual update of two shapes": (
        lambda g: g.virtual_update(ones, ones[:2], 0.1),
        ValueError,
        r"\(3, 4\).*\(2, 4\)",
    ),
    "virtual shift with an infinite rate": (
        lambda g: g.virtual_covariance_shift(ones, ones, math.inf),
        ValueError,
        "inf",
    ),
    "virtual shift with a rate in words": (lambda g: g.virtual_covariance_shift(ones, ones, "0.1"), TypeError, "str"),
    "gap with wrong axes": (lambda g: g.second_order_gap(ones, ones, ones.T, 0.1), ValueError, r"expected \(n, d\)"),
    "correlation with a constant": (lambda g: g.matrix_correlation(ones, ones), ValueError, "all entries equal"),
    "correlation with rounding": (
        lambda g: g.matrix_correlation(torch.full((3, 3), 0.1).double(), torch.eye(3).double()),
        ValueError,
        "all entries equal",
    ),
    "correlation of two shapes": (lambda g: g.matrix_correlation(ones, ones.T), ValueError, "must agree"),
    "agop of nothing": (lambda g: g.agop(lambda x: x, torch.ones(0, 3)), ValueError, "at least one sample"),
    "agop of a mixture": (lambda g: g.agop(lambda x: x - x.mean(dim=0), torch.eye(3)), ValueError, "the sample before"),
    "agop of sums": (lambda g: g.agop(lambda x: x.cumsum(dim=0), torch.eye(3)), ValueError, "the sample before"),
    "agop of a reduction": (lambda g: g.agop(lambda x: x.sum(), ones), ValueError, r"expected \(n, K\)"),
}


@pytest.mark.parametrize("case", BAD_CALLS, ids=lambda case: case.replace(" ", "-"))
def test_bad_input_is_named(case, unchecked):
    call, kind, words = BAD_CALLS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


def test_a_foreign_layer_is_refused():
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="none of the parameter groups"):
        VirtualCovariance(layer, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"LayerNorm.*nn\.Linear and nn\.Conv2d"):
        VirtualCovariance(nn.LayerNorm(3), torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_closure_is_refused():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    VirtualCovariance(layer, optimizer)
    with pytest.raises(ValueError, match="without a closure"):
        optimizer.step(lambda: 1.0)


def test_recording_says_what_is_missing():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with pytest.raises(ValueError, match=r"no layer 'head' in the model; it has 0, 1"), record(model, ["head"]):
        pass
    with pytest.raises(TypeError, match="layer '1' is ReLU"), record(model, ["1"]):
        pass
    with pytest.raises(ValueError, match=r"no nn\.Linear or nn\.Conv2d"), record(nn.ReLU()):
        pass
    with record(model) as seen:
        pass
    with pytest.raises(ValueError, match="not called"):
        _ = seen["0"].features
    with record(model) as seen:
        model(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"loss\.backward"):
        _ = seen["0"].deltas


def test_recording_notices_an_overwritten_input():
    model, inputs = nn.Sequential(nn.Linear(3, 2)), torch.ones(4, 3)

    def overwrite_after_recording():
        with record(model), torch.no_grad():
            model(inputs)
            inputs.zero_()

    with pytest.raises(ValueError, match="changed in place"):
        overwrite_after_recording()


def test_recording_leaves_no_hook_behind():
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="stop"), record(model):
        raise RuntimeError("stop")
    assert not model[0]._forward_hooks


def test_under_autocast_the_equation_holds_to_the_lower_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    with record(model) as records, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(64, 20)).square().mean().backward()
    for each in records.values():
        left, right = feature_learning_sides(each)
        assert relative_error(left, right) < 0.02  # bfloat16 has eight bits


def test_a_layer_called_by_keyword_or_under_inference_is_recorded():
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with record(layer, "") as records, torch.inference_mode():
        layer(input=x)
    assert records[""].features.equal(x)


def test_a_backward_pass_after_the_block_changes_nothing():
    model = nn.Linear(3, 2)
    with record(model) as records:
        loss = model(torch.ones(4, 3)).sum()
        loss.backward(retain_graph=True)
    before = records[""].deltas
    loss.backward()
    assert records[""].deltas.equal(before)


@pytest.mark.parametrize(("layers", "words"), [([], "layers is empty"), ("absent", "no layer 'absent'")])
def test_layers_to_record_are_named(layers, words):
    with pytest.raises(ValueError, match=words), record(nn.Sequential(nn.Linear(2, 2)), layers):
        pass


def test_correlation_of_tiny_matrices_is_no_underflow():
    A = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    assert matrix_correlation(A * 1e-170, A * 1e-170) == pytest.approx(1, abs=1e-12)
    assert matrix_correlation(A * 1e-170, -A * 1e-170) == pytest.approx(-1, abs=1e-12)
