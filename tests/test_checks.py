"""What is said of a tensor that cannot be measured."""

import pytest
import torch

from gramlin.checks import check_finite, check_floating, check_matrix, check_one_device

GOOD = torch.ones(3, 2)


def test_what_is_right_passes():
    check_matrix("A", GOOD)
    check_matrix("A", GOOD.bfloat16())
    check_finite("A", torch.ones(0, 2))
    check_one_device({"A": GOOD, "B": GOOD[0]})


@pytest.mark.parametrize("value", [[[1.0]], GOOD.long(), GOOD.bool(), GOOD.cfloat()], ids=repr)
def test_only_floating_point_tensors(value):
    with pytest.raises(
        TypeError, match=r"A: got a (list|torch\.\w+ tensor); pass a floating-point torch.Tensor, e.g. A\d"
    ):
        check_floating("A", value, "e.g. A2")


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (0, 2), (1, 2, 3)])
def test_a_matrix_has_two_axes_and_entries(shape):
    with pytest.raises(ValueError, match=r"A: got shape \(.*\); pass a non-empty \(K, d\)"):
        check_matrix("A", torch.ones(shape), "(K, d)")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_entries_that_are_no_numbers_are_counted(value, dtype):
    A = GOOD.to(dtype, copy=True)
    A[1, 0] = A[2, 1] = value
    with pytest.raises(ValueError, match=r"A: 2 NaN or infinite entries of 6, shape \(3, 2\)"):
        check_finite("A", A)


def test_devices_are_named():
    with pytest.raises(ValueError, match="several devices: A on cpu, B on meta; move them to one device"):
        check_one_device({"A": GOOD, "B": GOOD.to("meta")})
