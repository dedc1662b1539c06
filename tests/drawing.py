"""What property tests draw from: seeds, a number of examples, and float64 matrices of a seed."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

seeds = st.integers(0, 2**31 - 1)
few = settings(max_examples=25, deadline=None, derandomize=True)


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Independent normal entries, one tensor a shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
