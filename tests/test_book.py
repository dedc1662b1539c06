"""Running chapters: parameters are checked first, errors are one line, the book is built without touching sources."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from gramlin import book

ROOT = Path(__file__).parent.parent


def tiny_notebook(path: Path, *cells: str, parameters: str = 'profile = "quick"\nword = "hello"') -> Path:
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    notebook.cells = [first, *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(notebook, path)
    return path


# ---- parameters ----


def test_defaults_are_the_quick_profile_on_embedded_images():
    run = book.check_parameters(device="cpu")
    assert (run.profile, run.dataset, run.seeds, run.paper) == ("quick", "fashion-mnist-mini", (0, 1, 2), False)
    assert run.results_dir == ROOT / "results"


def test_a_chapter_may_have_classes_of_its_own():
    assert book.check_parameters(device="cpu", digit_a=3, digit_b="8").classes == (3, 8)


def test_the_paper_profile_takes_the_papers_data():
    assert book.check_parameters(profile="paper", device="cpu").dataset == "cifar10"


@pytest.mark.parametrize("seeds", [[3, 1], (3, 1), "3,1", "[3, 1]", " 3 , 1 "])
def test_seeds_may_be_a_list_or_words(seeds):
    assert book.check_parameters(seeds=seeds, device="cpu").seeds == (3, 1)


BAD = {
    "profile": ({"profile": "fast"}, "'fast'.*'quick', 'paper'"),
    "dataset": ({"dataset": "fashion_mnist"}, "did you mean 'fashion-mnist'"),
    "not-images": ({"dataset": "swiss-roll"}, "there is no data set 'swiss-roll'"),
    "device": ({"device": "gpu"}, "'gpu'.*'auto', 'cpu', 'cuda'"),
    "absent-device": ({"device": "cuda:77"}, "does not have"),
    "seeds-words": ({"seeds": "a, b"}, "different integers"),
    "seeds-twice": ({"seeds": [1, 1]}, "different integers"),
    "seeds-none": ({"seeds": []}, "different integers"),
    "seeds-float": ({"seeds": [0.5]}, "different integers"),
    "seeds-negative": ({"seeds": [-1]}, "at least 0"),
    "results-file": ({"results_dir": __file__}, "is a file"),
    "class": ({"digit_a": 10}, "digit_a is 10; pass the number of a class, from 0 to 9"),
    "class-digits": ({"digit_b": "12"}, "digit_b is '12'"),
    "class-word": ({"digit_b": "boot"}, "digit_b is 'boot'"),
    "class-none": ({"digit_b": ""}, "digit_b is ''"),
    "results-number": ({"results_dir": 3}, "path of a folder"),
    "results-empty": ({"results_dir": ""}, "path of a folder"),
    "results-none": ({"results_dir": None}, "path of a folder"),
    "results-typo": ({"results_dir": "/typo"}, "results_dir is '/typo', and there is no such folder"),
    "results-typo-above": ({"results_dir": "/no/typo", "profile": "paper"}, "there is no folder '/no'"),
    "results-below-file": ({"results_dir": f"{__file__}/x", "profile": "paper"}, "there is no folder"),
    "results-nobody": ({"results_dir": "~nobody-has-this-name/x"}, "cannot be looked at"),
    "results-null": ({"results_dir": "a\0b"}, "cannot be looked at"),
    "results-surrogate": ({"results_dir": "\ud800"}, "cannot be looked at"),
    "results-long": ({"results_dir": "x" * 300}, "cannot be looked at"),
    "profile-case": ({"profile": "Paper"}, "'Paper'.*'quick', 'paper'"),
    "profile-none": ({"profile": None}, "profile is None"),
    "device-empty": ({"device": ""}, "device is ''"),
    "device-number": ({"device": 0}, "device is 0"),
    "device-apple": ({"device": "mps"}, "device is 'mps'"),
    "dataset-none": ({"dataset": None}, "no data set None"),
    "dataset-empty": ({"dataset": ""}, "no data set ''"),
    "folder-empty": ({"dataset": "folder:"}, "no folder ''; pass folder:PATH"),
    "folder-typo": ({"dataset": "folder:/typo"}, "no folder '/typo'; pass folder:PATH"),
    "class-float": ({"digit_a": 3.0}, "digit_a is 3.0"),
    "class-true": ({"digit_a": True}, "digit_a is True"),
}


NO_SEEDS = [
    "",
    " ",
    "None",
    "True",
    "-1",
    "1e3",
    "3.5",
    "0 1",
    "0,,1",
    "0,1,",
    "[]",
    "[0, 0]",
    "[0, 'a']",
    "[[0]",
    "[0,1)",
]
NO_SEEDS += ["²", "٣", "'0'", "00,0", "9" * 5000, str(2**53 + 1), None, True, False, 1.0, 1e3, -1, 10**30, [], [0, 0]]
NO_SEEDS += [[0, True], [1.0], [[0]], {0}, {0: 1}, ["0"], [None]]


@pytest.mark.parametrize("seeds", NO_SEEDS, ids=lambda seeds: repr(seeds)[:20])
def test_what_are_no_seeds_is_refused_in_one_wording(seeds, unchecked):
    with pytest.raises(ValueError, match=r"seeds is .*; pass a list of different integers of at least 0 and at most"):
        unchecked.book.check_parameters(seeds=seeds, device="cpu")


def test_seeds_may_be_one_and_large():
    for seeds in ("0", 0, [0], "[0]"):
        assert book.check_parameters(seeds=seeds, device="cpu").seeds == (0,)
    assert book.check_parameters(seeds=2**53, device="cpu").seeds == (2**53,)


def test_a_new_folder_of_results_is_for_the_paper_profile_and_said(tmp_path, capsys):
    new = tmp_path / "new ü"
    run = book.check_parameters(profile="paper", results_dir=str(new), device="cpu")
    assert run.results_dir == new
    assert (
        capsys.readouterr().out
        == f"results_dir is {str(new)!r}, a new folder: runs that are finished will be stored there\n"
    )
    assert not new.exists()
    new.mkdir()
    for profile in book.PROFILES:
        assert book.check_parameters(profile=profile, results_dir=str(new), device="cpu").results_dir == new
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_parameter_is_named(case, unchecked):
    parameters, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        unchecked.book.check_parameters(**parameters)


def test_a_wrong_parameter_is_found_before_torch_is_imported():
    code = (
        "import sys; from gramlin import book\n"
        "try: book.check_parameters(profile='fast')\n"
        "except ValueError: print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---- claims ----


def test_claims_print_and_pass(capsys):
    book.claims([("C1", "holds", True), ("C4b", "later", None), ("C5", "who knows", book.UNDECIDED)])
    assert capsys.readouterr().out == "C1   ok      holds\nC4b  not run later\nC5   open    who knows\n"


def test_a_claim_that_does_not_hold_is_printed_and_raised(capsys):
    with pytest.raises(book.ClaimError, match="C2"):
        book.claims([("C1", "holds", True), ("C2", "does not", False)])
    assert "C2   FAILED  does not\n" in capsys.readouterr().out


# ---- running ----


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        (["reproduced", "yes", True], True),
        (["reproduced", "undecided"], book.UNDECIDED),
        (["open", "not decided by one seed"], book.UNDECIDED),
        (["reproduced", "not decided by one seed"], None),
        (["undecided", "not reproduced", None], False),
        ([False, True], False),
        ([], None),
    ],
)
def test_verdicts_agree_only_if_all_do(verdicts, together):
    assert book.agreed(verdicts) is together


def test_an_interval_that_holds_the_bound_does_not_decide():
    assert book.exceeds((0.1, 2.0)) is True
    assert book.exceeds((-3.0, -2.0), -1.0) is False
    assert book.exceeds((-3.0, 0.0), -1.0) is book.UNDECIDED


def test_the_opposite_of_what_is_not_decided_is_not_decided():
    assert [book.opposite(each) for each in (True, "holds", "reproduced")] == [False] * 3
    assert [book.opposite(each) for each in (False, "reversed", "not reproduced")] == [True] * 3
    for open_still in (None, book.UNDECIDED, "not decided by one seed"):
        assert book.opposite(open_still) == open_still


def test_a_chapter_runs_with_parameters_into_another_file(tmp_path):
    chapter = tiny_notebook(tmp_path / "tiny.ipynb", "print(word)")
    before = chapter.read_bytes()
    assert book.execute(chapter, tmp_path / "out" / "tiny.ipynb", {"word": "world"}) == "world"
    assert chapter.read_bytes() == before


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    chapter = tiny_notebook(tmp_path / "tiny.ipynb", "print(word)")
    with pytest.raises(ValueError, match="no parameter 'wrod'; it has profile, word"):
        book.execute(chapter, tmp_path / "out.ipynb", {"wrod": "world"})
    assert not (tmp_path / "out.ipynb").exists()


def test_a_misspelt_parameter_of_plain_papermill_is_refused_by_the_chapter(tmp_path):
    papermill = Path(sys.executable).with_name("papermill")
    done = subprocess.run(
        [
            papermill,
            ROOT / "book" / "01_feature_learning_equation.ipynb",
            tmp_path / "out.ipynb",
            "-p",
            "profil",
            "quick",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert (
        "there is no parameter 'profil'; this chapter has profile, dataset, device, seeds, results_dir" in done.stderr
    )


def test_a_failing_cell_is_named_with_its_reason(tmp_path):
    chapter = tiny_notebook(tmp_path / "tiny.ipynb", "1 / 0")
    with pytest.raises(book.BookError, match=r"tiny\.ipynb, cell 2: ZeroDivisionError: division by zero"):
        book.execute(chapter, tmp_path / "out.ipynb")


def test_a_failing_claim_is_told_from_other_failures(tmp_path):
    chapter = tiny_notebook(tmp_path / "tiny.ipynb", "from gramlin import book; book.claims([('C1', 'text', False)])")
    with pytest.raises(book.ClaimError, match="C1"):
        book.execute(chapter, tmp_path / "out.ipynb")


def test_chapters_are_found_by_number_name_and_path(tmp_path):
    path = ROOT / "book" / "01_feature_learning_equation.ipynb"
    assert [book.find_chapter(name) for name in ("1", "01", path.stem, path.name)] == [path] * 4
    other = tiny_notebook(tmp_path / "mine.ipynb")
    assert book.find_chapter(str(other)) == other
    with pytest.raises(book.BookError, match=r"no chapter '99'.*01_feature_learning_equation"):
        book.find_chapter("99")


# ---- building ----


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of one page and one small chapter, with a renderer that only says that it was called."""
    (tmp_path / "book").mkdir()
    (tmp_path / "gramlin").mkdir()
    (tmp_path / "gramlin" / "code.py").write_text("x = 1")
    (tmp_path / "results").mkdir()
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "_config.yml").write_text("title: small\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/intro\n")
    (tmp_path / "book" / "intro.md").write_text("# Small\n")
    tiny_notebook(tmp_path / "book" / "01_tiny.ipynb", "print(word)")
    monkeypatch.setattr(book, "repository", lambda: tmp_path)
    monkeypatch.setattr(book, "_render", lambda root, source, strict: None)
    return tmp_path


def test_a_build_executes_what_changed_and_nothing_else(small_book):
    assert book.build()[1] == ["01_tiny"]
    assert book.build()[1] == []
    (small_book / "gramlin" / "code.py").write_text("x = 2")
    assert book.build()[1] == ["01_tiny"]
    (small_book / "results" / "demo.json").write_text("{}")
    assert book.build()[1] == ["01_tiny"]
    tiny_notebook(small_book / "book" / "01_tiny.ipynb", "print(word * 2)")
    assert book.build()[1] == ["01_tiny"]
    assert book.build(profile="paper")[1] == ["01_tiny"]


def test_a_build_of_stored_outputs_executes_nothing_and_renders_them(small_book):
    page = small_book / "book" / "01_tiny.ipynb"
    assert book.build(stored=True)[1] == []
    rendered = small_book / "_build" / "source" / "book" / page.name
    assert rendered.read_bytes() == page.read_bytes()
    assert not (small_book / "_build" / "executed").exists()
    book.build()
    assert rendered.read_bytes() != page.read_bytes()  # the executed copy has its outputs
    with pytest.raises(ValueError, match="nothing is executed; leave out profile"):
        book.build(stored=True, profile="paper")


def test_a_page_without_parameters_is_built_in_any_profile(small_book):
    page = small_book / "book" / "guide.ipynb"
    tiny_notebook(page, "print(1)")
    notebook = nbformat.read(page, as_version=4)
    notebook.cells = notebook.cells[1:]
    nbformat.write(notebook, page)
    assert book.build(profile="paper")[1] == ["01_tiny", "guide"]


def test_a_build_leaves_the_sources_alone(small_book):
    before = {path: path.read_bytes() for path in small_book.rglob("*") if path.is_file()}
    book.build()
    after = {path: path.read_bytes() for path in small_book.rglob("*") if path.is_file() and "_build" not in path.parts}
    assert after == before


def test_a_removed_page_leaves_the_copy_too(small_book):
    (small_book / "book" / "extra.md").write_text("# Extra\n")
    book.build()
    (small_book / "book" / "extra.md").unlink()
    book.build()
    copied = {path.name for path in (small_book / "_build" / "source" / "book").iterdir()}
    assert copied == {"intro.md", "01_tiny.ipynb"}


def test_a_failed_execution_is_not_taken_for_done(small_book):
    tiny_notebook(small_book / "book" / "01_tiny.ipynb", "1 / 0")
    for _ in range(2):
        with pytest.raises(book.BookError, match="ZeroDivisionError"):
            book.build()


def test_a_page_with_a_warning_is_not_kept(small_book):
    chapter = small_book / "book" / "01_tiny.ipynb"
    tiny_notebook(chapter, "import warnings\nwarnings.warn('an old way')")
    before = chapter.read_bytes()
    with pytest.raises(book.BookError, match=r"01_tiny.ipynb, cell \S+ wrote on stderr: .*an old way"):
        book.refresh_outputs(chapter)
    assert chapter.read_bytes() == before


def test_a_full_disk_spares_the_page(small_book, monkeypatch):
    chapter = small_book / "book" / "01_tiny.ipynb"
    before = chapter.read_bytes()

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book.os, "fsync", fail)
    with pytest.raises(book.BookError, match=r"could not be written, and is as it was \(No space left on device\)"):
        book.refresh_outputs(chapter)
    assert chapter.read_bytes() == before
    assert [path.name for path in chapter.parent.iterdir() if path.suffix != ".md"] == [chapter.name]


def test_a_folder_among_the_results_does_not_stop_a_build(small_book):
    (small_book / "results" / "demo").mkdir()
    (small_book / "results" / "demo" / "x.json").mkdir()
    assert book.build()[1] == ["01_tiny"]


# ---- the committed notebooks ----


def test_claims_of_the_committed_chapters_are_read():
    assert book.live_claims()["C1"] is True
    assert set(book.live_claims()) >= {"C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8"}


def test_without_the_sources_there_are_no_claims(monkeypatch):
    monkeypatch.setattr(book, "repository", lambda: None)
    assert book.live_claims() == {}


def test_a_claim_counts_as_held_if_all_its_lines_do(small_book):
    printed = "book.claims([('C1', 'a', True), ('C2', 'a', True), ('C2', 'b', None), ('C3', 'a', None)])"
    tiny_notebook(small_book / "book" / "01_tiny.ipynb", "from gramlin import book\n" + printed)
    book.refresh_outputs(small_book / "book" / "01_tiny.ipynb")
    assert book.live_claims() == {"C1": True, "C2": True}


@pytest.mark.parametrize("chapter", book.chapters(), ids=lambda path: path.stem)
class TestCommittedChapter:
    def test_has_the_parameters_and_checks_them_first(self, chapter):
        notebook = nbformat.read(chapter, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code[0].metadata.tags == ["parameters"]
        names = [line.split(" = ")[0] for line in code[0].source.splitlines() if not line.startswith("#")]
        assert tuple(names)[: len(book.PARAMETERS)] == book.PARAMETERS
        assert "check_parameters" in code[1].source

    def test_ends_with_its_claims(self, chapter):
        notebook = nbformat.read(chapter, as_version=4)
        last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
        assert "book.claims(" in last.source
        assert last.metadata.tags == ["nbval-check-output"]
        words = [line.split()[1] for line in last.outputs[0].text.splitlines()]
        assert "ok" in words
        assert set(words) <= {"ok", "not", "open"}  # "not run": some paper-scale runs may be to come

    def test_every_figure_has_a_caption_and_alternative_text(self, chapter):
        for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
            if "plt.show()" in "".join(cell["source"]):
                described = cell["metadata"]["mystnb"]
                assert described["figure"]["caption"]
                assert described["figure"]["name"]
                assert described["image"]["alt"]


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_outputs_are_fit_to_be_committed(notebook):
    text = notebook.read_text(encoding="utf-8")
    notebook = nbformat.read(notebook, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.id for cell in notebook.cells)
    assert "papermill" not in notebook.metadata
    assert str(ROOT) not in text
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert "execution" not in cell.metadata
        assert "papermill" not in cell.metadata
        assert cell.execution_count is not None, f"{cell.id} was not run"
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"{cell.id} printed on stderr"
            assert output.output_type != "error"
            for kind, content in output.get("data", {}).items():
                assert "widget" not in kind
                assert kind != "image/png" or len(content) * 3 / 4 <= 150_000, f"{cell.id}: large figure"
