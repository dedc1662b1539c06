"""Chapter 5: variational autoencoders, and how straight they decode between two images, over training and over β."""

from gramlin.chapters.chapter import Chapter, drawings_of
from gramlin.chapters.interpolation.claims import CLAIMS, interpolation_verdicts
from gramlin.chapters.interpolation.experiment import INTERPOLATION, interpolation_settings, measure_interpolation
from gramlin.chapters.interpolation.tables import beta_panels, gap_points, interpolation_table, tradeoff_panels

CHAPTER = Chapter(5, INTERPOLATION, interpolation_settings, CLAIMS)
__getattr__ = drawings_of(__name__)

__all__ = [
    "CHAPTER",
    "INTERPOLATION",
    "beta_panels",
    "gap_points",
    "interpolation_settings",
    "interpolation_table",
    "interpolation_verdicts",
    "measure_interpolation",
    "tradeoff_panels",
]
