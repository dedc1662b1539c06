"""What a type checker tells a user: nothing of right code, and of each mistake its line."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import gramlin

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "typing"


@pytest.fixture(scope="module")
def complaints(pytestconfig) -> dict[str, list[tuple[int, str, str]]]:
    """Line, code and words of each error of mypy --strict, as a user runs it, by script."""
    given = ["--strict", "--config-file=", "--follow-imports=silent", "--show-error-codes", "--no-pretty"]
    where = ["--no-error-summary", f"--cache-dir={pytestconfig.cache.mkdir('mypy')}"]
    paths = [SCRIPTS / "user.py", SCRIPTS / "mistakes.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *given, *where, *paths], capture_output=True, text=True, cwd=ROOT
    )
    assert not done.stderr
    found = {path.name: [] for path in paths}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(.+?):(\d+): error: (.+)  \[([\w-]+)\]", line)
        if match:
            found[Path(match[1]).name].append((int(match[2]), match[4], match[3]))
        else:
            assert ": note: " in line, line
    return found


def test_right_code_has_no_complaint_and_runs(complaints):
    assert complaints["user.py"] == []
    runpy.run_path(str(SCRIPTS / "user.py"))


def test_a_mistake_has_one_where_it_is(complaints):
    lines = (SCRIPTS / "mistakes.py").read_text().splitlines()
    expected = {
        (number, match[1]) for number, line in enumerate(lines, 1) if (match := re.search(r"# \[(.+)\]$", line))
    }
    assert {(line, code) for line, code, _ in complaints["mistakes.py"]} == expected


def test_names_that_load_on_use_are_those_that_a_checker_sees():
    # A type checker does not run __getattr__, and reads these imports instead.
    tree = ast.parse(Path(gramlin.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        (each.asname, statement.module, each.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for each in statement.names
    }
    modules = {(name, "gramlin", name) for name in gramlin._MODULES}
    assert seen == modules | {(name, f"gramlin.{module}", name) for name, module in gramlin._MODULE_OF.items()}
    assert (Path(gramlin.__file__).parent / "py.typed").exists()
