"""What ``gram`` and ``whitening`` say to arguments that are no matrix of numbers: what was got, by its name."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

from gramlin.hooks import record

ones = torch.ones(3, 4)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])


def compressed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that compressed tensors are in beta
        return ones.to_sparse_csr()


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized tensors are deprecated
        return torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)


def fake():
    with FakeTensorMode():
        return torch.ones(3, 4)


# What is passed for a matrix, whether it is of the wrong type or of the wrong value, and words of what is said.
WRONG = {
    "none": (lambda: None, TypeError, "got a NoneType"),
    "word": (lambda: "W", TypeError, "got a str"),
    "list": (lambda: [[1.0, 2.0]], TypeError, "got a list"),
    "array": (lambda: np.ones((3, 4)), TypeError, r"got a ndarray.*from_numpy"),
    "integers": (lambda: torch.ones(3, 4, dtype=torch.int64), TypeError, "torch.int64"),
    "booleans": (lambda: torch.ones(3, 4, dtype=torch.bool), TypeError, "torch.bool"),
    "complex": (lambda: torch.ones(3, 4, dtype=torch.complex64), TypeError, "torch.complex64"),
    "coordinates": (ones.to_sparse, TypeError, r"sparse_coo.*to_dense"),
    "compressed": (compressed, TypeError, r"sparse_csr.*to_dense"),
    "quantized": (quantized, TypeError, r"quantized.*dequantize"),
    "nested": (nested, TypeError, "nested"),
    "eight bits": (lambda: ones.to(torch.float8_e4m3fn), TypeError, r"float8_e4m3fn.*\.float\(\)"),
    "meta": (lambda: torch.ones(3, 4, device="meta"), ValueError, "without data"),
    "fake": (fake, ValueError, "without data"),
    "nan": (lambda: ones * math.nan, ValueError, "12 NaN"),
    "infinity": (lambda: ones * math.inf, ValueError, "12 NaN or infinite"),
    "scalar": (lambda: torch.tensor(1.0), ValueError, r"\(\)"),
}

# Each place for a matrix, and the name that the error gives it.
PLACES = {
    "weight": lambda g, x: g.weight_gram(x),
    "before": lambda g, x: g.gram_shift(x, ones),
    "after": lambda g, x: g.gram_shift(ones, x),
    "features": lambda g, x: g.virtual_update(x, ones, 0.1),
    "gradient": lambda g, x: g.virtual_update(ones, x, 0.1),
    "features (shift)": lambda g, x: g.virtual_covariance_shift(x, ones, 0.1),
    "gradient (shift)": lambda g, x: g.virtual_covariance_shift(ones, x, 0.1),
    "features (gap)": lambda g, x: g.second_order_gap(x, torch.ones(3, 2), torch.ones(2, 4), 0.1),
    "deltas": lambda g, x: g.second_order_gap(torch.ones(3, 5), x, torch.ones(4, 5), 0.1),
    "weight (gap)": lambda g, x: g.second_order_gap(torch.ones(2, 4), torch.ones(2, 3), x, 0.1),
    "inputs": lambda g, x: g.agop(lambda h: h, x),
    "a": lambda g, x: g.matrix_correlation(x, torch.eye(3, 4)),
    "b": lambda g, x: g.matrix_correlation(torch.eye(3, 4), x),
    "value": lambda g, x: g.gram.relative_error(x, ones),
    "reference": lambda g, x: g.gram.relative_error(ones, x),
    "M": lambda g, x: g.polar_factor(x),
    "M (steps)": lambda g, x: g.newton_schulz_polar(x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_matrix_is_named(wrong, place, unchecked):
    make, kind, words = WRONG[wrong]
    if wrong == "scalar" and place in ("a", "b", "value", "reference"):
        words = "must agree"
    with pytest.raises(kind, match=words) as caught:
        PLACES[place](unchecked, make())
    assert place.split(" ")[0] in str(caught.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_weight_has_no_nearest(wrong, unchecked):
    make, kind, _ = WRONG[wrong]
    x = make()
    both = isinstance(x, torch.Tensor)
    if both and wrong in ("integers", "booleans", "complex"):
        kind = ValueError  # shape and dtype are named together
    for pair in (dict(before=x, after=x), dict(before=ones, after=x), dict(before=x, after=ones)):
        # Of two that differ in dtype or device, that is said first.
        with pytest.raises((kind, ValueError) if both else kind, match=r"before|after|weight"):
            unchecked.nearest_with_same_gram(**pair)


GOOD = {
    "a gradient": lambda: torch.eye(3, 4).requires_grad_(),
    "float64": lambda: torch.eye(3, 4, dtype=torch.float64),
    "float16": lambda: torch.eye(3, 4, dtype=torch.float16),
    "bfloat16": lambda: torch.eye(3, 4, dtype=torch.bfloat16),
    "parameter": lambda: nn.Parameter(torch.eye(3, 4)),
    "not contiguous": lambda: torch.eye(4, 3).mT,
}


@pytest.mark.parametrize("good", GOOD)
def test_any_matrix_of_numbers_is_taken(good, unchecked):
    g, x = unchecked, GOOD[good]()
    results = [
        g.weight_gram(x),
        g.gram_shift(x, x),
        g.virtual_covariance_shift(x, x, 0.1),
        g.second_order_gap(x, x[:, :2], x[:2], 0.1),
        g.agop(lambda h: 2 * h, x),
        g.polar_factor(x),
        g.newton_schulz_polar(x),
        g.nearest_with_same_gram(before=x, after=x),
        torch.tensor([g.matrix_correlation(x, x), g.gram.relative_error(x, x)]),
    ]
    assert all(each.isfinite().all() for each in results)


EMPTY = {
    "correlation": (lambda g, x: g.matrix_correlation(x, x), r"\(0, 3\).*not be empty"),
    "relative error": (lambda g, x: g.gram.relative_error(x, x), r"\(0, 3\) is zero"),
    "agop of none": (lambda g, x: g.agop(lambda h: h, x), r"\(0, 3\): expected \(n, d\)"),
    "agop of no axis": (lambda g, x: g.agop(lambda h: h, x.mT), r"\(3, 0\): expected \(n, d\)"),
    "agop without output": (lambda g, x: g.agop(lambda h: h[:, :0], torch.eye(3)), r"to \(2, 0\): expected \(n, K\)"),
    "polar factor": (lambda g, x: g.polar_factor(x), "no empty axis"),
    "newton-schulz": (lambda g, x: g.newton_schulz_polar(x), "no empty axis"),
    "nearest": (lambda g, x: g.nearest_with_same_gram(before=x, after=x), "not empty"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_nothing_has_no_measure(case, unchecked):
    call, words = EMPTY[case]
    with pytest.raises(ValueError, match=words):
        call(unchecked, torch.ones(0, 3))


def test_the_gram_of_no_rows_is_zero(unchecked):
    assert unchecked.weight_gram(torch.ones(0, 3)).equal(torch.zeros(3, 3))
    assert unchecked.gram_shift(torch.ones(0, 3), torch.ones(0, 3)).equal(torch.zeros(3, 3))
    assert unchecked.weight_gram(torch.ones(3, 0)).shape == (0, 0)


NUMBERS = {
    "rate in words": (lambda g: g.virtual_update(ones, ones, "0.1"), TypeError, "lr is a str"),
    "no rate": (lambda g: g.virtual_update(ones, ones, None), TypeError, "lr is a NoneType"),
    "complex rate": (lambda g: g.virtual_covariance_shift(ones, ones, 1j), TypeError, "lr is a complex"),
    "rate in a tensor": (lambda g: g.virtual_covariance_shift(ones, ones, ones), TypeError, "lr is a Tensor"),
    "infinite rate": (lambda g: g.second_order_gap(ones, ones[:, :2], ones[:2], math.inf), ValueError, "lr is inf"),
    "huge rate": (lambda g: g.virtual_update(ones, ones, 10**400), ValueError, "lr is inf"),
    "groups in words": (lambda g: g.weight_gram(ones, groups="3"), TypeError, "groups: got a str"),
    "no groups": (lambda g: g.gram_shift(ones, ones, groups=0), ValueError, "groups=0"),
    "steps in words": (lambda g: g.newton_schulz_polar(ones, "3"), TypeError, "steps: got a str"),
    "steps back": (lambda g: g.newton_schulz_polar(ones, -1), ValueError, "steps is -1"),
    "chunks of none": (lambda g: g.agop(lambda h: h, ones, chunk_size=0), ValueError, "chunk_size is 0"),
    "chunks in words": (lambda g: g.agop(lambda h: h, ones, chunk_size="a"), ValueError, "chunk_size is 'a'"),
    "vector shift": (lambda g: g.gram_shift(ones[0], ones[0]), ValueError, r"two axes.*\(4,\)"),
    "vector gap": (lambda g: g.second_order_gap(ones[0], ones[0], ones[0], 0.1), ValueError, r"expected \(n, d\)"),
    "two errors": (lambda g: g.gram.relative_error(ones, ones[:2]), ValueError, r"\(3, 4\).*\(2, 4\).*must agree"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_beside_the_matrix_are_named(case, unchecked):
    call, kind, words = NUMBERS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


FUNCTIONS = {
    "none": (None, TypeError, "function: got a NoneType"),
    "word": ("f", TypeError, "function: got a str"),
    "pair": (lambda h: (h, h), TypeError, "the function's output: got a tuple"),
    "number": (lambda h: 1.0, TypeError, "the function's output: got a float"),
    "classes": (lambda h: h.argmax(dim=1), TypeError, "the function's output: got a torch.int64"),
    "images": (lambda h: h[:, None, :], ValueError, r"to \(2, 1, 4\): expected \(n, K\)"),
    "nan": (lambda h: h.log() * 0 + (h - 1).sqrt(), ValueError, "the function's Jacobian"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_what_is_no_function_of_samples_is_named(case, unchecked):
    function, kind, words = FUNCTIONS[case]
    with pytest.raises(kind, match=words):
        unchecked.agop(function, ones)


RECORDS = {"none": None, "word": "0", "dictionary": {}, "layer": nn.Linear(2, 2), "tensor": ones}


@pytest.mark.parametrize("case", RECORDS)
def test_what_is_no_record_is_named(case, unchecked):
    with pytest.raises(TypeError, match=r"record: got a \w+; pass one layer's LayerRecord"):
        unchecked.feature_learning_sides(RECORDS[case])


def test_a_layer_without_gradient_or_own_weight_has_no_sides(unchecked):
    def sides(model, backward=True):
        with unchecked.hooks.record(model, ["0"]) as seen:
            out = model(torch.ones(2, 5, requires_grad=True)).sum()
            if backward:
                out.backward()
        return unchecked.feature_learning_sides(seen["0"])

    with pytest.raises(ValueError, match="weight of layer '0' is computed by _WeightNorm"):
        sides(nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4))))
    with pytest.raises(ValueError, match=r"layer '0' has no weight\.grad: call loss\.backward"):
        sides(nn.Sequential(nn.Linear(5, 4)), backward=False)
    with pytest.raises(ValueError, match=r"layer '0' has no weight\.grad.*unfrozen"):
        sides(nn.Sequential(nn.Linear(5, 4)).requires_grad_(False))


def test_sides_that_are_not_finite_are_named(unchecked):
    for bad, words in ((math.nan, "weight_gradient: 1 NaN"), (1e308, "∂L/∂W of layer '0' overflows float64")):
        model = nn.Sequential(nn.Linear(5, 4)).double()
        with unchecked.hooks.record(model) as seen:
            model(torch.ones(2, 5).double()).sum().backward()
        with torch.no_grad():
            model[0].weight.fill_(100.0)
        model[0].weight.grad[0, 0] = bad
        with pytest.raises(ValueError, match=words):
            unchecked.feature_learning_sides(seen["0"])


def test_calls_that_are_refused_leave_their_arguments(unchecked):
    before = [ones.clone(), torch.get_rng_state()]
    for place, wrong in itertools.product(PLACES.values(), ("integers", "nan", "scalar")):
        with pytest.raises((TypeError, ValueError)):
            place(unchecked, WRONG[wrong][0]())
    assert torch.equal(ones, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_the_twin_of_all_these_is_a_layer_that_works():
    model = nn.Sequential(nn.Linear(5, 4))
    with record(model) as seen:
        model(torch.ones(2, 5)).sum().backward()
    assert seen["0"].features.shape == (2, 5)
