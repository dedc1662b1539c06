"""Sweeps: settings in, finished runs out.

An experiment is a function from settings to metrics. ``sweep`` runs those settings that the store does not hold yet
and saves each run the moment it ends, so that a sweep that was killed goes on where it stopped.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from tqdm import tqdm

from gramlin.results import ResultsStore, Run


@dataclass(frozen=True)
class Experiment:
    """A named function from settings to metrics.

    Attributes:
        name: the folder of its runs in the store.
        measure: takes the settings and ``device`` as keyword arguments and returns the metrics, as JSON values.
    """

    name: str
    measure: Callable[..., dict]


def sweep(
    experiment: Experiment,
    store: ResultsStore,
    settings: Sequence[dict],
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
) -> list[Run]:
    """Run what the store lacks, save each run as it ends, and return all of them in the order of the settings.

    On a CPU the runs go side by side, one thread each; on another device one after the other.

    Args:
        experiment: what to run.
        store: where finished runs are kept.
        settings: of the runs.
        device: where to run.
        workers: processes side by side; by default one a core, and no process of its own for one run.

    Raises:
        ResultsError: a stored run is damaged or was edited.
        Exception: what a run raised, with its settings in a note; an ``ExceptionGroup`` if several did. The other runs
            have been done and saved by then.
    """
    missing = [each for each in settings if store.get(experiment.name, each) is None]
    if workers is None:
        workers = (os.cpu_count() or 1) if torch.device(device).type == "cpu" else 1
    failures: list[Exception] = []
    progress = tqdm(total=len(missing), desc=experiment.name, unit="run", disable=not (missing and sys.stderr.isatty()))
    with progress:
        if workers == 1 or len(missing) <= 1:
            for each in missing:
                try:
                    _run_and_save(experiment, each, device, store)
                except Exception as error:
                    failures.append(error)
                progress.update()
        else:
            # Fresh processes: a forked one would inherit the thread pools of PyTorch in an undefined state.
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
            with pool:
                futures = [pool.submit(_run_and_save, experiment, each, device, store) for each in missing]
                try:
                    for future in as_completed(futures):
                        if future.exception() is not None:
                            failures.append(future.exception())
                        progress.update()
                except BaseException:  # an interrupt: what has not begun shall not
                    pool.shutdown(cancel_futures=True)
                    raise
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(missing)} runs of {experiment.name} failed", failures)
    return [store.get(experiment.name, each) for each in settings]


def run_once(experiment: Experiment, settings: dict, device: str | torch.device = "cpu") -> Run:
    """Run one setting, and note how long it took and where; nothing is saved."""
    start = time.perf_counter()
    metrics = experiment.measure(**settings, device=device)
    seconds = round(time.perf_counter() - start, 2)
    return Run(experiment.name, settings, metrics, wall_seconds=seconds, device=_device_name(device))


def optimizer_of(method: str, model: torch.nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer of an experiment: "sgd", or "adam" with its usual moments."""
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    if method == "adam" and momentum == 0:
        return torch.optim.Adam(model.parameters(), lr=lr)
    raise ValueError(f"method is {method!r} with momentum {momentum}; pass 'sgd', or 'adam' with momentum 0")


def _start_worker() -> None:
    torch.set_num_threads(1)
    # A worker whose sweep was killed would go on working, and with the next sweep's for the same cores.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_and_save(experiment: Experiment, settings: dict, device: str, store: ResultsStore) -> None:
    try:
        store.save(run_once(experiment, settings, device))
    except Exception as error:
        error.add_note(f"in the run of {experiment.name} with {settings}")
        raise


def _device_name(device: str | torch.device) -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type
