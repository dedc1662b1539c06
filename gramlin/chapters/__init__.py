"""The book's chapters: a folder each, named by its subject, and what they share.

A folder holds what belongs to one chapter: what is measured (``experiment``), what is read off finished runs
(``tables``), how it is drawn (``figures``), and the rows of the scorecard (``claims``). Its ``CHAPTER`` tells
the rest of the package what it is. Folders do not import one another; what several need stands beside them.
"""

import functools
import importlib
import pkgutil

from gramlin.chapters.chapter import Chapter
from gramlin.chapters.summaries import mean_and_spread, paired_interval, select
from gramlin.chapters.sweeps import Experiment, run_once, sweep

__all__ = [
    "Chapter",
    "Experiment",
    "all_chapters",
    "mean_and_spread",
    "paired_interval",
    "run_once",
    "select",
    "sweep",
]


@functools.cache
def all_chapters() -> dict[str, Chapter]:
    """The chapters by subject, in the order of the book: one for each folder that is here."""
    subjects = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    chapters = {subject: importlib.import_module(f"{__name__}.{subject}").CHAPTER for subject in subjects}
    return dict(sorted(chapters.items(), key=lambda each: each[1].number))
