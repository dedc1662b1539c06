"""What enters the layers of a network, as rows of features."""

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gramlin.hooks import layer_names, watching


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
        layers: names as in ``network.named_modules()``, without wrappers.
        x: a batch of inputs.
        pooled: a map of a convolution enters as its averages on a grid of so many rows and columns. All its positions
            would be more features than a fit by least squares can bear.

    Raises:
        ValueError: a layer that is not in the network, or that did not see all of the batch once.
    """
    modules = layer_names(network)
    absent = [name for name in layers if name not in modules]
    if absent:
        raise ValueError(f"no layer {absent[0]!r} in the network; it has {', '.join(filter(None, modules))}")
    features: dict[str, Tensor] = {}

    def keep(name: str, maps: Tensor, _: Tensor) -> None:
        if name in features:
            raise ValueError(f"layer {name!r} is used more than once; measure it with gramlin.probe")
        if maps.ndim == 4:
            maps = F.adaptive_avg_pool2d(maps, min(pooled, *maps.shape[2:]))
        features[name] = maps.flatten(1).clone()  # the network may go on to change its own in place

    with watching({name: modules[name] for name in layers}, keep):
        output = network(x)
    for name in layers:
        seen = len(features.get(name, ()))
        if seen != len(x):
            raise ValueError(f"layer {name!r} saw {seen} of {len(x)} samples; name layers that see all of the batch")
    return features, output
