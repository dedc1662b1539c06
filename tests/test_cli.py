"""The command line: what it prints, and that every error is one line with status 2."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from gramlin import book
from gramlin.cli import main
from gramlin.results import ResultsStore, Run
from tests.test_book import tiny_notebook


def run(*arguments: str):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_one_line_error(result, words: str, status: int = 2) -> None:
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert words in line


@pytest.fixture
def chapter(tmp_path) -> Path:
    return tiny_notebook(tmp_path / "tiny.ipynb", "print(word)")


def test_run_prints_the_claims_and_where_the_notebook_is(chapter, tmp_path):
    result = run("run", chapter, "-p", "word", "world", "-o", tmp_path / "out.ipynb")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "world"
    assert str(tmp_path / "out.ipynb") in result.stdout.splitlines()[1]
    assert (tmp_path / "out.ipynb").exists()


def test_in_place_keeps_the_outputs_and_adds_nothing_else(chapter):
    import nbformat

    assert run("run", chapter, "--in-place").exit_code == 0
    first = chapter.read_bytes()
    assert nbformat.read(chapter, as_version=4).cells[-1].outputs[0].text == "hello\n"
    assert run("run", chapter, "--in-place").exit_code == 0
    assert chapter.read_bytes() == first


def test_errors_of_run(chapter, tmp_path):
    assert_one_line_error(run("run", "nothing"), "no chapter 'nothing'")
    assert_one_line_error(run("run", chapter, "-p", "wrod", "x"), "no parameter 'wrod'; it has profile, word")
    assert_one_line_error(run("run", "1", "-p", "dataset", "cifar"), "no data set 'cifar'")
    assert_one_line_error(run("run", "1", "--device", "gpu"), "device is 'gpu'")
    assert_one_line_error(run("run", "1", "--profile", "paper", "-p", "profile", "quick"), "profile is given twice")
    assert_one_line_error(run("run", chapter, "--in-place", "-p", "word", "x"), "--in-place")
    assert_one_line_error(run("run", chapter, "-o", chapter), "the chapter itself")
    assert_one_line_error(run("run", tiny_notebook(tmp_path / "bad.ipynb", "1 / 0")), "cell 2: ZeroDivisionError")
    (tmp_path / "text.ipynb").write_text("not json")
    assert_one_line_error(run("run", tmp_path / "text.ipynb"), "not a Jupyter notebook")
    (tmp_path / "file").write_text("")
    assert_one_line_error(run("run", chapter, "-o", tmp_path / "file" / "out.ipynb"), "file")
    assert run("run", "1", "--profile", "slow").exit_code == 2


def test_a_failed_claim_has_a_status_of_its_own(tmp_path):
    failing = tiny_notebook(tmp_path / "claim.ipynb", "from gramlin import book; book.claims([('C1', 'x', False)])")
    assert_one_line_error(run("run", failing, "-o", tmp_path / "out.ipynb"), "C1", status=1)


def test_data_list_names_every_set_and_its_licence():
    result = run("data", "list")
    assert result.exit_code == 0
    for word in ("fashion-mnist-mini", "embedded", "MIT", "cifar10-jpeg", "folder:PATH"):
        assert word in result.stdout


def test_data_path_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path))
    assert run("data", "path").stdout.strip() == str(tmp_path)


def test_data_get_prepares_or_says_why_not(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path))
    assert run("data", "get", "fashion-mnist-mini").stdout.startswith("ready: <fashion-mnist-mini: 10000 + 2000")
    assert_one_line_error(run("data", "get", "mnits"), "did you mean 'mnist'")
    assert_one_line_error(run("data", "get", "cifar10-jpeg"), str(tmp_path))


def test_results_are_listed_and_damage_is_reported(tmp_path):
    assert "no finished runs" in run("results", "--results-dir", tmp_path).stdout
    ResultsStore(tmp_path).save(Run("demo", {"dataset": "digits", "seed": 6}, {}, 4.5, "cpu"))
    path = ResultsStore(tmp_path).save(Run("demo", {"dataset": "digits", "seed": 7}, {}, 12.3, "cpu"))
    listed = run("results", "--results-dir", tmp_path)
    assert listed.exit_code == 0
    assert all(word in listed.stdout for word in ("demo", "digits", "7", "12"))
    path.write_text(path.read_text().replace("12.3", "1.3"))
    damaged = run("results", "--results-dir", tmp_path)
    assert damaged.exit_code == 2
    assert str(path) in damaged.stderr


def test_build_checks_its_parameters_first(monkeypatch):
    monkeypatch.setattr(book, "execute", lambda *_, **__: pytest.fail("a chapter was started"))
    assert_one_line_error(run("build", "--device", "gpu"), "device is 'gpu'")
