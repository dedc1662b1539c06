"""A user's script, of which test_typing asks mypy --strict: every name of the package's front page has its type."""

from typing import assert_type

import torch
from torch import Tensor, nn

import gramlin
from gramlin import VAE, LinearFit, Moments, NeuralCollapse, TargetLinearity, VirtualCovariance
from gramlin.hooks import LayerRecord, record
from gramlin.training import accuracy, train
from gramlin.whitening import WhiteningHandle

features, weight = torch.randn(50, 4), torch.randn(3, 4)
classes = torch.arange(50) % 3

# How linear features are in the target, at once and in batches.
assert_type(gramlin.target_linearity(features, classes, ridge=1e-3, num_classes=3, per_output=True), Tensor)
assert_type(gramlin.surrogate(features, weight, classes), Tensor)
assert_type(gramlin.normalized_surrogate(features, weight, classes), Tensor)
metric = TargetLinearity(ridge=0.1, num_classes=3)
metric.update(features, classes)
assert_type(metric.compute(), Tensor)
fit: LinearFit = metric.fit()
assert_type(gramlin.fit_linear(features, features), LinearFit)
assert_type(fit.score(features, classes), Tensor)
assert_type(fit.predict(features), Tensor)
assert_type(fit.rank, int)
moments = Moments(num_classes=3)
moments.update(features, classes)
moments.merge(Moments())
assert_type(moments.scatter, Tensor)
assert_type(moments.are_classes, bool | None)

# How far they have collapsed.
measures: dict[str, Tensor] = gramlin.neural_collapse(features, classes, weight, num_classes=3)
collapse = NeuralCollapse(num_classes=3)
collapse.update(features, classes)
assert_type(collapse.compute(weight=weight), dict[str, Tensor])
means: Tensor = collapse.class_means()
assert_type(gramlin.nearest_class_mean_disagreement(features, classes, means), Tensor)
assert_type(gramlin.simplex_etf(3, 4, generator=None), Tensor)

# The layers of a model, and its training with and without the rotation of each step.
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
virtual = VirtualCovariance(model[0], optimizer)
handle: WhiteningHandle = gramlin.whiten(optimizer, keep="gram", solver=gramlin.newton_schulz_polar)
history = train(model, optimizer, features, classes, epochs=1, record=lambda epoch: {"epoch_again": epoch})
losses = [row["train_loss"] for row in history]
handle.remove()
assert_type(virtual.shift, Tensor)
assert_type(virtual.steps, int)
assert_type(accuracy(model, features, classes), float)
table = gramlin.probe(model, features, classes, layers=["0"], metrics=("tl_in", "cka"), positions="flatten")
print(table["tl_in"])

# What a layer's weight has learnt.
with record(model) as records:
    nn.functional.cross_entropy(model(features), classes).backward()  # type: ignore[no-untyped-call]  # torch's own
assert_type(records, dict[str, LayerRecord])
left, right = gramlin.feature_learning_sides(records["0"])
assert_type(left, Tensor)
assert_type(gramlin.matrix_correlation(left, right), float)
assert_type(gramlin.weight_gram(weight, groups=1), Tensor)
assert_type(gramlin.gram_shift(weight, weight + 1), Tensor)
assert_type(gramlin.agop(model, features, chunk_size=10), Tensor)
assert_type(gramlin.polar_factor(weight), Tensor)

# Images between two.
vae = VAE((1, 8, 8), latent=3, hidden=16, kind="conv")
images = torch.rand(2, 1, 8, 8)
assert_type(gramlin.interpolate(vae, images[0], images[1], steps=5), Tensor)
assert_type(vae.encode(images), tuple[Tensor, Tensor])
latents, _ = vae.encode(images)
assert_type(gramlin.interpolation_gap(vae.decode, latents[:1], latents[1:]), Tensor)
assert_type(gramlin.active_units(vae, images), int)
train(vae, torch.optim.Adam(vae.parameters()), images, images, epochs=1, loss=gramlin.negative_elbo)

# Modules are attributes of the package, too.
assert_type(gramlin.moments.chunk_rows(4), int)
assert_type(gramlin.__version__, str)
