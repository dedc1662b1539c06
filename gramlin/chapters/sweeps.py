"""Sweeps: settings in, finished runs out.

An experiment is a function from settings to metrics. ``sweep`` runs those settings that the store does not hold yet
and saves each run the moment it ends, so that a sweep that was killed goes on where it stopped.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from tqdm import tqdm

from gramlin.results import JsonObject, ResultsError, ResultsStore, Run, check_json

_SHOWN = 5  # of the missing runs, how many a message lists


@dataclass(frozen=True)
class Experiment:
    """A named function from settings to metrics.

    Attributes:
        name: the folder of its runs in the store.
        measure: takes the settings and ``device`` as keyword arguments and returns the metrics, as JSON values.
    """

    name: str
    measure: Callable[..., JsonObject]


def sweep(
    experiment: Experiment,
    store: ResultsStore,
    settings: Sequence[JsonObject],
    *,
    device: str | torch.device = "cpu",
    workers: int | None = None,
) -> list[Run]:
    """Run what the store lacks, save each run as it ends, and return all of them in the order of the settings.

    On a CPU the runs go side by side, one thread each; on another device one after the other. Settings that are there
    twice are run once.

    Args:
        experiment: what to run.
        store: where finished runs are kept.
        settings: of the runs; JSON values.
        device: where to run.
        workers: processes side by side; by default one a core, and no process of its own for one run, or for an
            experiment that another process could not import (one of a notebook's own).

    Raises:
        ResultsError: a run asked for is damaged or was edited; before anything is run.
        ValueError, TypeError, OSError: wrong settings, device or workers, or a store that cannot be written; likewise.
        Exception: what a run raised, with its settings in a note; an ``ExceptionGroup`` if several did. The other runs
            have been done and saved by then.
        BrokenProcessPool: a worker process was killed; names runs that are missing. Another call does those alone.
    """
    if not isinstance(store, ResultsStore):
        raise TypeError(f"store is a {type(store).__name__}; pass a ResultsStore, such as ResultsStore('results')")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise ValueError(f"workers is {workers!r}; pass a whole number of at least 1, or None for one a core")
    settings = list(settings)
    missing = _missing(experiment, store, settings)
    if missing:
        store.check_writable(experiment.name)
    workers = _processes(experiment, len(missing), device, workers)
    failures: list[Exception] = []
    progress = tqdm(total=len(missing), desc=experiment.name, unit="run", disable=not (missing and sys.stderr.isatty()))
    with progress:
        if workers == 1:
            for each in missing:
                try:
                    _run_and_save(experiment, each, device, store)
                except Exception as error:
                    failures.append(error)
                progress.update()
        else:
            failures = _side_by_side(experiment, store, missing, device, workers, progress)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        count = f"{len(failures)} of {len(missing)} runs of {experiment.name} failed"
        raise ExceptionGroup(f"{count}, the first with {_in_words(failures[0])}", failures)
    return [store.get(experiment.name, each) for each in settings]  # type: ignore[misc]  # none is missing by now


def _processes(experiment: Experiment, runs: int, device: str | torch.device, workers: int | None) -> int:
    """How many processes so many runs get; raises if they, or the device, cannot be had."""
    if runs == 0:
        return 1
    try:
        kind = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; pass 'cpu', 'cuda', 'cuda:N' or a torch.device") from error
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
        raise ValueError(f"device is {str(device)!r}, which this machine does not have; it has {there}")
    wanted = workers or ((os.cpu_count() or 1) if kind.type == "cpu" else 1)
    hindrance = _why_not_elsewhere(experiment) if min(wanted, runs) > 1 else ""
    if hindrance and workers is not None:
        raise ValueError(
            f"{experiment.name} cannot be run in {workers} other processes: {hindrance}; define its function at the "
            "top of a module and import it, or pass workers=1"
        )
    return 1 if hindrance else min(wanted, runs)


def _why_not_elsewhere(experiment: Experiment) -> str:
    """Why a fresh process could not get at the experiment's function; empty if it can."""
    if getattr(experiment.measure, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return "its function is of a notebook or a prompt, which they cannot import"
    try:
        pickle.dumps(experiment)
    except Exception as error:  # whatever the parts of a callable raise
        return str(error)
    return ""


def _in_words(error: Exception) -> str:
    return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _missing(experiment: Experiment, store: ResultsStore, settings: Sequence[JsonObject]) -> list[JsonObject]:
    """The settings that the store lacks, each once; raises for all damaged runs at once."""
    missing, damaged = {}, {}
    for index, each in enumerate(settings):
        if not isinstance(each, dict):
            raise TypeError(f"settings[{index}] is {each!r}; pass a list of dictionaries, one a run")
        path = store.path(experiment.name, each)
        try:
            if path not in missing and store.get(experiment.name, each) is None:
                missing[path] = each
        except ResultsError as error:
            damaged[path] = str(error)
    if damaged:
        raise ResultsError("\n".join(damaged.values()))
    return list(missing.values())


def _side_by_side(
    experiment: Experiment,
    store: ResultsStore,
    missing: Sequence[JsonObject],
    device: str | torch.device,
    workers: int,
    progress: tqdm,
) -> list[Exception]:
    """Run and save in worker processes; returns what went wrong."""
    failures: list[Exception] = []
    broken = False
    # Fresh processes: a forked one would inherit the thread pools of PyTorch in an undefined state.
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)  # workers exit when it is closed
    with reader, writer, ProcessPoolExecutor(workers, context, _start_worker, (reader,)) as pool:
        try:
            futures = [pool.submit(_run_in_worker, experiment, each, device, store) for each in missing]
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    broken = True
                elif error is not None:
                    failures.append(error)  # type: ignore[arg-type]  # SystemExit becomes an Exception in the worker
                progress.update()
        except BrokenProcessPool:  # before all had been handed over
            broken = True
        except BaseException:  # an interrupt: what has begun stops, and what has not shall not begin
            writer.close()
            pool.shutdown(cancel_futures=True)
            raise
    if broken:
        lost = [each for each in missing if store.get(experiment.name, each) is None]
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        failures.append(
            BrokenProcessPool(
                f"a worker process of {experiment.name} was killed (memory ran out?) or could not start (a script "
                f"without `if __name__ == '__main__':`?). Of {len(missing)} runs {len(lost)} are missing, with "
                f"{', '.join(map(str, lost[:_SHOWN]))}{more}. What was finished is saved; call again for the rest, "
                "with fewer workers if memory ran out"
            )
        )
    return failures


def run_once(experiment: Experiment, settings: JsonObject, device: str | torch.device = "cpu") -> Run:
    """Run one setting, and note how long it took and where; nothing is saved.

    Raises:
        ValueError: what came out is no dictionary of JSON values; names the experiment, the settings and the key.
    """
    start = time.perf_counter()  # never goes back, whatever is done to the clock
    metrics = experiment.measure(**settings, device=device)
    seconds = round(time.perf_counter() - start, 2)
    came = f"{experiment.name} with {settings}"
    if not isinstance(metrics, dict):
        raise ValueError(f"{came} returned a {type(metrics).__name__}; return a dictionary of metrics")
    check_json(metrics, f"{came}: metrics")
    return Run(experiment.name, settings, metrics, wall_seconds=seconds, device=_device_name(device))


def optimizer_of(method: str, model: torch.nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer of an experiment: "sgd", or "adam" with its usual moments."""
    if method == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    if method == "adam" and momentum == 0:
        return torch.optim.Adam(model.parameters(), lr=lr)
    raise ValueError(f"method is {method!r} with momentum {momentum}; pass 'sgd', or 'adam' with momentum 0")


# Held while a worker saves, so that it is not stopped in the middle.
_SAVING = threading.Lock()


def _start_worker(pipe: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the sweep says what is to stop
    # A worker whose sweep was killed would go on working, and with the next sweep's for the same cores.
    threading.Thread(target=_exit_with_sweep, args=(pipe,), daemon=True).start()


def _exit_with_sweep(pipe: Connection) -> None:
    sweep_process = multiprocessing.parent_process()
    assert sweep_process is not None  # a worker has one
    wait([pipe, sweep_process.sentinel])
    with _SAVING:
        os._exit(1)


def _run_and_save(
    experiment: Experiment, settings: JsonObject, device: str | torch.device, store: ResultsStore
) -> None:
    try:
        run = run_once(experiment, settings, device)
        with _SAVING:
            store.save(run)
    except Exception as error:
        error.add_note(f"in the run of {experiment.name} with {settings}")
        raise
    except SystemExit as error:
        raise RuntimeError(f"{experiment.name} with {settings} ended Python, with status {error.code}") from error


def _run_in_worker(
    experiment: Experiment, settings: JsonObject, device: str | torch.device, store: ResultsStore
) -> None:
    try:
        _run_and_save(experiment, settings, device, store)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it would not arrive, and take the pool and all other runs with it
            raise RuntimeError(_in_words(error)) from error
        raise


def _device_name(device: str | torch.device) -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type
