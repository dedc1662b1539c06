"""Measure how a network's weight Gram matrices and features move together.

Names are loaded on first use, so that ``import gramlin`` is instant and a wrong parameter of a chapter is
reported before PyTorch has even been imported.
"""

import importlib

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


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"gramlin.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"gramlin.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'gramlin' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
