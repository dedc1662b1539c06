"""Chapter 4: Neural Collapse and Target Linearity of every layer, on to the terminal phase of training."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torchvision.models import resnet18

from gramlin import data
from gramlin.collapse import MEASURES, RANK_CUTOFF, nearest_class_mean_disagreement, self_duality
from gramlin.experiments.features import chunks, entering, features_name
from gramlin.experiments.summaries import grouped, mean_and_spread
from gramlin.experiments.sweeps import Experiment
from gramlin.hooks import SUPPORTED_LAYERS
from gramlin.linearity import HeldOut, fit_of, linearity_of
from gramlin.models import CNN, MLP
from gramlin.moments import Moments
from gramlin.results import Run
from gramlin.training import accuracy, train

# The learning rate falls to a tenth after each of these shares of the epochs, as in Papyan, Han and Donoho (2020).
_MILESTONES = (1 / 3, 2 / 3)


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
) -> dict:
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
    network = network.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(decay_groups(network, weight_decay), lr=lr, momentum=momentum)
    milestones = [round(share * epochs) for share in _MILESTONES]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    readout = network.get_submodule(layers[-1])
    measured = {name: {key: [] for key in ("tl", "tl_test", *MEASURES)} for name in layers}
    history: dict[str, list] = {"epoch": []}
    rest: dict[str, list] = {}
    cosines: dict[str, list] = {}

    def measure(epoch: int) -> None:
        moments = {name: Moments(split.num_classes) for name in layers}
        gradient, by_class = 0, 0
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
        row = {
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
        for key, value in row.items():
            history.setdefault(key, []).append(value)
        if weight_decay:
            for key, value in _at_rest(weight, gradient, by_class, means, weight_decay).items():
                rest.setdefault(key, []).append(value)

    moments_of_measurement = _moments_until(epochs)

    def after_epoch(epoch: int) -> dict:
        if epoch:
            schedule.step()
        if epoch in moments_of_measurement:
            measure(epoch)
        return {}

    options = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "record": after_epoch}
    rows = train(network, optimizer, inputs, targets, **options)
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


def decay_groups(network: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for an optimizer that decays weights, and neither biases nor normalisation."""
    decayed = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    free = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def _network(model: str, shape: torch.Size, num_classes: int, width: int) -> tuple[nn.Module, list[str], int]:
    """The network, its layers to be measured, the readout last, and the grid on which maps are averaged."""
    if model in ("mlp", "mlp-bn"):
        network = MLP([shape.numel(), *4 * [width], num_classes], "gelu", batch_norm=model == "mlp-bn")
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
    return (2 - 2 * torch.linalg.svdvals(W @ M.mT).sum()).clamp(min=0).sqrt().item()


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


def collapse_settings(dataset: str, seeds: Sequence[int]) -> list[dict]:
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


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart; perceptrons first."""
    groups = {}
    found = grouped(runs, "dataset", "model", "weight_decay").items()
    for (dataset, model, decay), group in sorted(found, key=lambda each: not each[0][1].startswith("mlp")):
        groups[f"{dataset}, {model.upper()}, {f'λ = {decay:g}' if decay else 'no decay'}"] = group
    return groups


def collapse_panels(runs: Sequence[Run], measure: str) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A measure of what enters each layer, for ``figures.plot_layers_over_training``: the epochs, and a row a run.

    Args:
        runs: of chapter 4.
        measure: a key of a layer's metrics, or "nonlinear" for 1 − TL.
    """

    def values(layer: dict) -> np.ndarray:
        return 1 - np.array(layer["tl"]) if measure == "nonlinear" else np.array(layer[measure])

    return {
        title: {
            features_name(index): (
                np.array(group[0].metrics["epoch"]),
                np.array([values(run.metrics["layers"][name]) for run in group]),
            )
            for index, name in enumerate(group[0].metrics["layers"])
        }
        for title, group in _groups(runs).items()
    }


def readout_panels(runs: Sequence[Run]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """All measures of the features that enter the readout, for ``figures.plot_measures``: the epochs, and a row a run.

    NC4 of 0 is NaN here: a logarithmic axis has no place for it.
    """
    panels = {}
    for title, group in _groups(runs).items():
        of_layer = [list(run.metrics["layers"].values())[-1] for run in group]
        rows = {"1 − TL": 1 - np.array([layer["tl"] for layer in of_layer])}
        rows |= {label: np.array([layer[key] for layer in of_layer]) for key, label in _LABELS.items()}
        rows["NC3"] = np.array([run.metrics["nc3"] for run in group])
        disagreement = np.array([run.metrics["nc4"] for run in group])
        rows["NC4"] = np.where(disagreement > 0, disagreement, np.nan)
        epochs = np.array(group[0].metrics["epoch"])
        panels[title] = {label: (epochs, values) for label, values in rows.items()}
    return panels


_LABELS = {
    "nc1": "NC1",
    "nc2_equinorm": "NC2 equinorm",
    "nc2_equiangular": "NC2 equiangular",
    "nc2_etf": "NC2 simplex",
}


def collapse_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Collapse at the end of training, a row a group and layer: mean ± standard deviation over seeds.

    "TL" and "NC1" of the features that enter the layer, on the training data; "1 − TL over its bound" by NC1,
    (1 − TL)(g + NC1)/NC1, which is at most 1, and 1 where the bound is tight (the largest over seeds); "NC2 simplex";
    "90% by epoch": when ln NC1 has made nine tenths of its way from the start to its least value; and "NC1, end/least",
    means over seeds. Nothing for the pixels, which do not move.
    """
    rows = {}
    for title, group in _groups(runs).items():
        for index, name in enumerate(group[0].metrics["layers"]):
            layers = [run.metrics["layers"][name] for run in group]
            rows[title, features_name(index)] = {
                "TL": mean_and_spread([layer["tl"][-1] for layer in layers], 4),
                "TL, held-out": mean_and_spread([layer["tl_test"][-1] for layer in layers], 3),
                "NC1": mean_and_spread([layer["nc1"][-1] for layer in layers], 4),
                "1 − TL over its bound": f"{max(_tightness(run, name)[-1] for run in group):.2f}",
                "NC2 simplex": mean_and_spread([layer["nc2_etf"][-1] for layer in layers], 3),
                "90% by epoch": f"{np.mean([_settles(run, name) for run in group]):.0f}" if index else "–",
                "NC1, end/least": f"{np.mean([layer['nc1'][-1] / min(layer['nc1']) for layer in layers]):.2f}"
                if index
                else "–",
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "features"])
    return pd.DataFrame(list(rows.values()), index=index)


def _tightness(run: Run, layer: str) -> np.ndarray:
    linearity, nc1 = (np.array(run.metrics["layers"][layer][key]) for key in ("tl", "nc1"))
    return (1 - linearity) * (run.metrics["class_spread"] + nc1) / nc1


def _settles(run: Run, layer: str) -> int:
    course = np.log(run.metrics["layers"][layer]["nc1"])
    way = (course[0] - course) / (course[0] - course.min())
    return run.metrics["epoch"][int(np.argmax(way >= 0.9))]


def bound_points(runs: Sequence[Run]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """NC1 and 1 − TL of every run and moment after the start, by the features' name, for ``figures.plot_bound``."""
    points: dict[str, list[np.ndarray]] = {}
    for run in runs:
        for index, layer in enumerate(run.metrics["layers"].values()):
            pair = np.array([layer["nc1"][1:], 1 - np.array(layer["tl"][1:])])
            points.setdefault(features_name(index), []).append(pair)
    return {name: tuple(np.concatenate(pairs, axis=1)) for name, pairs in points.items()}


def readout_paths(runs: Sequence[Run]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """NC1 and 1 − TL of what enters the readout over training, for ``figures.plot_bound``.

    By data set, by network: the epochs, and of either a row a run.
    """
    paths: dict = {}
    for title, group in _groups(runs).items():
        dataset = group[0].settings["dataset"]
        network = title.removeprefix(f"{dataset}, ")
        top = [list(run.metrics["layers"].values())[-1] for run in group]
        nc1, nonlinear = np.array([each["nc1"] for each in top]), 1 - np.array([each["tl"] for each in top])
        paths.setdefault(dataset, {})[network] = (np.array(group[0].metrics["epoch"]), nc1, nonlinear)
    return paths


def bound_violations(runs: Sequence[Run]) -> int:
    """How often, over runs, layers and moments, Target Linearity is less than the bound by NC1 says: it must be 0."""
    # Not "exceeds": a value that is not a number must count.
    return sum(int((~(_tightness(run, name) <= 1 + 1e-9)).sum()) for run in runs for name in run.metrics["layers"])


def readout_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The end of training, a row a group: accuracies in percent, and what enters the readout; mean ± sd over seeds.

    "last training error, epoch" is the last moment of measuring at which there was one. Target Linearity stands beside
    the bounds that NC1 puts on it, as a whole and direction by direction (the classes taken to
    be of equal size). "NC3" is the distance between weight and class means, "but for a rotation" the least that a left
    rotation of the weight could make of it.
    """
    rows = {}
    for title, group in _groups(runs).items():
        top = [list(run.metrics["layers"].values())[-1] for run in group]
        metrics = [run.metrics for run in group]
        rows[title] = {
            "seeds": len(group),
            "train accuracy": mean_and_spread([100 * each["train_accuracy"][-1] for each in metrics], 2),
            "test accuracy": mean_and_spread([100 * each["test_accuracy"][-1] for each in metrics], 2),
            "last training error, epoch": _range([_last_error(each) for each in metrics]),
            "TL": mean_and_spread([layer["tl"][-1] for layer in top], 4),
            "TL at least, by NC1": mean_and_spread([_bounds(each)[0] for each in metrics], 4),
            "TL at least, by direction": mean_and_spread([_bounds(each)[1] for each in metrics], 4),
            **{label: mean_and_spread([layer[key][-1] for layer in top], 3) for key, label in _LABELS.items()},
            "NC3": mean_and_spread([each["nc3"][-1] for each in metrics], 3),
            "NC3 but for a rotation": mean_and_spread([each["nc3_rotated"][-1] for each in metrics], 3),
            "NC4, %": mean_and_spread([100 * each["nc4"][-1] for each in metrics], 2),
            "NC4 held-out, %": mean_and_spread([100 * each["nc4_test"][-1] for each in metrics], 2),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _last_error(metrics: dict) -> int:
    """The last epoch at which accuracy on the training data was measured and was not 1; 0 if there is none."""
    shares = zip(metrics["epoch"], metrics["train_accuracy"], strict=True)
    return max((epoch for epoch, share in shares if share < 1), default=0)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


def _bounds(metrics: dict) -> tuple[float, float]:
    """g/(g + NC1), and the mean over directions of q/(q + NC1_k) with q = g/(K − 1)."""
    g, shares = metrics["class_spread"], np.array(metrics["nc1_shares"][-1])
    q = g / len(shares)
    return g / (g + shares.sum()), float(np.mean(q / (q + shares)))


def direction_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Collapse of what enters the readout at the end of training, by principal direction of the class means.

    Two rows a group, means over seeds: the direction's share of the class means' variance in percent, from the largest
    on, and what it adds to NC1.
    """
    rows = {}
    for title, group in _groups(runs).items():
        for label, key, scale in (("variance, %", "variances", 100), ("NC1", "nc1_shares", 1)):
            mean = scale * np.mean([run.metrics[key][-1] for run in group], axis=0)
            rows[title, label] = {index: f"{value:.2g}" for index, value in enumerate(mean, start=1)}
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "direction"])
    return pd.DataFrame(list(rows.values()), index=index)


def rest_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The readout's weight W at the end of training with weight decay, a row a group: mean ± sd over seeds.

    "‖∂L/∂W + λW‖/λ‖W‖" is 0 at rest; the share of ‖W‖² in the span of M and "‖W − AM/λ‖/‖W‖" are 1 and 0 at rest and
    collapse; "cos(A, I − 11ᵀ/K)" is then 1 where weight and class means are dual.
    """
    columns = {
        "stationarity": "‖∂L/∂W + λW‖/λ‖W‖",
        "in_span": "share of ‖W‖² in the span of M",
        "duality": "‖W − AM/λ‖/‖W‖",
        "simplex": "cos(A, I − 11ᵀ/K)",
    }
    rows = {
        title: {
            label: mean_and_spread([run.metrics["rest"][key][-1] for run in group], 3) for key, label in columns.items()
        }
        for title, group in _groups([run for run in runs if "rest" in run.metrics]).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def collapse_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 4's claim C7, a row a group.

    "over time": Spearman's rank correlation of TL and −NC1 of the features that enter the readout, over the moments
    after the start; "over layers": that of what enters the layers, at the end. Both as the least over seeds. "TL" and
    "NC1 fell to", the last over the first, of what enters the readout: the worst seed. "reproduced" if both
    correlations are at least 0.9, TL at least 0.95 and NC1 at most a tenth of what it was, "not reproduced" if one is
    not. The rule asks this of every seed: one can fail it, but not meet it, and says then "not decided by one seed".

    Not asked for by the rule, the worst seed as well: "from the drop", as "over time", but from the last moment before
    the learning rate first drops (after a third of the epochs) on; and "NC1, end/least".
    """
    rows = {}
    for title, group in _groups(runs).items():
        layers = [list(run.metrics["layers"].values()) for run in group]
        over_time = min(_rank_correlation(each[-1]["tl"][1:], each[-1]["nc1"][1:]) for each in layers)
        over_layers = min(
            _rank_correlation(*([layer[key][-1] for layer in each] for key in ("tl", "nc1"))) for each in layers
        )
        drop = np.searchsorted(group[0].metrics["epoch"], _MILESTONES[0] * group[0].settings["epochs"]) - 1
        late = [(each[-1]["tl"][drop:], each[-1]["nc1"][drop:]) for each in layers]
        linearity = min(each[-1]["tl"][-1] for each in layers)
        fall = max(each[-1]["nc1"][-1] / each[-1]["nc1"][0] for each in layers)
        turned = max(each[-1]["nc1"][-1] / min(each[-1]["nc1"]) for each in layers)
        holds = over_time >= 0.9 and over_layers >= 0.9 and linearity >= 0.95 and fall <= 0.1
        rows[title] = {
            "seeds": len(group),
            "over time": f"{over_time:.2f}",
            "over layers": f"{over_layers:.2f}",
            "TL": f"{linearity:.4f}",
            "NC1 fell to": f"{fall:.2g}",
            "from the drop": f"{min(_rank_correlation(*each) for each in late):.2f}" if len(late[0][0]) > 2 else "–",
            "NC1, end/least": f"{turned:.2f}",
            "C7": "not reproduced" if not holds else "reproduced" if len(group) > 1 else "not decided by one seed",
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _rank_correlation(linearity: Sequence[float], nc1: Sequence[float]) -> float:
    return float(stats.spearmanr(linearity, -np.array(nc1)).statistic)
