"""A user's mistakes, each with the complaint of mypy that it must give; test_typing reads them."""

from typing import assert_type

import torch

import gramlin
from gramlin import VAE, Moments, NeuralCollapse, TargetLinearity

features, classes = torch.randn(50, 4), torch.arange(50) % 3
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

gramlin.target_linearity(features, classes, num_classes="three")  # [arg-type]
gramlin.target_linearity(features.numpy(), classes.tolist())  # [arg-type]
gramlin.target_linearity(features, classes, rigde=0.1)  # [call-arg]
score: float = gramlin.target_linearity(features, classes)  # [assignment]
TargetLinearity(num_classes="three")  # [arg-type]
TargetLinearity().fit().scores(features, classes)  # [attr-defined]
NeuralCollapse()  # [call-arg]
NeuralCollapse(num_classes=3).update(features)  # [call-arg]
Moments().scatter()  # [operator]
Moments().are_classes.bit_length()  # [union-attr]
gramlin.probe(model, features, classes, ridge="none")  # [arg-type]
gramlin.probe(model, features, classes, metrics=5)  # [arg-type]
gramlin.whiten(optimizer, keep="gramm")  # [arg-type]
gramlin.whiten(model)  # [arg-type]
gramlin.VirtualCovariance(optimizer, model)  # [arg-type]
gramlin.weight_gram(weight=model)  # [arg-type]
gramlin.gram_shift(model.weight)  # [call-arg]
gramlin.agop(features, features)  # [arg-type]
VAE(8, latent=3)  # [arg-type]
gramlin.interpolate(model, features, features, steps=3)  # [arg-type]
assert_type(gramlin.matrix_correlation(features, features), int)  # [assert-type]
gramlin.target_lineraity(features, classes)  # [attr-defined]
