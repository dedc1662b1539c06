"""Chapter 2: training with parts of each step taken out."""

from gramlin.chapters.chapter import Chapter, drawings_of
from gramlin.chapters.whitening.claims import CLAIMS
from gramlin.chapters.whitening.experiment import WHITENING, measure_whitening, whitening_settings
from gramlin.chapters.whitening.steps import UPDATES, compare_solvers, split_steps
from gramlin.chapters.whitening.tables import (
    accuracy_difference,
    accuracy_panels,
    halves_table,
    kept_table,
    whitening_table,
)

CHAPTER = Chapter(2, WHITENING, whitening_settings, CLAIMS)
__getattr__ = drawings_of(__name__)

__all__ = [
    "CHAPTER",
    "UPDATES",
    "WHITENING",
    "accuracy_difference",
    "accuracy_panels",
    "compare_solvers",
    "halves_table",
    "kept_table",
    "measure_whitening",
    "split_steps",
    "whitening_settings",
    "whitening_table",
]
