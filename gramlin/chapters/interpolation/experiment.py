"""A variational autoencoder in training: how linear its latents are, and how straight it decodes between two images."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gramlin import data
from gramlin.chapters.sweeps import Experiment, optimizer_of
from gramlin.interpolation import (
    VAE,
    active_units,
    decodes_apart,
    gap_bound,
    interpolation_gap,
    negative_elbo,
    pca_ceiling,
    residual_ratio,
)
from gramlin.linearity import LinearFit, fit_of, linearity_of
from gramlin.moments import Moments
from gramlin.results import JsonObject
from gramlin.training import train

# Training images that the linear fits are made on: many for 32 latents, and measuring takes less time than training.
_FITTED = 10_000

# Rows that are put through the network at a time, in measuring.
_CHUNK_ROWS = 4096

# Pairs of test images, no image in two of them; fewer where the split has fewer images.
_PAIRS = 1000

# Latents are float32: a segment's points are on a line but for this much of the images' distance.
_ROUNDING = 1e-5

_QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


def measure_interpolation(
    *,
    dataset: str,
    model: str,
    beta: float,
    latent: int,
    hidden: int,
    lr: float,
    batch_size: int,
    epochs: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> JsonObject:
    """Train a ``VAE`` by Adam, and measure how linear its latents are and how straight it decodes between two of them.

    Args:
        dataset: a name for ``gramlin.data.load``, of images in [0, 1]; they stay as they are.
        model: "mlp" or "conv", the kind of ``VAE``.
        beta: weight of the KL divergence in the loss.
        latent: number of latents.
        hidden: width of the fully connected hidden layers.
        lr: the learning rate.
        batch_size: samples a step.
        epochs: passes over the training split.
        seed: of the initial weights, the order of samples and the noise of the latents.
        device: where to run.

    Returns:
        ``pca_ceiling`` and ``pca_ceiling_test``: what no linear map from so many latents exceeds, of 10,000 training
        images, evenly spaced through the split, and of the test split. ``train_loss`` over epochs from 1. Lists over
        epochs from 0, all of the latents' means:

        - ``reconstruction``, ``kl``: nats an image, test split, one draw of the latents each.
        - ``tl_inputs``, ``tl_decodings``: Target Linearity of the latents against the images and against what they
          decode to, on the 10,000 training images; with ``_test`` the score of this fit on the test split.
        - ``explained``: the fraction 1 − ‖x − D(z)‖²/‖x − x̄‖² of the test images' variance that decoding explains.
        - ``decoded_variance``: the variance of the decoded test images, as a fraction of that of the images; near 0 if
          the decoder ignores the latents, where all measures of decodings say little.
        - ``active_units``: on the test split.
        - ``gap``, ``bound``: of 1,000 pairs of test images, by name ``mean`` and quantiles (None if the ends of all
          pairs decode to one image); ``gap_within``, ``gap_across``: mean gap of pairs of one class, and of two.
        - ``violations``: pairs whose gap exceeds its bound; must be 0.
        - ``pairs``: pairs whose ends decode apart, over which these are taken.
        - ``pooled_gap``, ``residual_ratio``: the two that Target Linearity ties to each other, over the same pairs.
    """
    split = data.load(dataset, device=device)
    images, held_out = split.train_inputs, split.test_inputs
    fitted = images[torch.linspace(0, len(images) - 1, min(_FITTED, len(images))).long().to(images.device)]
    inputs, inputs_test = fitted.flatten(1), held_out.flatten(1)
    variance = _variance(inputs_test)
    torch.manual_seed(seed)
    network = VAE(images.shape[1:], latent, hidden, model).to(device)
    x0, x1, same_class = _fixed_pairs(held_out, split.test_targets)

    def measure(_: int) -> JsonObject:
        generator = torch.Generator(device).manual_seed(0)
        terms = [network.elbo_terms(x, generator) for x in held_out.split(_CHUNK_ROWS)]
        reconstruction, divergence = (torch.cat(each).mean().item() for each in zip(*terms, strict=True))

        latents, decodings = _passed(network, fitted)
        of_inputs, of_decodings = Moments(), Moments()
        of_inputs.update(latents, inputs)
        of_decodings.update(latents, decodings)
        fit = fit_of(of_decodings)
        latents, decodings = _passed(network, held_out)
        return {
            "reconstruction": reconstruction,
            "kl": divergence,
            "tl_inputs": linearity_of(of_inputs).item(),
            "tl_inputs_test": fit_of(of_inputs).score(latents, inputs_test).item(),
            "tl_decodings": linearity_of(of_decodings).item(),
            "tl_decodings_test": fit.score(latents, decodings).item(),
            "explained": 1 - ((inputs_test - decodings).square().sum(dim=1).mean() / variance).item(),
            "decoded_variance": (_variance(decodings) / variance).item(),
            "active_units": active_units(network, held_out),
            **_straightness(network, fit, x0, x1, same_class),
        }

    optimizer = optimizer_of("adam", network, lr, momentum=0.0)
    rows = train(
        network,
        optimizer,
        images,
        images,
        epochs=epochs,
        batch_size=batch_size,
        loss=partial(negative_elbo, beta=beta),
        seed=seed,
        record=measure,
    )
    return {
        "pca_ceiling": pca_ceiling(inputs, latent).item(),
        "pca_ceiling_test": pca_ceiling(inputs_test, latent).item(),
        "train_loss": [row["train_loss"] for row in rows[1:]],
        **{key: [row[key] for row in rows] for key in rows[0] if key != "train_loss"},
    }


def _fixed_pairs(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Images of pairs, drawn without replacement, and whether the two are of one class."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)
    first, second = order[: 2 * min(_PAIRS, len(order) // 2)].chunk(2)
    return images[first], images[second], targets[first] == targets[second]


def _passed(network: VAE, images: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the images' latents, and what these decode to, a row an image."""
    latents = [network.encode(x)[0] for x in images.split(_CHUNK_ROWS)]
    return torch.cat(latents), torch.cat([network.decode(z).flatten(1) for z in latents])


def _variance(rows: Tensor) -> Tensor:
    return rows.var(dim=0, correction=0).sum()


def _straightness(network: VAE, fit: LinearFit, x0: Tensor, x1: Tensor, same_class: Tensor) -> JsonObject:
    """The gaps of the pairs and their bounds."""
    z0, z1 = network.encode(x0)[0], network.encode(x1)[0]
    apart = decodes_apart(network.decode, z0, z1)
    z0, z1 = z0[apart], z1[apart]
    if len(z0) == 0:
        keys = ("gap", "bound", "gap_within", "gap_across", "pooled_gap", "residual_ratio")
        return {"pairs": 0, "violations": 0, **dict.fromkeys(keys)}
    gap, bound = interpolation_gap(network.decode, z0, z1), gap_bound(network.decode, fit, z0, z1)
    same_class = same_class[apart].to(gap.device)
    return {
        "pairs": len(z0),
        "gap": _summary(gap),
        "bound": _summary(bound),
        "violations": int((gap > bound + _ROUNDING).sum()),
        "gap_within": _mean(gap[same_class]),
        "gap_across": _mean(gap[~same_class]),
        "pooled_gap": interpolation_gap(network.decode, z0, z1, pooled=True).item(),
        "residual_ratio": residual_ratio(network.decode, fit, z0, z1).item(),
    }


def _summary(values: Tensor) -> dict[str, float]:
    shares = torch.tensor(list(_QUANTILES.values()), dtype=values.dtype, device=values.device)
    quantiles = zip(_QUANTILES, values.quantile(shares).tolist(), strict=True)
    return {"mean": values.mean().item(), **dict(quantiles)}


def _mean(values: Tensor) -> float | None:
    return values.mean().item() if len(values) else None


INTERPOLATION = Experiment("interpolation", measure_interpolation)


def interpolation_settings(dataset: str, seeds: Sequence[int]) -> list[JsonObject]:
    """The paper-scale runs of chapter 5, β by β: six for all seeds, on CIFAR-10 three for one seed."""
    large = dataset in ("cifar10", "cifar10-jpeg")
    base = {"dataset": dataset, "model": "mlp", "latent": 32, "hidden": 512, "lr": 1e-4, "batch_size": 128}
    betas, epochs = ((0.1, 1.0, 10.0), 30) if large else ((0.05, 0.1, 0.5, 1.0, 4.0, 10.0), 10)
    return [
        {**base, "epochs": epochs, "beta": beta, "seed": seed}
        for beta in betas
        for seed in (seeds[:1] if large else seeds)
    ]
