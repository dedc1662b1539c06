"""The package is a house: what stands on a floor may lean on its own floor and those below, on none above."""

import graphlib

import matplotlib.pyplot as plt
import pytest

from gramlin import book
from gramlin.chapters import all_chapters
from gramlin.layout import FLOORS, chapter_of, floor_of, imported, imports, plot_layout

IMPORTS = imports()
ROOMS = {chapter_of(name) for name in IMPORTS} - {""}


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
        assert floor_of(other) <= floor_of(module), f"gramlin.{module} imports gramlin.{other} from a floor above"


@pytest.mark.parametrize("module", sorted(name for name in IMPORTS if chapter_of(name)))
def test_chapters_do_not_import_one_another(module):
    assert {chapter_of(other) for other in IMPORTS[module]} <= {"", chapter_of(module)}


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


def test_a_module_on_no_floor_is_named():
    with pytest.raises(ValueError, match=r"gramlin\.attic is on no floor; put it on one"):
        floor_of("attic")
    with pytest.raises(ValueError, match="relative import"):
        imported("from . import data")


def test_the_map_has_every_module():
    figure = plot_layout()
    shown = {text.get_text().replace("\n", "_") for text in figure.axes[0].texts}
    plt.close(figure)
    assert {name for name in IMPORTS if "." not in name} | ROOMS | set(FLOORS) <= shown
