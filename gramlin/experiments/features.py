"""What enters the layers of a network, as rows of features."""

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def chunks(inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, 4,096 rows at a time."""
    return zip(inputs.split(4096), targets.split(4096), strict=True)


def features_name(index: int) -> str:
    """The name of the features that enter the layer of this index."""
    return f"h{index}" if index else "pixels"


def entering(network: nn.Module, layers: Sequence[str], x: Tensor, pooled: int) -> tuple[dict[str, Tensor], Tensor]:
    """The features that enter each of the layers, (n, d), and the network's output.

    Args:
        network: whose layers each see x, or what becomes of it, once.
        layers: names as in ``network.named_modules()``.
        x: a batch of inputs.
        pooled: a map of a convolution enters as its averages on a grid of so many rows and columns. All its positions
            would be more features than a fit by least squares can bear.
    """
    features: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(_: nn.Module, arguments: tuple[Tensor]) -> None:
            maps = arguments[0]
            if maps.ndim == 4:
                maps = F.adaptive_avg_pool2d(maps, min(pooled, *maps.shape[2:]))
            features[name] = maps.flatten(1)

        return hook

    handles = [network.get_submodule(name).register_forward_pre_hook(keep(name)) for name in layers]
    try:
        output = network(x)
    finally:
        for handle in handles:
            handle.remove()
    return features, output
