"""Training with parts of each step taken out, and what solvers make of a step."""

from collections.abc import Callable, Mapping

import pandas as pd
import torch
from torch import Tensor, nn

from gramlin.gram import gram_shift
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


def split_steps(
    optimizer: torch.optim.Optimizer,
    layers: Mapping[str, nn.Linear | nn.Conv2d],
    method: str,
    *,
    last: int | None = None,
) -> dict[str, dict[str, list[float]]]:
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
    watch: dict[str, dict[str, list[float]]] = {name: {} for name in layers}
    for name in trained:
        keys = ("steps", "kept", "gram_error", "gram_error_floor") if halves[name] == "gram" else ("steps", "kept")
        watch[name] = {key: [] for key in keys}
    before: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    step = 0

    # Hooks run in the order in which they are attached: one before each step; then one that sees the plain step, what
    # changes it, and one that sees what has become of it.
    @torch.no_grad()
    def save(*_: object) -> None:
        nonlocal step
        step += 1
        before.update({name: weights[name].clone() for name in trained})

    @torch.no_grad()
    def save_plain(*_: object) -> None:
        plain.update({name: weights[name].clone() for name in trained})

    @torch.no_grad()
    def change(*_: object) -> None:
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
    def look(*_: object) -> None:
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
        generator: Tensor = basis @ (basis.mT @ (half - half.mT) @ basis / sums) @ basis.mT
        return (generator @ random).view_as(step)

    return project


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
