"""The chapters' experiments: settings in, stored runs out, and the tables that are made of them."""

from gramlin.experiments.chapter1 import (
    GRAM_SHIFT,
    gram_shift_panels,
    gram_shift_settings,
    gram_shift_table,
    measure_gram_shift,
)
from gramlin.experiments.chapter2 import (
    UPDATES,
    WHITENING,
    accuracy_difference,
    accuracy_panels,
    compare_solvers,
    halves_table,
    kept_table,
    measure_whitening,
    split_steps,
    whitening_settings,
    whitening_table,
)
from gramlin.experiments.chapter3 import (
    LINEARITY,
    depth_profiles,
    growth_table,
    linearity_panels,
    linearity_settings,
    linearity_table,
    linearity_verdicts,
    measure_linearity,
)
from gramlin.experiments.chapter4 import COLLAPSE, collapse_settings, measure_collapse
from gramlin.experiments.chapter5 import INTERPOLATION, interpolation_settings, measure_interpolation
from gramlin.experiments.summaries import mean_and_spread, paired_interval, select
from gramlin.experiments.sweeps import Experiment, run_once, sweep

__all__ = [
    "COLLAPSE",
    "GRAM_SHIFT",
    "INTERPOLATION",
    "LINEARITY",
    "UPDATES",
    "WHITENING",
    "Experiment",
    "accuracy_difference",
    "accuracy_panels",
    "collapse_settings",
    "compare_solvers",
    "depth_profiles",
    "gram_shift_panels",
    "gram_shift_settings",
    "gram_shift_table",
    "growth_table",
    "halves_table",
    "interpolation_settings",
    "kept_table",
    "linearity_panels",
    "linearity_settings",
    "linearity_table",
    "linearity_verdicts",
    "mean_and_spread",
    "measure_collapse",
    "measure_gram_shift",
    "measure_interpolation",
    "measure_linearity",
    "measure_whitening",
    "paired_interval",
    "run_once",
    "select",
    "split_steps",
    "sweep",
    "whitening_settings",
    "whitening_table",
]
