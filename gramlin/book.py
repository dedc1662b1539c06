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
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from gramlin.catalogue import check_name, image_set_names
from gramlin.results import LEFT_OUT, JsonObject, ResultsStore, write_atomically

if TYPE_CHECKING:
    import nbformat

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
    def store(self) -> ResultsStore:
        """The store in ``results_dir``."""
        return ResultsStore(self.results_dir)


def check_parameters(
    *,
    profile: str = "quick",
    dataset: str = "auto",
    device: str = "auto",
    seeds: object = "0, 1, 2",
    results_dir: str = "auto",
    **classes: object,
) -> Parameters:
    """Check a chapter's parameters, and resolve "auto"; the first thing that a chapter does.

    Args:
        profile: "quick" or "paper".
        dataset: an image set (see ``gramlin data list``) or ``folder:PATH``; "auto" is the embedded
            ``fashion-mnist-mini`` for the quick profile and ``cifar10`` for the paper's.
        device: "auto" (cuda, else cpu), "cpu", "cuda" or "cuda:N".
        seeds: a list of different integers, or a string such as "0, 1, 2".
        results_dir: a folder; "auto" is ``results/`` of the repository, and without one the user's data folder. For
            the paper profile it may be new, and a line says so.
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
    elif isinstance(dataset, str) and dataset.startswith("folder:"):
        _check_image_folder(dataset)
    else:
        check_name(dataset, image_set_names())
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ValueError(f"device is {device!r}; pass 'auto', 'cpu', 'cuda' or 'cuda:N'")
    checked_seeds = _checked_seeds(seeds)
    directory = results_directory(results_dir, may_be_new=profile == "paper")
    numbers = tuple(int(str(value)) for value in classes.values())
    return Parameters(profile, dataset, checked_seeds, _resolved_device(device), directory, numbers)


def results_directory(results_dir: str | os.PathLike[str] = "auto", *, may_be_new: bool = False) -> Path:
    """The folder of finished runs that a parameter means; "auto" as in ``check_parameters``.

    Args:
        results_dir: a path, or "auto", whose folder is made when the first run is saved.
        may_be_new: whether a path may be of a folder to be made, in one that is there; a line is printed then, since a
            misspelt path looks just like it.

    Raises:
        ValueError: there is no such folder, it is a file, or it cannot be looked at.
    """
    advice = "pass the path of a folder, or 'auto'"
    if not isinstance(results_dir, str | os.PathLike) or not str(results_dir):
        raise ValueError(f"results_dir is {results_dir!r}; {advice}")
    if results_dir == "auto":
        return _default_results_directory()
    given = f"results_dir is {str(results_dir)!r}"
    try:
        directory = Path(results_dir).expanduser()
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        if not directory.parent.is_dir():
            raise ValueError(f"{given}, and there is no folder {str(directory.parent)!r}; {advice}") from None
        if not may_be_new:
            raise ValueError(f"{given}, and there is no such folder; {advice}, or make it first") from None
        print(f"{given}, a new folder: runs that are finished will be stored there")
    except (OSError, RuntimeError, ValueError) as error:  # pathlib's, for a home or a text that is none
        raise ValueError(f"{given}, which cannot be looked at ({error}); {advice}") from error
    else:
        if not directory.is_dir():
            raise ValueError(f"{given}, which is a file; {advice}")
    return directory


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


_LARGEST_SEED = 2**53  # what a stored run holds


def _checked_seeds(seeds: object) -> tuple[int, ...]:
    problem = (
        f"seeds is {seeds!r}; pass a list of different integers of at least 0 and at most 2**53, such as [0, 1, 2] or "
        "'0, 1, 2'"
    )
    if isinstance(seeds, str):
        text = seeds.strip()
        text = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
        words = [word.strip() for word in text.split(",")]
        if not all(re.fullmatch(r"[0-9]{1,20}", word) for word in words):
            raise ValueError(problem)
        seeds = [int(word) for word in words]
    elif isinstance(seeds, int):
        seeds = [seeds]
    if not isinstance(seeds, list | tuple) or not seeds:
        raise ValueError(problem)
    if not all(isinstance(seed, Integral) and not isinstance(seed, bool) for seed in seeds):
        raise ValueError(problem)
    if not all(0 <= seed <= _LARGEST_SEED for seed in seeds) or len(set(seeds)) != len(seeds):
        raise ValueError(problem)
    return tuple(int(seed) for seed in seeds)


def _check_image_folder(dataset: str) -> None:
    folder = dataset.removeprefix("folder:")
    if not folder or not os.path.isdir(os.path.expanduser(folder)):
        raise ValueError(
            f"dataset is {dataset!r}, and there is no folder {folder!r}; pass folder:PATH of a tree of images, "
            "PATH/train/CLASS/* and PATH/test/CLASS/*"
        )


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


def _sources() -> Path:
    """The folder of the book's sources; ``BookError`` without them."""
    root = repository()
    if root is None:
        raise BookError(
            "this gramlin was installed without the book's sources; clone its repository and install it with "
            "`make book` or `pip install --editable .[book]`, or give the path of a notebook"
        )
    return root


def notebooks() -> list[Path]:
    """The book's notebooks: the chapters in order, then the pages that sum them up.

    Raises:
        BookError: the package was installed without the book's sources.
    """
    return sorted((_sources() / "book").glob("*.ipynb"))  # chapters begin with their number


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
    if name.endswith(".ipynb") and Path(name).is_dir():
        raise BookError(f"{name} is a folder; pass the path of a notebook in it")
    for path in notebooks():
        number = path.stem.split("_")[0]
        if name in (path.stem, path.name) or (name.isdecimal() and number.isdecimal() and int(name) == int(number)):
            return path
    known = ", ".join(path.stem for path in notebooks())
    raise BookError(f"there is no chapter {name!r}; pass a number, a name or the path of a notebook: {known}")


def execute(chapter: Path, output: Path, parameters: JsonObject | None = None, *, progress: bool | None = None) -> str:
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
    from jupyter_client.kernelspec import NoSuchKernel
    from papermill.exceptions import PapermillExecutionError

    parameters = dict(parameters or {})
    known = _parameters_of(chapter)
    for name in parameters:
        if name not in known:
            raise ValueError(f"{chapter.name} has no parameter {name!r}; it has {', '.join(known) or 'none'}")
    if set(PARAMETERS) <= set(known):
        check_parameters(**parameters)
    _check_output(output, chapter)
    bar = {"desc": chapter.stem, "disable": not (sys.stderr.isatty() if progress is None else progress)}
    try:
        notebook = papermill.execute_notebook(
            str(chapter), str(output), parameters, progress_bar=bar, extra_arguments=_QUIET_KERNEL
        )
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for content in (each.get("data", {}) for cell in code for each in cell.outputs):
            if "image/png" in content:
                content["image/png"] = _with_palette(content["image/png"])
        nbformat.write(notebook, output)  # type: ignore[no-untyped-call]  # nbformat has no annotations
    except PapermillExecutionError as error:
        kind = ClaimError if error.ename == ClaimError.__name__ else BookError
        raise kind(
            f"{chapter.name}, cell {error.exec_count}: {error.ename}: {error.evalue} (traceback in {output})"
        ) from error
    except NoSuchKernel as error:
        raise BookError(
            f"{chapter} asks for the Jupyter kernel {error.name!r}, which is not installed; install it, or set python3 "
            "in the notebook's metadata"
        ) from error
    except OSError as error:
        raise BookError(
            f"{chapter.name}: {output} could not be written ({error}); make room, or pass another file"
        ) from error
    for line in _left_out(code):
        print(line, file=sys.stderr)
    return "".join(each.get("text", "") for each in code[-1].outputs).strip() if code else ""


def _parameters_of(chapter: Path) -> JsonObject:
    """The parameters of a notebook, by name; ``BookError`` if it is none, or none that can be run."""
    import papermill

    def refuse(error: Exception) -> BookError:
        reason = str(error).split("\n", 1)[0]
        return BookError(f"{chapter} is not a Jupyter notebook ({reason})")

    try:
        content = json.loads(chapter.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "nbformat" not in content:
            raise ValueError("it has no nbformat")
        kernel = content["metadata"].get("kernelspec", {}).get("name")
    except OSError as error:
        raise BookError(f"{chapter} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise refuse(error) from error
    if not kernel:
        raise BookError(f"{chapter} names no Jupyter kernel; choose one in Jupyter, and save it")
    try:
        parameters: JsonObject = papermill.inspect_notebook(str(chapter))
    except Exception as error:  # its readers let through whatever a file of another form makes them stumble over
        raise refuse(error) from error
    return parameters


def _check_output(output: Path, chapter: Path) -> None:
    """Make sure that an executed notebook can be written there, before minutes of work."""
    sources = [chapter, *(notebooks() if repository() else [])]
    if output.suffix != ".ipynb":
        raise ValueError(f"the output is {str(output)!r}; pass the path of a notebook, which ends with .ipynb")
    if output.exists() and any(output.samefile(each) for each in sources):
        raise ValueError(f"the output is {output}, a page to be run; pass another file, or --in-place")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "a"):
            pass
    except OSError as error:
        raise BookError(f"{output} cannot be written ({error.strerror}); pass another file for the output") from error


def _left_out(cells: Iterable["nbformat.NotebookNode"]) -> list[str]:
    """The lines of executed cells that say which stored runs were left out, each once."""
    printed = "".join(each.get("text", "") for cell in cells for each in cell.outputs if each.get("name") == "stdout")
    return list(dict.fromkeys(line for line in printed.splitlines() if line.startswith(LEFT_OUT)))


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
    show, or made something without a stored run that is damaged. The source is then left as it was.
    """
    import nbformat

    root = repository()
    if not os.access(chapter.resolve().parent, os.W_OK):
        raise BookError(f"{chapter} cannot be written; pass --output, or change who may write")
    executed = (root or chapter.parent) / "_build" / "refresh" / chapter.name
    printed = execute(chapter, executed, progress=progress)
    source, result = (nbformat.read(path, as_version=4) for path in (chapter, executed))  # type: ignore[no-untyped-call]  # nbformat has no annotations
    for cell, ran in zip(source.cells, result.cells, strict=True):
        if cell.cell_type == "code":
            for each in ran.outputs:
                if each.get("name") == "stderr":
                    raise BookError(f"{chapter.name}, cell {cell.id} wrote on stderr: {each.text.strip()}")
            for line in _left_out([ran]):
                raise BookError(f"{chapter.name}, cell {cell.id} is not kept: {line}")
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
            for each in cell.outputs:
                each.pop("transient", None)
    try:
        text = nbformat.writes(source)  # type: ignore[no-untyped-call]  # nbformat has no annotations
        write_atomically(chapter.resolve(), text.rstrip("\n") + "\n")
    except OSError as error:
        raise BookError(f"{chapter} could not be written, and is as it was ({error.strerror}); make room") from error
    return printed


def build(
    *,
    profile: str = "quick",
    device: str = "auto",
    strict: bool = False,
    stored: bool = False,
    progress: bool | None = None,
) -> tuple[Path, list[str]]:
    """Execute the chapters that changed, and render the book from the executed copies.

    All of it happens in ``_build/``; the sources stay as they are. A chapter is executed again when its cells, the
    package, the stored runs or the parameters have changed.

    Args:
        profile: parameter of the chapters; a page that has none is executed as it is.
        device: likewise.
        strict: whether a warning of the renderer is an error.
        stored: execute nothing, and render the outputs that the notebooks hold.
        progress: as in ``execute``.

    Returns:
        The path of ``index.html``, and the names of the chapters that were executed.

    Raises:
        BookError: the renderer failed or there are no sources.
        ValueError: a parameter beside ``stored``; as in ``execute``.
        ClaimError: as in ``execute``.
    """
    root, sources = _sources(), notebooks()
    asked = {name: value for name, value in (("profile", profile), ("device", device)) if value != _DEFAULTS[name]}
    check_parameters(**asked)
    if stored and asked:
        raise ValueError(f"with stored outputs nothing is executed; leave out {', '.join(asked)}")
    with_parameters, executed = chapters(), []
    for chapter in [] if stored else sources:
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
        outputs = chapter if stored else root / "_build" / "executed" / chapter.name
        _copy_if_changed(outputs, copy / "book" / chapter.name)
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


def _key(root: Path, chapter: Path, parameters: JsonObject) -> str:
    """What a chapter's outputs depend on, as a hash."""
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    notebook = json.loads(chapter.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        digest.update(json.dumps([cell["cell_type"], cell["source"], cell["metadata"]], sort_keys=True).encode())
    for path in sorted(
        [*(root / "gramlin").rglob("*.py"), *(root / "results").rglob("*.json"), root / "constraints.txt"]
    ):
        digest.update(str(path.relative_to(root)).encode() + (path.read_bytes() if path.is_file() else b""))
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
