"""A network in training with parts of its steps taken out: what it reaches, and what becomes of its Gram matrices."""

from collections.abc import Sequence

import torch
from torch import nn

from gramlin import data
from gramlin.chapters.sweeps import Experiment
from gramlin.chapters.whitening.steps import UPDATES, split_steps
from gramlin.gram import relative_error, weight_gram
from gramlin.hooks import SUPPORTED_LAYERS
from gramlin.models import CNN, MLP
from gramlin.results import JsonObject
from gramlin.training import accuracy, train


def measure_whitening(
    *,
    dataset: str,
    method: str,
    model: str,
    lr: float,
    momentum: float,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> JsonObject:
    """Train by SGD with parts of its steps taken out, and follow accuracy and each layer's Gram matrix.

    Args:
        dataset: a name for ``gramlin.data.load``; inputs are standardised.
        method: a key of ``UPDATES``; "newton-schulz" is "whitened" by the approximate solver of ten steps.
        model: "mlp" (two hidden layers of 256, GELU) or "cnn" (three convolutions of 16 channels, ReLU).
        lr: the learning rate.
        momentum: of SGD.
        batch_size: samples a step.
        epochs: passes over the training split.
        seed: of the initial weights and the order of samples.
        device: where to run.

    Returns:
        Of a run that diverged, ``diverged``: how. Otherwise lists over epochs from 1: ``train_loss``,
        ``train_accuracy``, ``test_accuracy`` (accuracies in [0, 1]). Under ``layers``, for each layer by name:

        - ``gram_change``, over epochs: the norm of the Gram shift since initialisation over that of the first Gram
          matrix.
        - ``shape``: (k, d) of its weight matrix.
        - ``singular_values``: of the last weight, 17 quantiles from the smallest to the largest.
        - unless it is frozen, for a few ``steps`` (the powers of two and the last) ``kept``: the length ‖R* W⁺ − W‖
          that whitening leaves, or would leave, of the step that SGD proposes, over the length of that step.
        - where the steps keep their Gram shift, and it alone, for the same steps ``gram_error``: the norm of what the
          stored weight's Gram matrix differs by from that of the plain step's weight, over the norm of the step's Gram
          shift; ``gram_error_floor``, the same for the exact R* W⁺ rounded to the weights' precision.
    """
    split = data.standardize(data.load(dataset, device=device))
    torch.manual_seed(seed)
    shape = split.train_inputs.shape[1:]
    network: nn.Module
    if model == "mlp":
        network = MLP([shape.numel(), 256, 256, split.num_classes], "gelu")
    elif model == "cnn":
        network = CNN(shape, split.num_classes)
    else:
        raise ValueError(f"model is {model!r}; pass 'mlp' or 'cnn'")
    network = network.to(device).to(memory_format=torch.channels_last)  # for convolutions on a CPU: 1.3 times faster
    layers = {name: layer for name, layer in network.named_children() if isinstance(layer, SUPPORTED_LAYERS)}
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)
    steps = epochs * -(-len(split.train_inputs) // batch_size)
    watch = split_steps(optimizer, layers, method, last=steps)
    initial = {name: weight_gram(layer.weight.detach().double()) for name, layer in layers.items()}
    changes: dict[str, list[float]] = {name: [] for name in layers}

    def compare(epoch: int) -> JsonObject:
        if epoch == 0:
            return {}
        for name, layer in layers.items():
            changes[name].append(relative_error(weight_gram(layer.weight.detach().double()), initial[name]))
        return {
            "train_accuracy": accuracy(network, split.train_inputs, split.train_targets),
            "test_accuracy": accuracy(network, split.test_inputs, split.test_targets),
        }

    try:
        history = train(
            network,
            optimizer,
            split.train_inputs,
            split.train_targets,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            record=compare,
        )
    except FloatingPointError as error:
        return {"diverged": str(error)}
    metrics = {key: [row[key] for row in history[1:]] for key in history[1]}
    quantiles = torch.linspace(0, 1, 17, dtype=torch.float64, device=device)
    for name, layer in layers.items():
        values = torch.linalg.svdvals(layer.weight.detach().flatten(1).double())
        watch[name]["singular_values"] = values.quantile(quantiles).tolist()
        watch[name]["gram_change"] = changes[name]
        watch[name]["shape"] = list(layer.weight.flatten(1).shape)
    return {**metrics, "layers": watch}


WHITENING = Experiment("whitening", measure_whitening)


def whitening_settings(dataset: str, seeds: Sequence[int]) -> list[JsonObject]:
    """The paper-scale runs of chapter 2, most telling first.

    SGD and its whitened twin for all seeds; the CNN, the approximate solver and the controls for three; other learning
    rates for two, the largest with a control.
    """
    momentum = 0.8 if dataset == "cifar100" else 0.95  # as in the paper
    base: JsonObject = {
        "dataset": dataset,
        "model": "mlp",
        "lr": 0.01,
        "momentum": momentum,
        "batch_size": 64,
        "epochs": 20,
    }
    twins: list[JsonObject] = [{"method": "sgd"}, {"method": "whitened"}]
    parts: list[tuple[int, list[JsonObject]]] = [
        (len(seeds), twins),
        (3, [{**twin, "model": "cnn"} for twin in twins]),
        (3, [{"method": method} for method in UPDATES if method not in ("sgd", "whitened")]),
        (2, [{**twin, "lr": lr} for lr in (0.1, 0.05, 0.005) for twin in twins]),
        (2, [{"method": method, "lr": 0.1} for method in ("random directions dropped", "shortened")]),
    ]
    return [
        {**base, **variant, "seed": seed} for count, variants in parts for seed in seeds[:count] for variant in variants
    ]
