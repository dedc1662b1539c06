"""Chapter 3: Target Linearity and the surrogate of every layer, over training."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from gramlin import data
from gramlin.experiments.features import chunks, entering, features_name
from gramlin.experiments.summaries import grouped, mean_and_spread, paired_interval
from gramlin.experiments.sweeps import Experiment, optimizer_of
from gramlin.hooks import SUPPORTED_LAYERS
from gramlin.linearity import HeldOut, alignment_of, fit_of, linearity_of
from gramlin.models import CNN, MLP
from gramlin.moments import Moments
from gramlin.results import Run
from gramlin.training import accuracy, evaluating, train

# A convolution's map enters as its 4×4 averages; one average of all would leave a feature a channel.
_POOLED = 4


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
) -> dict:
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
    if model == "mlp":
        network = MLP([shape.numel(), *depth * [width], split.num_classes], "gelu")
    elif model == "cnn" and depth == 3:
        network = CNN(shape, split.num_classes, channels=width)
    else:
        raise ValueError(f"model is {model!r} with depth {depth}; pass 'mlp', or 'cnn' with depth 3")
    network = network.to(device, memory_format=torch.channels_last)
    optimizer = optimizer_of(method, network, lr, momentum)
    names = [name for name, layer in network.named_children() if isinstance(layer, SUPPORTED_LAYERS)]
    steps_an_epoch = -(-len(split.train_inputs) // batch_size)
    layers = {name: {key: [] for key in ("tl", "tl_test", "surrogate", "cka")} for name in names}
    layers["output"] = {"tl": [], "tl_test": []}
    history: dict[str, list] = {"step": [], "test_accuracy": []}
    pixels: dict[str, Any] = {}  # the input's sums and values, which training does not change
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
            for name, each in held_out.items():
                each.update(output if name == "output" else features[name], y)
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

    def after_step(*_) -> None:
        nonlocal step
        step += 1
        if step < steps_an_epoch and step & (step - 1) == 0:
            measure()

    def after_epoch(epoch: int) -> dict:
        measure()
        return {}

    optimizer.register_step_post_hook(after_step)
    options = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "record": after_epoch}
    rows = train(network, optimizer, split.train_inputs, split.train_targets, **options)
    layers = {name: {key: values for key, values in each.items() if values} for name, each in layers.items()}
    return {**history, "train_loss": [row["train_loss"] for row in rows[1:]], "layers": layers}


def _sums(moments: Moments) -> tuple[int, Tensor, Tensor, Tensor]:
    """What the surrogate and CKA need: n, the cross moments, the features' scatter and the size of that of classes."""
    return moments.count, moments.cross, moments.scatter, moments.class_scatter_norm


LINEARITY = Experiment("linearity", measure_linearity)


def linearity_settings(dataset: str, seeds: Sequence[int]) -> list[dict]:
    """The paper-scale runs of chapter 3, most telling first: SGD and Adam for all seeds; other networks for one."""
    base = {"dataset": dataset, "model": "mlp", "width": 256, "depth": 4, "batch_size": 64, "epochs": 100}
    sgd = {**base, "method": "sgd", "lr": 0.0005, "momentum": 0.8}
    adam = {**base, "method": "adam", "lr": 0.0001, "momentum": 0.0}
    cnn = {**sgd, "model": "cnn", "width": 16, "depth": 3, "lr": 0.01, "epochs": 30}
    others = [{**sgd, "width": 64}, {**sgd, "width": 512}, cnn]
    return [{**each, "seed": seed} for each in (sgd, adam) for seed in seeds] + [
        {**each, "seed": seeds[0]} for each in others
    ]


_METHODS = {"sgd": "SGD", "adam": "Adam"}
_MOMENTS = {"start": 0.0, "after a tenth": 0.1, "halfway": 0.5, "end": 1.0}


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart."""
    keys = ("dataset", "model", "width", "method", "lr")
    several = {key for key in ("model", "width") if len({run.settings[key] for run in runs}) > 1}
    groups = {}
    for (dataset, model, width, method, lr), group in grouped(runs, *keys).items():
        title = f"{dataset}, {_METHODS[method]}"
        if several:
            title += f", {model.upper()} of width {width}"
        if title in groups:
            title += f", η = {lr:g}"
        groups[title] = group
    return dict(sorted(groups.items(), key=lambda item: "Adam" in item[0]))


def _epochs(run: Run) -> np.ndarray:
    steps = np.array(run.metrics["step"])
    return steps * run.settings["epochs"] / steps[-1]


def linearity_panels(
    runs: Sequence[Run], measure: str, *, until: float | int = np.inf
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A measure of every layer that has it, for ``figures.plot_layers_over_training``: the epochs, and a row a run.

    Target Linearity is of features, which have their own names: "pixels", "h1", "h2" and so on, and "output".

    Args:
        runs: of chapter 3.
        measure: "tl", "tl_test", "surrogate" or "cka".
        until: the last epoch.
    """
    panels = {}
    for title, group in _groups(runs).items():
        epochs = _epochs(group[0])
        shown = epochs <= until
        panels[title] = {
            (features_name(index) if measure in ("tl", "tl_test") and name != "output" else name): (
                epochs[shown],
                np.array([run.metrics["layers"][name][measure] for run in group])[:, shown],
            )
            for index, (name, layer) in enumerate(group[0].metrics["layers"].items())
            if measure in layer
        }
    return panels


def _entering_courses(run: Run, measure: str) -> np.ndarray:
    """The measure of what enters each layer over training: (layers, moments), from the input on."""
    return np.array([each[measure] for name, each in run.metrics["layers"].items() if name != "output"])


def _profile(run: Run, measure: str, share: float) -> np.ndarray:
    """The measure of what enters each layer, at this share of the run: (layers,), from the input on."""
    at = int(np.argmin(np.abs(_epochs(run) - share * run.settings["epochs"])))
    return _entering_courses(run, measure)[:, at]


def depth_profiles(runs: Sequence[Run], measure: str) -> dict[str, dict[str, list[np.ndarray]]]:
    """A measure over depth at four moments of training, for ``figures.plot_depth_profiles``: a row a run."""
    return {
        title: {moment: [_profile(run, measure, share) for run in group] for moment, share in _MOMENTS.items()}
        for title, group in _groups(runs).items()
    }


def linearity_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Target Linearity of what enters each layer, mean ± standard deviation over seeds: rows a group and moment.

    "highest, held-out" is the largest value of each run in the course of training.
    """
    rows = {}
    for title, group in _groups(runs).items():
        profiles = {
            "start": [_profile(run, "tl", 0.0) for run in group],
            "end": [_profile(run, "tl", 1.0) for run in group],
            "start, held-out": [_profile(run, "tl_test", 0.0) for run in group],
            "end, held-out": [_profile(run, "tl_test", 1.0) for run in group],
            "highest, held-out": [_entering_courses(run, "tl_test").max(axis=1) for run in group],
        }
        for moment, values in profiles.items():
            rows[title, moment] = {
                features_name(index): mean_and_spread(list(column)) for index, column in enumerate(np.transpose(values))
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "moment"])
    return pd.DataFrame(list(rows.values()), index=index)


def linearity_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 3's claims C5 (SGD) and C5b (Adam), a row a group.

    By Student's 95% intervals over seeds, "with training" is "rises" if Target Linearity is larger at the end than at
    the start for every hidden layer; "with depth" is "rises" if at the end it is larger at each layer than at the one
    before, from the input to the last hidden layer. "falls" is the opposite everywhere, "mixed" if one of them falls;
    else, with intervals that hold 0, it is "open". The verdict is "reproduced" if both rise on the training data, "not
    reproduced" if one falls or is mixed, else "undecided".
    """
    rows = {}
    for title, group in _groups(runs).items():
        row = {"seeds": len(group)}
        for suffix, measure in (("", "tl"), (", held-out", "tl_test")):
            start, end = (np.array([_profile(run, measure, share) for run in group]) for share in (0.0, 1.0))
            row["with training" + suffix] = _direction(end[:, 1:], start[:, 1:])
            row["with depth" + suffix] = _direction(end[:, 1:], end[:, :-1])
        both = {row["with training"], row["with depth"]}
        decided = "reproduced" if both == {"rises"} else "undecided" if both <= {"rises", "open"} else "not reproduced"
        row["verdict"] = decided if len(group) > 1 else "not decided by one seed"
        rows[title] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="runs")


def _direction(larger: np.ndarray, smaller: np.ndarray) -> str:
    """How the columns of the first array, over runs, compare with those of the second."""
    if len(larger) < 2:
        return "–"
    intervals = [paired_interval(list(a), list(b)) for a, b in zip(larger.T, smaller.T, strict=True)]
    if all(low > 0 for low, _ in intervals):
        return "rises"
    fallen = [high < 0 for _, high in intervals]
    return "falls" if all(fallen) else "mixed" if any(fallen) else "open"


def growth_table(runs: Sequence[Run]) -> pd.DataFrame:
    """By what law the surrogate and Target Linearity grow, a row a group and layer: means over seeds.

    The run is cut where the surrogate first reaches half of its largest value: the rise before, the rest after. Of the
    rise: its last epoch; the factor by which the surrogate has grown; the rate d ln S/dt, an epoch, in the first epoch
    and at its largest; and R² of ln S over time, which is 1 for exponential growth. Then the same R² for the whole run.
    Of the time after the rise, for Target Linearity of the features which enter the layer: the share of its change
    over the whole run that is still to come; R² over ln t, which is 1 for logarithmic growth, t counting from the start
    of training; R² of ln(1 − TL) over ln t, 1 for a power law; and R² over t, which tells how much a high one over ln t
    says: over a short stretch ln t is nearly straight. The input's is constant, so it has none of these.
    """
    rows = {}
    for title, group in _groups(runs).items():
        for name, layer in group[0].metrics["layers"].items():
            if "surrogate" in layer:
                rows[title, name] = np.mean([_laws(run, name) for run in group], axis=0)
    index = pd.MultiIndex.from_tuples(list(rows), names=["runs", "layer"])
    return pd.DataFrame(list(rows.values()), index=index, columns=_LAWS)


def growth_verdicts(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 3's claim C6, a row a group: "reproduced" if in every layer both laws fit with an R² of at least 0.9.

    The exponential law in the rise of the surrogate, and the logarithmic one for Target Linearity after it: the least
    R² over layers of each, as in ``growth_table``. They are means over seeds: of one seed, "not decided by one seed".
    """
    columns = ["R² exp, rise", "R² log"]
    least = growth_table(runs).groupby(level="runs", sort=False)[columns].min().add_prefix("least ")
    least["C6"] = np.where((least >= 0.9).all(axis=1), "reproduced", "not reproduced")
    alone = [title for title, group in _groups(runs).items() if len(group) < 2]
    least.loc[alone, "C6"] = "not decided by one seed"
    return least


_LAWS = [
    "until epoch",
    "S grows by",
    "first rate",
    "largest rate",
    "R² exp, rise",
    "R² exp, run",
    "TL still to come",
    "R² log",
    "R² power",
    "R² line",
]


def _laws(run: Run, name: str) -> list[float]:
    layer, epochs = run.metrics["layers"][name], _epochs(run)
    S, linearity = np.array(layer["surrogate"]), np.array(layer["tl"])
    cut = int(np.argmax(S / S.max() >= 0.5))
    rise, after = slice(cut + 1), slice(max(cut, 1), None)
    whole = np.isin(epochs, np.arange(epochs[-1] + 1))
    rates = np.diff(np.log(S[whole])) / np.diff(epochs[whole])
    varies = np.ptp(linearity) > 0
    return [
        epochs[cut],
        S[cut] / S[0],
        rates[0],
        rates.max(),
        _r_squared(epochs[rise], np.log(S[rise])),
        _r_squared(epochs, np.log(S)),
        (linearity[-1] - linearity[cut]) / (linearity[-1] - linearity[0]) if varies else np.nan,
        _r_squared(np.log(epochs[after]), linearity[after]) if varies else np.nan,
        _r_squared(np.log(epochs[after]), np.log1p(-linearity[after])) if varies else np.nan,
        _r_squared(epochs[after], linearity[after]) if varies else np.nan,
    ]


def _r_squared(x: np.ndarray, y: np.ndarray) -> float:
    """R² of the regression line; NaN for fewer than three points, where it says nothing."""
    return float(np.corrcoef(x, y)[0, 1] ** 2) if len(x) > 2 else np.nan
