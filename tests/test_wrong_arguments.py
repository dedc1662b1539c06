"""Every measure of features, with everything that a user may pass by mistake: it works, or says what to pass."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

N, D, K = 12, 4, 3
_G = torch.Generator().manual_seed(0)
H, Y = torch.randn(N, D, generator=_G), torch.randn(N, 2, generator=_G)
W, M = torch.randn(K, D, generator=_G), torch.randn(K, D, generator=_G)
LABELS = torch.arange(N) % K


def quantized(good):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but models that hold them are about
        return torch.quantize_per_tensor(good.float(), 0.1, 0, torch.quint8)


def nested(good):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def fake(good):
    with FakeTensorMode():
        return torch.empty(good.shape, dtype=good.dtype)


def read_only(good):
    array = good.numpy().copy()
    array.flags.writeable = False
    return array


# What is passed in place of what is right, and the words of the error.
BAD = {
    "None": (lambda good: None, "got a NoneType; pass"),
    "a string": (lambda good: "x", "got a str; pass"),
    "a list": (lambda good: good.tolist(), "got a list; pass"),
    "an array": (lambda good: good.numpy(), r"got a ndarray; pass .*torch.from_numpy\(array\)"),
    "a read-only array": (read_only, "got a ndarray; pass"),
    "a number": (lambda good: np.float32(1), "got a float32; pass"),
    "a dictionary": (lambda good: {"a": good}, "got a dict; pass"),
    "a module": (lambda good: nn.Linear(2, 2), "got a Linear; pass"),
    "complex numbers": (lambda good: good.to(torch.cfloat), "torch.complex64"),
    "sparse": (lambda good: good.to_sparse(), r"layout torch.sparse_coo; pass .*to_dense\(\)"),
    "quantized": (quantized, r"quantized torch.quint8 tensor; pass .*dequantize\(\)"),
    "nested": (nested, "nested tensor; pass"),
    "on meta": (lambda good: good.to("meta"), "several devices|are on meta|without data"),
    "fake": (fake, "without data"),
    "lazy": (lambda good: nn.LazyLinear(3).weight, "lazy layer.*run the model once"),
    "of no rows": (lambda good: good[:0], "empty|must agree|shape|pass"),
    "a scalar": (lambda good: good.flatten()[0], "shape"),
    "of four axes": (lambda good: good[None, None], "shape"),
    "NaN": (lambda good: good.float() * torch.nan, "NaN or infinite|pass integer classes|must agree"),
    "infinite": (lambda good: good.float() / 0, "NaN or infinite|pass integer classes|must agree"),
}

# Public name, what it is called with, and the arguments that are tensors.
CALLS = {
    "target_linearity of classes": (lambda g, **a: g.target_linearity(**a), {"features": H, "targets": LABELS}),
    "target_linearity of numbers": (lambda g, **a: g.target_linearity(**a), {"features": H, "targets": Y}),
    "fit_linear": (lambda g, **a: g.fit_linear(**a).intercept, {"features": H, "targets": Y}),
    "predict": (lambda g, **a: g.fit_linear(H, Y).predict(**a), {"features": H}),
    "score of classes": (lambda g, **a: g.fit_linear(H, LABELS).score(**a), {"features": H, "targets": LABELS}),
    "score of numbers": (lambda g, **a: g.fit_linear(H, Y).score(**a), {"features": H, "targets": Y}),
    "surrogate": (lambda g, **a: g.surrogate(**a), {"features": H, "weight": W, "targets": LABELS}),
    "normalized_surrogate": (lambda g, **a: g.normalized_surrogate(**a), {"features": H, "weight": W, "targets": Y}),
    "neural_collapse": (
        lambda g, **a: g.neural_collapse(**a)["nc3"],
        {"features": H, "targets": LABELS, "weight": W},
    ),
    "equinorm": (lambda g, **a: g.equinorm(**a), {"class_means": M}),
    "equiangularity": (lambda g, **a: g.equiangularity(**a), {"class_means": M}),
    "etf_distance": (lambda g, **a: g.etf_distance(**a), {"class_means": M}),
    "self_duality": (lambda g, **a: g.self_duality(**a), {"weight": W, "class_means": M}),
    "nearest_class_mean_disagreement": (
        lambda g, **a: g.nearest_class_mean_disagreement(**a),
        {"features": H, "predictions": LABELS, "class_means": M},
    ),
    "TargetLinearity.update": (
        lambda g, **a: updated(g.TargetLinearity(), **a).compute(),
        {"features": H, "targets": LABELS},
    ),
    "TargetLinearity.forward": (lambda g, **a: g.TargetLinearity()(**a), {"features": H, "targets": Y}),
    "NeuralCollapse.update": (
        lambda g, **a: updated(g.NeuralCollapse(K), **a).compute()["nc1"],
        {"features": H, "targets": LABELS},
    ),
    "NeuralCollapse.compute": (
        lambda g, **a: updated(g.NeuralCollapse(K), H, LABELS).compute(**a)["nc3"],
        {"weight": W},
    ),
    "Moments.update": (lambda g, **a: updated(g.Moments(), **a).mean, {"features": H, "targets": LABELS}),
}
EVERY = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]
OPTIONAL = {("neural_collapse", "weight"), ("NeuralCollapse.compute", "weight")}  # None is right there


def updated(metric, *args, **kwargs):
    metric.update(*args, **kwargs)
    return metric


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "argument"), EVERY)
def test_what_is_wrong_is_said(name, argument, bad, unchecked):
    if bad == "None" and (name, argument) in OPTIONAL:
        pytest.skip("None is a value there")
    call, arguments = CALLS[name]
    make, words = BAD[bad]
    with pytest.raises((TypeError, ValueError), match=words) as error:
        call(unchecked, **{**arguments, argument: make(arguments[argument])})
    said = argument.replace("_", " ")
    assert said in str(error.value).replace("_", " "), "the argument is named"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "argument"), EVERY)
def test_a_gradient_is_neither_needed_nor_given(name, argument, unchecked):
    call, arguments = CALLS[name]
    good = arguments[argument]
    if not good.is_floating_point():
        return
    expected = call(unchecked, **arguments)
    for tracked in (good.clone().requires_grad_(), nn.Parameter(good.clone()), 1.0 * good.clone().requires_grad_()):
        value = call(unchecked, **{**arguments, argument: tracked})
        assert torch.equal(value, expected)
        assert not value.requires_grad


OPTIONS = {
    "ridge": (lambda g, v: g.target_linearity(H, Y, ridge=v), [None, "1", [1.0], -1, float("nan"), float("inf"), H]),
    "ridge of a metric": (lambda g, v: g.TargetLinearity(v), [None, "1", [1.0], -1, float("nan"), float("inf"), H]),
    "num_classes": (lambda g, v: g.target_linearity(H, LABELS, num_classes=v), ["3", [3], 1, -1, 2.0, True, H]),
    "num_classes of collapse": (lambda g, v: g.NeuralCollapse(v), [None, "3", [3], 1, -1, 2.0, True, H]),
    "num_classes of moments": (lambda g, v: g.Moments(v), ["3", [3], 1, -1, 2.0, True, H]),
    "per_output": (lambda g, v: g.target_linearity(H, Y, per_output=v), [None, "yes", 1, [True], H]),
    "per_output of a metric": (lambda g, v: g.TargetLinearity(per_output=v), [None, "yes", 1, [True], H]),
    "K": (lambda g, v: g.simplex_etf(v, 4), [None, "3", 0, -1, 2.5, True, float("nan"), H, 2**40]),
    "d": (lambda g, v: g.simplex_etf(3, v), [None, "3", 0, -1, 2.5, True, float("nan"), H, 2**40]),
    "generator": (lambda g, v: g.simplex_etf(3, 4, generator=v), ["x", 0, 1.5, [1], np.random.default_rng(0)]),
    "other": (lambda g, v: g.Moments().merge(v), [None, "x", 1, [1], H, {}]),
    "state": (lambda g, v: g.TargetLinearity().merge_state(v), [None, "x", 1, [1], H, {}]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in OPTIONS.items() for value in bad])
def test_wrong_options_are_said(name, value, unchecked):
    with pytest.raises((TypeError, ValueError), match=rf"pass|{name.split()[0]}|Expected incoming state"):
        OPTIONS[name][0](unchecked, value)


def test_integers_of_numpy_are_integers(unchecked):
    assert torch.equal(
        unchecked.target_linearity(H, LABELS, num_classes=np.int64(5)), unchecked.target_linearity(H, LABELS)
    )
