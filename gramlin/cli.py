"""The command line: ``gramlin run``, ``gramlin build``, ``gramlin data``, ``gramlin results``."""

import difflib
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

import gramlin
from gramlin import book, catalogue
from gramlin.results import ResultsStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _UserError(click.ClickException):
    """What the user can mend."""

    exit_code = 2


def _one_line_errors(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """End errors that the user can mend in one line and exit status 2, and failed claims in status 1."""

    @functools.wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except book.ClaimError as error:
            raise click.ClickException(str(error)) from error
        except (ValueError, OSError, RuntimeError, ImportError, ExceptionGroup) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise _UserError(", ".join([str(error), *getattr(error, "__notes__", [])])) from error

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gramlin.__version__, prog_name="gramlin")
def main() -> None:
    """Run the chapters of the gramlin book, build it, and look after its data and results."""


_profile = click.option(
    "--profile",
    type=click.Choice(book.PROFILES),
    default="quick",
    show_default=True,
    help="quick: a minute; paper: hours.",
)
_device = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")


@main.command()
@click.argument("chapter")
@click.option("-p", "--parameter", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter.")
@click.option("--profile", type=click.Choice(book.PROFILES), help="Short for -p profile.")
@click.option("--device", help="Short for -p device: auto, cpu, cuda or cuda:N.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The executed notebook.")
@click.option("--in-place", is_flag=True, help="Run with the defaults and keep the outputs in the chapter itself.")
@_one_line_errors
def run(
    chapter: str,
    parameters: tuple[tuple[str, str], ...],
    profile: str | None,
    device: str | None,
    output: Path | None,
    in_place: bool,
) -> None:
    """Run a CHAPTER (its number, name or path) into a new notebook, and print its claims."""
    values: dict[str, str] = {}
    for name, value in (*parameters, ("profile", profile), ("device", device)):
        if value is not None:
            if values.get(name, value) != value:
                raise ValueError(f"{name} is given twice, as {values[name]!r} and {value!r}; pass it once")
            values[name] = value
    notebook = book.find_chapter(chapter)
    start = time.perf_counter()
    if in_place:
        if values or output:
            raise ValueError("--in-place runs a chapter with its defaults; leave out parameters and --output")
        printed, output = book.refresh_outputs(notebook), notebook
    else:
        output = Path("_build", "runs", notebook.name) if output is None else output
        if output.resolve() == notebook.resolve():
            raise ValueError(f"--output is the chapter itself, {notebook}; pass another file, or --in-place")
        printed = book.execute(notebook, output, values)
    click.echo(printed)
    click.echo(f"{output} ({time.perf_counter() - start:.0f} s)")


@main.command()
@_profile
@_device
@click.option("--strict", is_flag=True, help="Make every warning of the renderer an error.")
@click.option("--stored", is_flag=True, help="Execute nothing; render the outputs that the notebooks hold.")
@_one_line_errors
def build(profile: str, device: str, strict: bool, stored: bool) -> None:
    """Execute the chapters that changed, render the book, and print the path of its first page."""
    page, executed = book.build(profile=profile, device=device, strict=strict, stored=stored)
    click.echo(f"executed: {', '.join(executed) or ('nothing' if stored else 'nothing had changed')}")
    click.echo(page)


@main.command()
@_device
@click.option("--results-dir", default="auto", help="The folder of finished runs.")
@_one_line_errors
def cost(device: str, results_dir: str) -> None:
    """Measure time and memory of each chapter's quick profile, where the store lacks them, and print what it has."""
    from gramlin import costs
    from gramlin.chapters import sweep

    run = book.check_parameters(device=device)
    store = ResultsStore(book.results_directory(results_dir, may_be_new=True))
    sweep(costs.COST, store, costs.cost_settings(run.device), device=run.device, workers=1)
    click.echo(costs.cost_table(store).T.to_string())
    if store.problems():  # the table has named them
        sys.exit(2)


@main.group()
def data() -> None:
    """The data sets: which there are, where they lie, and how to get them."""


@data.command("list")
@_one_line_errors
def list_data() -> None:
    """List the data sets, and which are present."""
    click.echo(_table(catalogue.list_datasets()))
    click.echo("folder:PATH is any tree of images, PATH/train/CLASS/* and PATH/test/CLASS/*.")


@data.command()
@click.argument("name")
@_one_line_errors
def get(name: str) -> None:
    """Download a data set, check it, and make it ready."""
    from gramlin import data as sets

    click.echo(sets.get(name))


@data.command()
@_one_line_errors
def path() -> None:
    """Print the folder that data are read from ($GRAMLIN_DATA, else the user's cache)."""
    click.echo(catalogue.data_directory())


@main.command()
@click.argument("experiment", required=False)
@click.option("--results-dir", default="auto", help="The folder of finished runs.")
@_one_line_errors
def results(experiment: str | None, results_dir: str) -> None:
    """List the finished runs, of one EXPERIMENT or of all, and name damaged files on standard error (status 2)."""
    store = ResultsStore(book.results_directory(results_dir))
    if experiment is not None and experiment not in (known := store.experiments()):
        near = difflib.get_close_matches(experiment, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        there = f"there are runs of {', '.join(known)}" if known else "there are none of any experiment"
        raise ValueError(f"there are no runs of {experiment!r}{hint} in {store.directory}; {there}")
    runs, problems = store.read(experiment)
    # Of the settings, those that tell the runs apart.
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    telling = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
    rows = [
        {
            "experiment": run.experiment,
            **{name: run.settings.get(name, "") for name in dict.fromkeys(["dataset", *telling])},
            "seconds": f"{run.wall_seconds:.0f}",
            "finished": run.finished[:10],
            "commit": run.commit[:8],
            "file": store.path(run.experiment, run.settings).name,
        }
        for run in runs
    ]
    of_it = f" of {experiment}" if experiment else ""
    click.echo(_table(rows) if rows else f"no finished runs{of_it} in {store.directory}")
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(2)


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    import pandas

    text: str = pandas.DataFrame(rows).to_string(index=False)
    return text
