"""The networks of the chapters."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity}


class MLP(nn.Sequential):
    """A multilayer perceptron on flattened inputs; its layers are ``linear1``, ``linear2``, ….

    Args:
        sizes: widths from input to output, (d, hidden, …, K).
        activation: between the layers: "gelu", "relu", "tanh" or "identity".
        bias: whether the layers have one.

    Raises:
        ValueError: fewer than two sizes, or an unknown activation.

    Example:
        >>> import torch
        >>> MLP([784, 256, 10])(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(self, sizes: Sequence[int], activation: str = "gelu", bias: bool = True):
        if len(sizes) < 2:
            raise ValueError(f"sizes is {list(sizes)}; pass at least an input and an output width")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; pass one of {', '.join(ACTIVATIONS)}")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for index, (width_in, width_out) in enumerate(pairwise(sizes), start=1):
            layers[f"linear{index}"] = nn.Linear(width_in, width_out, bias)
            if index < len(sizes) - 1:
                layers[f"activation{index}"] = ACTIVATIONS[activation]()
        super().__init__(layers)
