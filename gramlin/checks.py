"""What can be wrong with a tensor that a caller passes, each with one wording: the name, what was got, what to pass."""

from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy


def check_tensor(name: str, tensor: object, advice: str = "a torch.Tensor") -> None:
    """Raise unless this is a dense tensor.

    Args:
        name: what the caller calls it.
        tensor: anything.
        advice: what to pass.

    Raises:
        TypeError: another type, such as a NumPy array; a sparse, nested, quantized or uninitialised tensor.
    """
    if not isinstance(tensor, Tensor):
        kind = type(tensor)
        hint = " (of a NumPy array: torch.from_numpy(array))" if kind.__module__ == "numpy" else ""
        raise TypeError(f"{name}: got a {kind.__name__}; pass {advice}{hint}")
    if is_lazy(tensor):
        raise TypeError(f"{name}: got a parameter of a lazy layer, without shape yet; run the model once first")
    if tensor.is_nested:
        raise TypeError(f"{name}: got a nested tensor; pass {advice} whose samples have one shape")
    if tensor.is_quantized:
        raise TypeError(f"{name}: got a quantized {tensor.dtype} tensor; pass {advice}, e.g. {name}.dequantize()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {tensor.layout}; pass a dense one, e.g. {name}.to_dense()")


def check_floating(name: str, tensor: object, advice: str = "") -> None:
    """Raise as ``check_tensor``, and ``TypeError`` unless it is floating-point; the advice follows on what to pass."""
    wanted = f"a floating-point torch.Tensor{advice and ', ' + advice}"
    check_tensor(name, tensor, wanted)
    assert isinstance(tensor, Tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: got a {tensor.dtype} tensor; pass {wanted}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if an entry is NaN or infinite, or if there are no values: on the meta device, or fake."""
    if tensor.is_meta or is_fake(tensor):
        raise ValueError(f"{name}: got a tensor without data (meta or fake); pass one that holds numbers")
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return
    if tensor.itemsize < 2:  # PyTorch can do nothing with 8 bits but convert them
        tensor = tensor.float()
    low, high = tensor.aminmax()  # NaN if there is one; reads the tensor once and stores nothing of its size
    if not (low.isfinite() and high.isfinite()):
        bad = int((~tensor.isfinite()).sum())
        raise ValueError(f"{name}: {bad} NaN or infinite entries of {tensor.numel()}, shape {tuple(tensor.shape)}")


def check_matrix(name: str, matrix: object, expected: str = "(n, d)") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless this is a floating-point matrix, not empty, of finite numbers."""
    check_floating(name, matrix)
    assert isinstance(matrix, Tensor)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"{name}: got shape {tuple(matrix.shape)}; pass a non-empty {expected}")
    check_finite(name, matrix)


def check_integers(name: str, classes: object) -> None:
    """Raise as ``check_tensor`` and ``check_finite``, and ``TypeError`` unless this is a vector of integers."""
    check_tensor(name, classes, "a torch.Tensor of integer classes (n,)")
    assert isinstance(classes, Tensor)
    if classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool or classes.ndim != 1:
        raise TypeError(
            f"{name} are {classes.dtype} of shape {tuple(classes.shape)}; pass integer classes (n,), e.g. "
            "scores.argmax(dim=1)"
        )
    check_finite(name, classes)


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ``ValueError`` unless this is a Python or NumPy integer of at least so much."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; pass an integer of at least {least}")


def check_one_device(tensors: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` if tensors, by name, are on several devices; Apple's GPU counts as the CPU here."""
    places = {name: "cpu" if tensor.is_mps else str(tensor.device) for name, tensor in tensors.items()}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in places.items())
        raise ValueError(f"tensors are on several devices: {listed}; move them to one device")
