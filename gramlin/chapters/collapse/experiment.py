"""A classifier trained on to the terminal phase: Neural Collapse and Target Linearity of every layer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from gramlin import data
from gramlin.chapters.features import chunks, entering
from gramlin.chapters.sweeps import Experiment
from gramlin.collapse import MEASURES, RANK_CUTOFF, nearest_class_mean_disagreement, self_duality
from gramlin.hooks import SUPPORTED_LAYERS
from gramlin.linearity import HeldOut, fit_of, linearity_of
from gramlin.models import CNN, MLP
from gramlin.moments import Moments
from gramlin.results import JsonObject
from gramlin.training import accuracy, train

# The learning rate falls to a tenth after each of these shares of the epochs, as in Papyan, Han and Donoho (2020).
MILESTONES = (1 / 3, 2 / 3)


def measure_collapse(
    *,
    dataset: str,
    train_size: int | None,
    model: str,
    width: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> JsonObject:
    """Train a classifier past zero training error by SGD, and measure collapse and linearity at each of its layers.

    Args:
        dataset: a name for ``gramlin.data.load``; inputs are standardised.
        train_size: train on so many images, the first of each class and as many of each; None for all of them.
        model: "mlp" (four hidden layers, GELU), "mlp-bn" (with batch normalisation before each activation), "cnn"
            (``gramlin.models.CNN``) or "resnet18" (torchvision's, with a first convolution of 3×3 without stride, and
            no pooling after it).
        width: of the MLP's hidden layers, or channels of the CNN's convolutions; 64 for "resnet18".
        lr: the learning rate at the start; a tenth of it from a third of the epochs on, a hundredth from two thirds.
        momentum: of SGD.
        weight_decay: of the weights that are matrices; biases and normalisation are free.
        batch_size: samples a step.
        epochs: passes over the training data.
        seed: of the initial weights and the order of samples.
        device: where to run.

    Returns:
        Lists over the moments of measurement: ``epoch`` (0, and on to the last in steps of about √2), ``train_loss``
        (the mean of the epoch; None at 0), ``train_accuracy`` and ``test_accuracy`` in [0, 1]. Of what enters the
        readout: ``nc3``; ``nc3_centred``, the same without the row that all classes' weights share; ``nc3_rotated``,
        the least that a left rotation of the weight could make of it, which is what its Gram matrix says; ``nc4`` and
        ``nc4_test``; for the directions between class means, from that of their largest variance on, ``variances``, the
        fractions of it, and ``nc1_shares``, what each adds to NC1. ``cosines`` of the class means about their mean are
        by epoch, of the start, epoch 4 and the end. Under ``layers``, by name,
        of the features that enter it: ``tl``, ``tl_test``, ``nc1``, ``nc2_equinorm``, ``nc2_equiangular``, ``nc2_etf``.
        ``class_spread`` is g = 1 − Σ(n_c/n)², of the bound TL ≥ g/(g + NC1). Under ``rest``, only with weight decay,
        what the readout's weight W is at rest: see ``_at_rest``.

    Raises:
        ValueError: an unknown model or width; a ``train_size`` that gives a class no image, or more than it has.
    """
    split = data.standardize(data.load(dataset, device=device))
    inputs, targets = split.train_inputs, split.train_targets
    if train_size is not None:
        chosen = _balanced(targets, train_size)
        inputs, targets = inputs[chosen], targets[chosen]
    torch.manual_seed(seed)
    network, layers, pooled = _network(model, inputs.shape[1:], split.num_classes, width)
    network = network.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(decay_groups(network, weight_decay), lr=lr, momentum=momentum)
    milestones = [round(share * epochs) for share in MILESTONES]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    readout = network.get_submodule(layers[-1])
    assert isinstance(readout, nn.Linear)
    measured: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in ("tl", "tl_test", *MEASURES)} for name in layers
    }
    history: JsonObject = {"epoch": []}
    rest: dict[str, list[float]] = {}
    cosines: dict[str, list[list[float]]] = {}

    def measure(epoch: int) -> None:
        moments = {name: Moments(split.num_classes) for name in layers}
        gradient = by_class = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for x, y in chunks(inputs, targets):
            features, output = entering(network, layers, x, pooled)
            for name in layers:
                moments[name].update(features[name], y)
            one_hot = F.one_hot(y, split.num_classes).double()
            residuals = (output.double().softmax(dim=1) - one_hot) / len(inputs)
            gradient = gradient + residuals.mT @ features[layers[-1]].double()
            by_class = by_class + residuals.mT @ one_hot
        held_out = {name: HeldOut(fit_of(each)) for name, each in moments.items()}
        means = moments[layers[-1]].class_means
        disagreement = {"nc4": _disagreement(network, layers, inputs, targets, means, pooled)}
        for x, y in chunks(split.test_inputs, split.test_targets):
            features, _ = entering(network, layers, x, pooled)
            for name in layers:
                held_out[name].update(features[name], y)
        disagreement["nc4_test"] = _disagreement(network, layers, split.test_inputs, split.test_targets, means, pooled)
        for name, each in moments.items():
            values = {"tl": linearity_of(each), "tl_test": held_out[name].score()}
            values |= {measure: of(each) for measure, of in MEASURES.items()}
            for key, value in values.items():
                measured[name][key].append(value.item())
        weight = readout.weight.detach().double()
        row: JsonObject = {
            "train_accuracy": accuracy(network, inputs, targets),
            "test_accuracy": accuracy(network, split.test_inputs, split.test_targets),
            "nc3": self_duality(weight=weight, class_means=means).item(),
            "nc3_centred": self_duality(weight=weight - weight.mean(dim=0), class_means=means).item(),
            "nc3_rotated": _duality_but_for_rotation(weight, means),
            **disagreement,
            **shares_by_direction(moments[layers[-1]]),
        }
        if epoch in (0, 4, epochs):
            directions = F.normalize(means - means.mean(dim=0), dim=1)
            cosines[str(epoch)] = (directions @ directions.mT).tolist()
        history["epoch"].append(epoch)
        for key, entry in row.items():
            history.setdefault(key, []).append(entry)
        if weight_decay:
            for key, distance in _at_rest(weight, gradient, by_class, means, weight_decay).items():
                rest.setdefault(key, []).append(distance)

    moments_of_measurement = _moments_until(epochs)

    def after_epoch(epoch: int) -> JsonObject:
        if epoch:
            schedule.step()
        if epoch in moments_of_measurement:
            measure(epoch)
        return {}

    rows = train(
        network, optimizer, inputs, targets, epochs=epochs, batch_size=batch_size, seed=seed, record=after_epoch
    )
    history["train_loss"] = [rows[epoch]["train_loss"] for epoch in history["epoch"]]
    shares = targets.bincount().double() / len(targets)
    history["class_spread"] = 1 - shares.square().sum().item()
    return {**history, "cosines": cosines, "layers": measured, **({"rest": rest} if rest else {})}


def _balanced(targets: Tensor, size: int) -> Tensor:
    """The first images of each class, as many of each, ``size`` in all (rounded down to a multiple of the classes)."""
    counts = targets.bincount()
    each = size // len(counts)
    if not 1 <= each <= counts.min():
        most = len(counts) * int(counts.min())
        raise ValueError(f"train_size is {size}; pass {len(counts)} to {most}, as many images of each class, or None")
    return torch.cat([(targets == label).nonzero().flatten()[:each] for label in range(len(counts))])


def decay_groups(network: nn.Module, weight_decay: float) -> list[dict[str, list[nn.Parameter] | float]]:
    """Parameter groups for an optimizer that decays weights, and neither biases nor normalisation."""
    decayed = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    free = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def _network(model: str, shape: torch.Size, num_classes: int, width: int) -> tuple[nn.Module, list[str], int]:
    """The network, its layers to be measured, the readout last, and the grid on which maps are averaged."""
    if model in ("mlp", "mlp-bn"):
        network: nn.Module = MLP([shape.numel(), *4 * [width], num_classes], "gelu", batch_norm=model == "mlp-bn")
    elif model == "cnn":
        network = CNN(shape, num_classes, channels=width)
    elif model == "resnet18" and width == 64:
        network = resnet18(num_classes=num_classes)
        network.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
        blocks = [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3, 4) for block in (0, 1)]
        return network, ["conv1", *blocks, "fc"], 1
    else:
        raise ValueError(f"model is {model!r} of width {width}; pass 'mlp', 'mlp-bn', 'cnn', or 'resnet18' of width 64")
    return network, [name for name, layer in network.named_children() if isinstance(layer, SUPPORTED_LAYERS)], 4


def _moments_until(epochs: int) -> set[int]:
    """Epochs 0, 1, 2, 3, 4, 6, 8, 11, …, and the last."""
    return {0, epochs} | {round(2 ** (step / 2)) for step in range(2 * epochs.bit_length()) if 2 ** (step / 2) < epochs}


def _disagreement(
    network: nn.Module, layers: Sequence[str], inputs: Tensor, targets: Tensor, means: Tensor, pooled: int
) -> float:
    wrong = 0.0
    for x, y in chunks(inputs, targets):
        features, output = entering(network, layers[-1:], x, pooled)
        wrong += len(y) * nearest_class_mean_disagreement(features[layers[-1]], output.argmax(dim=1), means).item()
    return wrong / len(inputs)


def shares_by_direction(moments: Moments) -> dict[str, list[float]]:
    """The principal directions of the class means: shares of their variance, and of NC1, which they add up to."""
    means = moments.class_means
    _, spread, directions = torch.linalg.svd(means - means.mean(dim=0), full_matrices=False)
    rank = int((spread[: len(means) - 1] > RANK_CUTOFF * spread[0]).sum())  # at most K − 1: the rows sum to zero
    spread, directions = spread[:rank], directions[:rank]
    within = moments.within_products(directions.mT).diagonal() / moments.count
    return {
        "variances": (spread.square() / spread.square().sum()).tolist(),
        "nc1_shares": (within / spread.square()).tolist(),
    }


def _duality_but_for_rotation(weight: Tensor, means: Tensor) -> float:
    """The least of ‖RW/‖W‖ − M/‖M‖‖ over orthogonal R: √(2 − 2σ), σ the sum of singular values of W̄M̄ᵀ."""
    W, M = (each / each.norm() for each in (weight, means - means.mean(dim=0)))
    total: Tensor = torch.linalg.svdvals(W @ M.mT).sum()
    return (2 - 2 * total).clamp(min=0).sqrt().item()


def _at_rest(
    weight: Tensor, gradient: Tensor, by_class: Tensor, means: Tensor, weight_decay: float
) -> dict[str, float]:
    """How near the readout's weight W (K, d) is to what it is where its loss with decay λ is stationary.

    - ``stationarity``: ‖∂L/∂W + λW‖/‖λW‖.
    - ``duality``: ‖W − AM/λ‖/‖W‖ with A = −ΔᵀY and M the class means about their mean; at rest this is the part of
      the gradient that features have about their class means, and 0 at collapse.
    - ``in_span``: ‖WΠ‖²/‖W‖², Π the projection on the span of M.
    - ``simplex``: the cosine of A and I − 11ᵀ/K.
    """
    M = means - means.mean(dim=0)
    A = -by_class
    K = len(A)
    simplex = torch.eye(K, dtype=A.dtype, device=A.device) - 1 / K
    _, spread, directions = torch.linalg.svd(M, full_matrices=False)
    directions = directions[spread > 1e-6 * spread[0]]
    return {
        "stationarity": ((gradient + weight_decay * weight).norm() / (weight_decay * weight).norm()).item(),
        "duality": ((weight - A @ M / weight_decay).norm() / weight.norm()).item(),
        "in_span": ((weight @ directions.mT).norm() / weight.norm()).square().item(),
        "simplex": ((A * simplex).sum() / (A.norm() * simplex.norm())).item(),
    }


COLLAPSE = Experiment("collapse", measure_collapse)


def collapse_settings(dataset: str, seeds: Sequence[int]) -> list[JsonObject]:
    """The paper-scale runs of chapter 4: on CIFAR-10 a CNN on 10,000 images and a ResNet-18, else MLPs.

    The MLPs with and without weight decay, and with both decay and batch normalisation.
    """
    base = {"dataset": dataset, "train_size": None, "momentum": 0.9, "batch_size": 128, "epochs": 350}
    if dataset in ("cifar10", "cifar10-jpeg"):
        cnn = {**base, "model": "cnn", "width": 32, "train_size": 10_000, "lr": 0.02}
        resnet = {**base, "model": "resnet18", "width": 64, "lr": 0.05}
        return [{**each, "weight_decay": 5e-4, "seed": seed} for seed in seeds for each in (cnn, resnet)]
    mlp = {**base, "width": 256, "lr": 0.05}
    kinds = [("mlp", 5e-4), ("mlp-bn", 5e-4), ("mlp", 0.0)]
    return [{**mlp, "model": model, "weight_decay": decay, "seed": seed} for seed in seeds for model, decay in kinds]
