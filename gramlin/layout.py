"""How the package is laid out: floors of modules, drawn from the imports themselves.

What stands on a floor may lean on its own floor and on those below, on none above; a test of the package holds it to
that. A chapter's folder counts as one module here.
"""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure

_PACKAGE = Path(__file__).parent

# From the ground up. The one look of the figures stands on nothing; the scorecard reads all chapters, and asks for them
# by name when it is called. "chapters.*" are the folders of the chapters.
FLOORS = {
    "ground": "catalogue checks data hooks images models moments results stepping",
    "measures": "collapse gram interpolation linearity whitening",
    "applied": "probing training",
    "shared by chapters": "figures chapters chapters.chapter chapters.claims chapters.features chapters.summaries "
    "chapters.sweeps",
    "chapters": "chapters.*",
    "scorecard": "chapters.scorecard",
    "people": "book cli costs layout pages",
}


def module_paths() -> dict[str, Path]:
    """The package's modules by name within it ("chapters.linearity.tables"), and their files."""
    files = {".".join(path.relative_to(_PACKAGE).with_suffix("").parts): path for path in _PACKAGE.rglob("*.py")}
    named = {name.removesuffix("__init__").rstrip("."): path for name, path in files.items()}
    return {name: path for name, path in sorted(named.items()) if name}


def chapter_of(module: str) -> str:
    """The chapter whose folder the module is in; empty for one that is in none."""
    _, *parts = module.split(".")
    return parts[0] if parts and (_PACKAGE / "chapters" / parts[0]).is_dir() else ""


def floor_of(module: str) -> int:
    """The height of a module's floor, 0 for the ground.

    Raises:
        ValueError: it is on none.
    """
    for height, names in enumerate(FLOORS.values()):
        if module in names.split() or (chapter_of(module) and "chapters.*" in names.split()):
            return height
    raise ValueError(f"gramlin.{module} is on no floor; put it on one, in gramlin.layout.FLOORS")


def imported(source: str) -> set[str]:
    """The package's modules that this source imports, wherever in it; of ``from a import b``, b if it is a module.

    Raises:
        ValueError: a relative import.
    """
    modules, found = module_paths(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError("a relative import; name the module in full")
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names
            if not {name.removeprefix("gramlin.") for name in names} <= modules.keys():
                found.add(node.module)
    return {name.removeprefix("gramlin.") for name in found if name.startswith("gramlin.")} & modules.keys()


def imports() -> dict[str, set[str]]:
    """Of each module, those of the package that it imports."""
    return {name: imported(path.read_text(encoding="utf-8")) for name, path in module_paths().items()}


def plot_layout() -> "matplotlib.figure.Figure":
    """Draw the floors with their modules, and a line for each module that another one imports."""
    import matplotlib.pyplot as plt

    boxes: dict[str, tuple[float, float]] = {}
    found = imports()
    for height in range(len(FLOORS)):
        here = sorted({_box(name) for name in found if floor_of(name) == height})
        boxes |= {name: ((place + 0.5) / len(here), height) for place, name in enumerate(here)}
    figure, axes = plt.subplots(figsize=(7.2, 6.4))
    lines = {(_box(name), _box(other)) for name, others in found.items() for other in others}
    for upper, lower in sorted(lines):
        if boxes[upper][1] > boxes[lower][1]:
            axes.plot(*zip(boxes[upper], boxes[lower], strict=True), color="0.75", linewidth=0.6, zorder=1)
    for name, (x, y) in boxes.items():
        shown = name.removeprefix("chapters.").replace("_", "\n") if "." in name else name
        style = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "0.3", "linewidth": 0.8}
        axes.text(x, y, shown, ha="center", va="center", fontsize=7.5, bbox=style, zorder=2)
    for height, title in enumerate(FLOORS):
        axes.axhspan(height - 0.4, height + 0.4, color="0.95" if height % 2 else "0.9", zorder=0)
        axes.text(-0.02, height, title, ha="right", va="center", fontsize=8.5, fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(-0.45, len(FLOORS) - 0.55))
    axes.axis("off")
    return figure


def _box(module: str) -> str:
    return f"chapters.{chapter_of(module)}" if chapter_of(module) else module
