"""What chapters cost: time and memory of their quick profiles, and of the stored runs at the paper's scale."""

import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from gramlin import book
from gramlin.chapters import Experiment, all_chapters
from gramlin.results import JsonObject, ResultsStore, Run


def measure_cost(*, chapter: int, device: str | torch.device = "cpu", gpu: bool = False) -> JsonObject:
    """Run a chapter in its quick profile; its wall time is that of the run.

    Args:
        chapter: its number.
        device: where to run it.
        gpu: tells a GPU's costs from a CPU's among the stored runs; the device decides.

    Returns:
        ``peak_mebibytes``: resident memory of the chapter's kernel at its peak, without that of a GPU.
    """
    # The memory is the largest that any process started so far has had: hence a process of its own to start it.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return {"peak_mebibytes": process.submit(_peak_of, book.find_chapter(str(chapter)), str(device)).result()}


def _peak_of(chapter: Path, device: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        book.execute(chapter, Path(folder, "out.ipynb"), {"device": device}, progress=False)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


COST = Experiment("cost", measure_cost)


def cost_settings(device: str | torch.device = "cpu") -> list[JsonObject]:
    """One for each chapter, those of a GPU apart from those of a CPU."""
    own = {} if torch.device(device).type == "cpu" else {"gpu": True}
    return [{"chapter": chapter.number, **own} for chapter in all_chapters().values()]


def cost_table(store: ResultsStore) -> pd.DataFrame:
    """A row a chapter: minutes and memory of the quick profile, and what the runs at the paper's scale took.

    Columns for a CPU and a GPU; "–" where nothing was measured. Of the stored runs, how many there are, the median
    minutes of one, and the hours of all; on a CPU with one thread a run, and often with another beside it.
    Last, how many runs a chapter asks for with three seeds, on MNIST and on CIFAR-10, which is the paper profile's own.
    """
    rows: dict[int, dict[str, str | int]] = {}
    measured = store.runs("cost")
    for chapter in all_chapters().values():
        runs = store.runs(chapter.experiment.name)
        row: dict[str, str | int] = {}
        for kind in ("CPU", "GPU"):
            quick = [run for run in _on(measured, kind) if run.settings.get("chapter") == chapter.number]
            row[f"quick, {kind}: seconds"] = f"{quick[-1].wall_seconds:.0f}" if quick else "–"
            row[f"quick, {kind}: GiB"] = f"{quick[-1].metrics['peak_mebibytes'] / 1024:.1f}" if quick else "–"
            minutes = [run.wall_seconds / 60 for run in _on(runs, kind)]
            row[f"paper, {kind}: runs stored"] = len(minutes) or "–"
            row[f"paper, {kind}: median minutes"] = f"{np.median(minutes):.0f}" if minutes else "–"
            row[f"paper, {kind}: hours in all"] = f"{sum(minutes) / 60:.1f}" if minutes else "–"
        for dataset in ("mnist", "cifar10"):
            row[f"paper: runs on {dataset}, 3 seeds"] = len(chapter.settings(dataset, (0, 1, 2)))
        rows[chapter.number] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="chapter")


def _on(runs: Sequence[Run], kind: str) -> list[Run]:
    return [run for run in runs if run.device.startswith("cpu") == (kind == "CPU")]
