"""The networks of the chapters."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity}


class MLP(nn.Sequential):
    """A multilayer perceptron on flattened inputs; its layers are ``linear1``, ``linear2``, ….

    Args:
        sizes: widths from input to output, (d, hidden, …, K).
        activation: between the layers: "gelu", "relu", "tanh" or "identity".
        bias: whether the layers have one.
        batch_norm: whether ``nn.BatchNorm1d`` stands before each activation.

    Raises:
        ValueError: fewer than two sizes, or an unknown activation.

    Example:
        >>> import torch
        >>> MLP([784, 256, 10])(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(self, sizes: Sequence[int], activation: str = "gelu", bias: bool = True, *, batch_norm: bool = False):
        if len(sizes) < 2:
            raise ValueError(f"sizes is {list(sizes)}; pass at least an input and an output width")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; pass one of {', '.join(ACTIVATIONS)}")
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for index, (width_in, width_out) in enumerate(pairwise(sizes), start=1):
            layers[f"linear{index}"] = nn.Linear(width_in, width_out, bias)
            if index < len(sizes) - 1:
                if batch_norm:
                    layers[f"norm{index}"] = nn.BatchNorm1d(width_out)
                layers[f"activation{index}"] = ACTIVATIONS[activation]()
        super().__init__(layers)


class CNN(nn.Sequential):
    """Three 3×3 convolutions with max-pooling after the first and third, and a linear readout.

    Its layers are ``conv1``, ``conv2``, ``conv3`` and ``linear``.

    Args:
        input_shape: (channels, height, width) of an image; at least 4×4 pixels.
        num_classes: K.
        channels: of each convolution.
        activation: after each convolution: "gelu", "relu", "tanh" or "identity".

    Raises:
        ValueError: images too small, or an unknown activation.

    Example:
        >>> import torch
        >>> CNN((3, 32, 32), 10)(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int, channels: int = 16, activation: str = "relu"):
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise ValueError(
                f"input_shape is {tuple(input_shape)}; pass (channels, height, width), at least 4×4 pixels"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; pass one of {', '.join(ACTIVATIONS)}")
        channels_in, height, width = input_shape
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index in (1, 2, 3):
            layers[f"conv{index}"] = nn.Conv2d(channels_in, channels, 3, padding=1)
            layers[f"activation{index}"] = ACTIVATIONS[activation]()
            if index != 2:
                layers[f"pool{index}"] = nn.MaxPool2d(2)
            channels_in = channels
        layers["flatten"] = nn.Flatten()
        layers["linear"] = nn.Linear(channels * (height // 4) * (width // 4), num_classes)
        super().__init__(layers)
