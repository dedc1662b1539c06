"""The chapters' sweeps: settings in, finished runs out.

An experiment is a function from settings to metrics. ``sweep`` runs those settings that the store does not hold yet
and saves each run the moment it ends, so that a sweep that was killed goes on where it stopped.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import pandas as pd
import torch
from scipy import stats
from torch import nn
from tqdm import tqdm

from gramlin import data
from gramlin.gram import VirtualCovariance, agop, gram_shift, matrix_correlation, relative_error, weight_gram
from gramlin.models import CNN, MLP
from gramlin.results import ResultsStore, Run
from gramlin.training import accuracy, train
from gramlin.whitening import nearest_with_same_gram, newton_schulz_polar, polar_factor, whiten


@dataclass(frozen=True)
class Experiment:
    """A named function from settings to metrics.

    Attributes:
        name: the folder of its runs in the store.
        measure: takes the settings and ``device`` as keyword arguments and returns the metrics, as JSON values.
    """

    name: str
    measure: Callable[..., dict]


def sweep(
    experiment: Experiment,
    store: ResultsStore,
    settings: Sequence[dict],
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
) -> list[Run]:
    """Run what the store lacks, save each run as it ends, and return all of them in the order of the settings.

    On a CPU the runs go side by side, one thread each; on another device one after the other.

    Args:
        experiment: what to run.
        store: where finished runs are kept.
        settings: of the runs.
        device: where to run.
        workers: processes side by side; by default one a core, and no process of its own for one run.

    Raises:
        ResultsError: a stored run is damaged or was edited.
    """
    missing = [each for each in settings if store.get(experiment.name, each) is None]
    if workers is None:
        workers = (os.cpu_count() or 1) if torch.device(device).type == "cpu" else 1
    progress = tqdm(total=len(missing), desc=experiment.name, unit="run", disable=not (missing and sys.stderr.isatty()))
    with progress:
        if workers == 1 or len(missing) <= 1:
            for each in missing:
                store.save(run_once(experiment, each, device))
                progress.update()
        else:
            # Fresh processes: a forked one would inherit the thread pools of PyTorch in an undefined state.
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
            with pool:
                futures = [pool.submit(_run_and_save, experiment, each, device, store) for each in missing]
                for future in as_completed(futures):
                    try:
                        future.result()
                    except BaseException:
                        pool.shutdown(cancel_futures=True)
                        raise
                    progress.update()
    return [store.get(experiment.name, each) for each in settings]


def run_once(experiment: Experiment, settings: dict, device: str | torch.device = "cpu") -> Run:
    """Run one setting, and note how long it took and where; nothing is saved."""
    start = time.perf_counter()
    metrics = experiment.measure(**settings, device=device)
    seconds = round(time.perf_counter() - start, 2)
    return Run(experiment.name, settings, metrics, wall_seconds=seconds, device=_device_name(device))


def _start_worker() -> None:
    torch.set_num_threads(1)
    # A worker whose sweep was killed would go on working, and with the next sweep's for the same cores.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_and_save(experiment: Experiment, settings: dict, device: str, store: ResultsStore) -> None:
    store.save(run_once(experiment, settings, device))


def _device_name(device: str | torch.device) -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type


# ---- Chapter 1: the Gram shift against the virtual covariance shift and against AGOP ------------------------------


def measure_gram_shift(
    *,
    dataset: str,
    method: str,
    lr: float,
    momentum: float,
    standardize: bool,
    hidden: int,
    activation: str,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> dict:
    """Train a two-layer network and follow the first layer's Gram shift, its virtual covariance shift and AGOP.

    Args:
        dataset: a name for ``gramlin.data.load``.
        method: "sgd" or "adam".
        lr: the learning rate.
        momentum: of SGD; Adam keeps its usual moments, and this must be 0.
        standardize: whether inputs are shifted and scaled to mean 0 and variance 1 a channel.
        hidden: units between input and output.
        activation: as in ``gramlin.models.MLP``.
        batch_size: samples a step.
        epochs: passes over the training split.
        seed: of the initial weights and the order of samples.
        device: where to run.

    Returns:
        Lists over epochs from 1: ``train_loss``; ``test_accuracy`` in [0, 1]; Pearson correlations with the Gram shift
        since initialisation of the accumulated virtual covariance shift (``rho_virtual``), of AGOP over the training
        split (``rho_agop``) and of its square root (``rho_agop_sqrt``); the correlations of the Gram matrix itself with
        those two (``rho_gram_agop``, ``rho_gram_agop_sqrt``), which is what the Neural Feature Ansatz speaks of; and
        ``gap``, the norm of (virtual covariance shift − Gram shift) over that of the Gram shift.
    """
    split = data.load(dataset, device=device)
    if standardize:
        split = data.standardize(split)
    torch.manual_seed(seed)
    width_in, width_out = split.train_inputs[0].numel(), split.num_classes
    model = MLP([width_in, hidden, width_out], activation).to(device)
    optimizer = _optimizer(method, model, lr, momentum)
    virtual = VirtualCovariance(model.linear1, optimizer)
    initial = model.linear1.weight.detach().clone()
    flat = split.train_inputs.flatten(1)

    def compare(epoch: int) -> dict:
        if epoch == 0:
            return {}
        weight = model.linear1.weight.detach()
        shift, virtual_shift = gram_shift(initial, weight), virtual.shift
        # By the chain rule, AGOP with respect to the input is WᵀAW, A that with respect to the pre-activations.
        above = agop(lambda z: model.linear2(model.activation1(z)), model.linear1(flat))
        eigenvalues, vectors = torch.linalg.eigh(above.double())
        factor = (vectors * eigenvalues.clamp(min=0).sqrt()).mT.to(weight) @ weight  # AGOP = factorᵀ factor
        _, singular, right = torch.linalg.svd(factor, full_matrices=False)
        agop_input, agop_sqrt = right.mT * singular**2 @ right, right.mT * singular @ right
        return {
            "test_accuracy": accuracy(model, split.test_inputs, split.test_targets),
            "rho_virtual": matrix_correlation(shift, virtual_shift),
            "rho_agop": matrix_correlation(shift, agop_input),
            "rho_agop_sqrt": matrix_correlation(shift, agop_sqrt),
            "rho_gram_agop": matrix_correlation(weight_gram(weight), agop_input),
            "rho_gram_agop_sqrt": matrix_correlation(weight_gram(weight), agop_sqrt),
            "gap": relative_error(virtual_shift, shift),
        }

    history = train(
        model,
        optimizer,
        split.train_inputs,
        split.train_targets,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        record=compare,
    )
    return {key: [row[key] for row in history[1:]] for key in history[1]}


GRAM_SHIFT = Experiment("gram-shift", measure_gram_shift)


def gram_shift_settings(dataset: str, seeds: Sequence[int]) -> list[dict]:
    """The paper-scale runs of chapter 1, most telling first: plain SGD, then what might change the answer."""
    plain = {
        "dataset": dataset,
        "method": "sgd",
        "lr": 0.01,
        "momentum": 0.0,
        "standardize": True,
        "hidden": 256,
        "activation": "relu",
        "batch_size": 128,
        "epochs": 10,
    }
    variants = [{}, {"lr": 0.05}, {"momentum": 0.9}, {"method": "adam", "lr": 0.001}, {"standardize": False}]
    return [{**plain, **variant, "seed": seed} for variant in variants for seed in seeds]


def _optimizer(method: str, model: torch.nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    if method == "adam" and momentum == 0:
        return torch.optim.Adam(model.parameters(), lr=lr)
    raise ValueError(f"method is {method!r} with momentum {momentum}; pass 'sgd', or 'adam' with momentum 0")


def _gram_shift_groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under titles that tell the groups apart; plain SGD first."""

    def rank(run: Run) -> tuple:
        chosen = run.settings
        return chosen["dataset"], chosen["method"] != "sgd", not chosen["standardize"], chosen["momentum"], chosen["lr"]

    several = len({run.settings["dataset"] for run in runs}) > 1
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=rank):
        chosen = run.settings
        title = f"{chosen['dataset']}: " if several else ""
        title += f"{_METHOD_NAMES[chosen['method']]}, η = {chosen['lr']:g}"
        title += f", momentum {chosen['momentum']:g}" if chosen["momentum"] else ""
        title += "" if chosen["standardize"] else ", raw inputs"
        groups.setdefault(title, []).append(run)
    return groups


_METHOD_NAMES = {"sgd": "SGD", "adam": "Adam"}


def gram_shift_panels(runs: Sequence[Run]) -> dict[str, list[dict]]:
    """The metrics of chapter 1's stored runs, grouped for ``figures.plot_correlations``."""
    return {title: [run.metrics for run in group] for title, group in _gram_shift_groups(runs).items()}


def gram_shift_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 1's stored runs after their last epoch: mean ± standard deviation over seeds, a row a group.

    The index has the name of the data set, or of the data sets, and then each row's title begins with its own.

    The column "C2" judges each group by the rule of the claim: the 95% interval over seeds of the paired difference of
    the first two correlations lies above 0 ("holds"), below 0 ("reversed") or on both sides ("undecided"); a group of
    one seed is "not decided by one seed". The relative gap is given for plain SGD only: with momentum or Adam the two
    matrices have different scales.
    """
    columns = {
        "ρ(shift, virtual)": "rho_virtual",
        "ρ(shift, AGOP)": "rho_agop",
        "ρ(shift, √AGOP)": "rho_agop_sqrt",
        "ρ(G, √AGOP)": "rho_gram_agop_sqrt",
        "relative gap": "gap",
        "test accuracy": "test_accuracy",
    }
    rows = {}
    for title, group in _gram_shift_groups(runs).items():
        rows[title] = {"seeds": len(group)}
        for name, key in columns.items():
            rows[title][name] = mean_and_spread([run.metrics[key][-1] for run in group])
        if group[0].settings["method"] != "sgd" or group[0].settings["momentum"]:
            rows[title]["relative gap"] = "–"
        rows[title]["C2"] = _gram_shift_verdict(group)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["seeds", *columns, "C2"])
    return table.rename_axis(index=", ".join(sorted({run.settings["dataset"] for run in runs})))


def _gram_shift_verdict(group: Sequence[Run]) -> str:
    if len(group) < 2:
        return "not decided by one seed"
    virtual, rival = ([run.metrics[key][-1] for run in group] for key in ("rho_virtual", "rho_agop"))
    low, high = paired_interval(virtual, rival)
    return "holds" if low > 0 else "reversed" if high < 0 else "undecided"


# ---- Chapter 2: the two halves of a step ---------------------------------------------------------------------------

# What becomes of a layer's steps, in the hidden layers and in the readout. "plain" keeps them, "gram" and "rotation"
# keep one half, "frozen" keeps nothing (the layer's bias is then frozen too; otherwise biases train plainly). The
# random ones are the controls: "not random" drops as many directions as there are rotations, but random ones, and
# "random" keeps those only.
UPDATES = {
    "sgd": ("plain", "plain"),
    "whitened": ("gram", "gram"),
    "newton-schulz": ("gram", "gram"),
    "rotation": ("rotation", "rotation"),
    "gram in hidden layers only": ("gram", "rotation"),
    "rotation in hidden layers": ("rotation", "plain"),
    "readout only": ("frozen", "plain"),
    "random directions dropped": ("not random", "not random"),
    "random directions only": ("random", "random"),
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
        - where the steps keep their Gram shift, and it alone, for a few ``steps`` (the powers of two and the last):
          ``gram_error``, the norm of what the stored weight's Gram matrix differs by from that of the plain step's
          weight, over the norm of the step's Gram shift; ``gram_error_floor``, the same for the exact R* W⁺ rounded
          to the weights' precision; ``kept``, the length ‖R* W⁺ − W‖ of what remains of the step over that of the
          step.
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
    watch = _split_steps(optimizer, layers, method, last=steps)
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


def _split_steps(
    optimizer: torch.optim.Optimizer, layers: dict[str, nn.Module], method: str, last: int
) -> dict[str, dict[str, list]]:
    """Attach what the method asks for to the optimizer; returns lists that fill up as it steps."""
    *hidden, readout = layers
    halves = dict.fromkeys(hidden, UPDATES[method][0]) | {readout: UPDATES[method][1]}
    for name, half in halves.items():
        if half == "frozen":
            layers[name].requires_grad_(False)
    whitened = {name: layers[name].weight for name, half in halves.items() if half == "gram"}
    keys = ("steps", "gram_error", "gram_error_floor", "kept")
    watch = {name: {key: [] for key in keys if name in whitened} for name in layers}
    seen = {}
    step = 0

    def watched() -> bool:
        return step & (step - 1) == 0 or step == last

    @torch.no_grad()
    def before_step(*_) -> None:
        nonlocal step
        step += 1
        if watched():
            seen["before"] = {name: weight.flatten(1).double() for name, weight in whitened.items()}

    @torch.no_grad()
    def after_step(*_) -> None:
        if watched():
            seen["plain"] = {name: weight.flatten(1).double() for name, weight in whitened.items()}

    @torch.no_grad()
    def after_whitening(*_) -> None:
        if not watched():
            return
        for name, weight in whitened.items():
            before, plain = seen["before"][name], seen["plain"][name]
            exact = nearest_with_same_gram(before=before, after=plain).to(weight.dtype)
            watch[name]["steps"].append(step)
            size = gram_shift(before, plain).norm()
            for key, stored in (("gram_error", weight.flatten(1)), ("gram_error_floor", exact)):
                watch[name][key].append((gram_shift(plain, stored.double()).norm() / size).item())
            watch[name]["kept"].append(((weight.flatten(1) - before).norm() / (plain - before).norm()).item())

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)  # hooks run in this order, so this one sees the plain step
    for keep in ("gram", "rotation"):
        chosen = [layers[name].weight for name, half in halves.items() if half == keep]
        solver = newton_schulz_polar if method == "newton-schulz" else polar_factor
        if chosen:
            whiten(optimizer, chosen, keep=keep, solver=solver)
    for name, half in halves.items():
        if half in ("random", "not random"):
            _project_steps(optimizer, layers[name].weight, only=half == "random")
    optimizer.register_step_post_hook(after_whitening)
    return watch


def _project_steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, *, only: bool) -> None:
    """Project each step onto {ΩV : Ω skew} for one random V of the weight's shape (`only`), or off it.

    With W in V's place these would be the rotations of W, to first order; so it is a subspace of their dimension, and
    about their geometry. The nearest ΩV to a step D solves ΩS + SΩ = DVᵀ − VDᵀ, S = VVᵀ: set the derivative of
    ‖ΩV − D‖² along every skew matrix to zero.
    """
    random = torch.randn(weight.flatten(1).shape, device=weight.device)  # from the seed of the run
    eigenvalues, basis = torch.linalg.eigh(random.double() @ random.mT.double())
    sums = (eigenvalues[:, None] + eigenvalues).to(random)
    basis = basis.to(random)
    seen = {}

    @torch.no_grad()
    def save(*_) -> None:
        seen["before"] = weight.clone()

    @torch.no_grad()
    def project(*_) -> None:
        half = (weight - seen["before"]).flatten(1) @ random.mT
        generator = basis @ (basis.mT @ (half - half.mT) @ basis / sums) @ basis.mT
        within = (generator @ random).view(weight.shape)
        weight.copy_(seen["before"] + within if only else weight - within)

    optimizer.register_step_pre_hook(save)
    optimizer.register_step_post_hook(project)


WHITENING = Experiment("whitening", measure_whitening)


def whitening_settings(dataset: str, seeds: Sequence[int]) -> list[dict]:
    """The paper-scale runs of chapter 2, most telling first.

    SGD and its whitened twin for all seeds; the CNN, the approximate solver and the controls for three; other learning
    rates for two.
    """
    base = {"dataset": dataset, "model": "mlp", "lr": 0.01, "momentum": 0.95, "batch_size": 64, "epochs": 20}
    twins = [{"method": "sgd"}, {"method": "whitened"}]
    parts = [
        (len(seeds), twins),
        (3, [{**twin, "model": "cnn"} for twin in twins]),
        (3, [{"method": method} for method in UPDATES if method not in ("sgd", "whitened")]),
        (2, [{**twin, "lr": lr} for lr in (0.1, 0.05, 0.005) for twin in twins]),
    ]
    return [
        {**base, **variant, "seed": seed} for count, variants in parts for seed in seeds[:count] for variant in variants
    ]


def whitening_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's claims C4 and C4b: SGD against whitened steps after the last epoch, a row a network and setting.

    Test accuracies in percent, mean ± standard deviation over seeds; the paired difference whitened − SGD in points
    with Student's 95% interval over the seeds that both have; and the verdict by the claims' rule: "reproduced" if
    the interval excludes a loss of more than 1 point, "not reproduced" if it holds nothing but such losses.
    """
    rows = {}
    for (dataset, model, lr), group in _grouped(runs, "dataset", "model", "lr").items():
        pair = {
            method: {run.settings["seed"]: run for run in group if run.settings["method"] == method}
            for method in ("sgd", "whitened")
        }
        seeds = sorted(pair["sgd"].keys() & pair["whitened"].keys())
        if not seeds:
            continue
        row = {"seeds": len(seeds)}
        if any("diverged" in pair[method][seed].metrics for method in pair for seed in seeds):
            failed = {m: sum("diverged" in pair[m][seed].metrics for seed in seeds) for m in pair}
            row |= {"SGD": f"{failed['sgd']} diverged", "whitened": f"{failed['whitened']} diverged"}
        else:
            sgd, whitened = ([100 * pair[m][seed].metrics["test_accuracy"][-1] for seed in seeds] for m in pair)
            row |= {"SGD": mean_and_spread(sgd, 2), "whitened": mean_and_spread(whitened, 2)}
            row["difference"] = f"{sum(whitened) / len(seeds) - sum(sgd) / len(seeds):+.2f}"
            if len(seeds) > 1:
                low, high = paired_interval(whitened, sgd)
                row["95% interval"] = f"[{low:+.2f}, {high:+.2f}]"
                row["verdict"] = "reproduced" if low > -1 else "not reproduced" if high < -1 else "undecided"
            else:
                row["verdict"] = "not decided by one seed"
        rows[dataset, model.upper(), lr] = row
    columns = ["seeds", "SGD", "whitened", "difference", "95% interval", "verdict"]
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "η"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns).fillna("–")


def halves_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Chapter 2's controls, for one network and setting: what is reached with which part of the steps.

    A row a method, in the order of ``UPDATES``: train and test accuracy after the last epoch in percent, mean ±
    standard deviation over seeds; and how far the Gram matrices of the first hidden layer and of the readout have
    moved, relative to the initial ones.
    """
    groups = _grouped(runs, "method")
    rows = {}
    for method in UPDATES:
        group = [run for run in groups.get((method,), []) if "diverged" not in run.metrics]
        if group:
            layers = list(group[0].metrics["layers"])
            rows[method] = {"seeds": len(group)}
            for name in ("train_accuracy", "test_accuracy"):
                values = [100 * run.metrics[name][-1] for run in group]
                rows[method][name.replace("_", " ")] = mean_and_spread(values, 2)
            for title, layer in (("first layer", layers[0]), ("readout", layers[-1])):
                moved = [run.metrics["layers"][layer]["gram_change"][-1] for run in group]
                rows[method][f"Gram shift, {title}"] = f"{sum(moved) / len(moved):.2g}"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="steps")


def kept_table(runs: Sequence[Run]) -> pd.DataFrame:
    """How much of a step is Gram shift: measured, and the share of directions, a row a layer and data set.

    "of the squared length" is the mean of ‖R* W⁺ − W‖²/‖W⁺ − W‖² over the watched steps of the whitened runs;
    "of the directions" is the share of the weight's k·d dimensions that are no rotations, 1 − (k−1)/(2d) for k ≤ d.
    """
    rows = {}
    for (dataset, model), group in _grouped(runs, "dataset", "model").items():
        group = [run for run in group if run.settings["method"] == "whitened" and "diverged" not in run.metrics]
        for name in group[0].metrics["layers"] if group else ():
            layers = [run.metrics["layers"][name] for run in group]
            kept = [length**2 for layer in layers for length in layer["kept"]]
            k, d = layers[0]["shape"]
            rotations = k * (k - 1) / 2 if k <= d else k * d - d * (d + 1) / 2
            rows[dataset, model.upper(), name] = {
                "weight": f"{k}×{d}",
                "of the directions": f"{1 - rotations / (k * d):.2f}",
                "of the squared length": f"{sum(kept) / len(kept):.2f}",
            }
    index = pd.MultiIndex.from_tuples(list(rows), names=["data set", "network", "layer"])
    return pd.DataFrame(list(rows.values()), index=index)


def _grouped(runs: Sequence[Run], *keys: str) -> dict[tuple, list[Run]]:
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.settings[key] for key in keys), []).append(run)
    return dict(sorted(groups.items()))


def select(runs: Sequence[Run], **settings) -> list[Run]:
    """The runs that have these settings."""
    return [run for run in runs if all(run.settings[key] == value for key, value in settings.items())]


# ---- Over seeds ----------------------------------------------------------------------------------------------------


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean ± standard deviation over repetitions, in words."""
    mean, n = sum(values) / len(values), len(values)
    if n == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Student's 95% interval of the mean of first − second, over paired repetitions.

    Raises:
        ValueError: fewer than two pairs.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"got {len(first)} and {len(second)} values; pass at least two pairs")
    result = stats.ttest_rel(first, second).confidence_interval(0.95)
    return float(result.low), float(result.high)
