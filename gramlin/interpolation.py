r"""Variational autoencoders, and how straight their decoders are between two latents: chapter 5.

A decoder D maps latents z (n, d) to images. On the segment z_λ = λz₁ + (1 − λ)z₀ its *gap* is
g_λ = D(z_λ) − λD(z₁) − (1 − λ)D(z₀): what interpolating latents shows that a cross-fade of the two images does not.

**The gap is the gap of the residual.** Let A be any affine map and r = D − A. The gap of A is zero at three collinear
points, hence g_λ = r(z_λ) − λr(z₁) − (1 − λ)r(z₀), and by the triangle inequality
‖g_λ‖ ≤ ‖r(z_λ)‖ + λ‖r(z₁)‖ + (1 − λ)‖r(z₀)‖.

**On average it is Target Linearity.** Let z₀, z₁ be independent draws of one law, A the best affine fit of D under that
law and TL its Target Linearity, and write ‖·‖₂ for the root of the expectation of a squared norm. Then
‖D(z₁) − D(z₀)‖₂² = 2V with V the total variance of D(z), ‖r(z)‖₂² = (1 − TL)V, and r(z₀), r(z₁) are independent with
mean zero, so that ‖λr(z₁) + (1 − λ)r(z₀)‖₂ = s_λ‖r(z)‖₂ with s_λ² = λ² + (1 − λ)². With
κ_λ = ‖r(z_λ)‖₂/‖r(z)‖₂ (for TL < 1) the triangle inequality says, both ways,

    |κ_λ − s_λ| √((1 − TL)/2)  ≤  ‖g_λ‖₂/‖D(z₁) − D(z₀)‖₂  ≤  (κ_λ + s_λ) √((1 − TL)/2),

and the same holds for root mean squares over λ, of g_λ, κ_λ and s_λ (∫s_λ² = 2/3). Nothing is assumed but second
moments. What TL cannot know is κ: points of a segment do not follow the law of its ends (the mean of two Gaussian draws
is too near the centre), and only where the affine fit is no worse there (κ ≤ 1) does TL alone bound the gap.
The statement holds exactly for a sample too, with the fit to it and all its n² ordered pairs.

**For inputs.** Where the decoder reconstructs, D(z) ≈ x, the Target Linearity TL_x of latents against inputs bounds the
same residual: the best fit A is no worse a fit of D than the best fit of x is, hence
√((1 − TL)V) ≤ ‖D(z) − x‖₂ + √((1 − TL_x)V_x), V_x the total variance of x.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from gramlin.checks import check_finite, check_floating, check_integer, check_matrix, check_one_device, check_tensor
from gramlin.linearity import LinearFit
from gramlin.models import ACTIVATIONS, MLP
from gramlin.moments import Sums, centred, check_squares, to_float64

__all__ = [
    "VAE",
    "active_units",
    "decodes_apart",
    "gap_bound",
    "interpolate",
    "interpolation_gap",
    "negative_elbo",
    "pca_ceiling",
    "residual_ratio",
]

# Images that differ by less than this many roundings of their norm are equal: the gap between them would have less
# than two digits.
_ROUNDINGS = 100

# PyTorch's bicubic resizing in float32 makes up to 12 roundings more than 1 of a white image.
_RANGE_ROUNDINGS = 16

# Bounds of an image's largest entry: the squared distance of two that are apart, and its ratio to another, stay normal
# float64 numbers.
_SMALLEST, _LARGEST = 1e-120, 1e120

# Variance below this has lost digits to float64's smallest numbers.
_UNDERFLOW = 1e-290

# Rows that are put through a network, or into sums, at a time.
_CHUNK_ROWS = 4096

Decoder = Callable[[Tensor], Tensor]

# ---- the model ----


class VAE(nn.Module):
    """A variational autoencoder of images in [0, 1]: Gaussian latents with prior N(0, I), Bernoulli likelihood.

    ``model(images)`` is (logits, mean, log-variance), with the logits of one draw of the latents: what
    ``negative_elbo`` takes, so that ``train(model, optimizer, images, images, loss=negative_elbo)`` trains it.
    A grey pixel enters the Bernoulli likelihood as the expectation over a coin with its value for probability.

    Args:
        input_shape: of an image, (channels, height, width).
        latent: d, the number of latents.
        hidden: width of the fully connected hidden layers.
        kind: "mlp": two hidden layers in each half; "conv": two 4×4 convolutions of stride 2 with 32 and 64 channels
            and one hidden layer in the encoder, and their mirror image in the decoder.
        activation: "gelu", "relu", "tanh" or "identity".

    Images may leave [0, 1] by rounding, 16 times the precision of float32 (of their own type, if that is coarser): no
    image is clipped, and the likelihood is taken at their value.

    Raises:
        ValueError: an unknown kind or activation, sizes that are no positive integers, or for "conv" a height or width
            that 4 does not divide.

    Source: Kingma and Welling (2014); β in ``negative_elbo`` of Higgins et al. (2017).

    Example:
        >>> model = VAE((1, 8, 8), latent=3, hidden=16)
        >>> mean, log_variance = model.encode(torch.rand(5, 1, 8, 8))
        >>> mean.shape, model.decode(mean).shape
        (torch.Size([5, 3]), torch.Size([5, 1, 8, 8]))
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        latent: int = 32,
        hidden: int = 512,
        kind: str = "mlp",
        activation: str = "gelu",
    ):
        super().__init__()
        shape = tuple(input_shape) if isinstance(input_shape, Sequence) else input_shape
        if not _is_shape(shape):
            raise ValueError(f"input_shape is {shape}; pass (channels, height, width), positive integers")
        for name, value in (("latent", latent), ("hidden", hidden)):
            check_integer(name, value, 1)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}; pass one of {', '.join(_KINDS)}")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; pass one of {', '.join(ACTIVATIONS)}")
        self.input_shape, self.latent = shape, latent
        self.encoder, self.decoder = _KINDS[kind](shape, latent, hidden, activation)

    def encode(self, images: Float[Tensor, "n *image"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """Mean and log-variance of each image's latents.

        Raises:
            TypeError: images that are no dense tensor, or not of the weights' floating-point type.
            ValueError: images of another shape, empty, with NaN, or with values outside [0, 1]; another device.
        """
        if not torch.compiler.is_compiling():
            check_tensor("images", images)
        if not images.is_floating_point():
            raise TypeError(f"images are {images.dtype}; pass floating-point values in [0, 1]")
        if images.shape[1:] != self.input_shape or len(images) == 0:
            raise ValueError(
                f"images have shape {tuple(images.shape)}, the model is of (n, *{self.input_shape}), n ≥ 1"
            )
        self._check_like_weights("images", images)
        if not _in_range(images):
            raise _out_of_range(images)
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return mean, log_variance

    def decode_logits(self, latents: Float[Tensor, "n d"]) -> Float[Tensor, "n *image"]:
        """Log-odds of each pixel.

        Raises:
            TypeError: latents that are no dense tensor, or not of the weights' floating-point type.
            ValueError: latents that are not (n, d); another device.
        """
        if not torch.compiler.is_compiling():
            check_floating("latents", latents)
        if latents.ndim != 2 or latents.shape[1] != self.latent:
            raise ValueError(f"latents have shape {tuple(latents.shape)}, the model is of (n, {self.latent})")
        self._check_like_weights("latents", latents)
        logits: Tensor = self.decoder(latents).unflatten(1, self.input_shape)
        return logits

    def decode(self, latents: Float[Tensor, "n d"]) -> Float[Tensor, "n *image"]:
        """Images: the probability of each pixel, in [0, 1]; errors as in ``decode_logits``."""
        return self.decode_logits(latents).sigmoid()

    def forward(
        self, images: Float[Tensor, "n *image"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "n *image"], Float[Tensor, "n d"], Float[Tensor, "n d"]]:
        """Logits of one draw z = mean + exp(log_variance/2) ε, ε ~ N(0, I), with mean and log-variance.

        ``generator`` draws ε, on the images' device; None is PyTorch's own.
        """
        mean, log_variance = self.encode(images)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return self.decode_logits(mean + (log_variance / 2).exp() * noise), mean, log_variance

    def elbo_terms(
        self, images: Float[Tensor, "n *image"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """−ln p(x|z) for one draw of z, and KL(q(z|x) ‖ N(0, I)), of each image in nats.

        Their sum is minus the evidence lower bound. Errors as in ``encode``; and as in ``negative_elbo`` of a model
        that has diverged.
        """
        outputs = self(images, generator)
        reconstruction, divergence = _elbo_terms(outputs, images)
        _check_elbo(reconstruction + divergence, outputs, images)
        return reconstruction, divergence

    def _check_like_weights(self, name: str, tensor: Tensor) -> None:
        if torch.compiler.is_compiling():  # which finds out by itself, and can do nothing with these questions
            return
        weight = next(self.parameters())
        if is_fake(tensor) and not is_fake(weight):
            check_finite(name, tensor)
        check_one_device({name: tensor, "the model": weight})
        if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
            raise TypeError(f"{name} are {tensor.dtype}, the model {weight.dtype}; pass {name}.to({weight.dtype})")


def _is_shape(shape: object) -> bool:
    return (
        isinstance(shape, tuple)
        and len(shape) == 3
        and all(isinstance(size, Integral) and not isinstance(size, bool) and int(size) > 0 for size in shape)
    )


def _in_range(images: Tensor) -> Bool[Tensor, ""]:
    """Whether all values are in [0, 1] but for rounding; not if one is NaN."""
    check_finite("images", images[:0])  # for its look at tensors without data
    low, high = images.aminmax()
    rounding = _RANGE_ROUNDINGS * max(torch.finfo(images.dtype).eps, torch.finfo(torch.float32).eps)
    return (low >= -rounding) & (high <= 1 + rounding)


def _out_of_range(images: Tensor) -> ValueError:
    low, high = (bound.item() for bound in images.aminmax())
    return ValueError(  # nine digits tell float32 numbers apart
        f"images have values from {low:.9g} to {high:.9g}: the Bernoulli likelihood is of [0, 1]; pass images as they "
        "are loaded, not standardised"
    )


def _mlp_halves(shape: tuple[int, ...], latent: int, hidden: int, activation: str) -> tuple[nn.Module, nn.Module]:
    pixels = shape[0] * shape[1] * shape[2]
    encoder = MLP([pixels, hidden, hidden, 2 * latent], activation)
    return encoder, MLP([latent, hidden, hidden, pixels], activation)


def _conv_halves(shape: tuple[int, ...], latent: int, hidden: int, activation: str) -> tuple[nn.Module, nn.Module]:
    channels, height, width = shape
    if height % 4 or width % 4:
        raise ValueError(f"input_shape is {shape}; for kind 'conv' pass a height and width that 4 divides")
    inner = (64, height // 4, width // 4)
    size = inner[0] * inner[1] * inner[2]
    bottom, top = MLP([size, hidden, 2 * latent], activation), MLP([latent, hidden, size], activation)
    act = ACTIVATIONS[activation]
    encoder = nn.Sequential(
        nn.Conv2d(channels, 32, 4, stride=2, padding=1), act(), nn.Conv2d(32, 64, 4, stride=2, padding=1), act(), bottom
    )
    decoder = nn.Sequential(
        *(top, act(), nn.Unflatten(1, inner)),
        *(nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), act()),
        *(nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1), nn.Flatten()),
    )
    return encoder, decoder


_KINDS = {"mlp": _mlp_halves, "conv": _conv_halves}


def negative_elbo(
    outputs: tuple[Float[Tensor, "n *image"], Float[Tensor, "n d"], Float[Tensor, "n d"]],
    images: Float[Tensor, "n *image"],
    beta: float = 1.0,
) -> Float[Tensor, ""]:
    """Mean over images of −ln p(x|z) + β KL(q(z|x) ‖ N(0, I)), in nats: the loss of a ``VAE``.

    Whether it is finite is looked at once a call, except where PyTorch transforms the function: under
    ``torch.compile``, ``torch.func`` and on tensors without data nothing looks at values.

    Args:
        outputs: of the model, (logits, mean, log-variance).
        images: in [0, 1] but for rounding, of the logits' shape.
        beta: β; 1 is the evidence lower bound.

    Raises:
        TypeError: outputs that are not three tensors; tensors that are not floating-point.
        ValueError: images of another shape, empty, or with values outside [0, 1]; a mean and a log-variance that are
            not (n, d); a β that is negative or not finite.
        FloatingPointError: the model has diverged: which of its outputs is not finite, or so large that the loss, and
            with it the gradient, overflows.

    Example:
        >>> outputs = torch.zeros(1, 1, 2, 2), torch.tensor([[2.0]]), torch.tensor([[0.0]])
        >>> round(negative_elbo(outputs, torch.ones(1, 1, 2, 2), beta=0.0).item(), 4)  # 4 ln 2
        2.7726
        >>> round(negative_elbo(outputs, torch.ones(1, 1, 2, 2)).item(), 4)
        4.7726
    """
    if not (isinstance(beta, Real) and 0 <= beta < float("inf")):
        raise ValueError(f"beta is {beta!r}; pass a finite number, 0 or more")
    if not torch.compiler.is_compiling():
        _check_outputs(outputs, images)
    reconstruction, divergence = _elbo_terms(outputs, images)
    loss = (reconstruction + beta * divergence).mean()
    _check_elbo(loss, outputs, images)
    return loss


_OUTPUTS = ("logits", "mean", "log_variance")


def _check_outputs(outputs: object, images: Tensor) -> None:
    if not isinstance(outputs, tuple | list) or len(outputs) != 3:
        got = f"{len(outputs)} of them" if isinstance(outputs, tuple | list) else f"a {type(outputs).__name__}"
        raise TypeError(f"outputs: got {got}; pass (logits, mean, log_variance), as a VAE returns them")
    tensors = dict(zip((*_OUTPUTS, "images"), (*outputs, images), strict=True))
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        if is_fake(tensor) and not all(map(is_fake, tensors.values())):
            check_finite(name, tensor)
    check_one_device(tensors)
    logits, mean, log_variance = outputs
    if logits.shape != images.shape or images.numel() == 0:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, images {tuple(images.shape)}: they must agree, and not be empty"
        )
    if mean.shape != log_variance.shape or mean.ndim != 2 or len(mean) != len(images):
        raise ValueError(
            f"mean has shape {tuple(mean.shape)}, log_variance {tuple(log_variance.shape)}; pass (n, d) for both, with "
            f"the {len(images)} rows of the images"
        )


def _elbo_terms(outputs: tuple[Tensor, Tensor, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    logits, mean, log_variance = outputs
    reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").flatten(1).sum(dim=1)
    return reconstruction, (log_variance.exp() + mean.square() - 1 - log_variance).sum(dim=1) / 2


def _check_elbo(values: Tensor, outputs: tuple[Tensor, Tensor, Tensor], images: Tensor) -> None:
    """Raise unless the values are finite and the images in [0, 1]: one wait for the device."""
    wrapped = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(values)
    if wrapped or values.is_meta or is_fake(values):
        return
    in_range = _in_range(images)
    if not (values.isfinite().all() & in_range):
        raise _cause(outputs) if in_range else _out_of_range(images)


def _cause(outputs: tuple[Tensor, Tensor, Tensor]) -> FloatingPointError:
    """Why a loss is not finite: the first of its causes in the order of computation."""
    logits, mean, log_variance = (output.detach() for output in outputs)
    advice = "the model has diverged; lower the learning rate, or clip its gradient"
    for name, tensor, term, terms in (
        ("mean", mean, "mean²", mean.square()),
        ("log_variance", log_variance, "exp(log_variance)", log_variance.exp()),
        ("logits", logits, "logits", logits),
    ):
        if not tensor.isfinite().all():
            bad = int((~tensor.isfinite()).sum())
            return FloatingPointError(f"{name} has {bad} NaN or infinite entries of {tensor.numel()}: {advice}")
        if not terms.isfinite().all():
            largest = tensor[~terms.isfinite()].abs().max()
            return FloatingPointError(
                f"{term} overflows {tensor.dtype}, {name} being as large as {largest:.4g}: {advice}"
            )
    sizes = ", ".join(f"{tensor.abs().max():.4g} of {name}" for name, tensor in zip(_OUTPUTS, outputs, strict=True))
    return FloatingPointError(f"the loss overflows {logits.dtype}, the largest entries being {sizes}: {advice}")


@torch.no_grad()
def active_units(model: VAE, images: Float[Tensor, "n *image"], threshold: float = 0.01) -> int:
    """How many latents have a mean that varies over the images by a variance above the threshold.

    The others follow the prior whatever the image, and the decoder learns to ignore them.

    Raises:
        TypeError: a model that is no ``VAE``; as in ``VAE.encode``.
        ValueError: fewer than two images; an encoder whose means are not finite; a threshold that is no number, 0 or
            more; as in ``VAE.encode``.

    Source: Burda, Grosse and Salakhutdinov (2016).

    Example:
        >>> model = VAE((1, 2, 2), latent=3, hidden=16)
        >>> active_units(model, torch.zeros(4, 1, 2, 2))
        0
        >>> active_units(model, torch.eye(4).reshape(4, 1, 2, 2), threshold=0.0)
        3
    """
    _check_model(model)
    check_floating("images", images)
    if not (isinstance(threshold, Real) and 0 <= threshold < math.inf):
        raise ValueError(f"threshold is {threshold!r}; pass a finite number, 0 or more")
    if images.ndim == 0 or len(images) < 2:
        count = len(images) if images.ndim else 0
        raise ValueError(f"got {count} images; pass at least two, a variance is taken over them")
    means = torch.cat([model.encode(chunk)[0] for chunk in images.split(_CHUNK_ROWS)])
    if not means.isfinite().all():
        raise ValueError(
            "the encoder's means hold NaN or infinite values: the model has diverged, or its images are not finite"
        )
    return int((to_float64(means).var(dim=0) > threshold).sum())


# ---- between two latents ----


@torch.no_grad()
def interpolate(
    model: VAE, x0: Float[Tensor, "*n channels height width"], x1: Float[Tensor, "*n channels height width"], steps: int
) -> Float[Tensor, "*n steps channels height width"]:
    """Images decoded along the straight segment from the latents' mean of x0 to that of x1, both ends included.

    Args:
        model: a ``VAE``.
        x0: where to start: one image, or n.
        x1: where to end, as many.
        steps: images of a segment, at least 2.

    Raises:
        TypeError: a model that is no ``VAE``; as in ``VAE.encode``.
        ValueError: fewer than two steps; images that are not as many on both sides; as in ``VAE.encode``.

    Example:
        >>> model = VAE((1, 2, 2), latent=3, hidden=16)
        >>> images = interpolate(model, torch.zeros(1, 2, 2), torch.ones(1, 2, 2), steps=5)
        >>> images.shape
        torch.Size([5, 1, 2, 2])
        >>> torch.allclose(images[4:], model.decode(model.encode(torch.ones(1, 1, 2, 2))[0]), atol=1e-6)
        True
    """
    _check_model(model)
    check_integer("steps", steps, 2)
    for name, x in (("x0", x0), ("x1", x1)):
        check_floating(name, x)
        if x.ndim not in (3, 4):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; pass one image (channels, height, width), or (n, …)")
    if x0.shape != x1.shape:
        raise ValueError(f"x0 has shape {tuple(x0.shape)}, x1 {tuple(x1.shape)}: they must agree")
    if x0.ndim == 3:
        return interpolate(model, x0[None], x1[None], steps)[0]
    z0, z1 = model.encode(x0)[0], model.encode(x1)[0]
    positions = torch.linspace(0, 1, steps, dtype=z0.dtype, device=z0.device)
    segments = torch.lerp(z0[:, None], z1[:, None], positions[:, None])
    images: Tensor = model.decode(segments.flatten(0, 1)).unflatten(0, (len(x0), steps))
    return images


def _check_model(model: object) -> None:
    # By what it has, not by its type: torch.compile wraps a model into another.
    if not all(callable(getattr(model, name, None)) for name in ("encode", "decode")):
        raise TypeError(f"model: got a {type(model).__name__}; pass a VAE")


@torch.no_grad()
def interpolation_gap(
    decoder: Decoder, z0: Float[Tensor, "n d"], z1: Float[Tensor, "n d"], *, steps: int = 8, pooled: bool = False
) -> Float[Tensor, "*n"]:
    """Root mean square over λ of ‖D(z_λ) − λD(z₁) − (1 − λ)D(z₀)‖, over ‖D(z₁) − D(z₀)‖ (``eq:vae-gap``).

    0 for an affine decoder, but for rounding; unchanged if the decoder's output is scaled, rotated or shifted, or if
    the ends are exchanged; 1/√12 = 0.289 if one end's image is shown up to the middle and the other's from there.

    Args:
        decoder: any function from latents (n, d) to images (n, …), such as ``VAE.decode``; it gets copies, which it
            may change in place.
        z0: one end of each pair's segment.
        z1: the other.
        steps: the mean over λ is taken at the middles of so many equal parts of [0, 1], 1 for the midpoint alone. Eight
            err by less than 0.3% a pair for an autoencoder trained on Fashion-MNIST.
        pooled: one number for all pairs, the root mean squares taken over them too, above and below the fraction bar:
            the one that Target Linearity bounds.

    Returns:
        A float64 tensor, of shape (n,), or of no axes if pooled.

    Raises:
        ValueError: latents that are not (n, d) on both sides, no pairs, NaN or infinite latents or images, fewer steps
            than 1; a pair whose ends decode to the same image, but for rounding (pooled: if all pairs do): leave such
            pairs out by ``decodes_apart``; float64 images whose squares leave float64's range.
        TypeError: a decoder that cannot be called; latents or images that are not floating-point; latents of two types.

    Example:
        >>> z0, z1 = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 2.0]])
        >>> interpolation_gap(lambda z: 3 * z + 1, z0, z1).item() < 1e-6
        True
        >>> round(interpolation_gap(torch.square, z0, z1, steps=1).item(), 6)
        0.25
    """
    check_integer("steps", steps, 1)
    D0, D1 = _decoded_ends(decoder, z0, z1)
    squares = torch.zeros_like(D0[:, 0])
    for position, _, D in _decoded_inside(decoder, z0, z1, steps):
        squares += (D - torch.lerp(D0, D1, position)).square().sum(dim=1)
    return _relative(squares / steps, D0, D1, _eps(z0), pooled)


@torch.no_grad()
def gap_bound(
    decoder: Decoder, fit: LinearFit, z0: Float[Tensor, "n d"], z1: Float[Tensor, "n d"], *, steps: int = 8
) -> Float[Tensor, " n"]:
    """Root mean square over λ of ‖r(z_λ)‖ + λ‖r(z₁)‖ + (1 − λ)‖r(z₀)‖, over ‖D(z₁) − D(z₀)‖ (``eq:vae-bound``).

    r = D − A is what an affine map A leaves of the decoder. No ``interpolation_gap`` with the same steps is larger,
    whatever A.

    Args:
        decoder: as in ``interpolation_gap``.
        fit: A, usually ``fit_linear(latents, decoder(latents).flatten(1))``.
        z0: one end of each pair's segment.
        z1: the other.
        steps: as in ``interpolation_gap``.

    Raises:
        ValueError, TypeError: as in ``interpolation_gap``; what is no fit, or one to latents or images of another
            width.

    Example:
        >>> from gramlin.linearity import fit_linear
        >>> z = torch.tensor([[0.0], [1.0], [2.0]])
        >>> fit = fit_linear(z, torch.square(z))  # 2z − 1/3
        >>> round(gap_bound(torch.square, fit, z[:1], z[1:2], steps=1).item(), 6)
        0.916667
        >>> round(interpolation_gap(torch.square, z[:1], z[1:2], steps=1).item(), 6)
        0.25
    """
    check_integer("steps", steps, 1)
    _check_fit(fit)
    D0, D1 = _decoded_ends(decoder, z0, z1)
    r0, r1 = (_residual(fit, z, D) for z, D in ((z0, D0), (z1, D1)))
    squares = torch.zeros_like(r0)
    for position, z, D in _decoded_inside(decoder, z0, z1, steps):
        squares += (_residual(fit, z, D) + torch.lerp(r0, r1, position)).square()
    return _relative(squares / steps, D0, D1, _eps(z0))


@torch.no_grad()
def residual_ratio(
    decoder: Decoder, fit: LinearFit, z0: Float[Tensor, "n d"], z1: Float[Tensor, "n d"], *, steps: int = 8
) -> Float[Tensor, ""]:
    """κ, the root mean square of ‖D − A‖ along the segments over that at their ends (``eq:vae-pooled``).

    1 if the affine map fits the decoder between the ends as well as at them. The pooled ``interpolation_gap`` over
    √((1 − TL)/2) lies between ``|κ − s|`` and κ + s, with s² the mean of λ² + (1 − λ)² over the positions (2/3, but for
    few steps) and TL the Target Linearity of latents against their decodings: exactly for all n² ordered pairs of the n
    latents that A is fitted to, for other pairs but for the sampling error.

    Args: as in ``gap_bound``.

    Raises:
        ValueError, TypeError: as in ``gap_bound``, without need for ends that decode apart; no residual at the ends.
            One of rounding is not told from others, and gives the ratio of two roundings.

    Example:
        >>> from gramlin.linearity import fit_linear
        >>> z = torch.tensor([[0.0], [1.0], [2.0]])
        >>> fit = fit_linear(z, torch.square(z))  # leaves 1/3, −2/3, 1/3
        >>> round(residual_ratio(torch.square, fit, z[:1], z[2:], steps=1).item(), 6)
        2.0
    """
    check_integer("steps", steps, 1)
    _check_fit(fit)
    D0, D1 = _decoded_ends(decoder, z0, z1)
    ends = (_residual(fit, z0, D0).square().mean() + _residual(fit, z1, D1).square().mean()) / 2
    if ends == 0:
        raise ValueError("the affine map leaves nothing of the decoder at the ends: the ratio is undefined")
    inside = [_residual(fit, z, D).square().mean() for _, z, D in _decoded_inside(decoder, z0, z1, steps)]
    return (sum(inside) / steps / ends).sqrt()


@torch.no_grad()
def decodes_apart(decoder: Decoder, z0: Float[Tensor, "n d"], z1: Float[Tensor, "n d"]) -> Bool[Tensor, " n"]:
    """Whether the two ends of a pair decode to images further apart than 100 roundings of their norm.

    Args: as in ``interpolation_gap``.

    Raises:
        ValueError, TypeError: as there, but for ends that decode alike and for ``steps``.

    Example:
        >>> z0, z1 = torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [-1.0]])
        >>> decodes_apart(torch.square, z0, z1).tolist()
        [True, False]
    """
    return _apart(*_decoded_ends(decoder, z0, z1), _eps(z0))


def _decoded_ends(decoder: Decoder, z0: Tensor, z1: Tensor) -> tuple[Float[Tensor, "n p"], Float[Tensor, "n p"]]:
    if not callable(decoder):
        raise TypeError(f"decoder: got a {type(decoder).__name__}; pass a function of latents, such as model.decode")
    for name, z in (("z0", z0), ("z1", z1)):
        check_matrix(name, z, "(n, d); z[None] for one pair")
    if z0.shape != z1.shape:
        raise ValueError(f"z0 has shape {tuple(z0.shape)}, z1 {tuple(z1.shape)}: they must agree")
    if z0.dtype != z1.dtype:
        raise TypeError(f"z0 is {z0.dtype}, z1 {z1.dtype}: they must agree")
    check_one_device({"z0": z0, "z1": z1})
    return _decoded(decoder, z0), _decoded(decoder, z1)


def _decoded_inside(decoder: Decoder, z0: Tensor, z1: Tensor, steps: int) -> Iterator[tuple[float, Tensor, Tensor]]:
    """λ, z_λ and D(z_λ) at the middles of equal parts of the segments."""
    for step in range(steps):
        position = (step + 0.5) / steps
        z = torch.lerp(z0, z1, position)
        check_finite("latents between z0 and z1", z)
        yield position, z, _decoded(decoder, z)


def _decoded(decoder: Decoder, z: Tensor) -> Float[Tensor, "n p"]:
    images = decoder(z.clone())
    name = f"the decoder's images of {len(z)} latents"
    check_floating(name, images)
    if images.ndim < 2 or len(images) != len(z) or images.numel() == 0:
        raise ValueError(f"the decoder made shape {tuple(images.shape)} of latents {tuple(z.shape)}; expected (n, …)")
    check_finite(name, images)
    D = to_float64(images.flatten(1))
    if images.dtype != torch.float64:
        return D
    largest = D.abs().amax(dim=1)
    outside = ((largest > 0) & (largest < _SMALLEST)) | (largest > _LARGEST)  # other types hold no such numbers
    if outside.any():
        raise ValueError(
            f"{name}: the largest entry of one is {largest[outside][0]:.3g}, and squares of such numbers leave "
            f"float64; scale the decoder's output to have it between {_SMALLEST:g} and {_LARGEST:g}"
        )
    return D.clone()  # a decoder may write all its images into one tensor


def _check_fit(fit: object) -> None:
    if not isinstance(fit, LinearFit):
        raise TypeError(f"fit: got a {type(fit).__name__}; pass what fit_linear returns")


def _residual(fit: LinearFit, z: Tensor, D: Float[Tensor, "n p"]) -> Float[Tensor, " n"]:
    """‖D(z) − A(z)‖ of each latent."""
    if len(fit.intercept) != D.shape[1]:
        raise ValueError(f"the decoder has {D.shape[1]} outputs, the fit {len(fit.intercept)}: they must agree")
    residual: Tensor = torch.linalg.vector_norm(D - fit.predict(z), dim=1)
    if not residual.isfinite().all():
        raise ValueError("the fit's predictions of the decoder's images overflow float64; fit it to this decoder")
    return residual


def _relative(
    squares: Float[Tensor, " n"], D0: Float[Tensor, "n p"], D1: Float[Tensor, "n p"], eps: float, pooled: bool = False
) -> Float[Tensor, "*n"]:
    """Roots of the squares over the ends' distances."""
    apart = _apart(D0, D1, eps)
    if not (apart.any() if pooled else apart.all()):
        same = (~apart).nonzero().flatten().tolist()
        raise ValueError(
            f"the ends of {len(same)} of {len(apart)} pairs, pair {same[0]} for one, decode to the same image but for "
            "rounding: the gap is undefined; leave them out by decodes_apart(decoder, z0, z1)"
        )
    distances = (D1 - D0).square().sum(dim=1)
    return squares.mean().sqrt() / distances.mean().sqrt() if pooled else squares.sqrt() / distances.sqrt()


def _apart(D0: Float[Tensor, "n p"], D1: Float[Tensor, "n p"], eps: float) -> Bool[Tensor, " n"]:
    norms = torch.maximum(torch.linalg.vector_norm(D0, dim=1), torch.linalg.vector_norm(D1, dim=1))
    apart: Tensor = torch.linalg.vector_norm(D1 - D0, dim=1) > _ROUNDINGS * eps * norms
    return apart


def _eps(z: Tensor) -> float:
    return torch.finfo(z.dtype).eps


# ---- what any linear map could do ----


def pca_ceiling(targets: Float[Tensor, "n K"], dimensions: int) -> Float[Tensor, ""]:
    """The fraction of the targets' variance in their top principal components.

    No affine map from so many dimensions explains more of these targets, whatever the features and however it was
    fitted: centred, its predictions have at most that rank, and by Eckart and Young no matrix of that rank is nearer to
    the centred targets than their leading principal components.

    Exact, from the smaller of the (n, n) and (K, K) Gram matrices in float64.

    Raises:
        ValueError: targets that are not (n, K), empty, constant, with NaN or infinite entries, or with a variance that
            leaves float64's range; dimensions that are no integer of at least 1.
        TypeError: targets that are not floating-point.

    Example:
        >>> targets = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> round(pca_ceiling(targets, 1).item(), 4)
        0.8
    """
    check_integer("dimensions", dimensions, 1)
    check_matrix("targets", targets, "(n, K), e.g. images.flatten(1)")
    check_squares("targets", targets)
    n, K = targets.shape
    if (targets == targets[0]).all():
        raise ValueError(f"the targets of all {n} samples are constant: there is no variance to explain; pass others")
    if n <= K:
        rows = centred(targets)
        gram = rows @ rows.mT
    else:
        sums = Sums.zeros(K, 0, to_float64(targets[:1]).device)
        for chunk in targets.split(_CHUNK_ROWS):
            sums.add_rows(to_float64(chunk))
        gram = sums.products
    variances: Tensor = torch.linalg.eigvalsh(gram, UPLO="U").clamp_min(0)
    total = variances.sum()
    if total < _UNDERFLOW:
        raise ValueError(
            f"targets: their variance, {total / n:.3g}, is rounding or underflows float64; leave out columns that are "
            "constant, and scale the others up"
        )
    return variances[-dimensions:].sum() / total
