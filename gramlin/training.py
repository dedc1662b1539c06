"""One training loop for all chapters: data stay on the device, and nothing is done a sample at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    *,
    epochs: int,
    batch_size: int | None = None,
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    seed: int = 0,
    record: Callable[[int], dict] | None = None,
) -> list[dict]:
    """Train a model, and record what is asked for before the first epoch and after each.

    Args:
        model: on the device of the data.
        optimizer: over the model's parameters; stepped without a closure.
        inputs: the whole training split.
        targets: as many rows as inputs.
        epochs: passes over the data.
        batch_size: rows a step, in a new random order each epoch (the last batch may be smaller); None for full
            batches, which are not shuffled.
        loss: the mean loss of a batch, of (outputs, targets); outputs are what the model returns, of any type.
        seed: of the order of the samples; the same on every device.
        record: called with the epoch (0 before training) when the model is in evaluation mode and gradients are off;
            its dictionary becomes part of that epoch's row.

    Returns:
        A row an epoch, from 0: ``epoch``, ``train_loss`` (the mean over the epoch's batches; for epoch 0 None), and
        what ``record`` returned.

    Raises:
        ValueError: no rows, or a different number of inputs and targets.
        FloatingPointError: the loss became NaN or infinite, or at last a weight; says when.
    """
    n = len(inputs)
    if n == 0 or n != len(targets):
        raise ValueError(f"got {n} inputs and {len(targets)} targets; pass the same number, at least one")
    generator = torch.Generator().manual_seed(seed)
    history = [{"epoch": 0, "train_loss": None, **_recorded(model, record, 0)}]
    for epoch in range(1, epochs + 1):
        model.train()
        if batch_size is None:
            batches = [slice(None)]
        else:
            batches = torch.randperm(n, generator=generator).to(inputs.device).split(batch_size)
        total = torch.zeros((), device=inputs.device)
        for batch in batches:
            optimizer.zero_grad()
            batch_loss = loss(model(inputs[batch]), targets[batch])
            batch_loss.backward()
            optimizer.step()
            total += batch_loss.detach()
        mean_loss = total.item() / len(batches)
        if not torch.isfinite(total):
            raise FloatingPointError(f"the loss became {mean_loss} in epoch {epoch}: lower the learning rate")
        history.append({"epoch": epoch, "train_loss": mean_loss, **_recorded(model, record, epoch)})
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise FloatingPointError("a weight became NaN or infinite in the last step: lower the learning rate")
    return history


def _recorded(model: nn.Module, record: Callable[[int], dict] | None, epoch: int) -> dict:
    if record is None:
        return {}
    with evaluating(model):
        return record(epoch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and no gradients; each of its modules is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, *, batch_size: int = 8192) -> float:
    """Fraction of samples whose largest output is their class, in [0, 1], in evaluation mode."""
    with evaluating(model):
        correct = sum(
            (model(x).argmax(dim=1) == y).sum().item()
            for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True)
        )
    return correct / len(inputs)
