"""A Sphinx extension for the book's pages, listed in ``_config.yml``.

It puts MathJax among the book's own files, so that pages typeset offline and ask no other host: the files of the
package ``django-static-mathjax``, which is MathJax and nothing of Django's. And in docstrings it turns the labels of
equations into links to them.
"""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sphinx.application

# What a page may load: MathJax itself, its fonts, TeX's rarer commands, and what its menu offers to screen readers.
_PARTS = ("tex-chtml.js", "output/chtml", "input/tex", "a11y", "sre")


def mathjax() -> Path:
    """The folder of MathJax's files.

    Raises:
        ImportError: they are not installed.
    """
    found = importlib.util.find_spec("mathjax")
    # A folder that happens to be called so has no origin.
    folder = found and found.origin and Path(found.origin).parent / "static" / "mathjax" / "es5"
    if not folder or not folder.is_dir():
        raise ImportError("MathJax is not installed; `pip install django-static-mathjax` brings it")
    return folder


def copy_mathjax(app: "sphinx.application.Sphinx", _env: object) -> None:
    """Put MathJax beside the pages, where ``_config.yml`` says it is; files that are there whole are left alone."""
    if app.builder.format != "html":
        return
    target = Path(app.outdir) / "mathjax"
    for part in _PARTS:
        for path in [mathjax() / part] if (mathjax() / part).is_file() else (mathjax() / part).rglob("*"):
            copied = target / path.relative_to(mathjax())
            if path.is_file() and not (copied.exists() and copied.stat().st_size == path.stat().st_size):
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)


def link_equations(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Turn the labels of equations, marked as code in a docstring, into links."""
    lines[:] = [re.sub(r"\(?``(eq:[a-z0-9-]+)``\)?", r":eq:`\1`", line) for line in lines]


def setup(app: "sphinx.application.Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-updated", copy_mathjax)
    app.connect("autodoc-process-docstring", link_equations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
