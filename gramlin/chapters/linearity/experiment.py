"""A network in training: Target Linearity and the surrogate of every layer."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gramlin import data
from gramlin.chapters.features import chunks, entering
from gramlin.chapters.sweeps import Experiment, optimizer_of
from gramlin.hooks import SUPPORTED_LAYERS
from gramlin.linearity import HeldOut, alignment_of, fit_of, linearity_of
from gramlin.models import CNN, MLP
from gramlin.moments import Moments
from gramlin.results import JsonObject
from gramlin.training import accuracy, evaluating, train

# A convolution's map enters as its 4×4 averages; one average of all would leave a feature a channel.
_POOLED = 4

_Sums: TypeAlias = tuple[int, Tensor, Tensor, Tensor]


def measure_linearity(
    *,
    dataset: str,
    method: str,
    model: str,
    width: int,
    depth: int,
    lr: float,
    momentum: float,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> JsonObject:
    """Train a network, and measure the features that enter each of its layers, and the network's output.

    Args:
        dataset: a name for ``gramlin.data.load``; inputs are standardised.
        method: "sgd" or "adam".
        model: "mlp" (GELU) or "cnn" (``gramlin.models.CNN``; depth is then 3, and width the number of channels).
        width: of the hidden layers.
        depth: number of hidden layers.
        lr: the learning rate.
        momentum: of SGD; Adam keeps its usual moments, and this must be 0.
        batch_size: samples a step.
        epochs: passes over the training split.
        seed: of the initial weights and the order of samples.
        device: where to run.

    Returns:
        Lists over the moments of measurement: ``step`` (0; the powers of two within the first epoch; the end of each
        epoch), ``test_accuracy`` (in [0, 1]). ``train_loss`` is over epochs from 1. Under ``layers``, by name, for the
        features that enter the layer: ``tl`` (training split, where the fit is made) and ``tl_test``; for the layer's
        weight and these features ``surrogate`` (K·S/n², in which the number of samples does not count) and ``cka``.
        The last entry, "output", has ``tl`` and ``tl_test`` only. A map of a convolution enters as its 4×4 averages,
        without surrogate.
    """
    split = data.standardize(data.load(dataset, device=device))
    torch.manual_seed(seed)
    shape = split.train_inputs.shape[1:]
    network: nn.Module
    if model == "mlp":
        network = MLP([shape.numel(), *depth * [width], split.num_classes], "gelu")
    elif model == "cnn" and depth == 3:
        network = CNN(shape, split.num_classes, channels=width)
    else:
        raise ValueError(f"model is {model!r} with depth {depth}; pass 'mlp', or 'cnn' with depth 3")
    network = network.to(device).to(memory_format=torch.channels_last)
    optimizer = optimizer_of(method, network, lr, momentum)
    names = [name for name, layer in network.named_children() if isinstance(layer, SUPPORTED_LAYERS)]
    steps_an_epoch = -(-len(split.train_inputs) // batch_size)
    layers: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in ("tl", "tl_test", "surrogate", "cka")} for name in names
    }
    layers["output"] = {"tl": [], "tl_test": []}
    history: dict[str, list[float]] = {"step": [], "test_accuracy": []}
    pixels: dict[str, _Sums] = {}  # the input's sums and values, which training does not change
    step = 0

    @evaluating(network)
    def measure() -> None:
        moments = {name: Moments(split.num_classes) for name in layers if name not in pixels}
        for x, y in chunks(split.train_inputs, split.train_targets):
            features, output = entering(network, names, x, _POOLED)
            for name, each in moments.items():
                each.update(output if name == "output" else features[name], y)
        held_out = {name: HeldOut(fit_of(each)) for name, each in moments.items()}
        for x, y in chunks(split.test_inputs, split.test_targets):
            features, output = entering(network, names, x, _POOLED)
            for name, fit in held_out.items():
                fit.update(output if name == "output" else features[name], y)
        for name, each in moments.items():
            layers[name]["tl"].append(linearity_of(each).item())
            layers[name]["tl_test"].append(held_out[name].score().item())
        if pixels:
            for key in ("tl", "tl_test"):
                layers[names[0]][key].append(layers[names[0]][key][0])
        else:
            pixels[names[0]] = _sums(moments[names[0]])
        for name in names:
            layer = getattr(network, name)
            if isinstance(layer, nn.Linear):
                n, cross, scatter, of_targets = pixels[name] if name in pixels else _sums(moments[name])
                W = layer.weight.double()
                layers[name]["surrogate"].append(((W @ cross).square().sum() / n**2).item())
                layers[name]["cka"].append(alignment_of(W @ cross, W @ scatter @ W.mT, of_targets).item())
        history["step"].append(step)
        history["test_accuracy"].append(accuracy(network, split.test_inputs, split.test_targets))

    def after_step(*_: object) -> None:
        nonlocal step
        step += 1
        if step < steps_an_epoch and step & (step - 1) == 0:
            measure()

    def after_epoch(epoch: int) -> JsonObject:
        measure()
        return {}

    optimizer.register_step_post_hook(after_step)
    rows = train(
        network,
        optimizer,
        split.train_inputs,
        split.train_targets,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        record=after_epoch,
    )
    layers = {name: {key: values for key, values in each.items() if values} for name, each in layers.items()}
    return {**history, "train_loss": [row["train_loss"] for row in rows[1:]], "layers": layers}


def _sums(moments: Moments) -> _Sums:
    """What the surrogate and CKA need: n, the cross moments, the features' scatter and the size of that of classes."""
    return moments.count, moments.cross, moments.scatter, moments.class_scatter_norm


LINEARITY = Experiment("linearity", measure_linearity)


def linearity_settings(dataset: str, seeds: Sequence[int]) -> list[JsonObject]:
    """The paper-scale runs of chapter 3, most telling first: SGD and Adam for all seeds; other networks for one."""
    base: JsonObject = {"dataset": dataset, "model": "mlp", "width": 256, "depth": 4, "batch_size": 64, "epochs": 100}
    sgd = {**base, "method": "sgd", "lr": 0.0005, "momentum": 0.8}
    adam = {**base, "method": "adam", "lr": 0.0001, "momentum": 0.0}
    cnn = {**sgd, "model": "cnn", "width": 16, "depth": 3, "lr": 0.01, "epochs": 30}
    others = [{**sgd, "width": 64}, {**sgd, "width": 512}, cnn]
    return [{**each, "seed": seed} for each in (sgd, adam) for seed in seeds] + [
        {**each, "seed": seeds[0]} for each in others
    ]
