"""Chapter 2: training with parts of each step taken out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

from gramlin import data
from gramlin.experiments.summaries import finished, grouped, mean_and_spread, paired_interval, select
from gramlin.experiments.sweeps import Experiment
from gramlin.gram import gram_shift, relative_error, weight_gram
from gramlin.models import CNN, MLP
from gramlin.results import Run
from gramlin.training import accuracy, train
from gramlin.whitening import nearest_with_same_gram, newton_schulz_polar, polar_factor, whiten

# What becomes of a layer's steps, in the hidden layers and in the readout. "plain" keeps them, "gram" and "rotation"
# keep one half, "frozen" keeps nothing of the weight's. Biases train plainly throughout. The others are the controls:
# "scaled rotation" keeps the rotation and the change of the weight's length; "not random" drops as many directions as
# there are rotations, but random ones, and "random" keeps those only; "shortened" is the plain step, but only as long
# as what whitening would leave of it.
UPDATES = {
    "sgd": ("plain", "plain"),
    "whitened": ("gram", "gram"),
    "newton-schulz": ("gram", "gram"),
    "rotation": ("rotation", "rotation"),
    "rotation and length": ("scaled rotation", "scaled rotation"),
    "gram in hidden layers only": ("gram", "rotation"),
    "rotation in hidden layers": ("rotation", "plain"),
    "readout and biases": ("frozen", "plain"),
    "random directions dropped": ("not random", "not random"),
    "random directions only": ("random", "random"),
    "shortened": ("shortened", "shortened"),
}


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
) -> dict:
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
    if model == "mlp":
        network = MLP([shape.numel(), 256, 256, split.num_classes], "gelu")
    elif model == "cnn":
        network = CNN(shape, split.num_classes)
    else:
        raise ValueError(f"model is {model!r}; pass 'mlp' or 'cnn'")
    network = network.to(device, memory_format=torch.channels_last)  # for convolutions on a CPU: 1.3 times faster
    layers = {name: layer for name, layer in network.named_children() if hasattr(layer, "weight")}
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)
    steps = epochs * -(-len(split.train_inputs) // batch_size)
    watch = split_steps(optimizer, layers, method, last=steps)
    initial = {name: weight_gram(layer.weight.detach().double()) for name, layer in layers.items()}
    changes = {name: [] for name in layers}

    def compare(epoch: int) -> dict:
        if epoch == 0:
            return {}
        for name, layer in layers.items():
            changes[name].append(relative_error(weight_gram(layer.weight.detach().double()), initial[name]))
        return {
            "train_accuracy": accuracy(network, split.train_inputs, split.train_targets),
            "test_accuracy": accuracy(network, split.test_inputs, split.test_targets),
        }

    options = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "record": compare}
    try:
        history = train(network, optimizer, split.train_inputs, split.train_targets, **options)
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


def split_steps(
    optimizer: torch.optim.Optimizer, layers: dict[str, nn.Module], method: str, *, last: int | None = None
) -> dict[str, dict[str, list]]:
    """Attach what the method asks for to the optimizer; returns lists that fill up as it steps.

    Args:
        optimizer: over the layers' parameters, and others.
        layers: all that have a weight, by name; the last is the readout.
        method: a key of ``UPDATES``.
        last: the number of the last step, which is watched as the powers of two are.

    Returns:
        By layer, ``steps``, ``kept``, ``gram_error`` and ``gram_error_floor`` as in ``measure_whitening``.

    Raises:
        ValueError: an unknown method.
    """
    if method not in UPDATES:
        raise ValueError(f"method is {method!r}; pass one of {', '.join(map(repr, UPDATES))}")
    *hidden, readout = layers
    halves = dict.fromkeys(hidden, UPDATES[method][0]) | {readout: UPDATES[method][1]}
    weights = {name: layer.weight for name, layer in layers.items()}
    for name, half in halves.items():
        weights[name].requires_grad_(half != "frozen")
    trained = [name for name, half in halves.items() if half != "frozen"]
    watch = {name: {} for name in layers}
    for name in trained:
        keys = ("steps", "kept", "gram_error", "gram_error_floor") if halves[name] == "gram" else ("steps", "kept")
        watch[name] = {key: [] for key in keys}
    before, plain = {}, {}
    step = 0

    # Hooks run in the order in which they are attached: one before each step; then one that sees the plain step, what
    # changes it, and one that sees what has become of it.
    @torch.no_grad()
    def save(*_) -> None:
        nonlocal step
        step += 1
        before.update({name: weights[name].clone() for name in trained})

    @torch.no_grad()
    def save_plain(*_) -> None:
        plain.update({name: weights[name].clone() for name in trained})

    @torch.no_grad()
    def change(*_) -> None:
        for name in trained:
            new = None
            if halves[name] == "scaled rotation":  # turned already: only the length is to come
                new = weights[name] * (plain[name].norm() / weights[name].norm())
            elif halves[name] == "shortened":
                new = before[name] + _kept(before[name], plain[name]) * (plain[name] - before[name])
            elif halves[name] in ("random", "not random"):
                within = projections[name](plain[name] - before[name])
                new = before[name] + within if halves[name] == "random" else plain[name] - within
            if new is not None:
                weights[name].copy_(new)

    @torch.no_grad()
    def look(*_) -> None:
        if step & (step - 1) and step != last:
            return
        for name in trained:
            old, proposed = before[name].flatten(1).double(), plain[name].flatten(1).double()
            watch[name]["steps"].append(step)
            watch[name]["kept"].append(_kept(old, proposed).item())
            if halves[name] == "gram":  # which has raised an error if the step is not finite
                exact = nearest_with_same_gram(before=old, after=proposed).to(weights[name].dtype)
                size = gram_shift(old, proposed).norm()
                for key, stored in (("gram_error", weights[name].flatten(1)), ("gram_error_floor", exact)):
                    watch[name][key].append((gram_shift(proposed, stored.double()).norm() / size).item())

    projections = {name: _projection(weights[name]) for name in trained if "random" in halves[name]}
    optimizer.register_step_pre_hook(save)
    optimizer.register_step_post_hook(save_plain)
    for keep in ("gram", "rotation"):
        chosen = [weights[name] for name in trained if halves[name].endswith(keep)]
        solver = newton_schulz_polar if method == "newton-schulz" else polar_factor
        if chosen:
            whiten(optimizer, chosen, keep=keep, solver=solver)
    optimizer.register_step_post_hook(change)
    optimizer.register_step_post_hook(look)
    return watch


def _kept(before: Tensor, plain: Tensor) -> Tensor:
    """The length of what whitening leaves of a step over that of the step; 1 for no step, NaN for one not finite."""
    before, plain = before.flatten(1), plain.flatten(1)
    if not plain.isfinite().all():
        return plain.new_tensor(torch.nan)
    step = (plain - before).norm()
    left = (nearest_with_same_gram(before=before, after=plain) - before).norm()
    return torch.where(step > 0, left / step, 1.0)


def _projection(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The projection of steps onto {ΩV : Ω skew}, for one random V of the weight's shape.

    With W in V's place these would be the rotations of W, to first order; so it is a subspace of their dimension, and
    about their geometry. The nearest ΩV to a step D solves ΩS + SΩ = DVᵀ − VDᵀ, S = VVᵀ: set the derivative of
    ‖ΩV − D‖² along every skew matrix to zero.
    """
    random = torch.randn(weight.flatten(1).shape, device=weight.device)  # from the seed of the run
    eigenvalues, basis = torch.linalg.eigh(random.double() @ random.mT.double())
    sums = (eigenvalues[:, None] + eigenvalues).to(random)
    basis = basis.to(random)

    def project(step: Tensor) -> Tensor:
        half = step.flatten(1) @ random.mT
        generator = basis @ (basis.mT @ (half - half.mT) @ basis / sums) @ basis.mT
        return (generator @ random).view_as(step)

    return project


WHITENING = Experiment("whitening", measure_whitening)


def compare_solvers(
    steps: dict[str, tuple[Tensor, Tensor]], solvers: dict[str, Callable[[Tensor, Tensor], Tensor]]
) -> pd.DataFrame:
    """What solvers make of the same steps of float32 weights: a row a step and solver.

    Args:
        steps: by name, W and W⁺, (k, d) with k ≤ d and W⁺ of rank k.
        solvers: by name, a function from W and W⁺ to R W⁺, in float32.

    Returns:
        ``orthogonality``: the largest entry of RRᵀ − I, in absolute value. ``Gram error``: the norm by which the Gram
        matrix of the result differs from that of W⁺, over the norm of the Gram shift; ``float32 floor``: the same of
        the exact R* W⁺ rounded to float32. ``length``: of the step to the result, over that of the plain step; and
        ``excess length`` over that to the exact R* W⁺, minus 1.
    """
    rows = {}
    for step, weights in steps.items():
        before, after = (weight.detach().double() for weight in weights)
        shift, plain = gram_shift(before, after).norm(), (after - before).norm()
        exact = polar_factor(before @ after.mT) @ after
        floor = gram_shift(after, exact.float().double()).norm() / shift
        for name, solve in solvers.items():
            result = solve(*(weight.detach() for weight in weights)).double()
            rotation = torch.linalg.lstsq(after.mT, result.mT).solution.mT  # from the stored result = R W⁺
            length = (result - before).norm()
            identity = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
            rows[step, name] = {
                "orthogonality": (rotation @ rotation.mT - identity).abs().max().item(),
                "Gram error": (gram_shift(after, result).norm() / shift).item(),
                "float32 floor": floor.item(),
                "length": (length / plain).item(),
                "excess length": (length / (exact - before).norm() - 1).item(),
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["weight", "solver"])
    return pd.DataFrame(list(rows.values()), index=index)


def whitening_settings(dataset: str, seeds: Sequence[int]) -> list[dict]:
    """The paper-scale runs of chapter 2, most telling first.

    SGD and its whitened twin for all seeds; the CNN, the approximate solver and the controls for three; other learning
    rates for two, the largest with a control.
    """
    momentum = 0.8 if dataset == "cifar100" else 0.95  # as in the paper
    base = {"dataset": dataset, "model": "mlp", "lr": 0.01, "momentum": momentum, "batch_size": 64, "epochs": 20}
    twins = [{"method": "sgd"}, {"method": "whitened"}]
    parts = [
        (len(seeds), twins),
        (3, [{**twin, "model": "cnn"} for twin in twins]),
        (3, [{"method": method} for method in UPDATES if method not in ("sgd", "whitened")]),
        (2, [{**twin, "lr": lr} for lr in (0.1, 0.05, 0.005) for twin in twins]),
        (2, [{"method": method, "lr": 0.1} for method in ("random directions dropped", "shortened")]),
    ]
    return [
        {**base, **variant, "seed": seed} for count, variants in parts for seed in seeds[:count] for variant in variants
    ]


def accuracy_panels(runs: Sequence[Run], methods: Sequence[str]) -> dict[str, dict[str, list[list[float]]]]:
    """Test accuracies over epochs by data set and network, then by method, a row a run: for ``plot_accuracy_curves``.

    A panel has those of the methods that have a run which did not diverge; one without any is left out.
    """
    panels = {}
    for (dataset, model), group in grouped(runs, "dataset", "model").items():
        curves = {
            method: [run.metrics["test_accuracy"] for run in select(group, method=method) if finished(run)]
            for method in methods
        }
        seeds = len({run.settings["seed"] for run in group if run.settings["method"] in methods})
        title = f"{dataset}, {model.upper()}, {seeds} seed{'s' if seeds > 1 else ''}"
        panels[title] = {method: rows for method, rows in curves.items() if rows}
    return {title: curves for title, curves in panels.items() if curves}


def whitening_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's claims C4 and C4b: SGD against whitened steps after the last epoch, a row a network and setting.

    Test accuracies in percent, mean ± standard deviation over the seeds that did not diverge; the paired difference
    whitened − SGD in points with Student's 95% interval over the seeds that both have; and the verdict by the claims'
    rule: "reproduced" if the interval excludes a loss of more than 1 point, "not reproduced" if it holds nothing but
    such losses.
    """
    columns = ["seeds", "SGD", "whitened", "difference", "95% interval", "verdict"]
    rows = {}
    for (dataset, model, lr), group in grouped(runs, "dataset", "model", "lr").items():
        sgd, whitened = _pairs(group, "sgd", "whitened")
        if not sgd:
            continue
        row = dict.fromkeys(columns, "–") | {"seeds": len(sgd)}
        row |= {"SGD": _reached(sgd), "whitened": _reached(whitened)}
        if all(finished(run) for run in (*sgd, *whitened)):
            difference = accuracy_difference(group, "whitened", "sgd")
            row["difference"] = f"{difference.mean:+.2f}"
            row["verdict"] = "not decided by one seed"
            if len(sgd) > 1:
                low, high = difference.interval
                row["95% interval"] = f"[{low:+.2f}, {high:+.2f}]"
                row["verdict"] = "reproduced" if low > -1 else "not reproduced" if high < -1 else "undecided"
        rows[dataset, model.upper(), lr] = row
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "η"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs of runs, and Student's 95% interval of it; without one for a single pair."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.interval[0]:+.2f}, {self.interval[1]:+.2f}]"


def accuracy_difference(runs: Sequence[Run], method: str, other: str) -> Difference | None:
    """Last test accuracy of one method − another, in points, over the seeds that both have; None if there are none.

    Runs that diverged do not count. The runs must not differ in anything but method and seed.
    """
    pairs = [each for each in zip(*_pairs(runs, method, other), strict=True) if all(map(finished, each))]
    if not pairs:
        return None
    first, second = (_final(each) for each in zip(*pairs, strict=True))
    mean = sum(first) / len(first) - sum(second) / len(second)
    return Difference(mean, paired_interval(first, second) if len(pairs) > 1 else None)


def _pairs(runs: Sequence[Run], *methods: str) -> list[list[Run]]:
    """The runs of each method, for the seeds that all of them have, in the order of the seeds."""
    by_seed = [{run.settings["seed"]: run for run in select(runs, method=method)} for method in methods]
    seeds = sorted(set.intersection(*(set(each) for each in by_seed)))
    return [[each[seed] for seed in seeds] for each in by_seed]


def _reached(runs: Sequence[Run]) -> str:
    """The final accuracies of the runs that did not diverge, and how many did."""
    accuracies = _final([run for run in runs if finished(run)])
    words = [mean_and_spread(accuracies, 2)] if accuracies else []
    if len(accuracies) < len(runs):
        words.append(f"{len(runs) - len(accuracies)} diverged")
    return ", ".join(words)


def _final(runs: Sequence[Run]) -> list[float]:
    return [100 * run.metrics["test_accuracy"][-1] for run in runs]


def halves_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's controls, for one network and setting: what is reached with which part of the steps.

    A row a method, in the order of ``UPDATES``: train and test accuracy after the last epoch in percent, mean ±
    standard deviation over seeds; the difference of the test accuracy to SGD's with its 95% interval
    (`accuracy_difference`); and how far the Gram matrix G of the first layer has moved since initialisation, relative
    to the initial one.
    """
    groups = grouped(runs, "method")
    rows = {}
    for method in UPDATES:
        group = [run for run in groups.get((method,), []) if finished(run)]
        if group:
            rows[method] = {"seeds": len(group)}
            for name in ("train_accuracy", "test_accuracy"):
                values = [100 * run.metrics[name][-1] for run in group]
                rows[method][name.replace("_", " ")] = mean_and_spread(values, 2)
            difference = accuracy_difference(runs, method, "sgd")
            rows[method]["against SGD"] = "–" if method == "sgd" or difference is None else str(difference)
            first = next(iter(group[0].metrics["layers"]))
            moved = [run.metrics["layers"][first]["gram_change"][-1] for run in group]
            rows[method]["change of G"] = f"{sum(moved) / len(moved):.2g}"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="kept of each step")


def kept_table(runs: Sequence[Run]) -> pd.DataFrame:
    """How much of a step is Gram shift, a row a layer and data set: the share of directions, and what is measured.

    "of the directions" is the share of the weight's dimensions that are no rotations, 1 − (k−1)/(2d) for k ≤ d. The
    other columns are means over runs of ‖R* W⁺ − W‖²/‖W⁺ − W‖² for the steps that SGD proposes: at the first step, and
    from the 1,024th on, in plain and in whitened runs.
    """
    rows = {}
    for (dataset, model), group in grouped(runs, "dataset", "model").items():
        methods = {method: [run for run in select(group, method=method) if finished(run)] for method in _TWINS}
        if not methods["sgd"]:
            continue
        for name, layer in methods["sgd"][0].metrics["layers"].items():
            k, d = layer["shape"]
            rotations = k * (k - 1) / 2 if k <= d else k * d - d * (d + 1) / 2
            row = {"weight": f"{k}×{d}", "of the directions": f"{1 - rotations / (k * d):.2f}"}
            for method, twins in methods.items():
                layers = [run.metrics["layers"][name] for run in twins]
                first = [layer["kept"][0] ** 2 for layer in layers]
                late = [
                    x**2
                    for layer in layers
                    for x, step in zip(layer["kept"], layer["steps"], strict=True)
                    if step >= 1024
                ]
                if method == "sgd":
                    row["of the first step"] = _mean(first)
                row[f"late, {_TWINS[method]}"] = _mean(late)
            rows[dataset, model.upper(), name] = row
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "layer"])
    return pd.DataFrame(list(rows.values()), index=index)


_TWINS = {"sgd": "SGD", "whitened": "whitened"}


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else "–"
