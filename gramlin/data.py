"""Data sets as whole splits of tensors on the device; nothing is loaded a sample at a time.

Images are float32 in [0, 1] of shape (n, C, H, W) with int64 classes (n,); generated sets say what theirs are. Files
are checked before they are read, so that a damaged one gives an error with its name and never wrong data.
"""

import hashlib
import importlib.resources
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gramlin.catalogue import CATALOGUE, Entry, check_name, data_directory, list_datasets

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


class DataError(RuntimeError):
    """Data are missing or damaged: the message names the file and says what to do."""


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
    data_dir: str | os.PathLike | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Load a data set whole, onto a device; nothing is downloaded (see ``get``).

    Args:
        name: one of ``gramlin data list``, or ``folder:PATH`` for a tree PATH/train/CLASS/* and PATH/test/CLASS/* of
            images, which is decoded once and kept in the data directory.
        device: where the tensors go.
        data_dir: in place of the data directory.
        image_size: for folders, the side of the square that images are scaled (shorter side) and cropped (centre) to;
            without it they must all have one size.

    Raises:
        ValueError: an unknown name, or an ``image_size`` for a set that is not a folder.
        DataError: files are missing or damaged, or the tree is not what it should be.
    """
    folder = name.removeprefix("folder:") if name.startswith("folder:") else None
    if folder is None:
        check_name(name)
    if image_size is not None:
        if folder is None and CATALOGUE[name].origin != "folder":
            raise ValueError(f"image_size is for folders of images; leave it out for {name!r}")
        if not isinstance(image_size, int) or image_size < 1:
            raise ValueError(f"image_size is {image_size!r}; pass the side in pixels, a whole number of at least 1")
    directory = data_directory(data_dir)
    if folder is not None:
        source = f"the images in {folder}"
        dataset = _load_folder(name, Path(folder).expanduser(), directory, image_size, source, "as their owner says")
    else:
        entry = CATALOGUE[name]
        if entry.origin == "folder":
            tree = directory / name
            if not tree.is_dir():
                raise DataError(_missing(entry, directory))
            dataset = _load_folder(name, tree, directory, image_size, entry.source, entry.licence)
        elif entry.origin == "torchvision":
            dataset = _load_torchvision(entry, directory)
        else:
            dataset = _MADE_HERE[name](entry)
    splits = ("train_inputs", "train_targets", "test_inputs", "test_targets")
    return replace(dataset, **{split: getattr(dataset, split).to(device) for split in splits})


def get(name: str, data_dir: str | os.PathLike | None = None) -> str:
    """Download a data set if it is not there, check it, prepare what can be kept, and say so in a line.

    Raises:
        ValueError: an unknown name.
        DataError: it cannot be downloaded from here, the download failed, or what came is damaged.
    """
    if not name.startswith("folder:"):
        check_name(name)
        entry, directory = CATALOGUE[name], data_directory(data_dir)
        if entry.origin == "torchvision" and not all((directory / file).exists() for file in entry.files):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                for options in _split_options(name):
                    _torchvision_class(name)(directory, download=True, **options)
            except Exception as error:  # torchvision lets through whatever its many servers and formats raise
                raise DataError(f"{name} could not be downloaded into {directory}: {error}") from error
    return f"ready: {load(name, data_dir=data_dir)}"


def standardize(dataset: Dataset) -> Dataset:
    """Shift and scale inputs to mean 0 and variance 1 a channel, both taken over the training split.

    Raises:
        ValueError: a channel that is constant.
    """
    axes = [axis for axis in range(dataset.train_inputs.ndim) if axis != 1]
    mean = dataset.train_inputs.mean(axes, keepdim=True)
    std = dataset.train_inputs.std(axes, keepdim=True)
    if (std == 0).any():
        raise ValueError(f"a channel of {dataset.name} is constant and cannot be scaled to variance 1")
    return replace(
        dataset, train_inputs=(dataset.train_inputs - mean) / std, test_inputs=(dataset.test_inputs - mean) / std
    )


# ---- Generated and embedded sets ----------------------------------------------------------------------------------


def swiss_roll(n: int, *, turns: float = 1.5, noise: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw points of a rolled-up strip in the plane, and their position along it.

    The angle is uniform on ``turns`` turns from 3π/2 on, and the radius is the angle. The target is the angle: along
    the roll it orders points as the arc length does, and it is what unrolling has to make linear.

    Args:
        n: how many points.
        turns: of the roll.
        noise: standard deviation of what is added to both coordinates, in units of theirs.
        seed: of the draw.

    Returns:
        Points (n, 2), scaled to variance about 1 a coordinate, and angles (n, 1), scaled to mean 0 and variance 1;
        the scales are those of the distribution, not of the draw, so that two draws fit together.
    """
    generator = torch.Generator().manual_seed(seed)
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
        ValueError: a degree outside 1 … dimension.
    """
    if not 1 <= degree <= dimension:
        raise ValueError(f"degree is {degree}; pass a whole number from 1 to the dimension, {dimension}")
    generator = torch.Generator().manual_seed(seed)
    inputs = 2.0 * torch.randint(0, 2, (n, dimension), generator=generator) - 1
    return inputs, inputs[:, :degree].cumprod(dim=1).sum(dim=1, keepdim=True)


def modular_addition(modulus: int = 61) -> tuple[Tensor, Tensor]:
    """All pairs (x, y) of residues as two one-hot vectors side by side, with the class x + y mod the modulus.

    Returns:
        Inputs (modulus², 2·modulus) and classes (modulus²,), in lexicographic order.
    """
    x, y = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus)).T
    one_hot = torch.nn.functional.one_hot
    return torch.cat([one_hot(x, modulus), one_hot(y, modulus)], dim=1).float(), (x + y) % modulus


def _made(entry: Entry, train: tuple, test: tuple, classes: tuple[str, ...] | None) -> Dataset:
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


def _torchvision_class(name: str):
    import torchvision.datasets

    return getattr(torchvision.datasets, _CLASS_NAMES[name])


def _split_options(name: str) -> tuple[dict, dict]:
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
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
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
    absent = [path for path in files if not path.exists()]
    if absent == files:
        raise DataError(_missing(entry, directory))
    if absent:
        raise DataError(
            f"{absent[0]} is missing, though other files of {entry.name} are there; run `gramlin data get {entry.name}`"
        )
    stats = {path: path.stat() for path in files}
    cache = _cache_file(directory, entry.name, [f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in stats.items()])
    if not cache.exists():
        _check_sums(entry, directory)
        _write_arrays(cache, _torchvision_arrays(entry, directory))
    return _images(entry.name, _read_arrays(cache, _CACHE_ADVICE), entry.source, entry.licence)


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
    files, labels, classes = {}, {}, {}
    for split in ("train", "test"):
        if not (tree / split).is_dir():
            raise DataError(f"{tree / split} is not a folder; expected {tree}/train/CLASS/* and {tree}/test/CLASS/*")
        classes[split] = sorted(path.name for path in (tree / split).iterdir() if path.is_dir())
        files[split], labels[split] = _image_files(tree / split, classes[split])
    if classes["train"] != classes["test"]:
        odd = sorted(set(classes["train"]) ^ set(classes["test"]))
        raise DataError(f"{tree}: train and test must have the same classes, but {', '.join(odd)} is in one only")
    listing = [f"{file.path} {file.size} {file.modified_ns}" for found in files.values() for file in found]
    cache = _cache_file(directory, tree.resolve().name, [f"{tree.resolve()} {image_size}", *listing])
    if not cache.exists():
        arrays = {"classes": np.array(classes["train"])}
        paths = {split: [Path(file.path) for file in found] for split, found in files.items()}
        pixels = _decode(paths["train"] + paths["test"], image_size, tree.name)
        arrays["train_inputs"], arrays["test_inputs"] = np.split(pixels, [len(paths["train"])])
        arrays["train_targets"], arrays["test_targets"] = (np.array(labels[split]) for split in ("train", "test"))
        _write_arrays(cache, arrays)
    return _images(name, _read_arrays(cache, _CACHE_ADVICE), source, licence)


# What torchvision's ImageFolder takes; importing it for this list would cost more than reading the cache.
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class _ImageFile:
    path: str
    size: int
    modified_ns: int


def _scan(folder: str | Path) -> Iterator[_ImageFile]:
    # os.scandir: a tree of 60,000 images is looked through at each load, and pathlib takes seconds for that.
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _scan(entry.path)
            elif entry.name.lower().endswith(_IMAGE_SUFFIXES):
                stat = entry.stat()
                yield _ImageFile(entry.path, stat.st_size, stat.st_mtime_ns)


def _image_files(folder: Path, classes: Sequence[str]) -> tuple[list[_ImageFile], list[int]]:
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_scan(folder / name), key=lambda file: file.path)
        if not found:
            raise DataError(f"{folder / name} has no images ({', '.join(_IMAGE_SUFFIXES)})")
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{folder} has no folders of images; expected one a class")
    return files, labels


def _open_image(path: Path):
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{path} is not an image that can be read ({error}); replace or delete it") from error


def _is_grey(path: Path) -> bool:
    with _open_image(path) as image:
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{path} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
        return image.mode in ("L", "1")


def _decode(paths: list[Path], image_size: int | None, title: str) -> np.ndarray:
    """Decode images to (n, C, H, W) bytes: one channel if all are grey, else three."""
    grey = all([_is_grey(path) for path in paths])

    def one(path: Path) -> np.ndarray:
        with _open_image(path) as image:
            try:
                pixels = image.convert("L" if grey else "RGB")
            except Exception as error:  # PIL's many decoders raise much besides OSError
                raise DataError(f"{path} is truncated or damaged ({error}); replace or delete it") from error
        if image_size is not None:
            scale = image_size / min(pixels.size)
            size = [max(image_size, round(side * scale)) for side in pixels.size]
            left, top = ((side - image_size) // 2 for side in size)
            pixels = pixels.resize(size).crop((left, top, left + image_size, top + image_size))
        array = np.asarray(pixels)
        return array[None] if grey else array.transpose(2, 0, 1)

    shape = one(paths[0]).shape

    def one_of_that_shape(path: Path) -> np.ndarray:
        image = one(path)
        if image.shape != shape:
            raise DataError(
                f"{path} has {_size(image.shape)} pixels, {paths[0]} {_size(shape)}; pass image_size=… to "
                "scale and crop all images to one size"
            )
        return image

    result = np.empty((len(paths), *shape), dtype=np.uint8)
    with ThreadPoolExecutor() as pool:
        # An error inside the worker, unlike one in this loop, makes map() cancel the images still waiting.
        images = tqdm(
            pool.map(one_of_that_shape, paths), title, len(paths), unit="image", disable=not sys.stderr.isatty()
        )
        for index, image in enumerate(images):
            result[index] = image
    return result


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[2]}×{shape[1]}"


# ---- Arrays on disk -----------------------------------------------------------------------------------------------


def _images(name: str, arrays: dict[str, np.ndarray], source: str, licence: str) -> Dataset:
    train, test = (
        (
            torch.from_numpy(np.ascontiguousarray(arrays[f"{split}_inputs"])).to(torch.float32).div_(255),
            torch.from_numpy(arrays[f"{split}_targets"].astype(np.int64)),
        )
        for split in ("train", "test")
    )
    return Dataset(name, *train, *test, tuple(map(str, arrays["classes"])), source, licence)


_CACHE_ADVICE = "delete it, and it is made anew"


def _cache_file(directory: Path, name: str, origin: list[str]) -> Path:
    """Where decoded arrays are kept: another file as soon as an original is added, removed, resized or touched."""
    key = hashlib.sha256("\n".join(origin).encode(errors="surrogateescape")).hexdigest()[:16]
    return directory / "cache" / f"{re.sub(r'[^a-zA-Z0-9.-]+', '-', name)}-{key}.npz"


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
        raise DataError(f"{path} cannot be read or is damaged ({error}); {advice}") from error
    if arrays.keys() != _ARRAYS:
        raise DataError(f"{path} is damaged (it holds {sorted(arrays)}, not {sorted(_ARRAYS)}); {advice}")
    return arrays


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # readable for all who share the folder
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
