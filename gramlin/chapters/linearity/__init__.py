"""Chapter 3: Target Linearity and the surrogate of every layer, over training."""

from gramlin.chapters.chapter import Chapter, drawings_of
from gramlin.chapters.linearity.claims import CLAIMS, growth_verdicts, linearity_verdicts
from gramlin.chapters.linearity.experiment import LINEARITY, linearity_settings, measure_linearity
from gramlin.chapters.linearity.tables import depth_profiles, growth_table, linearity_panels, linearity_table

CHAPTER = Chapter(3, LINEARITY, linearity_settings, CLAIMS)
__getattr__ = drawings_of(__name__)

__all__ = [
    "CHAPTER",
    "LINEARITY",
    "depth_profiles",
    "growth_table",
    "growth_verdicts",
    "linearity_panels",
    "linearity_settings",
    "linearity_table",
    "linearity_verdicts",
    "measure_linearity",
]
