"""The named data sets: what they are, where they come from, under which terms. Imports nothing heavy."""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A named data set.

    Attributes:
        name: for ``gramlin.data.load``.
        origin: "embedded" (in the package), "generated", "torchvision" (downloaded on request) or "folder".
        shape: of one input; ``train`` and ``test`` are the numbers of samples.
        layout: the files it is read from, below the data directory, with the shell's braces; empty if there are none.
        source, licence: in words.
    """

    name: str
    origin: str
    shape: tuple[int, ...]
    train: int
    test: int
    source: str
    licence: str
    layout: str = ""

    @property
    def is_images(self) -> bool:
        """Whether inputs are images (C, H, W) with integer classes."""
        return len(self.shape) == 3

    @property
    def files(self) -> tuple[str, ...]:
        """The files of ``layout``, one by one; for a folder of images, what its folders are called."""
        paths = [self.layout.split("/CLASS")[0]]
        while any("{" in path for path in paths):
            parts = [re.split(r"\{([^{}]*)\}", path, maxsplit=1) for path in paths]
            paths = [head + word + tail for head, words, tail in parts for word in words.split(",")]
        return tuple(paths) if self.layout else ()


_FASHION = "Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017)"
_TINY = "Krizhevsky (2009), Learning multiple layers of features from tiny images"

CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(
            "fashion-mnist-mini",
            "embedded",
            (1, 28, 28),
            10_000,
            2_000,
            f"the first 1,000 training and 200 test images of each class of {_FASHION}",
            "MIT",
        ),
        Entry(
            "digits",
            "embedded",
            (1, 8, 8),
            1_437,
            360,
            "scikit-learn's copy of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), test part",
            "CC BY 4.0",
        ),
        Entry("swiss-roll", "generated", (2,), 1_000, 1_000, "generated: gramlin.data.swiss_roll", "none needed"),
        Entry("staircase", "generated", (10,), 1_000, 1_000, "generated: gramlin.data.staircase", "none needed"),
        Entry(
            "modular-addition",
            "generated",
            (122,),
            2_605,
            1_116,
            "generated: gramlin.data.modular_addition",
            "none needed",
        ),
        Entry(
            "mnist",
            "torchvision",
            (1, 28, 28),
            60_000,
            10_000,
            "MNIST (LeCun, Cortes and Burges, 1998)",
            "CC BY-SA 3.0",
            "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        ),
        Entry(
            "fashion-mnist",
            "torchvision",
            (1, 28, 28),
            60_000,
            10_000,
            _FASHION,
            "MIT",
            "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        ),
        Entry(
            "cifar10",
            "torchvision",
            (3, 32, 32),
            50_000,
            10_000,
            f"CIFAR-10: {_TINY}",
            "not stated by its authors",
            "cifar-10-batches-py/{data_batch_1,data_batch_2,data_batch_3,data_batch_4,data_batch_5,test_batch,batches.meta}",
        ),
        Entry(
            "cifar100",
            "torchvision",
            (3, 32, 32),
            50_000,
            10_000,
            f"CIFAR-100: {_TINY}",
            "not stated by its authors",
            "cifar-100-python/{train,test,meta}",
        ),
        Entry(
            "svhn",
            "torchvision",
            (3, 32, 32),
            73_257,
            26_032,
            "SVHN (Netzer and others, 2011)",
            "for non-commercial use only, say its authors",
            "{train,test}_32x32.mat",
        ),
        Entry(
            "cifar10-jpeg",
            "folder",
            (3, 32, 32),
            50_000,
            10_000,
            f"CIFAR-10 re-encoded as JPEG: lossy, so figures on it are not figures on CIFAR-10; {_TINY}",
            "not stated by its authors",
            "cifar10-jpeg/{train,test}/CLASS/*.jpg",
        ),
    )
}


def image_set_names() -> list[str]:
    """The names of the image sets, which are what a chapter can be run on."""
    return [entry.name for entry in CATALOGUE.values() if entry.is_images]


def check_name(name: str, known: Iterable[str] = tuple(CATALOGUE)) -> None:
    """Raise ``ValueError`` unless the name is known; the message lists what is, nearest first."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"there is no data set {name!r}{hint}; pass one of {', '.join(known)}, or folder:PATH")


def expanded(name: str, path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` for the user's home.

    Raises:
        ValueError: a home that is not known, under the name by which the caller knows the path.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} is {os.fspath(path)!r}, a home that is not known here; pass a full path") from error


def data_directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder that data are read from: the argument, else ``$GRAMLIN_DATA``, else the user's cache folder.

    It need not exist; an empty ``$GRAMLIN_DATA`` counts as not set.

    Raises:
        ValueError: what is no path, or the path of a file.
    """
    name = "data_dir"
    if data_dir is None:
        name, data_dir = "GRAMLIN_DATA", os.environ.get("GRAMLIN_DATA") or None
    if data_dir is None:
        import platformdirs

        return Path(platformdirs.user_cache_dir("gramlin"))
    if not isinstance(data_dir, str | os.PathLike) or not os.fspath(data_dir):
        raise ValueError(f"{name} is {data_dir!r}; pass the path of a folder, or None for GRAMLIN_DATA")
    directory = expanded(name, data_dir)
    if os.path.exists(directory) and not os.path.isdir(directory):
        advice = "set $GRAMLIN_DATA to a folder, or unset it" if name == "GRAMLIN_DATA" else "pass the path of a folder"
        raise ValueError(f"the folder of data, {directory}, is a file; {advice}")
    return directory


def list_datasets(data_dir: str | os.PathLike[str] | None = None) -> list[dict[str, str | int]]:
    """The named data sets, a dictionary each: name, sizes, licence, and whether it is present; reads no data."""
    directory = data_directory(data_dir)

    def present(entry: Entry) -> str:
        if entry.origin in ("embedded", "generated"):
            return entry.origin
        return "yes" if all(os.path.exists(directory / file) for file in entry.files) else "no"

    return [
        {
            "name": entry.name,
            "inputs": "×".join(map(str, entry.shape)),
            "train": entry.train,
            "test": entry.test,
            "present": present(entry),
            "licence": entry.licence,
        }
        for entry in CATALOGUE.values()
    ]
