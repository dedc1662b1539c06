"""Run chapters and build the book: parameters, claims, papermill, Jupyter Book.

Nothing here imports PyTorch at the top, so that a chapter's first cell answers a wrong parameter at once.
"""

import ast
import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gramlin.catalogue import check_name, image_set_names

PROFILES = ("quick", "paper")
PARAMETERS = ("profile", "dataset", "device", "seeds", "results_dir")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")  # Apple's GPUs lack float64, in which chapters measure


class ClaimError(AssertionError):
    """A claim of a chapter does not hold."""


class BookError(RuntimeError):
    """A chapter or the book could not be run, for a reason that the message gives."""


# ---- Inside a chapter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """A chapter's checked parameters.

    Attributes:
        profile: "quick" (embedded images, about a minute) or "paper" (the paper's scale).
        dataset: what the chapter trains on live.
        seeds: of the repetitions.
        device: "cpu", "cuda", "cuda:1".
        results_dir: the folder of finished runs.
        classes: a chapter's own choice of classes.
    """

    profile: str
    dataset: str
    seeds: tuple[int, ...]
    device: str
    results_dir: Path
    classes: tuple[int, ...] = ()

    @property
    def paper(self) -> bool:
        """Whether the paper's scale was asked for."""
        return self.profile == "paper"

    @property
    def store(self):
        """The ``ResultsStore`` in ``results_dir``."""
        from gramlin.results import ResultsStore

        return ResultsStore(self.results_dir)


def check_parameters(
    *,
    profile: str = "quick",
    dataset: str = "auto",
    device: str = "auto",
    seeds="0, 1, 2",
    results_dir: str = "auto",
    **classes,
) -> Parameters:
    """Check a chapter's parameters, and resolve "auto"; the first thing that a chapter does.

    Args:
        profile: "quick" or "paper".
        dataset: an image set (see ``gramlin data list``) or ``folder:PATH``; "auto" is the embedded
            ``fashion-mnist-mini`` for the quick profile and ``cifar10`` for the paper's.
        device: "auto" (cuda, else cpu), "cpu", "cuda" or "cuda:N".
        seeds: a list of different integers, or a string such as "0, 1, 2".
        results_dir: a folder; "auto" is ``results/`` of the repository, and without one the user's data folder.
        classes: a chapter's parameters of its own, each the number of a class from 0 to 9, or the digit as a string.

    Raises:
        ValueError: a wrong value, or a name that papermill injected and no parameter has; the message says what is
            allowed.
    """
    known = (*PARAMETERS, *classes)
    for name in _injected_names():
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}; this chapter has {', '.join(known)}")
    for name, value in classes.items():
        if isinstance(value, bool) or str(value) not in tuple("0123456789"):
            raise ValueError(f"{name} is {value!r}; pass the number of a class, from 0 to 9")
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}; pass one of {', '.join(map(repr, PROFILES))}")
    if dataset == "auto":
        dataset = "cifar10" if profile == "paper" else "fashion-mnist-mini"
    elif not str(dataset).startswith("folder:"):
        check_name(dataset, image_set_names())
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ValueError(f"device is {device!r}; pass 'auto', 'cpu', 'cuda' or 'cuda:N'")
    checked_seeds = _checked_seeds(seeds)
    if not isinstance(results_dir, str | os.PathLike) or not str(results_dir):
        raise ValueError(f"results_dir is {results_dir!r}; pass the path of a folder, or 'auto'")
    directory = _default_results_directory() if results_dir == "auto" else Path(results_dir).expanduser()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"results_dir is {str(results_dir)!r}, which is a file; pass the path of a folder, or 'auto'")
    numbers = tuple(int(value) for value in classes.values())
    return Parameters(profile, dataset, checked_seeds, _resolved_device(device), directory, numbers)


UNDECIDED = "undecided"


def claims(rows: Iterable[tuple[str, str, bool | str | None]]) -> None:
    """Print a chapter's claims, one a line, and raise if one does not hold.

    Args:
        rows: (id, what is claimed, whether it holds). In place of a truth value, None if it has not been run, or
            ``UNDECIDED`` if its runs do not decide it. The text is fixed: no numbers that vary from run to run.

    Raises:
        ClaimError: after all lines have been printed; names the claims that do not hold.
    """
    rows = list(rows)
    for name, text, holds in rows:
        word = "not run" if holds is None else "open" if holds == UNDECIDED else "ok" if holds else "FAILED"
        print(f"{name:<4} {word:<7} {text}")
    failed = [name for name, _, holds in rows if holds is not None and not holds]
    if failed:
        raise ClaimError(f"these claims do not hold in this run: {', '.join(failed)}")


_YES = ("reproduced", "yes", "holds", True)
_NO = ("not reproduced", "no", "reversed", False)


def agreed(verdicts: Iterable[bool | str | None]) -> bool | str | None:
    """What verdicts on several sets of runs say together, as ``claims`` takes it.

    Args:
        verdicts: words of the tables of verdicts, or what ``exceeds`` returns.

    Returns:
        False if one says no; else ``UNDECIDED`` if one is "undecided" or "open"; else None if one is neither (of a
        single seed, say) or there are none; else True.
    """
    verdicts = list(verdicts)
    if any(each in _NO for each in verdicts):
        return False
    if any(each in (UNDECIDED, "open") for each in verdicts):
        return UNDECIDED
    return True if verdicts and all(each in _YES for each in verdicts) else None


def exceeds(interval: tuple[float, float], bound: float = 0.0) -> bool | str:
    """Whether an interval lies above a bound (True), below it (False), or holds it (``UNDECIDED``)."""
    low, high = interval
    return True if low > bound else False if high < bound else UNDECIDED


def opposite(verdict: bool | str | None) -> bool | str | None:
    """True for a no (also in words, such as "reversed") and False for a yes; what is not decided stays so."""
    return False if verdict in _YES else True if verdict in _NO else verdict


def _injected_names() -> list[str]:
    """The names that papermill set in this notebook, which is the only trace of a misspelt parameter."""
    get_ipython = sys.modules["IPython"].get_ipython if "IPython" in sys.modules else lambda: None
    shell = get_ipython()
    if shell is None:
        return []
    names = []
    for source in shell.history_manager.input_hist_raw:
        if source.startswith("# Parameters\n"):
            for statement in ast.parse(source).body:
                if isinstance(statement, ast.Assign):
                    names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return names


def _checked_seeds(seeds) -> tuple[int, ...]:
    problem = f"seeds is {seeds!r}; pass a list of different integers of at least 0, such as [0, 1, 2] or '0, 1, 2'"
    if isinstance(seeds, str):
        words = seeds.strip().strip("[]()").split(",")
        if not all(word.strip().isdigit() for word in words):
            raise ValueError(problem)
        seeds = [int(word) for word in words]
    elif isinstance(seeds, int):
        seeds = [seeds]
    if not isinstance(seeds, list | tuple) or not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(problem)
    if not all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in seeds):
        raise ValueError(problem)
    return tuple(seeds)


def _resolved_device(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    present = ["cpu"]
    if torch.cuda.is_available():
        present[:0] = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device == "auto":
        return present[0]
    if device not in present:
        raise ValueError(f"device is {device!r}, which this machine does not have; it has {', '.join(present)}")
    return device


def _default_results_directory() -> Path:
    root = repository()
    if root is not None:
        return root / "results"
    import platformdirs

    return Path(platformdirs.user_data_dir("gramlin")) / "results"


# ---- Around the chapters ------------------------------------------------------------------------------------------


def repository() -> Path | None:
    """The folder of the book's sources that this package belongs to; None if it was installed without them."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "_toc.yml").exists() and (root / "book").is_dir() else None


def notebooks() -> list[Path]:
    """The book's notebooks: the chapters in order, then the pages that sum them up.

    Raises:
        BookError: the package was installed without the book's sources.
    """
    root = repository()
    if root is None:
        raise BookError(
            "this gramlin was installed without the book's sources; clone its repository and install it with "
            "`make book` or `pip install --editable .[book]`, or give the path of a notebook"
        )
    return sorted((root / "book").glob("*.ipynb"))  # chapters begin with their number


def chapters() -> list[Path]:
    """The notebooks of the chapters, in order; errors as in ``notebooks``."""
    return [path for path in notebooks() if path.stem[0].isdigit()]


def live_claims() -> dict[str, bool]:
    """For each claim that the chapters' committed outputs name, whether all that they check of it holds.

    Lines of stored runs that have not been run do not count. Empty without the book's sources.
    """
    found: dict[str, bool] = {}
    if repository() is None:
        return found
    for path in chapters():
        code = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        printed = "".join("".join(output.get("text", "")) for output in code[-1]["outputs"])
        for name, word, *_ in (line.split() for line in printed.splitlines()):
            if word not in ("not", "open"):
                found[name] = found.get(name, True) and word == "ok"
    return found


def find_chapter(name: str) -> Path:
    """The notebook that a name means: its number ("1", "01"), its name, or a path.

    Raises:
        BookError: there is none; the message lists the chapters.
    """
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name)
    for path in notebooks():
        number = path.stem.split("_")[0]
        if name in (path.stem, path.name) or (name.isdigit() and number.isdigit() and int(name) == int(number)):
            return path
    known = ", ".join(path.stem for path in notebooks())
    raise BookError(f"there is no chapter {name!r}; pass a number, a name or the path of a notebook: {known}")


def execute(chapter: Path, output: Path, parameters: dict | None = None, *, progress: bool | None = None) -> str:
    """Run a chapter with papermill into a new notebook; the source is left alone.

    Args:
        chapter: the notebook.
        output: where the executed notebook goes.
        parameters: values for the chapter's parameters cell; checked before anything is started.
        progress: whether to show a bar of cells and elapsed time on stderr; by default, if that is a terminal.

    Returns:
        What the last code cell printed: the chapter's claims.

    Raises:
        ValueError: a parameter that the notebook does not have, or a wrong value.
        ClaimError: a claim does not hold.
        BookError: a cell failed; names the cell, the reason and the notebook that has the traceback.
    """
    import nbformat
    import papermill
    from papermill.exceptions import PapermillExecutionError

    parameters = dict(parameters or {})
    try:
        known = papermill.inspect_notebook(str(chapter))
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise BookError(f"{chapter} is not a Jupyter notebook ({str(error).splitlines()[0]})") from error
    for name in parameters:
        if name not in known:
            raise ValueError(f"{chapter.name} has no parameter {name!r}; it has {', '.join(known) or 'none'}")
    if set(PARAMETERS) <= set(known):
        check_parameters(**parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    bar = {"desc": chapter.stem, "disable": not (sys.stderr.isatty() if progress is None else progress)}
    try:
        notebook = papermill.execute_notebook(
            str(chapter), str(output), parameters, progress_bar=bar, extra_arguments=_QUIET_KERNEL
        )
    except PapermillExecutionError as error:
        kind = ClaimError if error.ename == ClaimError.__name__ else BookError
        raise kind(
            f"{chapter.name}, cell {error.exec_count}: {error.ename}: {error.evalue} (traceback in {output})"
        ) from error
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for content in (each.get("data", {}) for cell in code for each in cell.outputs):
        if "image/png" in content:
            content["image/png"] = _with_palette(content["image/png"])
    nbformat.write(notebook, output)
    return "".join(each.get("text", "") for each in code[-1].outputs).strip() if code else ""


def _with_palette(png: str) -> str:
    """The same picture in 256 colours, which the eye does not miss in a figure: a third of the file."""
    from PIL import Image

    written = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        dpi = image.info.get("dpi", (96, 96))
        image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            written, "PNG", optimize=True, dpi=dpi
        )
    return base64.b64encode(written.getvalue()).decode("ascii")


# Each kernel would print that it talks to this process over an unencrypted local socket.
_QUIET_KERNEL = ["--IPKernelApp.log_level=40"]


def refresh_outputs(chapter: Path, *, progress: bool | None = None) -> str:
    """Run a chapter with its own parameters and put the outputs into the source, as they are to be committed.

    Times, versions of tools and papermill's marks are left out, so that the file changes only when a result does.

    Returns, raises: as ``execute``; and ``BookError`` if a cell wrote on stderr (a warning, say), which no page is to
    show. The source is then left as it was.
    """
    import nbformat

    root = repository()
    executed = (root or chapter.parent) / "_build" / "refresh" / chapter.name
    printed = execute(chapter, executed, progress=progress)
    source, result = nbformat.read(chapter, as_version=4), nbformat.read(executed, as_version=4)
    for cell, ran in zip(source.cells, result.cells, strict=True):
        if cell.cell_type == "code":
            for each in ran.outputs:
                if each.get("name") == "stderr":
                    raise BookError(f"{chapter.name}, cell {cell.id} wrote on stderr: {each.text.strip()}")
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
            for each in cell.outputs:
                each.pop("transient", None)
    nbformat.write(source, chapter)
    return printed


def build(
    *, profile: str = "quick", device: str = "auto", strict: bool = False, progress: bool | None = None
) -> tuple[Path, list[str]]:
    """Execute the chapters that changed, and render the book from the executed copies.

    All of it happens in ``_build/``; the sources stay as they are. A chapter is executed again when its cells, the
    package, the stored runs or the parameters have changed.

    Args:
        profile: parameter of the chapters; a page that has none is executed as it is.
        device: likewise.
        strict: whether a warning of the renderer is an error.
        progress: as in ``execute``.

    Returns:
        The path of ``index.html``, and the names of the chapters that were executed.

    Raises:
        BookError: the renderer failed or there are no sources; ValueError, ClaimError: as in ``execute``.
    """
    sources = notebooks()
    root = repository()
    asked = {name: value for name, value in (("profile", profile), ("device", device)) if value != _DEFAULTS[name]}
    check_parameters(**asked)
    with_parameters, executed = chapters(), []
    for chapter in sources:
        parameters = asked if chapter in with_parameters else {}
        output = root / "_build" / "executed" / chapter.name
        key_file, key = output.with_suffix(".key"), _key(root, chapter, parameters)
        if not (output.exists() and key_file.exists() and key_file.read_text() == key):
            key_file.unlink(missing_ok=True)
            execute(chapter, output, parameters, progress=progress)
            key_file.write_text(key)
            executed.append(chapter.stem)
    copy = root / "_build" / "source"
    _mirror(root, copy)
    for chapter in sources:
        _copy_if_changed(root / "_build" / "executed" / chapter.name, copy / "book" / chapter.name)
    _render(root, copy, strict)
    return root / "_build" / "html" / "index.html", executed


_DEFAULTS = {"profile": "quick", "device": "auto"}


def _render(root: Path, source: Path, strict: bool) -> None:
    beside = Path(sys.executable).with_name("jupyter-book")
    program = str(beside) if beside.exists() else shutil.which("jupyter-book")
    if program is None:
        raise BookError("jupyter-book is not installed; `pip install 'gramlin[book]'` brings it")
    command = [program, "build", str(source), "--path-output", str(root), "--quiet"]
    command += ["-W", "-n", "--keep-going"] if strict else []
    finished = subprocess.run(command, capture_output=True, text=True)
    log = (finished.stdout + finished.stderr).strip()
    if finished.returncode:
        raise BookError(f"the book did not render:\n{log}")
    warnings = [line for line in log.splitlines() if "WARNING" in line or "ERROR" in line]
    if warnings:
        print("\n".join(warnings), file=sys.stderr)


def _key(root: Path, chapter: Path, parameters: dict) -> str:
    """What a chapter's outputs depend on, as a hash."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    notebook = json.loads(chapter.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        digest.update(json.dumps([cell["cell_type"], cell["source"], cell["metadata"]], sort_keys=True).encode())
    for path in sorted(
        [*(root / "gramlin").rglob("*.py"), *(root / "results").rglob("*.json"), root / "constraints.txt"]
    ):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _mirror(root: Path, copy: Path) -> None:
    """Make ``copy`` hold the book's sources as they are now, touching only files that changed."""
    wanted = {Path("_config.yml"), Path("_toc.yml")}
    wanted |= {
        path.relative_to(root)
        for path in (root / "book").rglob("*")
        if path.is_file() and ".ipynb_checkpoints" not in path.parts and path.suffix != ".ipynb"
    }
    notebooks = {Path("book") / path.name for path in (root / "book").glob("*.ipynb")}
    for path in copy.rglob("*"):
        if path.is_file() and path.relative_to(copy) not in wanted | notebooks:
            path.unlink()
    for path in wanted:
        _copy_if_changed(root / path, copy / path)


def _copy_if_changed(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
