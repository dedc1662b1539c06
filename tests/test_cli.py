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
    assert "digits-6-" in damaged.stdout, "one damaged file hides the others"
    assert path.name not in damaged.stdout
    assert run("results", "demo", "--results-dir", tmp_path).exit_code == 2
    ResultsStore(tmp_path).save(Run("other", {"seed": 0}, {}, 1.0, "cpu"))
    assert run("results", "other", "--results-dir", tmp_path).exit_code == 0


def test_results_of_what_is_not_there(tmp_path):
    ResultsStore(tmp_path).save(Run("gram-shift", {"seed": 0}, {}, 4.5, "cpu"))
    for name in ("gram-shfit", "*", "../gram-shift", "/etc", "["):
        assert_one_line_error(run("results", name, "--results-dir", tmp_path), "there are runs of gram-shift")
    assert_one_line_error(run("results", "gram-shfit", "--results-dir", tmp_path), "did you mean 'gram-shift'?")
    (tmp_path / "empty").mkdir()
    assert_one_line_error(run("results", "demo", "--results-dir", tmp_path / "empty"), "none of any experiment")
    assert_one_line_error(run("results", "--results-dir", tmp_path / "typo"), f"'{tmp_path / 'typo'}', and there is no")
    assert_one_line_error(run("results", "--results-dir", tmp_path / "no" / "typo"), "there is no folder")
    (tmp_path / "file").write_text("")
    assert_one_line_error(run("results", "--results-dir", tmp_path / "file"), "is a file")
    assert_one_line_error(run("results", "--results-dir", ""), "pass the path of a folder, or 'auto'")
    assert_one_line_error(run("cost", "--results-dir", tmp_path / "no" / "typo"), "there is no folder")


def test_a_page_made_without_a_damaged_run_says_so_and_so_does_the_command(tmp_path):
    path = ResultsStore(tmp_path).save(Run("demo", {"seed": 0}, {}, 1.0, "cpu"))
    path.write_text("{}")
    cell = f"from gramlin import book; print(book.check_parameters(results_dir={str(tmp_path)!r}).store.runs('demo'))"
    page = tiny_notebook(tmp_path / "page.ipynb", cell)
    before = page.read_bytes()
    result = run("run", page, "-o", tmp_path / "out.ipynb")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"left out: {path} ")
    assert f"left out: {path} " in (tmp_path / "out.ipynb").read_text()
    assert_one_line_error(run("run", page, "--in-place"), f"is not kept: left out: {path} ")
    assert page.read_bytes() == before


def test_errors_of_notebooks(tmp_path):
    for name, content in {
        "list": b"[1]",
        "bytes": b"\xff\xfe",
        "empty": b"",
        "object": b"{}",
        "deep": b"[" * 9999,
    }.items():
        path = tmp_path / f"{name}.ipynb"
        path.write_bytes(content)
        assert_one_line_error(run("run", path), f"{path} is not a Jupyter notebook (")
    page = tiny_notebook(tmp_path / "page.ipynb", "print(1)")
    text = page.read_text()
    page.write_text(text.replace('"kernelspec"', '"no kernel"'))
    assert_one_line_error(run("run", page), "names no Jupyter kernel")
    page.write_text(text.replace('"name": "python3"', '"name": "julia-9"'))
    assert_one_line_error(run("run", page, "-o", tmp_path / "out.ipynb"), "asks for the Jupyter kernel 'julia-9'")
    (tmp_path / "folder.ipynb").mkdir()
    assert_one_line_error(run("run", tmp_path / "folder.ipynb"), "is a folder")
    assert_one_line_error(run("run", tmp_path / "none.ipynb"), "pass a number, a name or the path of a notebook")
    assert_one_line_error(run("run", "²"), "there is no chapter '²'")


def test_errors_of_the_output(chapter, tmp_path):
    before = chapter.read_bytes()
    for output in ("", "out.txt", "results.json"):
        assert_one_line_error(run("run", chapter, "-o", output), "which ends with .ipynb")
    (tmp_path / "link.ipynb").hardlink_to(chapter)
    assert_one_line_error(run("run", chapter, "-o", tmp_path / "link.ipynb"), "pass another file")
    other = book.find_chapter("2")
    assert_one_line_error(run("run", chapter, "-o", other), "pass another file")
    assert run("run", chapter, "-o", tmp_path).exit_code == 2
    assert_one_line_error(run("run", chapter, "-o", "/dev/null/x/out.ipynb"), "cannot be written")
    assert chapter.read_bytes() == before
    new = tmp_path / "new folder ü" / "a name.ipynb"
    assert run("run", chapter, "-p", "word", 'it\'s "quoted" \\ ☃', "-o", new).stdout.startswith(
        'it\'s "quoted" \\ ☃\n'
    )
    assert new.exists()


def test_a_parameter_given_twice_is_refused(chapter):
    twice = run("run", chapter, "-p", "word", "a", "-p", "word", "b")
    assert_one_line_error(twice, "word is given twice, as 'a' and 'b'")


def test_several_failures_and_their_notes_are_one_line(monkeypatch):
    def fail(**_):
        raise ExceptionGroup("2 of 5 runs of cost failed", [ValueError("a"), ValueError("b")])

    monkeypatch.setattr(book, "check_parameters", fail)
    assert_one_line_error(run("cost"), "2 of 5 runs of cost failed")


def test_a_data_folder_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path / "file"))
    for command in (["path"], ["list"], ["get", "digits"]):
        assert_one_line_error(run("data", *command), "is a file; set $GRAMLIN_DATA to a folder")


def test_build_checks_its_parameters_first(monkeypatch):
    monkeypatch.setattr(book, "execute", lambda *_, **__: pytest.fail("a chapter was started"))
    assert_one_line_error(run("build", "--device", "gpu"), "device is 'gpu'")
