"""Chapter 4: Neural Collapse and Target Linearity of every layer, on to the terminal phase of training."""

from gramlin.chapters.chapter import Chapter, drawings_of
from gramlin.chapters.collapse.claims import CLAIMS, collapse_verdicts
from gramlin.chapters.collapse.experiment import COLLAPSE, collapse_settings, measure_collapse
from gramlin.chapters.collapse.tables import (
    bound_points,
    bound_violations,
    collapse_panels,
    collapse_table,
    direction_table,
    readout_panels,
    readout_paths,
    readout_table,
    rest_table,
)

CHAPTER = Chapter(4, COLLAPSE, collapse_settings, CLAIMS)
__getattr__ = drawings_of(__name__)

__all__ = [
    "CHAPTER",
    "COLLAPSE",
    "bound_points",
    "bound_violations",
    "collapse_panels",
    "collapse_settings",
    "collapse_table",
    "collapse_verdicts",
    "direction_table",
    "measure_collapse",
    "readout_panels",
    "readout_paths",
    "readout_table",
    "rest_table",
]
