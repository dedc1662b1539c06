"""A Sphinx extension: MathJax from the book's own files, so that pages typeset offline and ask no other host.

``_config.yml`` lists it, and names ``../mathjax/tex-chtml.js``, seen from the static files, as the place of MathJax.
The files are those of the package ``django-static-mathjax``, which is MathJax and nothing of Django's.
"""

import importlib.util
import shutil
from pathlib import Path

# What a page may load: MathJax itself, its fonts, TeX's rarer commands, and what its menu offers to screen readers.
_PARTS = ("tex-chtml.js", "output/chtml", "input/tex", "a11y", "sre")


def source() -> Path:
    """The folder of MathJax's files.

    Raises:
        ImportError: they are not installed.
    """
    found = importlib.util.find_spec("mathjax")
    folder = found and Path(found.origin).parent / "static" / "mathjax" / "es5"
    if not folder or not folder.is_dir():
        raise ImportError("MathJax is not installed; `pip install django-static-mathjax` brings it")
    return folder


def copy(app, _config) -> None:
    """Put MathJax beside the pages; files that are there already are left alone."""
    if app.builder.format != "html":
        return
    target = Path(app.outdir) / "mathjax"
    for part in _PARTS:
        for path in [source() / part] if (source() / part).is_file() else (source() / part).rglob("*"):
            copied = target / path.relative_to(source())
            if path.is_file() and not copied.exists():
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("env-updated", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
