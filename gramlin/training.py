"""One training loop for all chapters: data stay on the device, and nothing is done a sample at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gramlin.checks import check_integers, check_tensor
from gramlin.hooks import unwrapped


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
    record: Callable[[int], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
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
        ValueError: no rows, or a different number of inputs and targets; a last batch of one sample for a model that
            normalises over the batch. Nothing has been trained by then.
        FloatingPointError: the loss became NaN or infinite, or at last a weight; says when.
    """
    n = len(inputs)
    if n == 0 or n != len(targets):
        raise ValueError(f"got {n} inputs and {len(targets)} targets; pass the same number, at least one")
    if batch_size is not None:
        check_batch_size(batch_size)
    _check_smallest_batch(model, inputs, batch_size or n)
    generator = torch.Generator().manual_seed(seed)
    history = [{"epoch": 0, "train_loss": None, **_recorded(model, record, 0)}]
    for epoch in range(1, epochs + 1):
        model.train()
        batches: Sequence[slice | Tensor] = [slice(None)]
        if batch_size is not None:
            batches = torch.randperm(n, generator=generator).to(inputs.device).split(batch_size)
        total = torch.zeros((), device=inputs.device)
        for batch in batches:
            optimizer.zero_grad()
            x = inputs.clone() if batch_size is None else inputs[batch]  # a copy: the model may change it in place
            batch_loss = loss(model(x), targets[batch])
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


def _check_smallest_batch(model: nn.Module, inputs: Tensor, batch_size: int) -> None:
    """Raise if the last batch has one sample and the model cannot train on it; leaves the model as it was."""
    n = len(inputs)
    number, left = divmod(n, batch_size)
    alone = left == 1 or batch_size == 1
    if not (alone and any(isinstance(module, _BatchNorm) for module in model.modules())):
        return
    # Whether one sample is enough depends on the positions that it has at each batch norm: the model is asked.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        devices = [inputs.device] if inputs.is_cuda else []
        eager: Literal["force_eager"] = "force_eager"  # one sample is no shape to compile for
        with _in_mode(model, training=True), torch.random.fork_rng(devices), torch.compiler.set_stance(eager):
            unwrapped(model)(inputs[:1].clone())
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise ValueError(
            f"batch {number + left} of {number + left} has one sample ({n} inputs, batch_size={batch_size}), and batch "
            "normalisation needs more; pass another batch_size, or one input less as drop_last would: inputs[:-1], "
            "targets[:-1]"
        ) from error
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def check_batch_size(batch_size: int) -> None:
    """Raise ``ValueError`` unless this is a positive integer."""
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; pass a positive integer")


def _recorded(model: nn.Module, record: Callable[[int], dict[str, Any]] | None, epoch: int) -> dict[str, Any]:
    if record is None:
        return {}
    with evaluating(model):
        return record(epoch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and no gradients; each of its modules is left in the mode it was in."""
    with _in_mode(model, training=False):
        yield


@contextmanager
def _in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got a {type(model).__name__}; pass an nn.Module")
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train() if training else model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, *, batch_size: int = 8192) -> float:
    """Fraction of samples whose largest output is their class, in [0, 1], in evaluation mode.

    Args:
        model: maps a batch of inputs to scores (n, K).
        inputs: of all samples, which the model does not change.
        targets: their classes (n,), integers.
        batch_size: of the parts in which inputs are passed through the model.

    Raises:
        ValueError: no inputs, or a different number of targets; outputs that are not (n, K).
        TypeError: inputs that are no tensor; targets that are not integers (n,).
    """
    check_tensor("inputs", inputs)
    check_integers("targets", targets)
    if not inputs.ndim or len(inputs) == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"got inputs {tuple(inputs.shape)} and {len(targets)} targets; pass the same number, at least one"
        )
    check_batch_size(batch_size)
    correct = 0
    with evaluating(model):
        for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
            scores = model(x.clone())  # which it may change in place
            if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(x):
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(f"the model's output for {len(x)} inputs is {got}; pass a model with scores (n, K)")
            correct += (scores.argmax(dim=1) == y).sum().item()
    return correct / len(inputs)
