"""The store's laws: whole files or none, nothing edited passes, a killed sweep loses nothing."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramlin.chapters import Experiment, run_once, sweep
from gramlin.results import ResultsError, ResultsStore, Run, source_commit, write_atomically

SETTINGS = {"dataset": "digits", "method": "sgd", "lr": 0.1, "seed": 3}


def a_run(settings=SETTINGS, metrics=None) -> Run:
    return Run("demo", dict(settings), metrics or {"loss": [1.0, 0.5]}, wall_seconds=1.5, device="cpu")


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(tmp_path / "results")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    settings=st.dictionaries(st.text(max_size=5), values, max_size=4),
    metrics=st.dictionaries(st.text(), values, max_size=4),
)
def test_what_is_saved_comes_back(tmp_path_factory, settings, metrics):
    store = ResultsStore(tmp_path_factory.mktemp("store"))
    run = Run("demo", settings, metrics, wall_seconds=0.1, device="cpu")
    store.save(run)
    assert store.get("demo", settings) == run


def test_a_run_says_where_it_came_from(store):
    run = a_run()
    assert set(run.versions) == {"python", "gramlin", "torch", "torchvision", "numpy"}
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|unknown", run.commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run.finished)


def test_commit_marks_changed_sources():
    commit = source_commit()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "gramlin"], capture_output=True, text=True, check=True
    ).stdout
    assert commit.endswith("+changes") == bool(changed)


def test_file_names_tell_what_was_run(store):
    assert re.fullmatch(r"digits-sgd-3-[0-9a-f]{8}\.json", store.save(a_run()).name)


def test_order_of_settings_does_not_matter(store):
    store.save(a_run())
    assert store.get("demo", dict(reversed(SETTINGS.items()))) is not None
    assert store.get("demo", {**SETTINGS, "lr": 0.2}) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, object(), {1: 2}, [{"deep": -math.inf}]])
def test_what_json_cannot_hold_is_refused_by_name(store, bad):
    with pytest.raises(ValueError, match=r"metrics\['value'\]"):
        store.save(a_run(metrics={"value": bad}))
    assert store.runs() == []


def damaged(path, how):
    text = path.read_text()
    content = json.loads(text)
    if how == "truncated":
        path.write_text(text[: len(text) // 2])
    elif how == "empty":
        path.write_text("")
    elif how == "edited metric":
        content["metrics"]["loss"][1] = 0.1
        path.write_text(json.dumps(content))
    elif how == "edited seed":
        content["settings"]["seed"] = 4
        path.write_text(json.dumps(content))
    elif how == "missing field":
        del content["commit"]
        path.write_text(json.dumps(content))
    elif how == "another kind of file":
        path.write_text("[1, 2]")
    elif how == "renamed":
        path.rename(path.with_name("digits-sgd-4-00000000.json"))


@pytest.mark.parametrize(
    "how", ["truncated", "empty", "edited metric", "edited seed", "missing field", "another kind of file", "renamed"]
)
def test_a_damaged_or_edited_file_is_reported_by_name(store, how, capsys):
    path = store.save(a_run())
    damaged(path, how)
    (found,) = (store.directory / "demo").iterdir()
    assert store.runs("demo") == []
    assert capsys.readouterr().out.startswith(f"left out: {found} ")
    assert len(store.problems()) == 1
    assert str(found) in store.problems()[0]
    if found == path:
        with pytest.raises(ResultsError, match=re.escape(str(path))):
            store.get("demo", SETTINGS)


def test_every_run_of_the_repository_is_sound_and_found_by_its_settings():
    store = ResultsStore(Path(__file__).parent.parent / "results")
    runs, problems = store.read()
    assert problems == []
    assert len(runs) >= 175
    for run in runs:
        assert store.get(run.experiment, run.settings) == run


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---- sweeps ----


def square(*, seed: int, device: str) -> dict:
    return {"square": seed**2}


DEMO = Experiment("demo", square)
FOUR = [{"seed": seed} for seed in range(4)]


def test_a_sweep_computes_only_what_is_missing(store):
    store.save(run_once(DEMO, {"seed": 2}))
    before = store.get("demo", {"seed": 2})
    runs = sweep(DEMO, store, FOUR, workers=1)
    assert [run.metrics["square"] for run in runs] == [0, 1, 4, 9]
    assert store.get("demo", {"seed": 2}) == before


def test_workers_side_by_side_give_the_same_runs(store):
    assert [run.metrics["square"] for run in sweep(DEMO, store, FOUR, workers=2)] == [0, 1, 4, 9]


def fails_when_odd(*, seed: int, device: str) -> dict:
    if seed % 2:
        raise FloatingPointError("diverged")
    return square(seed=seed, device=device)


@pytest.mark.parametrize("workers", [1, 2])
def test_failing_runs_leave_the_others(store, workers):
    experiment = Experiment("demo", fails_when_odd)
    with pytest.raises(ExceptionGroup, match="2 of 4 runs of demo failed") as caught:
        sweep(experiment, store, FOUR, workers=workers)
    assert caught.group_contains(FloatingPointError, match="diverged")
    assert [run.settings["seed"] for run in store.runs("demo")] == [0, 2]
    with pytest.raises(FloatingPointError, match="diverged") as caught:
        sweep(experiment, store, FOUR[:2], workers=workers)
    assert caught.value.__notes__[-1] == "in the run of demo with {'seed': 1}"


def test_a_killed_sweep_resumes_with_nothing_lost(store):
    # The child is killed from outside, in the middle of its third run, as by a cut of power.
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import signal
            from gramlin.chapters import Experiment, sweep
            from gramlin.results import ResultsStore

            def measure(*, seed, device):
                if seed == 2:
                    print("in the third run", flush=True)
                    signal.pause()
                return {{"square": seed**2}}

            settings = [{{"seed": seed}} for seed in range(4)]
            sweep(Experiment("demo", measure), ResultsStore({str(store.directory)!r}), settings, workers=1)
        """)],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "in the third run\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    finished = store.runs("demo")
    assert [run.settings["seed"] for run in finished] == [0, 1]
    resumed = sweep(DEMO, store, FOUR, workers=1)
    assert resumed[:2] == finished
    assert [run.metrics["square"] for run in resumed] == [0, 1, 4, 9]
    assert store.problems() == []


def test_workers_stop_with_their_sweep(store, tmp_path):
    """They hold the child's end of the pipe, which is therefore at its end only when they have stopped."""
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(f"""
        import signal
        from gramlin.chapters import Experiment, sweep
        from gramlin.results import ResultsStore

        def measure(*, seed, device):
            print("working", flush=True)
            signal.pause()

        if __name__ == "__main__":
            settings = [{{"seed": seed}} for seed in range(4)]
            sweep(Experiment("demo", measure), ResultsStore({str(store.directory)!r}), settings, workers=2)
    """)
    )
    child = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "working\n"
    child.kill()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
