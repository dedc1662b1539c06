"""Data sets as whole splits of tensors on the device; nothing is loaded a sample at a time.

Images are float32 in [0, 1] of shape (n, C, H, W) with int64 classes (n,); generated sets say what theirs are. Files
are checked before they are read, so that a damaged one gives an error with its name and never wrong data.

Nothing in a file is run: torchvision unpickles CIFAR's batches and unpacks its archives only once their MD5 sums are
right, and arrays kept here are read without pickle.
"""

import hashlib
import importlib.resources
import operator
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramlin.catalogue import CATALOGUE, Entry, check_name, data_directory, expanded, list_datasets
from gramlin.images import DECODING, DataError, decode, list_images, one_line, shown

__all__ = [
    "DataError",
    "Dataset",
    "data_directory",
    "get",
    "list_datasets",
    "load",
    "modular_addition",
    "staircase",
    "standardize",
    "swiss_roll",
]


@dataclass(frozen=True, repr=False)
class Dataset:
    """A data set with its two splits.

    Attributes:
        name: as given to ``load``.
        train_inputs, test_inputs: float32, (n, …).
        train_targets, test_targets: int64 classes (n,), or float32 values (n, K).
        classes: the names of the classes, or None for real-valued targets.
        source, licence: in words.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: tuple[str, ...] | None
    source: str
    licence: str

    @property
    def num_classes(self) -> int:
        """How many classes there are.

        Raises:
            ValueError: the targets are real-valued.
        """
        if self.classes is None:
            raise ValueError(f"{self.name} has real-valued targets and no classes")
        return len(self.classes)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.train_inputs.shape[1:]))
        targets = "real targets" if self.classes is None else f"{len(self.classes)} classes"
        return f"<{self.name}: {len(self.train_inputs)} + {len(self.test_inputs)} inputs of {shape}, {targets}>"


def load(
    name: str,
    *,
    device: str | torch.device = "cpu",
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Load a data set whole, onto a device; nothing is downloaded (see ``get``).

    **Folders of images.** ``folder:PATH`` is a tree PATH/train/CLASS/* and PATH/test/CLASS/* of images (JPEG, PNG,
    TIFF, WebP, BMP, PPM or PGM). The classes are the folders of train, sorted; test may lack some, and folders in them
    are looked through too. Links are followed; hidden files and folders (``.ipynb_checkpoints``, ``__MACOSX``) and
    files that are no images are left out. Images are read as a viewer shows them on a white page: turned as
    their EXIF orientation says, and white where they are transparent. (torchvision's ``ImageFolder`` does neither.)
    There is one channel if all are grey, else three. Grey images of 16 bits keep all their steps, also beside others of
    8 bits; colours of 16 bits are read with 8. CMYK is converted without colour profiles. Images of several pages, or
    of fractional or signed numbers, are refused.

    Decoded images are kept in the data directory until a file of the tree is changed, added or removed. Where nothing
    can be written a warning says so, and they are decoded at each load.

    Args:
        name: one of ``gramlin data list``, or ``folder:PATH``.
        device: where the tensors go.
        data_dir: in place of the data directory.
        image_size: for folders, the side of the square that images are scaled (shorter side, bicubic) and cropped
            (centre) to; without it they must all have one size.

    Raises:
        TypeError: a name that is no string.
        ValueError: an unknown name, a device that is not there, a ``data_dir`` that is no folder, or an ``image_size``
            for a set that is not a folder.
        DataError: files are missing or damaged, or the tree is not what it should be.
    """
    folder = _folder(name)
    place = _checked_device(device)
    if image_size is not None:
        if folder is None and CATALOGUE[name].origin != "folder":
            raise ValueError(f"image_size is for folders of images; leave it out for {name!r}")
        image_size = _whole("image_size", image_size, 1, "the side in pixels, ")
    if folder is not None:
        source = f"the images in {folder}"
        dataset = _load_folder(name, folder, data_directory(data_dir), image_size, source, "as their owner says")
    else:
        entry = CATALOGUE[name]
        if entry.origin == "folder":
            directory = data_directory(data_dir)
            if not os.path.isdir(directory / name):
                raise DataError(_missing(entry, directory))
            dataset = _load_folder(name, directory / name, directory, image_size, entry.source, entry.licence)
        elif entry.origin == "torchvision":
            dataset = _load_torchvision(entry, data_directory(data_dir))
        else:
            dataset = _MADE_HERE[name](entry)
    splits = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    return replace(dataset, **{split: getattr(dataset, split).to(place) for split in splits})


def get(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Download a data set if it is not there, check it, prepare what can be kept, and say so in a line.

    Raises:
        TypeError: a name that is no string.
        ValueError: an unknown name, or a ``data_dir`` that is no folder.
        DataError: it cannot be downloaded from here, the download failed, or what came is damaged.
    """
    if _folder(name) is None:
        entry, directory = CATALOGUE[name], data_directory(data_dir)
        if entry.origin == "torchvision" and not all(os.path.exists(directory / file) for file in entry.files):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for options in _split_options(name):
                    _torchvision_class(name)(directory, download=True, **options)
            except Exception as error:  # torchvision lets through whatever its many servers and formats raise
                raise DataError(f"{name} could not be downloaded into {directory}: {one_line(error)}") from error
    return f"ready: {load(name, data_dir=data_dir)}"


def _folder(name: str) -> Path | None:
    """The path of ``folder:PATH``; None for the name of a set that is known."""
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; pass a string, one of `gramlin data list` or 'folder:PATH'")
    if not name.startswith("folder:"):
        check_name(name)
        return None
    path = name.removeprefix("folder:")
    if not path.strip():
        raise ValueError(f"name is {name!r}, without a path; pass 'folder:PATH', or 'folder:.' for the working folder")
    return expanded("the folder", path)


def _checked_device(device: str | torch.device) -> torch.device:
    """The device, once PyTorch has shown that it can put a tensor there."""
    try:
        chosen = torch.device(device)
        if torch.empty(0, device=chosen).is_meta:
            raise ValueError("a tensor there has no values")
    except Exception as error:  # RuntimeError, AssertionError, TypeError, …: each kind of device has its own
        present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        if torch.backends.mps.is_available():
            present.append("mps")
        raise ValueError(
            f"device is {device!r}, which PyTorch does not have here; it has {', '.join(present)}"
        ) from error
    return chosen


def _whole(name: str, value: int, least: int, advice: str = "") -> int:
    """A whole number of any integer type, NumPy's too."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool) or whole < least:
        raise ValueError(f"{name} is {value!r}; pass {advice}a whole number of at least {least}")
    return whole


def _number(name: str, value: float, least: float, most: float) -> float:
    if not isinstance(value, Real) or not least <= value <= most:  # NaN is not
        raise ValueError(f"{name} is {value!r}; pass a number from {least:g} to {most:g}")
    return float(value)


def standardize(dataset: Dataset) -> Dataset:
    """Shift and scale inputs to mean 0 and variance 1 a channel, both taken over the training split.

    Raises:
        TypeError: what is no ``Dataset``.
        ValueError: a channel that is constant, or that float32 cannot tell from constant.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(f"dataset is a {type(dataset).__name__}; pass what gramlin.data.load returns")
    train = dataset.train_inputs
    axes = [axis for axis in range(train.ndim) if axis != 1]
    mean = train.mean(axes, keepdim=True)
    # By its extremes: the standard deviation of a large constant channel is the rounding of its mean, and not zero.
    constant = train.amax(axes) == train.amin(axes)
    if constant.any():
        raise ValueError(f"a channel of {dataset.name} is constant and cannot be scaled to variance 1")
    std = train.std(axes, keepdim=True)
    return replace(dataset, train_inputs=(train - mean) / std, test_inputs=(dataset.test_inputs - mean) / std)


# ---- Generated and embedded sets ----------------------------------------------------------------------------------


def swiss_roll(n: int, *, turns: float = 1.5, noise: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw points of a rolled-up strip in the plane, and their position along it.

    The angle is uniform on ``turns`` turns from 3π/2 on, and the radius is the angle. The target is the angle: along
    the roll it orders points as the arc length does, and it is what unrolling has to make linear.

    Args:
        n: how many points.
        turns: of the roll, from 0.01 to 1000, within which float32 tells the angles of points apart.
        noise: standard deviation of what is added to both coordinates, in units of theirs; at most a million, which
            leaves nothing of the roll.
        seed: of the draw, 0 or more.

    Returns:
        Points (n, 2), scaled to variance about 1 a coordinate, and angles (n, 1), scaled to mean 0 and variance 1;
        the scales are those of the distribution, not of the draw, so that two draws fit together.

    Raises:
        ValueError: an argument outside its range, or a count that is no whole number.
    """
    n, generator = _whole("n", n, 1), _seeded(seed)
    turns, noise = _number("turns", turns, 0.01, 1000.0), _number("noise", noise, 0.0, 1e6)
    start, length = 1.5 * torch.pi, 2 * torch.pi * turns
    angle = start + length * torch.rand(n, 1, generator=generator)
    points = torch.cat([angle * angle.cos(), angle * angle.sin()], dim=1)
    mean_square_radius = ((start + length) ** 3 - start**3) / (3 * length)
    points = points / (mean_square_radius / 2) ** 0.5 + noise * torch.randn(n, 2, generator=generator)
    return points, (angle - start - length / 2) / (length / 12**0.5)


def staircase(n: int, *, dimension: int = 10, degree: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw inputs uniform on {−1, 1}^d and the staircase x₁ + x₁x₂ + … + x₁⋯x_degree (Abbe and others, 2022).

    Returns:
        Inputs (n, dimension) and targets (n, 1).

    Raises:
        ValueError: a degree outside 1 … dimension, a negative seed, fewer than one input, or what is no whole number.
    """
    n, dimension, generator = _whole("n", n, 1), _whole("dimension", dimension, 1), _seeded(seed)
    if isinstance(degree, bool) or not hasattr(degree, "__index__") or not 1 <= degree <= dimension:
        raise ValueError(f"degree is {degree!r}; pass a whole number from 1 to the dimension, {dimension}")
    inputs = 2.0 * torch.randint(0, 2, (n, dimension), generator=generator) - 1
    return inputs, inputs[:, :degree].cumprod(dim=1).sum(dim=1, keepdim=True)


def modular_addition(modulus: int = 61) -> tuple[Tensor, Tensor]:
    """All pairs (x, y) of residues as two one-hot vectors side by side, with the class x + y mod the modulus.

    Returns:
        Inputs (modulus², 2·modulus) and classes (modulus²,), in lexicographic order.

    Raises:
        ValueError: a modulus that is no whole number of at least 1.
    """
    modulus = _whole("modulus", modulus, 1)
    x, y = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus)).T
    one_hot = torch.nn.functional.one_hot
    return torch.cat([one_hot(x, modulus), one_hot(y, modulus)], dim=1).float(), (x + y) % modulus


def _seeded(seed: int) -> torch.Generator:
    seed = _whole("seed", seed, 0)
    if seed >= 2**64:
        raise ValueError(f"seed is {seed}; pass a whole number below 2**64")
    return torch.Generator().manual_seed(seed)


def _made(
    entry: Entry, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: tuple[str, ...] | None
) -> Dataset:
    return Dataset(entry.name, *train, *test, classes, entry.source, entry.licence)


def _load_modular_addition(entry: Entry) -> Dataset:
    inputs, classes = modular_addition()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, train = order[: entry.test], order[entry.test :]
    names = tuple(map(str, range(61)))
    return _made(entry, (inputs[train], classes[train]), (inputs[test], classes[test]), names)


def _load_digits(entry: Entry) -> Dataset:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, classes, test_size=entry.test, stratify=classes, random_state=0)
    train_x, test_x = (torch.from_numpy(part).float().reshape(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.from_numpy(part).long() for part in parts[2:])
    return _made(entry, (train_x, train_y), (test_x, test_y), tuple(map(str, range(10))))


def _load_embedded_fashion(entry: Entry) -> Dataset:
    resource = importlib.resources.files("gramlin").joinpath("embedded", f"{entry.name}.npz")
    with importlib.resources.as_file(resource) as path:
        arrays = _read_arrays(path, "reinstall gramlin")
    return _images(entry.name, arrays, entry.source, entry.licence)


_MADE_HERE = {
    "fashion-mnist-mini": _load_embedded_fashion,
    "digits": _load_digits,
    "swiss-roll": lambda entry: _made(entry, swiss_roll(entry.train, seed=0), swiss_roll(entry.test, seed=1), None),
    "staircase": lambda entry: _made(entry, staircase(entry.train, seed=0), staircase(entry.test, seed=1), None),
    "modular-addition": _load_modular_addition,
}


# ---- Sets that torchvision knows ----------------------------------------------------------------------------------

# torchvision checks the archives it downloads, not the files it unpacks from these two; these are their MD5 sums.
_IDX_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
_CLASS_NAMES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}


def _torchvision_class(name: str) -> type[Any]:
    import torchvision.datasets

    known: type[Any] = getattr(torchvision.datasets, _CLASS_NAMES[name])
    if name not in _IDX_MD5:
        return known
    # Where processed/*.pt of its old versions are there too, torchvision takes those, whose sums nobody knows.
    return type(known.__name__, (known,), {"_check_legacy_exist": lambda self: False})


def _split_options(name: str) -> tuple[dict[str, str | bool], dict[str, str | bool]]:
    if name == "svhn":
        return {"split": "train"}, {"split": "test"}
    return {"train": True}, {"train": False}


def _md5_sums(entry: Entry, directory: Path) -> dict[Path, str]:
    """The files a set is read from, with their MD5 sums."""
    known = _torchvision_class(entry.name)
    if entry.name in _IDX_MD5:
        sums = _IDX_MD5[entry.name]
    elif entry.name == "svhn":
        sums = {known.split_list[split][1]: known.split_list[split][2] for split in ("train", "test")}
    else:
        sums = dict([*known.train_list, *known.test_list, (known.meta["filename"], known.meta["md5"])])
    return {directory / file: sums[Path(file).name] for file in entry.files}


def _check_sums(entry: Entry, directory: Path) -> None:
    for path, md5 in _md5_sums(entry, directory).items():
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "md5").hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); allow reading, or replace it") from error
        if found != md5:
            size = path.stat().st_size
            raise DataError(
                f"{path} is damaged or half downloaded ({size} bytes, MD5 {found}, not {md5}); delete it and run "
                f"`gramlin data get {entry.name}`"
            )


def _missing(entry: Entry, directory: Path) -> str:
    how = (
        f"run `gramlin data get {entry.name}`"
        if entry.origin == "torchvision"
        else "it cannot be downloaded: put a tree of images there"
    )
    return (
        f"{entry.name} is not in the data directory {directory} (set GRAMLIN_DATA to use another); "
        f"expected {directory / entry.layout}; {how}"
    )


def _load_torchvision(entry: Entry, directory: Path) -> Dataset:
    files = [directory / file for file in entry.files]
    stats = {path: status for path in files if (status := _status(path)) is not None}
    absent = [path for path in files if path not in stats]
    if absent == files:
        raise DataError(_missing(entry, directory))
    if absent:
        raise DataError(
            f"{absent[0]} is missing, though other files of {entry.name} are there; run `gramlin data get {entry.name}`"
        )
    cache = _cache_file(directory, entry.name, [f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in stats.items()])

    def make() -> dict[str, np.ndarray]:
        _check_sums(entry, directory)
        return _torchvision_arrays(entry, directory)

    return _images(entry.name, _kept(cache, make), entry.source, entry.licence)


def _status(path: Path) -> os.stat_result | None:
    """What ``os.stat`` says; None if there is no such file."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be looked at ({error.strerror}); allow reading its folder") from error


def _torchvision_arrays(entry: Entry, directory: Path) -> dict[str, np.ndarray]:
    train, test = (_torchvision_class(entry.name)(directory, **options) for options in _split_options(entry.name))
    arrays = {}
    for split, part in (("train", train), ("test", test)):
        pixels = np.asarray(part.data)
        if entry.name.startswith("cifar"):
            pixels = pixels.transpose(0, 3, 1, 2)
        arrays[f"{split}_inputs"] = pixels.reshape(-1, *entry.shape)
        arrays[f"{split}_targets"] = np.asarray(part.labels if entry.name == "svhn" else part.targets)
    arrays["classes"] = np.array(getattr(train, "classes", [str(digit) for digit in range(10)]))
    return arrays


# ---- Folders of images --------------------------------------------------------------------------------------------


def _load_folder(name: str, tree: Path, directory: Path, image_size: int | None, source: str, licence: str) -> Dataset:
    listed = list_images(tree)
    files = [*listed.files["train"], *listed.files["test"]]
    origin = [
        f"{os.path.realpath(tree)} {image_size} decoding {DECODING}",
        *(f"{file.path} {file.size} {file.modified_ns}" for file in files),
    ]

    def make() -> dict[str, np.ndarray]:
        pixels = decode([file.path for file in files], image_size, tree.name)
        arrays = {"classes": np.array(listed.classes)}
        arrays["train_inputs"], arrays["test_inputs"] = np.split(pixels, [len(listed.files["train"])])
        arrays["train_targets"], arrays["test_targets"] = map(np.array, listed.labels.values())
        return arrays

    cache = _cache_file(directory, os.path.basename(os.path.realpath(tree)), origin)
    return _images(name, _kept(cache, make), source, licence)


# ---- Arrays on disk -----------------------------------------------------------------------------------------------


def _images(name: str, arrays: dict[str, np.ndarray], source: str, licence: str) -> Dataset:
    train, test = (
        (
            torch.from_numpy(arrays[f"{split}_inputs"].astype(np.float32, order="C")).div_(
                np.iinfo(arrays[f"{split}_inputs"].dtype).max
            ),
            torch.from_numpy(arrays[f"{split}_targets"].astype(np.int64)),
        )
        for split in ("train", "test")
    )
    return Dataset(name, *train, *test, tuple(map(str, arrays["classes"])), source, licence)


_CACHE_ADVICE = "delete it, and it is made anew"


def _cache_file(directory: Path, name: str, origin: list[str]) -> Path:
    """Where decoded arrays are kept: another file as soon as an original is added, removed, resized or touched."""
    key = hashlib.sha256("\n".join(origin).encode(errors="surrogateescape")).hexdigest()[:16]
    return directory / "cache" / f"{re.sub(r'[^a-zA-Z0-9.-]+', '-', name)[:100]}-{key}.npz"


def _kept(cache: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays kept in a file; if it is not there they are made, and kept where that can be."""
    if os.path.exists(cache):
        return _read_arrays(cache, _CACHE_ADVICE)
    arrays = make()
    try:
        _write_arrays(cache, arrays)
    except OSError as error:  # a full disk, or a shared folder that may only be read: no reason to do without the data
        warnings.warn(
            f"the decoded images could not be kept in {shown(cache)} ({error.strerror or one_line(error)}) and are "
            "made anew at each load; make room or allow writing there, or set GRAMLIN_DATA to another folder",
            stacklevel=4,
        )
    return arrays


_ARRAYS = {"train_inputs", "train_targets", "test_inputs", "test_targets", "classes"}


def _read_arrays(path: Path, advice: str) -> dict[str, np.ndarray]:
    """Read a .npz file whole, and with it check every member's CRC-32.

    ``np.load(path)`` would not do: zipfile checks a sum at the end of a member, which NumPy does not reach when a
    damaged header claims fewer rows than there are.
    """
    arrays = {}
    try:
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                with file.open(name) as member:
                    arrays[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
                    if member.read():
                        raise ValueError(f"{name} has more bytes than its header says")
    except Exception as error:  # damaged bytes raise whatever zipfile, the decompressors and NumPy come upon
        raise DataError(f"{shown(path)} cannot be read or is damaged ({one_line(error)}); {advice}") from error
    if arrays.keys() != _ARRAYS:
        raise DataError(f"{shown(path)} is damaged (it holds {sorted(arrays)}, not {sorted(_ARRAYS)}); {advice}")
    if not all(_fits(arrays, split) for split in ("train", "test")):
        found = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise DataError(f"{shown(path)} is damaged (its arrays do not fit together: {found}); {advice}")
    return arrays


def _fits(arrays: dict[str, np.ndarray], split: str) -> bool:
    """Whether a split is images of 8 or 16 bits, each with one of the classes."""
    inputs, targets, classes = arrays[f"{split}_inputs"], arrays[f"{split}_targets"], arrays["classes"]
    return bool(
        (inputs.dtype in (np.uint8, np.uint16) and inputs.ndim == 4 and len(inputs) > 0)
        and (targets.dtype.kind in "iu" and targets.shape == (len(inputs),))
        and (classes.dtype.kind == "U" and classes.ndim == 1)
        and (targets.min() >= 0 and targets.max() < len(classes))
    )


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes an array for savez's allow_pickle
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # readable for all who share the folder
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
