"""Measure how a network's weight Gram matrices and features move together.

Names are loaded on first use, so that ``import gramlin`` is instant and a wrong parameter of a chapter is
reported before PyTorch has even been imported.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what __getattr__ finds, for tools that do not run it
    from gramlin import book as book
    from gramlin import chapters as chapters
    from gramlin import collapse as collapse
    from gramlin import costs as costs
    from gramlin import data as data
    from gramlin import figures as figures
    from gramlin import gram as gram
    from gramlin import hooks as hooks
    from gramlin import interpolation as interpolation
    from gramlin import linearity as linearity
    from gramlin import models as models
    from gramlin import moments as moments
    from gramlin import probing as probing
    from gramlin import results as results
    from gramlin import training as training
    from gramlin import whitening as whitening
    from gramlin.collapse import NeuralCollapse as NeuralCollapse
    from gramlin.collapse import equiangularity as equiangularity
    from gramlin.collapse import equinorm as equinorm
    from gramlin.collapse import etf_distance as etf_distance
    from gramlin.collapse import nearest_class_mean_disagreement as nearest_class_mean_disagreement
    from gramlin.collapse import neural_collapse as neural_collapse
    from gramlin.collapse import self_duality as self_duality
    from gramlin.collapse import simplex_etf as simplex_etf
    from gramlin.gram import VirtualCovariance as VirtualCovariance
    from gramlin.gram import agop as agop
    from gramlin.gram import feature_learning_sides as feature_learning_sides
    from gramlin.gram import gram_shift as gram_shift
    from gramlin.gram import matrix_correlation as matrix_correlation
    from gramlin.gram import second_order_gap as second_order_gap
    from gramlin.gram import virtual_covariance_shift as virtual_covariance_shift
    from gramlin.gram import virtual_update as virtual_update
    from gramlin.gram import weight_gram as weight_gram
    from gramlin.interpolation import VAE as VAE
    from gramlin.interpolation import active_units as active_units
    from gramlin.interpolation import decodes_apart as decodes_apart
    from gramlin.interpolation import gap_bound as gap_bound
    from gramlin.interpolation import interpolate as interpolate
    from gramlin.interpolation import interpolation_gap as interpolation_gap
    from gramlin.interpolation import negative_elbo as negative_elbo
    from gramlin.interpolation import pca_ceiling as pca_ceiling
    from gramlin.interpolation import residual_ratio as residual_ratio
    from gramlin.linearity import LinearFit as LinearFit
    from gramlin.linearity import TargetLinearity as TargetLinearity
    from gramlin.linearity import fit_linear as fit_linear
    from gramlin.linearity import normalized_surrogate as normalized_surrogate
    from gramlin.linearity import surrogate as surrogate
    from gramlin.linearity import target_linearity as target_linearity
    from gramlin.moments import Moments as Moments
    from gramlin.probing import probe as probe
    from gramlin.whitening import nearest_with_same_gram as nearest_with_same_gram
    from gramlin.whitening import newton_schulz_polar as newton_schulz_polar
    from gramlin.whitening import polar_factor as polar_factor
    from gramlin.whitening import whiten as whiten

# Every public name and the module that defines it: the table of the package.
_MODULE_OF = {
    "equiangularity": "collapse",
    "equinorm": "collapse",
    "etf_distance": "collapse",
    "nearest_class_mean_disagreement": "collapse",
    "neural_collapse": "collapse",
    "self_duality": "collapse",
    "simplex_etf": "collapse",
    "NeuralCollapse": "collapse",
    "agop": "gram",
    "feature_learning_sides": "gram",
    "gram_shift": "gram",
    "matrix_correlation": "gram",
    "second_order_gap": "gram",
    "virtual_covariance_shift": "gram",
    "virtual_update": "gram",
    "weight_gram": "gram",
    "VirtualCovariance": "gram",
    "active_units": "interpolation",
    "decodes_apart": "interpolation",
    "gap_bound": "interpolation",
    "interpolate": "interpolation",
    "interpolation_gap": "interpolation",
    "negative_elbo": "interpolation",
    "pca_ceiling": "interpolation",
    "residual_ratio": "interpolation",
    "VAE": "interpolation",
    "fit_linear": "linearity",
    "normalized_surrogate": "linearity",
    "surrogate": "linearity",
    "target_linearity": "linearity",
    "LinearFit": "linearity",
    "TargetLinearity": "linearity",
    "Moments": "moments",
    "probe": "probing",
    "nearest_with_same_gram": "whitening",
    "newton_schulz_polar": "whitening",
    "polar_factor": "whitening",
    "whiten": "whitening",
}
_MODULES = (
    "book",
    "chapters",
    "collapse",
    "costs",
    "data",
    "figures",
    "gram",
    "hooks",
    "interpolation",
    "linearity",
    "models",
    "moments",
    "probing",
    "results",
    "training",
    "whitening",
)

__all__ = ["__version__", *_MODULE_OF]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker has the names from above, and is to complain of any other

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"gramlin.{name}")
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"gramlin.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module 'gramlin' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
