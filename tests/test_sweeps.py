"""Sweeps: what is wrong is said before anything runs, no failure takes another run with it, and all can be resumed."""

import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch

from gramlin.chapters import Experiment, run_once, sweep
from gramlin.results import ResultsError, ResultsStore

FOUR = [{"seed": seed} for seed in range(4)]


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(tmp_path / "results")


def square(*, seed: int, device: str) -> dict:
    return {"square": seed**2}


def never(**_) -> dict:
    pytest.fail("a run was started")


# ---- before anything runs ----


@pytest.mark.parametrize("workers", [0, -1, "2", 1.5, True])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_workers_are_a_positive_number(unchecked, tmp_path, workers, count):
    with pytest.raises(ValueError, match=rf"workers is {workers!r}; pass a whole number of at least 1, or None"):
        unchecked.chapters.sweep(
            Experiment("demo", never), unchecked.results.ResultsStore(tmp_path), FOUR[:count], workers=workers
        )


@pytest.mark.parametrize("settings", [["seed"], {"seed": 0}, [{"seed": 0}, 3], [None]])
def test_settings_are_dictionaries(unchecked, tmp_path, settings):
    with pytest.raises(TypeError, match=r"settings\[\d\] is .*; pass a list of dictionaries"):
        unchecked.chapters.sweep(Experiment("demo", never), unchecked.results.ResultsStore(tmp_path), settings)


def test_a_store_is_no_path(unchecked, tmp_path):
    with pytest.raises(TypeError, match="store is a str; pass a ResultsStore"):
        unchecked.chapters.sweep(Experiment("demo", never), str(tmp_path), FOUR)


@pytest.mark.parametrize("value", [np.float32(0.1), torch.tensor(3), (1, 2), math.nan, {1: 2}])
def test_settings_that_json_does_not_hold_start_nothing(store, value):
    with pytest.raises(ValueError, match=r"settings\['lr'\]"):
        sweep(Experiment("demo", never), store, [{"lr": 0.1}, {"lr": value}])
    with pytest.raises(ValueError, match=r"experiment is '../demo'; pass the name of a folder"):
        sweep(Experiment("../demo", never), store, FOUR)


@pytest.mark.parametrize("device", ["banana", "cuda:99", ""])
def test_a_device_that_is_not_there_starts_nothing(store, device):
    with pytest.raises(ValueError, match=f"device is '{device}'"):
        sweep(Experiment("demo", never), store, FOUR, device=device)


def test_stored_runs_are_had_without_the_device_they_ran_on(store):
    runs = sweep(Experiment("demo", square), store, FOUR, workers=1)
    assert sweep(Experiment("demo", never), store, FOUR, device="cuda:99") == runs


def test_a_store_that_cannot_be_written_starts_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, ResultsStore(tmp_path).directory / "new"):
        store = ResultsStore(place)
        place.mkdir(exist_ok=True)
        (place / "demo").write_text("where the folder should be")
        with pytest.raises(OSError, match="demo"):
            sweep(Experiment("demo", never), store, FOUR)


def test_damaged_runs_that_are_asked_for_stop_a_sweep_and_stay(store):
    experiment = Experiment("demo", square)
    sweep(experiment, store, FOUR[:3], workers=1)
    damaged = [store.path("demo", each) for each in FOUR[:2]]
    for path in damaged:
        path.write_text("{}")
    with pytest.raises(ResultsError) as caught:
        sweep(Experiment("demo", never), store, FOUR, workers=1)
    assert all(str(path) in str(caught.value) for path in damaged)
    assert [path.read_text() for path in damaged] == ["{}", "{}"]
    assert [run.settings["seed"] for run in sweep(experiment, store, FOUR[2:], workers=1)] == [2, 3]


# ---- settings ----


def test_no_settings_give_no_runs(store):
    assert sweep(Experiment("demo", never), store, []) == []
    assert not store.directory.exists()


def test_settings_given_twice_are_run_once(store):
    asked = []

    def measure(*, device, **settings):
        asked.append(settings)
        return {"times": len(asked)}

    twice = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": 2}, {"a": 1, "b": 2}]
    runs = sweep(Experiment("demo", measure), store, twice, workers=1)
    assert [run.metrics["times"] for run in runs] == [1, 1, 2, 1]
    assert len(asked) == 2


# ---- what an experiment may do ----

BROKEN = {
    "nothing": (None, "returned a NoneType; return a dictionary of metrics"),
    "a number": (3.0, "returned a float; return a dictionary"),
    "NaN": ({"loss": math.nan}, r"metrics\['loss'\] is nan"),
    "a tensor": ({"loss": torch.tensor(1.0)}, r"metrics\['loss'\] is a torch\.Tensor; pass float\(x\)"),
    "an array, deep": ({"a": {"b": [np.float32(1)]}}, r"metrics\['a'\]\['b'\]\[0\] is a numpy\.float32"),
    "a tuple": ({"loss": (1, 2)}, r"metrics\['loss'\] is a tuple; pass a list"),
    "numbers as keys": ({0: 1.0}, "metrics has the key 0; keys must be strings"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_metrics_that_cannot_be_stored_name_experiment_settings_and_key(store, case):
    value, words = BROKEN[case]

    def measure(*, seed, device):
        return value if seed == 1 else {"loss": 0.5}

    with pytest.raises(ValueError, match=rf"demo with {{'seed': 1}}:? {words}"):
        sweep(Experiment("demo", measure), store, FOUR, workers=1)
    assert [run.settings["seed"] for run in store.runs()] == [0, 2, 3]


def test_several_failures_say_the_first_reason(store):
    def measure(*, seed, device):
        raise ArithmeticError("too large")

    with pytest.raises(
        ExceptionGroup, match=r"4 of 4 .*, the first with ArithmeticError: too large, in the run of demo"
    ):
        sweep(Experiment("demo", measure), store, FOUR, workers=1)


class PeculiarError(Exception):
    def __init__(self, reason, code):
        super().__init__(reason)
        self.code = code


def misbehaves(*, seed: int, device: str) -> dict:
    if seed == 1:
        raise PeculiarError("an error that pickle cannot make again", 5)
    if seed == 2:
        sys.exit("tired")
    return {"seed": seed}


@pytest.mark.parametrize("workers", [1, 2])
def test_failures_that_cannot_travel_or_would_end_python_take_no_other_run_with_them(store, workers):
    with pytest.raises(ExceptionGroup, match="2 of 4 runs of demo failed") as caught:
        sweep(Experiment("demo", misbehaves), store, FOUR, workers=workers)
    told = " ".join(map(str, caught.value.exceptions))
    assert "an error that pickle cannot make again" in told
    assert "demo with {'seed': 2} ended Python, with status tired" in told
    assert [run.settings["seed"] for run in store.runs()] == [0, 3]


def is_killed(*, seed: int, device: str) -> dict:
    if seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return {"square": seed**2}


def test_a_killed_worker_leaves_a_sweep_that_can_be_resumed(store):
    with pytest.raises(
        BrokenProcessPool, match=r"a worker process of demo was killed.*Of 4 runs \d are missing, with"
    ) as caught:
        sweep(Experiment("demo", is_killed), store, FOUR, workers=2)
    assert "{'seed': 1}" in str(caught.value)
    assert "call again for the rest" in str(caught.value)
    assert store.problems() == []
    assert [run.metrics["square"] for run in sweep(Experiment("demo", square), store, FOUR, workers=1)] == [0, 1, 4, 9]


def test_a_function_that_other_processes_cannot_have_runs_in_this_one(store):
    here = Experiment("demo", lambda *, seed, device: {"process": os.getpid()})
    with pytest.raises(ValueError, match=r"demo cannot be run in 2 other processes.*top of a module.*workers=1"):
        sweep(here, store, FOUR, workers=2)
    assert {run.metrics["process"] for run in sweep(here, store, FOUR)} == {os.getpid()}


def test_time_that_goes_back_gives_no_negative_seconds(monkeypatch):
    clock = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert 0 <= run_once(Experiment("demo", square), {"seed": 0}).wall_seconds < 60


# ---- ended from outside ----


def child_of(store: ResultsStore, tmp_path, body: str, workers: int) -> subprocess.Popen:
    script = tmp_path / "child.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, time
        from gramlin.chapters import Experiment, sweep
        from gramlin.results import ResultsStore

        {textwrap.indent(textwrap.dedent(body), " " * 8).strip()}

        if __name__ == "__main__":
            settings = [{{"seed": seed}} for seed in range(4)]
            sweep(Experiment("demo", measure), ResultsStore({str(store.directory)!r}), settings, workers={workers})
    """)
    )
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_sweep_killed_in_the_middle_of_saving_is_resumed(store, tmp_path):
    body = """
        def measure(*, seed, device):
            if seed == 2:
                os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            return {"square": seed**2}
    """
    child = child_of(store, tmp_path, body, workers=1)
    child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL
    finished, problems = store.read()
    assert problems == []
    assert [run.settings["seed"] for run in finished] == [0, 1]
    resumed = sweep(Experiment("demo", square), store, FOUR, workers=1)
    assert resumed[:2] == finished
    assert [run.metrics["square"] for run in resumed] == [0, 1, 4, 9]


def test_an_interrupt_stops_side_by_side_runs_at_once_and_keeps_what_is_finished(store, tmp_path):
    body = """
        def measure(*, seed, device):
            if seed == 0:
                return {"square": 0}
            print("working", flush=True)
            time.sleep(300)
    """
    child = child_of(store, tmp_path, body, workers=2)
    assert child.stdout.readline() == "working\n"
    assert child.stdout.readline() == "working\n"
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=60)  # workers hold the pipes, too
    assert time.monotonic() - start < 30
    assert told.rstrip().endswith("KeyboardInterrupt")
    assert [run.settings["seed"] for run in store.runs()] == [0]
