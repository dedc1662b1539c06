"""The package is a house: what stands on a floor may lean on its own floor and those below, on none above."""

import ast
import graphlib
from pathlib import Path

import pytest

from gramlin import book
from gramlin.chapters import all_chapters

PACKAGE = Path(__file__).parent.parent / "gramlin"

# From the ground up. The one look of the figures stands on nothing; the scorecard reads all chapters, and asks for them
# by name when it is called.
FLOORS = {
    "ground": "catalogue checks data hooks images models moments results stepping",
    "measures": "collapse gram interpolation linearity whitening",
    "applied": "probing training",
    "shared by chapters": "figures chapters chapters.chapter chapters.claims chapters.features chapters.summaries "
    "chapters.sweeps",
    "chapters": "chapters.*",
    "scorecard": "chapters.scorecard",
    "people": "book cli costs pages",
}


def module_name(path: Path) -> str:
    """Its name within the package: "chapters.linearity.tables"; empty for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}
ROOMS = {
    name.split(".")[1] for name, path in MODULES.items() if name.startswith("chapters.") and path.stem == "__init__"
}


def room(module: str) -> str:
    """The chapter whose folder the module is in; empty for one that is in none."""
    _, *parts = module.split(".")
    return parts[0] if parts and parts[0] in ROOMS else ""


def floor(module: str) -> int:
    for height, names in enumerate(FLOORS.values()):
        if module in names.split() or (room(module) and "chapters.*" in names.split()):
            return height
    raise AssertionError(f"gramlin.{module} is on no floor; put it on one")


def imported(source: str) -> set[str]:
    """The package's modules that this source imports, wherever in it; of ``from a import b``, b if it is a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if not {f"{node.module}.{alias.name}".removeprefix("gramlin.") for alias in node.names} <= set(MODULES):
                found.add(node.module)
    names = {name.removeprefix("gramlin.") for name in found if name.startswith("gramlin.")}
    return names & set(MODULES)


IMPORTS = {name: imported(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if name}


def test_what_is_imported_is_found():
    assert imported("from gramlin import data, whiten") == {"data"}
    assert imported("def f():\n    from gramlin.chapters.linearity import figures, tables") == {
        "chapters.linearity.figures",
        "chapters.linearity.tables",
    }
    assert imported("from gramlin.chapters import sweep\nimport gramlin.moments as m") == {"chapters", "moments"}
    assert imported("import torch\nfrom torch import nn") == set()
    assert {"linearity", "moments"} <= IMPORTS["collapse"]


@pytest.mark.parametrize("module", sorted(IMPORTS))
def test_imports_go_down_only(module):
    for other in IMPORTS[module]:
        assert floor(other) <= floor(module), f"gramlin.{module} imports gramlin.{other} from a floor above"


@pytest.mark.parametrize("module", sorted(name for name in IMPORTS if room(name)))
def test_chapters_do_not_import_one_another(module):
    assert {room(other) for other in IMPORTS[module]} <= {"", room(module)}


def test_imports_go_in_no_circle():
    tuple(graphlib.TopologicalSorter(IMPORTS).static_order())


def test_the_floors_name_no_module_that_is_gone():
    assert {name for names in FLOORS.values() for name in names.split()} - {"chapters.*"} <= set(IMPORTS)


def test_every_folder_is_a_chapter_of_the_book_in_its_order():
    numbers = {subject: chapter.number for subject, chapter in all_chapters().items()}
    assert set(numbers) == ROOMS
    assert list(numbers.values()) == [int(path.stem.split("_")[0]) for path in book.chapters()]


def test_chapters_store_their_runs_apart_and_share_no_claim():
    chapters = all_chapters().values()
    assert len({chapter.experiment.name for chapter in chapters}) == len(chapters)
    names = [claim.name for chapter in chapters for claim in chapter.claims]
    assert len(set(names)) == len(names)
