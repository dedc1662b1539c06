"""A two-layer network in training: its Gram shift beside the virtual covariance shift and beside AGOP."""

from collections.abc import Sequence

import torch
from torch import nn

from gramlin import data
from gramlin.chapters.sweeps import Experiment, optimizer_of
from gramlin.gram import VirtualCovariance, agop, gram_shift, matrix_correlation, relative_error, weight_gram
from gramlin.models import MLP
from gramlin.results import JsonObject
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
) -> JsonObject:
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
    _, first, activation1, second = model
    assert isinstance(first, nn.Linear)
    virtual = VirtualCovariance(first, optimizer)
    initial = first.weight.detach().clone()
    flat = split.train_inputs.flatten(1)

    def compare(epoch: int) -> JsonObject:
        if epoch == 0:
            return {}
        weight = first.weight.detach()
        shift, virtual_shift = gram_shift(initial, weight), virtual.shift
        # By the chain rule, AGOP with respect to the input is WᵀAW, A that with respect to the pre-activations.
        above = agop(lambda z: second(activation1(z)), first(flat))
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


def gram_shift_settings(dataset: str, seeds: Sequence[int]) -> list[JsonObject]:
    """The paper-scale runs of chapter 1, most telling first: plain SGD, then what might change the answer."""
    plain: JsonObject = {
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
    variants: list[JsonObject] = [
        {},
        {"lr": 0.05},
        {"momentum": 0.9},
        {"method": "adam", "lr": 0.001},
        {"standardize": False},
    ]
    return [{**plain, **variant, "seed": seed} for variant in variants for seed in seeds]
