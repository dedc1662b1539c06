"""The store of finished runs: one small JSON file a run, written whole or not at all.

A file says what was run (experiment and settings), what came out (metrics) and where it came from (wall time,
device, versions, commit, date), and carries a checksum of all that, so that an edited or damaged file is reported
by name rather than plotted.
"""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

# What JSON holds, at any depth: ``check_json`` tells, with a message that names the place. Not a union, which would ask
# readers of a metric for a cast to the type that they know it has.
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Json]

FORMAT = 1
LEFT_OUT = "left out: "  # begins each line that says which run a page is made without
_RECORDED_VERSIONS = ("gramlin", "torch", "torchvision", "numpy")
_LARGEST_INTEGER = 2**53  # JSON readers that have floats alone (jq, JavaScript) round larger ones
_DEEPEST = 50  # levels of lists and dictionaries; far above it Python's own reader gives up
_LONGEST_SLUG = 200  # bytes, of the 255 that file systems allow a name; the digest and a temporary name's end need 25


class ResultsError(RuntimeError):
    """A stored run cannot be trusted: the message names the file and says why."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        experiment: its name, such as "gram-shift".
        settings: all that determines the run, seed included; JSON values only.
        metrics: what came out; JSON values only, and no NaN or infinity.
        wall_seconds: how long it took.
        device: where it ran, in words.
        versions: of Python and the packages that compute.
        commit: of the sources, with "+changes" if they differed from it; "unknown" outside a checkout.
        finished: date and time, UTC, ISO 8601.
    """

    experiment: str
    settings: JsonObject
    metrics: JsonObject
    wall_seconds: float
    device: str
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    commit: str = field(default_factory=lambda: source_commit())
    finished: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class ResultsStore:
    """A folder of finished runs, a sub-folder an experiment.

    Settings are told apart as JSON tells them: 1, 1.0 and true are three values, and the order of keys does not
    matter. Everywhere a setting that JSON cannot hold as it is (an array, a path, a tuple, NaN) is a ``ValueError``
    that names it. Files are read as JSON, and nothing in them is executed.

    Args:
        directory: made when the first run is saved.

    Example:
        >>> import tempfile
        >>> store = ResultsStore(tempfile.mkdtemp())
        >>> run = Run("demo", {"lr": 0.1, "seed": 0}, {"accuracy": 0.9}, wall_seconds=1.0, device="cpu")
        >>> _ = store.save(run)
        >>> store.get("demo", {"lr": 0.1, "seed": 0}).metrics
        {'accuracy': 0.9}
    """

    def __init__(self, directory: str | os.PathLike[str]):
        if not str(directory):
            raise ValueError("directory is ''; pass the path of a folder")
        self.directory = Path(directory)
        self._named: set[str] = set()

    def __repr__(self) -> str:
        return f"ResultsStore({str(self.directory)!r})"

    def path(self, experiment: str, settings: JsonObject) -> Path:
        """Where a run with these settings is kept; the name tells the data set, the method and the seed.

        Raises:
            ValueError: a setting that JSON cannot hold, or a name of an experiment that is none of a folder.
        """
        _check_name(experiment)
        check_json(settings, "settings")
        words = [settings[key] for key in ("dataset", "method", "seed") if key in settings]
        slug = "-".join(re.sub(r"[^\w.]+", "-", str(word)).strip("-") for word in words)
        slug = slug.encode()[:_LONGEST_SLUG].decode(errors="ignore").lstrip(".")  # hidden files are not runs
        name = f"{slug}-{_digest(settings)[:8]}.json" if slug else f"{_digest(settings)[:8]}.json"
        return self.directory / experiment / name

    def get(self, experiment: str, settings: JsonObject) -> Run | None:
        """The run with exactly these settings, or None if it has not been finished.

        Raises:
            ResultsError: its file is damaged or was edited.
        """
        path = self.path(experiment, settings)
        try:
            os.lstat(path)
        except FileNotFoundError:
            return None
        run = self._read(path)
        if _digest(run.settings) != _digest(settings):
            raise ResultsError(
                f"{path} holds a run with other settings whose file has the same name; move it elsewhere"
            )
        return run

    def check_writable(self, experiment: str) -> None:
        """Make sure that a run can be saved: to be asked before hours of work rather than after them.

        Raises:
            OSError: it cannot, and why.
        """
        _check_name(experiment)
        folder = self.directory / experiment
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            raise _cannot_save(folder, error) from error

    def save(self, run: Run) -> Path:
        """Write a run atomically, replacing one with the same settings; returns its file.

        Raises:
            ValueError: a value that JSON cannot hold, NaN and infinity among them; names it.
            OSError: the file cannot be written; names it.
        """
        _check_run(run)
        content = {"format": FORMAT, **vars(run)}
        path = self.path(run.experiment, run.settings)
        text = json.dumps({**content, "sha256": _digest(content)}, indent=1, ensure_ascii=False) + "\n"
        try:
            write_atomically(path, text)
        except OSError as error:
            raise _cannot_save(path, error) from error
        return path

    def runs(self, experiment: str | None = None) -> list[Run]:
        """All sound runs, of one experiment or of all, in the order of their file names.

        A damaged or edited file is left out, and a line on standard output names it, once a store: on a page it stands
        with what was made of the others. (A warning would not do: Python shows one at most once a place, and a user
        may have turned them off.)
        """
        runs, problems = self.read(experiment)
        for problem in problems:
            if problem not in self._named:
                print(LEFT_OUT + problem)
        self._named.update(problems)
        return runs

    def problems(self, experiment: str | None = None) -> list[str]:
        """What is wrong with which file: a line a file that ``runs`` leaves out."""
        return self.read(experiment)[1]

    def experiments(self) -> list[str]:
        """The names of the experiments that have a folder here."""
        if not self.directory.exists():
            return []
        return sorted(each.name for each in self.directory.iterdir() if each.is_dir() and each.name[0] != ".")

    def read(self, experiment: str | None = None) -> tuple[list[Run], list[str]]:
        """The sound runs, and a line a file that holds none, in the order of their file names; prints nothing."""
        if experiment is not None:
            _check_name(experiment)
        runs, problems = [], []
        for name in self.experiments() if experiment is None else [experiment]:
            try:
                files = sorted(each for each in (self.directory / name).iterdir() if _may_be_run(each.name))
            except FileNotFoundError:
                continue
            except OSError as error:  # not a folder, or not ours to look into
                problems.append(f"{error.filename} cannot be listed ({error.strerror})")
                continue
            for path in files:
                try:
                    runs.append(self._read(path))
                except ResultsError as error:
                    problems.append(str(error))
        return runs, problems

    def _read(self, path: Path) -> Run:
        advice = "restore it from version control, or delete it and run it again"
        try:
            if not path.is_file():  # to open a named pipe would wait for ever
                raise ValueError("it is not a file")
            content = _parsed(path.read_text(encoding="utf-8"))
            if content.get("format", FORMAT) != FORMAT:
                raise ResultsError(
                    f"{path} is in format {content['format']!r}, and this gramlin reads {FORMAT}; read it with the "
                    "version that wrote it, or move it elsewhere"
                )
            checksum = content.pop("sha256", None)
            if checksum != _digest(content):
                raise ResultsError(f"{path} was changed after it was written: its checksum does not fit; {advice}")
            run = _run_of(content)
            place = self.path(run.experiment, run.settings)
        except OSError as error:
            raise ResultsError(f"{path} cannot be read ({error.strerror}); {advice}") from error
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path} is damaged ({error}); {advice}") from error
        if path != place:
            raise ResultsError(f"{path} holds a run that belongs in {place}; {advice}")
        return run


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is either there whole or not at all, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is told
            os.unlink(temporary)
        raise


def source_commit() -> str:
    """The commit of the package's sources, "+changes" if they differ from it, "unknown" outside a checkout."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", package, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed below somebody else's repository
            return "unknown"
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _RECORDED_VERSIONS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _digest(content: JsonObject) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_json(value: object, name: str, _depth: int = 0) -> None:
    """Raise ``ValueError`` unless JSON holds this value, and gives the same one back; the message names its place."""
    if _depth > _DEEPEST:
        raise ValueError(f"{name.partition('[')[0]} is nested more than {_DEEPEST} levels deep; store it flatter")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; keys must be strings")
            check_json(key, f"{name}: the key {key!r}", _depth + 1)
            check_json(item, f"{name}[{key!r}]", _depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{name}[{index}]", _depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is {value!r}, which is no Unicode text; pass one without surrogates") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; store whether a run diverged, not a number that is none")
    elif isinstance(value, int):
        if abs(value) > _LARGEST_INTEGER:
            raise ValueError(f"{name} is an integer beyond ±2**53, which not every reader of JSON holds; pass str(x)")
    elif value is not None:
        raise ValueError(f"{name} is a {_type_name(value)}; pass {_instead(value)}")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _instead(value: object) -> str:
    """What to pass in place of a value that JSON does not hold."""
    if isinstance(value, tuple | range):
        return "a list: list(x)"
    if isinstance(value, set | frozenset):
        return "a list: sorted(x)"
    if isinstance(value, os.PathLike):
        return "a string: str(x)"
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's
        return "float(x), int(x) or bool(x), and of an array x.tolist()"
    return "what JSON holds: numbers, strings, True, False, None, and lists and dictionaries of them"


def _check_run(run: Run) -> None:
    """Raise ``ValueError`` unless each field is what ``Run`` says."""
    _check_name(run.experiment)
    for name in ("settings", "metrics", "versions"):
        if not isinstance(getattr(run, name), dict):
            raise ValueError(f"{name} is a {_type_name(getattr(run, name))}; pass a dictionary")
        check_json(getattr(run, name), name)
    for name in ("device", "commit", "finished"):
        if not isinstance(getattr(run, name), str):
            raise ValueError(f"{name} is a {_type_name(getattr(run, name))}; pass a string")
        check_json(getattr(run, name), name)
    seconds = run.wall_seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"wall_seconds is {seconds!r}; pass a number of at least 0")


def _run_of(content: JsonObject) -> Run:
    """The run that a file's content, less its checksum, describes; ``ValueError`` if it does not."""
    names = {"format", *(each.name for each in fields(Run))}
    for what, differing in (("lacks", names - content.keys()), ("has an unknown", content.keys() - names)):
        if differing:
            raise ValueError(f"it {what} {', '.join(sorted(differing))}")
    run = Run(**{name: value for name, value in content.items() if name != "format"})
    _check_run(run)
    return run


def _parsed(text: str) -> JsonObject:
    """A text of JSON as a dictionary; ``ValueError`` for another kind, repeated keys, NaN and infinity."""

    def without_repeats(pairs: list[tuple[str, Json]]) -> JsonObject:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice in one dictionary")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    content = json.loads(text, object_pairs_hook=without_repeats, parse_constant=refuse)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {_type_name(content)}, not a dictionary")
    return content


def _check_name(experiment: str) -> None:
    if not isinstance(experiment, str) or not re.fullmatch(r"\w[\w.+-]{0,99}", experiment):
        raise ValueError(
            f"experiment is {experiment!r}; pass the name of a folder: letters, digits, '-', '_', '+' and '.', at "
            "most 100, and no '.' first"
        )
    check_json(experiment, "experiment")


def _may_be_run(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")  # hidden: what a killed writer left behind


def _cannot_save(path: Path, error: OSError) -> OSError:
    reason = error.strerror or error
    return OSError(error.errno, f"{path}: a run cannot be saved there ({reason}); make room, or pass another folder")
