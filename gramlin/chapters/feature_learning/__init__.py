"""Chapter 1: the Gram shift against the virtual covariance shift and against AGOP."""

from gramlin.chapters.chapter import Chapter, drawings_of
from gramlin.chapters.feature_learning.claims import CLAIMS
from gramlin.chapters.feature_learning.experiment import GRAM_SHIFT, gram_shift_settings, measure_gram_shift
from gramlin.chapters.feature_learning.tables import gram_shift_panels, gram_shift_table

CHAPTER = Chapter(1, GRAM_SHIFT, gram_shift_settings, CLAIMS)
__getattr__ = drawings_of(__name__)

__all__ = [
    "CHAPTER",
    "GRAM_SHIFT",
    "gram_shift_panels",
    "gram_shift_settings",
    "gram_shift_table",
    "measure_gram_shift",
]
