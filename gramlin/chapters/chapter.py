"""What a chapter is to the rest of the package."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gramlin.chapters.claims import Claim
from gramlin.chapters.sweeps import Experiment
from gramlin.results import JsonObject


@dataclass(frozen=True)
class Chapter:
    """What a chapter's folder says of itself, as ``CHAPTER``.

    Attributes:
        number: its place in the book; the name of its notebook begins with it.
        experiment: whose finished runs it stores.
        settings: of these runs at the paper's scale, for a data set and seeds.
        claims: of the paper, those that it puts to the test.
    """

    number: int
    experiment: Experiment
    settings: Callable[[str, Sequence[int]], list[JsonObject]]
    claims: tuple[Claim, ...]


def drawings_of(package: str) -> Callable[[str], object]:
    """A chapter's ``__getattr__``: its drawings on first use, since what measures needs no matplotlib."""

    def find(name: str) -> object:
        if name.startswith("plot_"):
            return getattr(importlib.import_module(f"{package}.figures"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
