"""The store among hostile files, names, values and disks: nothing is hidden, overwritten or run that should not be."""

import errno
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramlin import results
from gramlin.results import LEFT_OUT, ResultsError, ResultsStore, Run

SETTINGS = {"dataset": "digits", "seed": 1}


def a_run(settings=SETTINGS, metrics=None, experiment="demo") -> Run:
    return Run(experiment, dict(settings), metrics or {"loss": [1.0, 0.5]}, wall_seconds=1.5, device="cpu")


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(tmp_path / "results")


# ---- files ----


def forged(**changes) -> bytes:
    """A run's file with other fields, and a checksum that fits, as another program might write it."""
    content = {"format": 1, **vars(a_run()), **changes}
    content = {name: value for name, value in content.items() if value is not ...}
    return json.dumps({**content, "sha256": results._digest(content)}).encode()


def edited(old: str, new: str) -> bytes:
    text = forged().decode()
    assert text.count(old) == 1
    return text.replace(old, new).encode()


DAMAGED = {
    "empty": (b"", "damaged"),
    "cut short": (forged()[:200], "damaged"),
    "of a later version": (forged(format=2), "in format 2, and this gramlin reads 1"),
    "binary": (bytes(range(256)), "utf-8"),
    "not UTF-8": ('{"a": "\xfc"}'.encode("latin-1"), "utf-8"),
    "another encoding": (forged().decode().encode("utf-8-sig"), "BOM"),
    "nested without end": (b"[" * 100_000, "recursion"),
    "nested deeply": (forged(metrics=json.loads('{"a":' * 60 + "1" + "}" * 60)), "metrics is nested"),
    "a list": (b"[1]", "holds a list, not a dictionary"),
    "null": (b"null", "holds a NoneType"),
    "a number of 5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "5000"),
    "NaN": (edited("[1.0, 0.5]", "[NaN, 0.5]"), "NaN is no number"),
    "infinite by its exponent": (edited("[1.0, 0.5]", "[1e999, 0.5]"), "changed after it was written"),
    "a surrogate": (edited("digits", "\\ud800"), "surrogates"),
    "keys twice": (edited('"loss"', '"loss": [0.1], "loss"'), "twice"),
    "edited": (edited("0.5", "0.4"), "changed after it was written"),
    "edited by its type": (edited('"format": 1', '"format": true'), "changed after it was written"),
    "without provenance": (forged(commit=...), "lacks commit"),
    "with an unknown field": (forged(colour="red"), "unknown colour"),
    "settings of another type": (forged(settings=[1]), "settings is a list"),
    "experiment of another type": (forged(experiment=5), "experiment is 5"),
    "experiment elsewhere": (forged(experiment="../demo"), "experiment is '../demo'"),
    "seconds in words": (forged(wall_seconds="1.5"), "wall_seconds is '1.5'"),
    "negative seconds": (forged(wall_seconds=-1.5), "wall_seconds is -1.5"),
    "seconds without end": (forged(wall_seconds=1e999), "Infinity"),
    "a date of another type": (forged(finished=20260101), "finished is a int"),
    "of another place": (forged(settings={"seed": 2}), "holds a run that belongs in"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_and_hides_no_other(unchecked, tmp_path, case, capsys):
    content, reason = DAMAGED[case]
    store = unchecked.results.ResultsStore(tmp_path)
    sound = store.save(a_run({"dataset": "digits", "seed": 0})).read_bytes()
    path = store.save(a_run())
    path.write_bytes(content)
    assert [run.settings["seed"] for run in store.runs("demo")] == [0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(LEFT_OUT + str(path))
    assert reason in line
    assert [LEFT_OUT + problem for problem in store.problems()] == [line]
    with pytest.raises(unchecked.results.ResultsError, match=r"damaged|changed|belongs|format"):
        store.get("demo", SETTINGS)
    assert path.read_bytes() == content
    assert store.path("demo", {"dataset": "digits", "seed": 0}).read_bytes() == sound


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("annexed elsewhere"))


@pytest.mark.parametrize("make", [a_folder, a_pipe, a_dangling_link])
def test_what_is_no_file_is_named_and_not_waited_for(store, make):
    store.save(a_run({"seed": 0}))
    path = store.path("demo", SETTINGS)
    make(path)
    runs, (problem,) = store.read()
    assert len(runs) == 1
    assert problem.startswith(f"{path} is damaged (it is not a file)")
    with pytest.raises(ResultsError, match="not a file"):
        store.get("demo", SETTINGS)


def test_a_page_names_each_damaged_file_once(store, capsys):
    store.save(a_run()).write_text("")
    for _ in range(3):
        assert store.runs("demo") == []
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert ResultsStore(store.directory).runs() == []  # another page
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_what_killed_writers_left_behind_is_no_run(store):
    path = store.save(a_run())
    for name in (f".{path.name}.x7_ab12c", ".other.json", "._digits.json", "notes.txt", "old.json.bak"):
        (path.parent / name).write_text("{")
    (store.directory / ".cache").mkdir()
    (store.directory / ".cache" / "x.json").write_text("{")
    (store.directory / "README.json").write_text("{")
    assert store.read() == ([store.get("demo", SETTINGS)], [])


def test_a_folder_that_cannot_be_listed_is_named(store):
    store.save(a_run())
    (store.directory / "other").write_text("a file")
    assert store.problems("demo") == []
    (problem,) = store.problems("other")
    assert problem == f"{store.directory / 'other'} cannot be listed (Not a directory)"


def test_copies_of_a_folder_are_told_from_it(store):
    path = store.save(a_run())
    copy = store.directory / "demo copy"
    copy.mkdir()
    (copy / path.name).write_bytes(path.read_bytes())
    assert len(store.runs()) == 1
    assert str(copy) in store.problems()[0]


def test_a_store_that_is_a_file_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    store = ResultsStore(tmp_path / "file")
    for ask in (store.read, lambda: store.get("demo", SETTINGS), lambda: store.save(a_run())):
        with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
            ask()
    with pytest.raises(ValueError, match="pass the path of a folder"):
        ResultsStore("")


def test_nothing_in_a_file_is_executed(store, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    path = store.save(a_run())
    for content in (pickle.dumps(Bomb()), b"__import__('os').mkdir('executed')", b'{"py/object": "os.mkdir"}'):
        path.write_bytes(content)
        assert store.runs() == []
    assert not (tmp_path / "executed").exists()


# ---- values ----


class Color(IntEnum):
    RED = 1


REFUSED = {
    "numpy float": (np.float32(0.1), r"is a numpy\.float32; pass float\(x\)"),
    "numpy integer": (np.int64(3), r"is a numpy\.int64; pass .*int\(x\)"),
    "numpy boolean": (np.bool_(True), r"is a numpy\.bool.*; pass .*bool\(x\)"),
    "array": (np.zeros(2), r"is a numpy\.ndarray; pass .*x\.tolist\(\)"),
    "tensor": (torch.tensor(3), r"is a torch\.Tensor; pass float\(x\), int\(x\)"),
    "path": (Path("x"), r"is a pathlib\.\w*Path; pass a string: str\(x\)"),
    "tuple": ((1, 2), r"is a tuple; pass a list: list\(x\)"),
    "range": (range(3), r"is a range; pass a list: list\(x\)"),
    "set": ({1}, r"is a set; pass a list: sorted\(x\)"),
    "bytes": (b"x", "is a bytes; pass what JSON holds: numbers, strings"),
    "complex": (1j, "is a complex; pass what JSON holds"),
    "NaN": (math.nan, "is nan"),
    "infinity": (-math.inf, "is -inf"),
    "number as key": ({1: 2}, "has the key 1; keys must be strings"),
    "surrogate": ("\ud800", "surrogates"),
    "surrogate in a key": ({"\udcff": 2}, "surrogates"),
    "large integer": (2**53 + 1, r"integer beyond ±2\*\*53.*pass str\(x\)"),
    "integer of 5000 digits": (10**5000, r"integer beyond ±2\*\*53"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_json_does_not_hold_is_refused_by_name_everywhere(store, case):
    value, words = REFUSED[case]
    for settings, name in (({"lr": value}, r"settings\['lr'\]"), ({"a": [{"b": value}]}, r"\['a'\]\[0\]\['b'\]")):
        for ask in (store.path, store.get, lambda experiment, each: store.save(a_run(each))):
            with pytest.raises(ValueError, match=f"{name}.*{words}"):
                ask("demo", settings)
    with pytest.raises(ValueError, match=rf"metrics\['lr'\].*{words}"):
        store.save(a_run(metrics={"lr": value}))
    assert not store.directory.exists()


def test_endless_values_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="settings is nested more than 50 levels deep"):
        results.check_json({"a": endless}, "settings")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("metrics", None, "metrics is a NoneType; pass a dictionary"),
        ("settings", [1], "settings is a list; pass a dictionary"),
        ("wall_seconds", -0.1, "wall_seconds is -0.1; pass a number of at least 0"),
        ("wall_seconds", math.nan, "wall_seconds is nan"),
        ("wall_seconds", True, "wall_seconds is True"),
        ("device", 3, "device is a int; pass a string"),
        ("experiment", None, "experiment is None; pass the name of a folder"),
    ],
)
def test_fields_of_a_run_are_checked_before_it_is_written(unchecked, tmp_path, field, value, words):
    store = unchecked.results.ResultsStore(tmp_path / "results")
    run = unchecked.results.Run(**{**vars(a_run()), field: value})
    with pytest.raises(ValueError, match=words):
        store.save(run)
    assert not store.directory.exists()


def test_settings_are_told_apart_as_json_tells_them(store):
    values = [True, 1, 1.0, "1", None, 0.0, -0.0, 0, False, [], {}, [1, 2], "", "é", "e\u0301", 2**53, -(2**53)]
    for value in values:
        store.save(a_run({"a": value}, {"value": value}))
    assert len(store.runs()) == len(values)
    for value in values:
        found = store.get("demo", {"a": value}).metrics["value"]
        assert repr(found) == repr(value)
    # Numbers that are Python's own by inheritance come back as those.
    assert store.get("demo", {"a": Color.RED}) == store.get("demo", {"a": 1})
    assert store.get("demo", {"a": np.float64(1.0)}) == store.get("demo", {"a": 1.0})


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "*", "x\0y", "a" * 101, "[a]", ".hid", "a b", "C:\\x"])
def test_an_experiment_is_named_as_a_folder_can_be(store, name):
    for ask in (lambda: store.path(name, {}), lambda: store.get(name, {}), lambda: store.read(name)):
        with pytest.raises(ValueError, match="pass the name of a folder"):
            ask()
    with pytest.raises(ValueError, match="pass the name of a folder"):
        store.save(a_run(experiment=name))
    assert not store.directory.exists()


@given(st.dictionaries(st.sampled_from(["dataset", "method", "seed"]), st.text() | st.text("./\\-ü\0 ", max_size=400)))
def test_no_setting_leads_out_of_the_folder(settings):
    path = ResultsStore("results").path("demo", settings)
    assert path.parent == Path("results/demo")
    assert len(os.fsencode(path.name)) + 10 <= 255  # a temporary file's name is so much longer
    assert not path.name.startswith(".")
    assert "\0" not in path.name


def test_long_names_and_odd_folders_hold_runs(tmp_path):
    for folder in ("with spaces", "ü ☃ 中", "-dash", "new\nline", "quote'\""):
        store = ResultsStore(tmp_path / folder)
        settings = {"dataset": "folder:/a very/long/../päth/" + "x" * 300, "seed": 0}
        store.save(a_run(settings))
        assert store.read() == ([store.get("demo", settings)], [])


def test_runs_whose_files_would_share_a_name_are_not_mixed_up(store, monkeypatch):
    digest = results._digest
    monkeypatch.setattr(results, "_digest", lambda content: "00000000" + digest(content))
    store.save(a_run({"lr": 0.1}))
    with pytest.raises(ResultsError, match="holds a run with other settings"):
        store.get("demo", {"lr": 0.2})


# ---- disks and writers ----


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB, where this user may mount one."""
    folder = tmp_path / "tiny disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_what_it_has(tiny_disk):
    store = ResultsStore(tiny_disk / "results")
    path = store.save(a_run())
    before = path.read_bytes()
    for settings in (SETTINGS, {"seed": 2}):
        with pytest.raises(OSError, match=r"a run cannot be saved there \(No space left on device\)") as caught:
            store.save(a_run(settings, {"large": [0.123456789] * 10_000}))
        assert caught.value.errno == errno.ENOSPC
        assert str(store.path("demo", settings)) in str(caught.value)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    (tiny_disk / "fill").write_bytes(bytes(tiny_disk.stat().st_blksize * (os.statvfs(tiny_disk).f_bfree)))
    with pytest.raises(OSError, match="No space left"):
        store.check_writable("demo")


def test_a_read_only_disk_is_read_and_told_before_work(tiny_disk):
    store = ResultsStore(tiny_disk / "results")
    store.save(a_run())
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    assert len(store.runs()) == 1
    with pytest.raises(OSError, match=r"a run cannot be saved there \(Read-only file system\)"):
        store.check_writable("demo")


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_fails_leaves_the_old_run_and_no_more(store, monkeypatch, step):
    path = store.save(a_run())
    before = path.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match=f"{path}: a run cannot be saved there"):
        store.save(a_run(metrics={"loss": [0.0]}))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_first_error_is_told_even_if_the_temporary_file_cannot_go(store, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(os, "unlink", lambda _: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(OSError, match="Input/output error"):
        store.save(a_run())
    assert store.read() == ([], [])


def test_two_writers_and_a_reader_at_once_see_whole_runs(store):
    runs = [a_run(metrics={"loss": [float(writer)] * 500}) for writer in range(2)]
    store.save(runs[0])

    def write(run):
        for _ in range(40):
            store.save(run)

    writers = [threading.Thread(target=write, args=(run,)) for run in runs]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.get("demo", SETTINGS) in runs
    assert store.problems() == []
    assert len(list((store.directory / "demo").iterdir())) == 1


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fsync", "os.chmod", "os.replace"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_at_any_step_leaves_a_whole_run_or_none(store, step, when):
    store.save(a_run({"seed": 0}))
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(f"""
            import os, signal, tempfile
            from gramlin.results import ResultsStore, Run

            real = {step}
            def killed(*args, **kwargs):
                if {when == "after"}:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            {step} = killed
            run = Run("demo", {SETTINGS}, {{"loss": [1.0]}}, wall_seconds=1.0, device="cpu", commit="-")
            ResultsStore({str(store.directory)!r}).save(run)
        """)],
        capture_output=True,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    runs, problems = store.read()
    assert problems == []
    assert len(runs) == 1 + ((step, when) == ("os.replace", "after"))
    store.save(a_run())
    assert len(store.runs()) == 2
