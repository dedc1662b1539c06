"""What can be wrong with a tensor that a caller passes, each with one wording: the name, what was got, what to pass."""

from torch import Tensor


def check_floating(name: str, tensor: object, advice: str = "") -> None:
    """Raise ``TypeError`` unless this is a floating-point tensor; the advice follows on what to pass."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"{tensor.dtype} tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: got a {kind}; pass a floating-point torch.Tensor{advice and ', ' + advice}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if an entry is NaN or infinite."""
    if tensor.numel() == 0:
        return
    low, high = tensor.aminmax()  # NaN if there is one; reads the tensor once and stores nothing of its size
    if not (low.isfinite() and high.isfinite()):
        bad = int((~tensor.isfinite()).sum())
        raise ValueError(f"{name}: {bad} NaN or infinite entries of {tensor.numel()}, shape {tuple(tensor.shape)}")


def check_matrix(name: str, matrix: Tensor, expected: str = "(n, d)") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless this is a floating-point matrix, not empty, of finite numbers."""
    check_floating(name, matrix)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"{name}: got shape {tuple(matrix.shape)}; pass a non-empty {expected}")
    check_finite(name, matrix)


def check_one_device(tensors: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` if tensors, by name, are on several devices; Apple's GPU counts as the CPU here."""
    places = {name: "cpu" if tensor.is_mps else str(tensor.device) for name, tensor in tensors.items()}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in places.items())
        raise ValueError(f"tensors are on several devices: {listed}; move them to one device")
