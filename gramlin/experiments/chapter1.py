"""Chapter 1: the Gram shift against the virtual covariance shift and against AGOP."""

from collections.abc import Sequence

import pandas as pd
import torch

from gramlin import data
from gramlin.experiments.summaries import mean_and_spread, paired_interval
from gramlin.experiments.sweeps import Experiment, optimizer_of
from gramlin.gram import VirtualCovariance, agop, gram_shift, matrix_correlation, relative_error, weight_gram
from gramlin.models import MLP
from gramlin.results import Run
from gramlin.training import accuracy, train


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
    optimizer = optimizer_of(method, model, lr, momentum)
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
    titles = pd.Index(list(rows), dtype=object, name=", ".join(sorted({run.settings["dataset"] for run in runs})))
    return pd.DataFrame(list(rows.values()), index=titles, columns=["seeds", *columns, "C2"])


def _gram_shift_verdict(group: Sequence[Run]) -> str:
    if len(group) < 2:
        return "not decided by one seed"
    virtual, rival = ([run.metrics[key][-1] for run in group] for key in ("rho_virtual", "rho_agop"))
    low, high = paired_interval(virtual, rival)
    return "holds" if low > 0 else "reversed" if high < 0 else "undecided"
