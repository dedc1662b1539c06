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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FORMAT = 1
_RECORDED_VERSIONS = ("gramlin", "torch", "torchvision", "numpy")


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
    settings: dict
    metrics: dict
    wall_seconds: float
    device: str
    versions: dict = field(default_factory=lambda: _versions())
    commit: str = field(default_factory=lambda: source_commit())
    finished: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class ResultsStore:
    """A folder of finished runs, a sub-folder an experiment.

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

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"ResultsStore({str(self.directory)!r})"

    def path(self, experiment: str, settings: dict) -> Path:
        """Where a run with these settings is kept; the name tells the data set, the method and the seed."""
        words = [settings[key] for key in ("dataset", "method", "seed") if key in settings]
        slug = "-".join(re.sub(r"[^\w.]+", "-", str(word)).strip("-") for word in words)
        name = f"{slug}-{_digest(settings)[:8]}.json" if slug else f"{_digest(settings)[:8]}.json"
        return self.directory / experiment / name

    def get(self, experiment: str, settings: dict) -> Run | None:
        """The run with exactly these settings, or None if it has not been finished.

        Raises:
            ResultsError: its file is damaged or was edited.
        """
        path = self.path(experiment, settings)
        return self._read(path) if path.exists() else None

    def save(self, run: Run) -> Path:
        """Write a run atomically, replacing one with the same settings; returns its file.

        Raises:
            ValueError: a value that JSON cannot hold, NaN and infinity among them; names it.
        """
        for part in ("settings", "metrics"):
            _check_json(getattr(run, part), part)
        content = {"format": FORMAT, **asdict(run)}
        path = self.path(run.experiment, run.settings)
        write_atomically(path, json.dumps({**content, "sha256": _digest(content)}, indent=1, ensure_ascii=False) + "\n")
        return path

    def runs(self, experiment: str | None = None) -> list[Run]:
        """All finished runs, of one experiment or of all, in the order of their file names.

        Raises:
            ResultsError: a file is damaged or was edited.
        """
        return [self._read(path) for path in self._paths(experiment)]

    def problems(self) -> list[str]:
        """What is wrong with which file: a line a file that ``runs`` would stop at."""
        lines = []
        for path in self._paths(None):
            try:
                self._read(path)
            except ResultsError as error:
                lines.append(str(error))
        return lines

    def _paths(self, experiment: str | None) -> Iterator[Path]:
        return iter(sorted(self.directory.glob(f"{experiment or '*'}/*.json")))

    def _read(self, path: Path) -> Run:
        advice = "restore it from version control, or delete it and run it again"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            checksum = content.pop("sha256")
            if content.pop("format") != FORMAT:
                raise ResultsError(f"{path} is in another format than {FORMAT}; {advice}")
            run = Run(**content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ResultsError(f"{path} is damaged ({error}); {advice}") from error
        if checksum != _digest({"format": FORMAT, **content}):
            raise ResultsError(f"{path} was changed after it was written: its checksum does not fit; {advice}")
        if path != self.path(run.experiment, run.settings):
            raise ResultsError(
                f"{path} holds a run that belongs in {self.path(run.experiment, run.settings)}; {advice}"
            )
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


def _versions() -> dict:
    versions = {"python": platform.python_version()}
    for package in _RECORDED_VERSIONS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _digest(content: dict) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _check_json(value, name: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} has the key {key!r}; keys must be strings")
            _check_json(item, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{name}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; store whether a run diverged, not a number that is none")
    elif not (value is None or isinstance(value, str | int | bool)):
        raise ValueError(f"{name} is a {type(value).__name__}; JSON holds numbers, strings, lists and dictionaries")
