"""Chapter 5's laws: the autoencoder, the gap of an interpolation, its bounds, and the ceiling of linear maps."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Bernoulli, Normal, kl_divergence

from gramlin import (
    VAE,
    active_units,
    decodes_apart,
    fit_linear,
    gap_bound,
    interpolate,
    interpolation_gap,
    negative_elbo,
    pca_ceiling,
    residual_ratio,
    target_linearity,
)
from gramlin.linearity import LinearFit
from gramlin.training import train
from tests.drawing import few, seeds, tensors

# Float64 sums of a few hundred numbers of order 1.
TIGHT = 1e-12


def curved(seed: int, d: int, outputs: tuple[int, ...] = (5,)):
    """A decoder with no affine part to speak of."""
    first, second = tensors(seed, (d, 7), (7, math.prod(outputs)))
    return lambda z: (torch.sin(2 * z.double() @ first) @ second + (z.double() @ first).square() @ second).unflatten(
        1, outputs
    )


def small_vae(kind: str = "mlp", activation: str = "gelu", seed: int = 0) -> VAE:
    torch.manual_seed(seed)
    return VAE((2, 8, 12), latent=3, hidden=10, kind=kind, activation=activation)


def images(n: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 2, 8, 12, generator=torch.Generator().manual_seed(seed))


# ---- the autoencoder ----


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_elbo_is_that_of_torchs_distributions(kind):
    model, x = small_vae(kind), images()
    x[0] = x[0].round()  # Bernoulli's own support; grey values are between
    reconstruction, divergence = model.elbo_terms(x, torch.Generator().manual_seed(5))
    mean, log_variance = model.encode(x)
    posterior = Normal(mean, log_variance.exp().sqrt())
    noise = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
    likelihood = Bernoulli(logits=model.decode_logits(mean + posterior.scale * noise), validate_args=False)
    # Float32 sums of 192 pixels.
    torch.testing.assert_close(reconstruction, -likelihood.log_prob(x).sum((1, 2, 3)), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(divergence, kl_divergence(posterior, Normal(0.0, 1.0)).sum(1), rtol=1e-5, atol=1e-5)
    expected = (reconstruction + 2.5 * divergence).mean()
    assert negative_elbo(model(x, torch.Generator().manual_seed(5)), x, 2.5).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_decoding_gives_the_pixels_probabilities_and_every_weight_is_used(kind):
    model, x = small_vae(kind), images()
    z, _ = model.encode(x)
    assert model.decode(z).shape == x.shape
    assert torch.equal(model.decode(z), model.decode_logits(z).sigmoid())
    negative_elbo(model(x), x).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_draw_is_its_generators():
    model, x = small_vae(), images()
    draws = [model.elbo_terms(x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0][0], draws[1][0])
    assert not torch.equal(draws[0][0], draws[2][0])
    assert torch.equal(draws[0][1], draws[2][1])  # the divergence is no draw


def test_a_standard_normal_posterior_has_no_divergence():
    zeros = torch.zeros(4, 3)
    logits, x = torch.zeros(4, 1, 2, 2), torch.zeros(4, 1, 2, 2)
    assert negative_elbo((logits, zeros, zeros), x, beta=7.0).item() == pytest.approx(4 * math.log(2))
    # One latent moved to mean 2, one to variance e²: 2 nats, and (e² − 3)/2.
    mean, log_variance = zeros.clone(), zeros.clone()
    mean[:, 0], log_variance[:, 1] = 2, 2
    more = negative_elbo((logits, mean, log_variance), x, beta=7.0).item() - 4 * math.log(2)
    assert more == pytest.approx(7 * (2 + (math.exp(2) - 3) / 2))


def test_the_training_loop_trains_it_and_beta_weighs_the_divergence():
    x = images(64).round() * images(64, seed=1)[:, :, :1, :1].round()  # blank, or not
    ends = {}
    for beta in (0.1, 0.1, 10.0):
        model = small_vae()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loss = partial(negative_elbo, beta=beta)
        torch.manual_seed(1)
        rows = train(model, optimizer, x, x, epochs=15, batch_size=16, loss=loss)
        divergence = model.elbo_terms(x, torch.Generator().manual_seed(0))[1].mean().item()
        assert rows[-1]["train_loss"] < 0.9 * rows[1]["train_loss"]
        assert ends.setdefault(beta, divergence) == divergence
    assert ends[10.0] < 0.1 * ends[0.1]


def test_active_units_are_those_whose_mean_varies():
    model, x = small_vae(), images(200)
    with torch.no_grad():
        model.encoder.linear3.weight[:2] *= torch.tensor([[30.0], [0.0]])
        means = model.encode(x)[0].numpy().astype(np.float64)
    variances = np.sort(means.var(axis=0, ddof=1))
    assert variances[0] < 1e-12
    for threshold in (0.01, 0.99 * variances[1], 1.01 * variances[1], 1.01 * variances[2]):
        assert active_units(model, x, threshold) == (variances > threshold).sum()


# ---- interpolation ----


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_interpolation_runs_from_one_reconstruction_to_the_other(kind):
    model, x0, x1 = small_vae(kind), images(4), images(4, seed=1)
    strips = interpolate(model, x0, x1, 5)
    assert strips.shape == (4, 5, 2, 8, 12)
    assert not strips.requires_grad
    z0, z1 = model.encode(x0)[0], model.encode(x1)[0]
    for step, weight in enumerate((0, 0.25, 0.5, 0.75, 1)):
        torch.testing.assert_close(strips[:, step], model.decode(weight * z1 + (1 - weight) * z0))
    torch.testing.assert_close(interpolate(model, x0[2], x1[2], 5), strips[2])


@few
@given(d=st.integers(1, 6), seed=seeds)
def test_an_affine_decoder_has_no_gap(d, seed):
    z0, z1, matrix, shift = tensors(seed, (9, d), (9, d), (d, 4), (4,))
    assert interpolation_gap(lambda z: z @ matrix + shift, z0, z1).max() < TIGHT
    matrix, shift = matrix.float(), shift.float()
    ends = z0.float(), z1.float()
    # Float32's rounding, over distances that may be small.
    distance = (ends[0] - ends[1]).norm(dim=1).min().item()
    assert interpolation_gap(lambda z: z @ matrix + shift, *ends).max() < 1e-4 / min(distance, 1)


def test_logits_of_a_linear_network_have_no_gap_but_its_images_do():
    model = small_vae(activation="identity").double()
    z0, z1 = tensors(0, (5, 3), (5, 3))
    assert interpolation_gap(model.decode_logits, 30 * z0, 30 * z1).max() < TIGHT
    assert interpolation_gap(model.decode, 30 * z0, 30 * z1).min() > 1e-3


@few
@given(d=st.integers(1, 5), scale=st.floats(1e-3, 1e3), seed=seeds)
def test_the_gap_is_blind_to_scale_rotation_and_shift_of_images_and_to_the_direction(d, scale, seed):
    z0, z1, square, shift = tensors(seed, (6, d), (6, d), (5, 5), (5,))
    decoder, rotation = curved(seed, d), torch.linalg.qr(square).Q
    gap = interpolation_gap(decoder, z0, z1)
    moved = interpolation_gap(lambda z: scale * (decoder(z) @ rotation + shift), z0, z1)
    torch.testing.assert_close(moved, gap, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(interpolation_gap(decoder, z1, z0), gap, rtol=1e-8, atol=1e-9)


def test_the_gap_is_the_one_of_a_plain_loop():
    decoder, (z0, z1) = curved(0, 3, (2, 2, 3)), tensors(1, (4, 3), (4, 3))
    squares, distances = np.zeros(4), np.zeros(4)
    for pair in range(4):
        ends = [decoder(z[pair : pair + 1]).numpy().ravel() for z in (z0, z1)]
        distances[pair] = np.sum((ends[1] - ends[0]) ** 2)
        for weight in (0.1, 0.3, 0.5, 0.7, 0.9):
            image = decoder((1 - weight) * z0[pair : pair + 1] + weight * z1[pair : pair + 1]).numpy().ravel()
            squares[pair] += np.sum((image - weight * ends[1] - (1 - weight) * ends[0]) ** 2) / 5
    assert np.allclose(interpolation_gap(decoder, z0, z1, steps=5), np.sqrt(squares / distances))
    pooled = interpolation_gap(decoder, z0, z1, steps=5, pooled=True)
    assert pooled.item() == pytest.approx(np.sqrt(squares.sum() / distances.sum()))


def test_known_decoders_have_their_known_gaps():
    z0, z1 = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    # λ² − λ has mean square 1/30; min(λ, 1 − λ) has 1/12. The rule of middles errs by 1/steps² of that.
    assert interpolation_gap(torch.square, z0, z1, steps=300).item() == pytest.approx(30**-0.5, rel=1e-4)
    switch = interpolation_gap(lambda z: (z > 0.5).double(), z0, z1, steps=300).item()
    assert switch == pytest.approx(12**-0.5, rel=1e-4)
    assert interpolation_gap(torch.square, z0, z1, steps=1).item() == pytest.approx(0.25)


# ---- what Target Linearity says of it ----


@few
@given(d=st.integers(1, 5), seed=seeds, steps=st.integers(1, 9))
def test_no_gap_exceeds_its_bound_whatever_the_affine_map(d, seed, steps):
    decoder, (z, matrix, shift) = curved(seed, d), tensors(seed + 1, (40, d), (d, 5), (5,))
    z0, z1 = z.chunk(2)
    gap = interpolation_gap(decoder, z0, z1, steps=steps)
    for fit in (fit_linear(z, decoder(z)), fit_linear(z, decoder(z), 3.0), LinearFit(matrix, shift, 0.0, d, False)):
        assert (gap <= gap_bound(decoder, fit, z0, z1, steps=steps) + TIGHT).all()


def test_the_bound_and_the_ratio_are_those_of_a_plain_loop():
    decoder, (z0, z1, slope, shift) = curved(0, 3), tensors(1, (4, 3), (4, 3), (3, 5), (5,))

    def left(z):
        return np.linalg.norm((decoder(z[None])[0] - z @ slope - shift).numpy())

    bounds, at_ends, inside = [], [], []
    for start, end in zip(z0, z1, strict=True):
        at_ends += [left(start), left(end)]
        terms = []
        for weight in (0.1, 0.3, 0.5, 0.7, 0.9):
            inside.append(left((1 - weight) * start + weight * end))
            terms.append(inside[-1] + weight * left(end) + (1 - weight) * left(start))
        distance = (decoder(end[None]) - decoder(start[None])).norm().item()
        bounds.append(np.sqrt(np.mean(np.square(terms))) / distance)
    fit = LinearFit(slope, shift, 0.0, 3, False)
    assert np.allclose(gap_bound(decoder, fit, z0, z1, steps=5), bounds)
    ratio = np.sqrt(np.mean(np.square(inside)) / np.mean(np.square(at_ends)))
    assert residual_ratio(decoder, fit, z0, z1, steps=5).item() == pytest.approx(ratio)


def test_the_bound_is_reached_and_less_would_be_none():
    # D(z) = (|z|, z/1000) between −1 and 1, A(z) = (1/2, z/1000): residuals of 1/2 at the ends and −1/2 at the middle.
    z, slope, shift = (torch.tensor(x, dtype=torch.float64) for x in ([[1.0]], [[0.0, 1e-3]], [0.5, 0.0]))
    fit = LinearFit(slope, shift, 0.0, 1, False)

    def decoder(z):
        return torch.cat([z.abs(), 1e-3 * z], dim=1)

    gap, bound = interpolation_gap(decoder, -z, z, steps=1), gap_bound(decoder, fit, -z, z, steps=1)
    assert gap.item() == pytest.approx(bound.item())
    assert gap.item() == pytest.approx(1 / 2e-3)


def all_pairs(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.repeat_interleave(len(z), dim=0), z.repeat(len(z), 1)


@few
@given(n=st.integers(8, 25), d=st.integers(1, 5), seed=seeds, steps=st.integers(1, 9))
def test_the_pooled_gap_is_bounded_by_target_linearity_on_both_sides(n, d, seed, steps):
    decoder, (z,) = curved(seed, d), tensors(seed + 1, (n, d))
    fit, loss = fit_linear(z, decoder(z)), 1 - target_linearity(z, decoder(z)).item()
    ratio = residual_ratio(decoder, fit, *all_pairs(z), steps=steps).item()
    positions = (np.arange(steps) + 0.5) / steps
    s = np.sqrt(np.mean(positions**2 + (1 - positions) ** 2))
    gap = interpolation_gap(decoder, *all_pairs(z), steps=steps, pooled=True).item()
    assert abs(ratio - s) * (1 - 1e-9) <= gap / math.sqrt(loss / 2) <= (ratio + s) * (1 + 1e-9)


def test_gaussian_latents_and_a_quadratic_decoder_give_a_formula():
    # D(z) = (z, c (z₁² − z₂²)): no Laplacian. Midpoint gap² = (1 − TL)/8, and κ = s² = 1/2.
    z, w = tensors(0, (40_000, 2), (40_000, 2))

    def decoder(z):
        return torch.cat([z, 0.7 * (z[:, :1].square() - z[:, 1:].square())], dim=1)

    loss = 1 - target_linearity(z, decoder(z)).item()
    assert loss == pytest.approx(1 - 2 / (2 + 4 * 0.49), abs=0.02)
    gap = interpolation_gap(decoder, z, w, steps=1, pooled=True).item()
    # Fourth moments over 40,000 samples.
    assert gap**2 == pytest.approx(loss / 8, rel=0.05)
    assert residual_ratio(decoder, fit_linear(z, decoder(z)), z, w, steps=1).item() == pytest.approx(0.5, rel=0.05)


def test_target_linearity_alone_does_not_bound_the_gap():
    # D(z) = (z, ‖z‖²): midpoints of Gaussian draws are nearer to the centre than any draw, where the fit is worse.
    z, w = tensors(0, (5000, 32), (5000, 32))

    def decoder(z):
        return torch.cat([z, z.square().sum(1, keepdim=True)], dim=1)

    fit, loss = fit_linear(z, decoder(z)), 1 - target_linearity(z, decoder(z)).item()
    ratio = residual_ratio(decoder, fit, z, w, steps=1).item()
    assert ratio == pytest.approx(math.sqrt(1 / 4 + 32 / 8), rel=0.05)
    gap = interpolation_gap(decoder, z, w, steps=1, pooled=True).item() / math.sqrt(loss / 2)
    assert 1 + math.sqrt(0.5) < gap < ratio + math.sqrt(0.5)


@few
@given(d=st.integers(1, 5), seed=seeds, noise=st.floats(0, 3))
def test_linearity_against_inputs_bounds_that_against_decodings(d, seed, noise):
    decoder, (z, error) = curved(seed, d), tensors(seed + 1, (60, d), (60, 5))
    decoded = decoder(z)
    x = decoded + noise * error

    def left(Y):
        return math.sqrt((1 - target_linearity(z, Y).item()) * Y.var(dim=0, correction=0).sum().item())

    assert left(decoded) <= (x - decoded).square().sum(1).mean().sqrt().item() + left(x) + TIGHT


# ---- the ceiling ----


@pytest.mark.parametrize(("n", "K"), [(30, 12), (9, 20), (12, 12), (5000, 7)])
@pytest.mark.parametrize("dimensions", [1, 4, 50])
def test_the_ceiling_is_scikit_learns(n, K, dimensions):
    rows, mix = tensors(0, (n, K), (K, K))
    Y = rows @ mix + 100
    expected = PCA().fit(Y.numpy()).explained_variance_ratio_[:dimensions].sum()
    assert pca_ceiling(Y, dimensions).item() == pytest.approx(expected, abs=1e-10)
    assert pca_ceiling(Y.float(), dimensions).item() == pytest.approx(expected, abs=1e-5)


@few
@given(n=st.integers(3, 40), d=st.integers(1, 6), K=st.integers(1, 9), seed=seeds)
def test_no_linear_map_passes_the_ceiling_and_principal_components_reach_it(n, d, K, seed):
    Y, mix, noise = tensors(seed, (n, K), (K, d), (n, d))
    ceiling = pca_ceiling(Y, d).item()
    assert target_linearity(Y @ mix + 0.1 * noise, Y).item() <= ceiling + 1e-10
    scores = torch.as_tensor(PCA(min(d, n, K)).fit_transform(Y.numpy()))
    assert target_linearity(scores, Y).item() == pytest.approx(ceiling, abs=1e-9)
    # Also a map that was fitted to other data stays below the ceiling of the data it is scored on.
    held_out, other = tensors(seed + 1, (n, K), (n, d))
    score = fit_linear(Y @ mix + 0.1 * noise, Y).score(held_out @ mix + 0.1 * other, held_out).item()
    assert score <= pca_ceiling(held_out, d).item() + 1e-10


# ---- pairs that decode alike, and errors ----


def test_ends_that_decode_alike_are_refused_unless_pooled_with_others():
    def decoder(z):
        return z[:, :1].relu() + 5

    z0 = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 1.0]])
    z1 = torch.tensor([[-2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    apart = decodes_apart(decoder, z0, z1)
    assert apart.tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"1 of 3 pairs, pair 0 for one, decode to the same image .* leave them out"):
        interpolation_gap(decoder, z0, z1)
    assert interpolation_gap(decoder, z0[apart], z1[apart])[0] < 1e-6
    assert interpolation_gap(decoder, z0, z1, pooled=True).isfinite()
    with pytest.raises(ValueError, match="1 of 1 pairs"):
        interpolation_gap(decoder, z0[:1], z1[:1], pooled=True)
    # Images a rounding apart are equal too.
    assert not decodes_apart(lambda z: 1 + 1e-6 * z, z0, z1).any()
    assert decodes_apart(lambda z: 1 + 1e-6 * z, z0.double(), z1.double()).all()


def at_rest(g):
    torch.manual_seed(0)
    return g.VAE((1, 4, 8), latent=3, hidden=4)


X, Z = torch.rand(5, 1, 4, 8), torch.randn(5, 3)
NO_FIT = {
    **{"coefficients": torch.zeros(3, 2).double(), "intercept": torch.zeros(2).double()},
    **{"ridge": 0.0, "rank": 0, "of_classes": False},
}
ERRORS = {
    "shape of two axes": (lambda g: g.VAE((8, 8)), ValueError, r"input_shape is \(8, 8\); pass \(channels"),
    "latent 0": (lambda g: g.VAE((1, 8, 8), latent=0), ValueError, "latent is 0; pass an integer of at least 1"),
    "hidden real": (lambda g: g.VAE((1, 8, 8), hidden=2.5), ValueError, "hidden is 2.5; pass an integer"),
    "kind": (lambda g: g.VAE((1, 8, 8), kind="cnn"), ValueError, "kind is 'cnn'; pass one of mlp, conv"),
    "activation": (lambda g: g.VAE((1, 8, 8), activation="swish"), ValueError, "pass one of gelu"),
    "size of conv": (lambda g: g.VAE((1, 8, 6), kind="conv"), ValueError, "a height and width that 4 divides"),
    "images' shape": (lambda g: at_rest(g).encode(X.mT), ValueError, r"shape \(5, 1, 8, 4\), the model is of \(n, \*"),
    "no images": (lambda g: at_rest(g).encode(X[:0]), ValueError, "n ≥ 1"),
    "images' kind": (lambda g: at_rest(g).encode((X * 255).byte()), TypeError, r"torch.uint8; pass floating-point"),
    "images' range": (lambda g: at_rest(g)(X * 3 - 1), ValueError, "values from .* not standardised"),
    "NaN images": (lambda g: at_rest(g).elbo_terms(X * torch.nan), ValueError, "values from nan to nan"),
    "latents' width": (lambda g: at_rest(g).decode(Z[:, :2]), ValueError, r"shape \(5, 2\), the model is of \(n, 3\)"),
    "beta": (lambda g: g.negative_elbo((X, Z, Z), X, -1.0), ValueError, "beta is -1.0; pass a finite number, 0 or"),
    "labels": (lambda g: g.negative_elbo((X, Z, Z), X[:, 0]), ValueError, r"logits have shape .*they must agree"),
    "one image": (lambda g: g.active_units(at_rest(g), X[:1]), ValueError, "got 1 images; pass at least two"),
    "one step": (lambda g: g.interpolate(at_rest(g), X, X, 1), ValueError, "steps is 1; .* at least 2"),
    "unequal pairs": (lambda g: g.interpolate(at_rest(g), X, X[:3], 4), ValueError, r"x0 has shape \(5, .*must agree"),
    "no steps": (lambda g: g.interpolation_gap(torch.sin, Z, -Z, steps=0), ValueError, "steps is 0; .* at least 1"),
    "one latent": (
        lambda g: g.interpolation_gap(torch.sin, Z[0], Z[1]),
        ValueError,
        r"shape \(3,\); .*z\[None\]",
    ),
    "unequal latents": (
        lambda g: g.interpolation_gap(torch.sin, Z, Z[:2]),
        ValueError,
        r"z1 \(2, 3\): they must",
    ),
    "integer latents": (
        lambda g: g.interpolation_gap(torch.sin, Z.long(), Z),
        TypeError,
        "z0: got a torch.int64 tensor; pass",
    ),
    "NaN latents": (lambda g: g.interpolation_gap(torch.sin, Z, Z / 0), ValueError, "z1: 15 NaN or infinite entries"),
    "NaN decodings": (lambda g: g.interpolation_gap(torch.log, Z, -Z), ValueError, "decoder's images .* NaN or inf"),
    "flat decoder": (lambda g: g.interpolation_gap(lambda z: z.sum(1), Z, -Z), ValueError, r"made shape \(5,\)"),
    "same image": (lambda g: g.interpolation_gap(torch.abs, Z, -Z), ValueError, "5 of 5 pairs, .* decode to the same"),
    "fit's outputs": (
        lambda g: g.gap_bound(torch.sin, g.linearity.LinearFit(**NO_FIT), Z, -Z),
        ValueError,
        "the decoder has 3 outputs, the fit 2: they must agree",
    ),
    "fit's latents": (
        lambda g: g.gap_bound(lambda z: z[:, :2], g.fit_linear(Z[:, :2], Z[:, :2]), Z, -Z),
        ValueError,
        "features have width 3, the fit 2",
    ),
    "no residual": (
        lambda g: g.residual_ratio(lambda z: 0 * z[:, :2], g.linearity.LinearFit(**NO_FIT), Z, -Z),
        ValueError,
        "leaves nothing of the decoder at the ends",
    ),
    "dimensions": (lambda g: g.pca_ceiling(Z, 0), ValueError, "dimensions is 0; pass an integer of at least 1"),
    "targets' shape": (
        lambda g: g.pca_ceiling(X, 2),
        ValueError,
        r"pass a non-empty \(n, K\), e.g. images",
    ),
    "targets' kind": (lambda g: g.pca_ceiling(Z.long(), 2), TypeError, "targets: got a torch.int64"),
    "NaN targets": (lambda g: g.pca_ceiling(Z * torch.nan, 2), ValueError, "targets: 15 NaN or infinite entries"),
    "constant targets": (lambda g: g.pca_ceiling(Z * 0 + 0.1, 2), ValueError, "all 5 samples are constant"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, unchecked):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


def test_a_model_that_diverged_has_no_count_of_active_units():
    model = VAE((1, 2, 2), latent=3, hidden=16)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="diverged"):
        active_units(model, torch.rand(4, 1, 2, 2))


# ---- images that are almost in [0, 1], and models that have diverged ----


@pytest.mark.parametrize("antialias", [True, False])
def test_images_that_resizing_left_just_outside_the_range_are_taken_as_they_are(antialias):
    white = torch.ones(3, 2, 33, 50)
    x = F.interpolate(white, size=(8, 12), mode="bicubic", antialias=antialias).clamp_min(1 + 2**-23)
    assert x.max() > 1
    model = small_vae()
    logits, mean, log_variance = model(x, torch.Generator().manual_seed(0))
    by_hand = F.softplus(logits) - x * logits  # of the values themselves, which a clip would change
    assert torch.allclose(model.elbo_terms(x, torch.Generator().manual_seed(0))[0], by_hand.sum((1, 2, 3)))
    no_divergence = negative_elbo((logits, mean, log_variance), x, beta=0.0)
    assert no_divergence.item() == pytest.approx(by_hand.sum((1, 2, 3)).mean().item(), rel=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.00001), (-1e-5, 1.0), (-2.0, 3.0)])
def test_the_range_of_refused_images_shows_what_is_wrong(low, high):
    x = images()
    x[0, 0, 0, 0], x[1, 1, 2, 3] = low, high
    outputs = torch.zeros_like(x), torch.zeros(6, 3), torch.zeros(6, 3)
    for call in (small_vae().encode, lambda x: negative_elbo(outputs, x)):
        with pytest.raises(ValueError, match=r"images have values from .* to .*: the Bernoulli") as caught:
            call(x)
        shown = [float(word) for word in str(caught.value).split(":")[0].split()[4::2]]
        assert [torch.tensor(value).item() for value in shown] == [x.min().item(), x.max().item()]


def outputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((6, 2, 8, 12), (6, 3), (6, 3))]


DIVERGED = {
    "log-variance": (2, 1000.0, r"exp\(log_variance\) overflows torch.float32, log_variance being as large as 1000"),
    "log-variance just too large": (2, 89.0, r"exp\(log_variance\) overflows torch.float32, .* as large as 89"),
    "infinite log-variance": (2, float("inf"), "log_variance has 1 NaN or infinite entries of 18"),
    "no variance": (2, float("-inf"), "log_variance has 1 NaN or infinite entries of 18"),
    "mean": (1, -1e30, r"mean² overflows torch.float32, mean being as large as 1e\+30"),
    "NaN mean": (1, float("nan"), "mean has 1 NaN or infinite entries of 18"),
    "infinite logits": (0, float("inf"), "logits has 1 NaN or infinite entries of 1152"),
    "NaN logits": (0, float("nan"), "logits has 1 NaN or infinite entries of 1152"),
}


@pytest.mark.parametrize("case", DIVERGED)
def test_a_loss_that_is_not_finite_names_its_cause_and_the_remedy(case):
    which, value, words = DIVERGED[case]
    made = outputs()
    made[which].flatten()[4] = value
    with pytest.raises(FloatingPointError, match=f"{words}.*: the model has diverged; lower the learning rate"):
        negative_elbo(tuple(made), images())


def test_a_sum_that_overflows_names_the_largest_entries():
    logits, mean, log_variance = outputs(torch.float16)
    logits[0] = 6e4
    with pytest.raises(FloatingPointError, match=r"loss overflows torch.float16, .* being 6e\+04 of logits, .* of"):
        negative_elbo((logits, mean, log_variance), images().half().clamp_max(0.5))


@pytest.mark.parametrize(("which", "value"), [(2, 88.0), (2, -1e30), (1, 1e18), (0, 1e30)])
def test_the_gradient_of_a_loss_that_is_accepted_is_finite(which, value):
    made = outputs()
    made[which].flatten()[4] = value
    for tensor in made:
        tensor.requires_grad_()
    assert negative_elbo(tuple(made), images(), beta=0.5).isfinite()
    negative_elbo(tuple(made), images(), beta=0.5).backward()
    assert all(tensor.grad.isfinite().all() for tensor in made)


def test_training_that_diverges_says_so_where_it_does():
    model, x = small_vae(), images(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    with pytest.raises(FloatingPointError, match="the model has diverged; lower the learning rate"):
        train(model, optimizer, x, x, epochs=3, batch_size=16, loss=negative_elbo)
    with pytest.raises(FloatingPointError, match="diverged"):
        model.elbo_terms(x)


def test_the_loss_can_be_compiled_mapped_and_differentiated(unchecked):
    negative_elbo = unchecked.negative_elbo  # what checks shapes cannot be compiled
    made, x = tuple(outputs()), images()
    expected = negative_elbo(made, x)
    compiled = torch.compile(negative_elbo, backend="eager", fullgraph=True)
    assert torch.equal(compiled(made, x), expected)

    def of_one(logits, mean, log_variance, image):
        return negative_elbo((logits[None], mean[None], log_variance[None]), image[None])

    torch.testing.assert_close(torch.func.vmap(of_one)(*made, x).mean(), expected)
    slopes = torch.func.vmap(torch.func.grad(of_one, argnums=1))(*made, x)
    torch.testing.assert_close(slopes, made[1])  # of mean²/2
    assert negative_elbo(tuple(tensor.to("meta") for tensor in made), x.to("meta")).shape == ()


def test_decoding_can_be_compiled_in_one_piece(unchecked):
    model = at_rest(unchecked)
    compiled = torch.compile(model.decode, backend="eager", fullgraph=True)
    assert torch.equal(compiled(Z), model.decode(Z))
    assert torch.equal(torch.compile(model, backend="eager").encode(X)[0], model.encode(X)[0])


# ---- what is no tensor, no decoder, no model ----


WRONG = {
    **{"None": None, "text": "x", "list": [[1.0, 2.0, 3.0]], "number": 3, "NumPy": np.ones((5, 3))},
    **{"integers": torch.ones(5, 3, dtype=torch.long), "complex": torch.ones(5, 3) + 0j},
    **{"sparse": torch.eye(5, 3).to_sparse(), "meta": torch.ones(5, 3, device="meta"), "bool": torch.ones(5, 3) > 0},
    **{"empty": torch.ones(0, 3), "scalar": torch.tensor(0.5)},
}
WRONG["fake"] = FakeTensorMode().from_tensor(torch.ones(5, 3))

TAKING = {
    "encode": (lambda g, bad: at_rest(g).encode(bad), "images"),
    "decode": (lambda g, bad: at_rest(g).decode(bad), "latents"),
    "forward": (lambda g, bad: at_rest(g)(bad), "images"),
    "elbo_terms": (lambda g, bad: at_rest(g).elbo_terms(bad), "images"),
    "logits": (lambda g, bad: g.negative_elbo((bad, Z, Z), X), "logits"),
    "log_variance": (lambda g, bad: g.negative_elbo((X, Z, bad), X), "log_variance"),
    "images": (lambda g, bad: g.negative_elbo((X, Z, Z), bad), "images"),
    "outputs": (lambda g, bad: g.negative_elbo(bad, X), "outputs"),
    "active_units": (lambda g, bad: g.active_units(at_rest(g), bad), "images"),
    "x0": (lambda g, bad: g.interpolate(at_rest(g), bad, X, 3), "x0"),
    "x1": (lambda g, bad: g.interpolate(at_rest(g), X, bad, 3), "x1"),
    "z0": (lambda g, bad: g.interpolation_gap(torch.sin, bad, Z), "z0"),
    "z1": (lambda g, bad: g.decodes_apart(torch.sin, Z, bad), "z1"),
    "ends of a bound": (lambda g, bad: g.gap_bound(torch.sin, g.fit_linear(Z, Z), bad, Z), "z0"),
    "ends of a ratio": (lambda g, bad: g.residual_ratio(torch.sin, g.fit_linear(Z, Z), Z, bad), "z1"),
    "pca_ceiling": (lambda g, bad: g.pca_ceiling(bad, 2), "targets"),
    "decodings": (lambda g, bad: g.interpolation_gap(lambda z: bad, Z, -Z), "the decoder"),
    "fit": (lambda g, bad: g.gap_bound(torch.sin, bad, Z, -Z), "fit"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("argument", TAKING)
def test_what_is_no_tensor_of_numbers_is_named(argument, kind, unchecked):
    call, name = TAKING[argument]
    if (argument, kind) == ("decode", "empty"):
        assert call(unchecked, WRONG[kind]).shape == (0, 1, 4, 8)
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        call(unchecked, WRONG[kind])
    message = str(caught.value)
    assert "\n" not in message
    assert name in message or "got 0 images" in message


MORE_ERRORS = {
    "no shape": (lambda g: g.VAE(None), ValueError, r"input_shape is None; pass \(channels, height, width\)"),
    "true size": (lambda g: g.VAE((1, True, 4)), ValueError, r"input_shape is \(1, True, 4\); pass"),
    "list for kind": (lambda g: g.VAE((1, 4, 4), kind=[]), ValueError, r"kind is \[\]; pass one of mlp, conv"),
    "list for activation": (lambda g: g.VAE((1, 4, 4), activation=[]), ValueError, r"activation is \[\]; pass one of"),
    "float64 images": (lambda g: at_rest(g).encode(X.double()), TypeError, r"pass images.to\(torch.float32\)"),
    "half latents": (
        lambda g: at_rest(g).decode(Z.half()),
        TypeError,
        "latents are torch.float16, the model",
    ),
    "two outputs": (lambda g: g.negative_elbo((X, Z), X), TypeError, r"outputs: got 2 of them; pass \(logits, mean"),
    "one log-variance": (
        lambda g: g.negative_elbo((X, Z, Z[:1]), X),
        ValueError,
        r"log_variance \(1, 3\); pass",
    ),
    "empty batch": (lambda g: g.negative_elbo((X[:0], Z[:0], Z[:0]), X[:0]), ValueError, "and not be empty"),
    "beta as text": (lambda g: g.negative_elbo((X, Z, Z), X, "1"), ValueError, "beta is '1'; pass a finite number"),
    "no model": (lambda g: g.interpolate(None, X, X, 3), TypeError, "model: got a NoneType; pass a VAE"),
    "layer": (lambda g: g.active_units(torch.nn.Linear(3, 3), X), TypeError, "model: got a Linear; pass a VAE"),
    "flat images": (lambda g: g.interpolate(at_rest(g), Z, Z, 3), ValueError, r"x0 has shape \(5, 3\); pass one image"),
    "negative threshold": (lambda g: g.active_units(at_rest(g), X, -1), ValueError, "threshold is -1; pass a finite"),
    "NaN threshold": (lambda g: g.active_units(at_rest(g), X, math.nan), ValueError, "threshold is nan; pass a finite"),
    "no threshold": (lambda g: g.active_units(at_rest(g), X, None), ValueError, "threshold is None; pass a finite"),
    "no decoder": (lambda g: g.interpolation_gap(None, Z, -Z), TypeError, "decoder: got a NoneType; pass a function"),
    "two types": (
        lambda g: g.interpolation_gap(torch.sin, Z, Z.double()),
        TypeError,
        "z0 is torch.float32, z1 torch",
    ),
    "tuple of images": (lambda g: g.interpolation_gap(lambda z: (z, z), Z, -Z), TypeError, "images .*: got a tuple"),
    "far apart": (
        lambda g: g.interpolation_gap(torch.sin, Z.double() * 0 - 1.7e308, Z.double() * 0 + 1.7e308),
        ValueError,
        "latents between z0 and z1: 15 NaN or infinite entries",
    ),
}


@pytest.mark.parametrize("case", MORE_ERRORS)
def test_more_bad_input_is_named(case, unchecked):
    call, kind, words = MORE_ERRORS[case]
    with pytest.raises(kind, match=words):
        call(unchecked)


def test_sizes_may_be_of_any_integer_type(unchecked):
    model = unchecked.VAE([np.int64(1), 4, 8], latent=np.int64(3), hidden=4)
    assert model.encode(X)[0].shape == (5, 3)
    assert unchecked.interpolate(model, X, X, np.int64(3)).shape == (5, 3, 1, 4, 8)


def test_a_refused_call_asks_no_decoder_and_changes_nothing(unchecked):
    def decoder(z):
        raise AssertionError("the decoder was called")

    state, latents, fit = torch.random.get_rng_state(), Z.clone(), fit_linear(Z, Z)
    for call in (
        lambda: unchecked.interpolation_gap(decoder, Z, -Z, steps=0),
        lambda: unchecked.gap_bound(decoder, fit, Z, -Z, steps=2.5),
        lambda: unchecked.gap_bound(decoder, None, Z, -Z),
        lambda: unchecked.residual_ratio(decoder, None, Z, -Z),
        lambda: unchecked.residual_ratio(decoder, fit, Z, Z * torch.nan),
        lambda: unchecked.decodes_apart(decoder, Z, Z[:2]),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert torch.equal(state, torch.random.get_rng_state())
    model = small_vae()
    model.decoder.eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="must agree"):
        unchecked.interpolate(model, images(), images(5), 3)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(Z, latents)


# ---- decoders that change what they get, and numbers at the ends of float64 ----


def test_a_decoder_that_works_in_place_changes_neither_latents_nor_gap():
    z0, z1 = (z.float() for z in tensors(0, (6, 3), (6, 3)))
    kept = z0.clone(), z1.clone()
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 5)
    in_place, plain = (torch.nn.Sequential(torch.nn.LeakyReLU(0.1, inplace=flag), linear) for flag in (True, False))
    fit = fit_linear(torch.cat([z0, z1]), plain(torch.cat([z0, z1])))
    for measure in (interpolation_gap, decodes_apart, partial(interpolation_gap, pooled=True)):
        assert torch.equal(measure(in_place, z0, z1), measure(plain, z0, z1))
    for measure in (gap_bound, residual_ratio):
        assert torch.equal(measure(in_place, fit, z0, z1), measure(plain, fit, z0, z1))
    assert torch.equal(z0, kept[0])
    assert torch.equal(z1, kept[1])


def test_a_decoder_that_writes_all_its_images_into_one_tensor_has_the_same_gap():
    z0, z1 = tensors(0, (6, 3), (6, 3))
    one = torch.empty(6, 3, dtype=torch.float64)
    assert torch.equal(interpolation_gap(lambda z: torch.sin(z, out=one), z0, z1), interpolation_gap(torch.sin, z0, z1))


@pytest.mark.parametrize("scale", [2.0**-390, 2.0**390, 2.0**-700, 2.0**700])
def test_images_of_any_scale_have_the_same_gap_or_are_refused_by_name(scale):
    z0, z1 = tensors(0, (6, 3), (6, 3))
    z = torch.cat([z0, z1])

    def measured(scale):
        def decoder(z):
            return scale * torch.sin(z)

        fit = fit_linear(z, torch.sin(z))
        fit = LinearFit(scale * fit.coefficients, scale * fit.intercept, 0.0, fit.rank, False)
        return (
            lambda: interpolation_gap(decoder, z0, z1),
            lambda: interpolation_gap(decoder, z0, z1, pooled=True),
            lambda: gap_bound(decoder, fit, z0, z1),
            lambda: residual_ratio(decoder, fit, z0, z1),
            lambda: decodes_apart(decoder, z0, z1),
            lambda: pca_ceiling(decoder(z), 2),
        )

    for scaled, plain in zip(measured(scale), measured(1.0), strict=True):
        if 1e-120 < scale < 1e120:
            torch.testing.assert_close(scaled(), plain(), rtol=1e-10, atol=0)
        else:
            with pytest.raises(ValueError, match=r"leave float64; (scale|rescale) .*to have it between"):
                scaled()


def test_one_image_too_small_to_square_is_refused_though_others_are_not():
    z0, z1 = tensors(0, (6, 3), (6, 3))
    size = torch.ones(6, 1, dtype=torch.float64)
    size[4] = 1e-158
    with pytest.raises(ValueError, match=r"largest entry of one is .*e-15[89], and squares of such"):
        interpolation_gap(lambda z: size * torch.sin(z), z0, z1)


def test_targets_whose_variance_underflows_are_refused():
    (rows,) = tensors(0, (8, 3))
    targets = torch.cat([torch.ones(8, 1, dtype=torch.float64), 1e-200 * rows], dim=1)
    for Y in (targets, targets.T.contiguous().T.repeat(1, 4)):
        with pytest.raises(ValueError, match="targets: their variance, 0, is rounding or underflows"):
            pca_ceiling(Y, 1)


def test_a_fit_to_something_else_that_overflows_is_refused():
    z0, z1 = tensors(0, (6, 3), (6, 3))
    huge = LinearFit(torch.full((3, 3), 1e300, dtype=torch.float64), torch.zeros(3).double(), 0.0, 3, False)
    for measure in (gap_bound, residual_ratio):
        with pytest.raises(ValueError, match="the fit's predictions of the decoder's images overflow float64"):
            measure(torch.sin, huge, z0, z1)


def test_latents_with_gradients_are_measured_and_get_none():
    z0, z1 = tensors(0, (6, 3), (6, 3))
    gap = interpolation_gap(torch.sin, z0.requires_grad_(), z1)
    assert torch.equal(gap, interpolation_gap(torch.sin, z0.detach(), z1))
    assert not gap.requires_grad
    assert z0.grad is None
