"""Trees of images on disk: which files are read, in which order, and as which numbers.

Hidden files and folders are left out, links are followed, and whatever would be read as something else than a viewer
shows is refused by name. Nothing in a file is run: only formats that are decoded in this process are tried.
"""

import os
import stat
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:  # imported where an image is opened
    import PIL.Image

# The rules of decoding: another number, and what was kept under the old rules is decoded anew.
DECODING = 2

# What torchvision's ImageFolder takes; importing it for this list would cost more than reading the cache.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

# What is tried, whatever the suffix: .jpg files of the web are often of another kind. PIL's own list has formats that
# it hands to other programs (PostScript to Ghostscript), which would run what is in the file.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")

# What unpacking an archive from a Mac leaves beside the data; other such names begin with a dot.
_MAC_FOLDER = "__MACOSX"

# EXIF orientations, and what sets such an image upright.
_TURNS = {
    **{2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"},
    **{6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"},
}

# TIFF's tags for the bits of a sample and for what is black, and its value for "0 is white".
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


class DataError(RuntimeError):
    """Data are missing or damaged: the message names the file and says what to do."""


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message of one line: escaped if it has undecodable bytes, line ends or the like."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def one_line(error: BaseException) -> str:
    """What an error says, without its line ends; its kind if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


# ---- Which files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFile:
    """An image's path, bytes and time of its last change."""

    path: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class ImageTree:
    """What a tree PATH/train/CLASS/*, PATH/test/CLASS/* holds.

    Attributes:
        classes: the folders of train, sorted; a class is counted by its place in them, in both splits.
        files: of each split, class by class and sorted.
        labels: the class of each file.
    """

    classes: tuple[str, ...]
    files: dict[str, list[ImageFile]]
    labels: dict[str, list[int]]


def list_images(tree: Path) -> ImageTree:
    """Look through a tree; no image is opened.

    Raises:
        DataError: a split or a class without images, a class that train lacks, an empty file, what cannot be read, and
            links that lead nowhere or to a folder that they lie in.
    """
    folders = {split: _class_folders(tree, split) for split in ("train", "test")}
    classes = tuple(sorted(folders["train"]))
    unknown = sorted(folders["test"].keys() - folders["train"].keys())
    if unknown:
        raise DataError(
            f"{shown(tree)}: test has classes that train lacks, {', '.join(map(shown, unknown))}; add images of them "
            "to train, or delete them"
        )
    files: dict[str, list[ImageFile]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for split, by_name in folders.items():
        top = os.path.realpath(tree / split)
        for label, name in enumerate(classes):
            if name not in by_name:
                continue
            found = sorted(_scan(by_name[name], (top,)), key=lambda file: file.path)
            if not found:
                raise DataError(f"{shown(by_name[name])} has no images ({', '.join(SUFFIXES)}); add some, or delete it")
            files[split] += found
            labels[split] += [label] * len(found)
    return ImageTree(classes, files, labels)


def _class_folders(tree: Path, split: str) -> dict[str, str]:
    folder = tree / split
    if not os.path.isdir(folder):
        raise DataError(
            f"{shown(folder)} is not a folder; expected {shown(tree)}/train/CLASS/* and {shown(tree)}/test/CLASS/*"
        )
    found = {entry.name: entry.path for entry, status in _entries(folder) if stat.S_ISDIR(status.st_mode)}
    if not found:
        raise DataError(f"{shown(folder)} has no folders of images; expected one a class")
    return found


def _entries(folder: str | Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """What is in a folder, and what the links among it lead to; without hidden names."""
    # os.scandir: a tree of 60,000 images is looked through at each load, and pathlib takes seconds for that.
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".") and entry.name != _MAC_FOLDER]
    except OSError as error:
        raise DataError(f"{shown(folder)} cannot be read ({error.strerror}); allow reading, or leave it out") from error
    for entry in found:
        try:
            status = entry.stat()
        except OSError as error:
            what = "is a link that cannot be followed" if entry.is_symlink() else "cannot be read"
            raise DataError(f"{shown(entry.path)} {what} ({error.strerror}); mend or delete it") from error
        yield entry, status


def _scan(folder: str, above: tuple[str, ...]) -> Iterator[ImageFile]:
    """The images below a folder; ``above`` are the real paths of the folders on the way to it."""
    real = os.path.realpath(folder)
    if any(path == real or path.startswith(os.path.join(real, "")) for path in above):
        raise DataError(
            f"{shown(folder)} is a link to {shown(real)}, a folder that it lies in: its images would have no end; "
            "delete the link"
        )
    for entry, status in _entries(folder):
        if stat.S_ISDIR(status.st_mode):
            yield from _scan(entry.path, (*above, real))
        elif entry.name.lower().endswith(SUFFIXES):
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{shown(entry.path)} is a pipe, socket or device and no file; delete it")
            if status.st_size == 0:
                raise DataError(f"{shown(entry.path)} is empty (0 bytes); replace or delete it")
            yield ImageFile(entry.path, status.st_size, status.st_mtime_ns)


# ---- As which numbers ---------------------------------------------------------------------------------------------


def decode(paths: list[str], image_size: int | None, title: str) -> np.ndarray:
    """Decode images to (n, C, H, W): one channel if all are grey, else three; uint16 if one has 16 bits, else uint8.

    Raises:
        DataError: an image that is damaged, too large, not of 8 or 16 bits, of several pages, or of another size.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        kinds = [_look(path) for path in paths]
    grey, deep = all(kind.grey for kind in kinds), any(kind.deep for kind in kinds)

    def one(path: str) -> np.ndarray:
        return _read(path, grey, deep, image_size)

    shape = one(paths[0]).shape

    def one_of_that_shape(path: str) -> np.ndarray:
        image = one(path)
        if image.shape != shape:
            raise DataError(
                f"{shown(path)} has {_size(image.shape)} pixels, {shown(paths[0])} {_size(shape)}; pass image_size=… "
                "to scale and crop all images to one size"
            )
        return image

    result = np.empty((len(paths), *shape), dtype=np.uint16 if deep else np.uint8)
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


@dataclass(frozen=True)
class _Kind:
    grey: bool
    deep: bool  # 16 bits of grey


@contextmanager
def _opened(path: str) -> Iterator["PIL.Image.Image"]:
    """An image of which the header has been read."""
    from PIL import Image, UnidentifiedImageError

    with ExitStack() as stack:
        try:
            # PIL gets a file, not its path: what has a path it may map into memory, and it then mixes up the rows of a
            # TIFF whose orientation lays it on its side; besides, a map of a file that is cut short ends the process.
            file = stack.enter_context(open(path, "rb"))
            image = stack.enter_context(Image.open(file, formats=_FORMATS))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"{shown(path)} is too large ({one_line(error)}); scale it down or delete it, or if you trust it raise "
                "PIL.Image.MAX_IMAGE_PIXELS"
            ) from error
        except UnidentifiedImageError as error:
            raise DataError(
                f"{shown(path)} is not an image of a kind that is read ({', '.join(_FORMATS)}); replace or delete it"
            ) from error
        except Exception as error:  # PIL's many decoders raise much besides OSError
            if isinstance(error, OSError) and error.errno:
                raise DataError(
                    f"{shown(path)} cannot be read ({error.strerror}); allow reading, or mend it"
                ) from error
            raise DataError(
                f"{shown(path)} is not an image that can be read ({one_line(error)}); replace or delete it"
            ) from error
        yield image


def _damaged(path: str, error: Exception) -> DataError:
    return DataError(
        f"{shown(path)} is truncated, damaged or of an unusual kind ({one_line(error)}); replace or delete it"
    )


def _look(path: str) -> _Kind:
    """What kind of image it is, as far as its header says."""
    from PIL.TiffImagePlugin import TiffImageFile

    with _opened(path) as image:
        try:
            pages = getattr(image, "n_frames", 1)
        except Exception as error:
            raise _damaged(path, error) from error
        if pages > 1 and image.format != "MPO":  # a photograph with previews of itself
            raise DataError(f"{shown(path)} has {pages} pages or frames; save each that is meant as a file of its own")
        deep = _is_deep(image)
        bits = image.tag_v2.get(_BITS, (16,)) if deep and isinstance(image, TiffImageFile) else (16,)
        if (not deep and image.mode[0] in "IF") or bits not in ((16,), 16):
            raise DataError(
                f"{shown(path)} has signed, fractional or other numbers than of 8 or 16 bits (mode {image.mode}), and "
                "nothing says which is white; convert it to 8 or 16 bits"
            )
        return _Kind(deep or image.mode in ("1", "L", "LA"), deep)


def _is_deep(image: "PIL.Image.Image") -> bool:
    # PIL's mode for PGM files of 16 bits is "I"; that of other formats may be of 32 bits or signed.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))


def _read(path: str, grey: bool, deep: bool, image_size: int | None) -> np.ndarray:
    """One image (C, H, W), upright, on white where it is transparent, scaled and cropped."""
    with _opened(path) as image:
        try:
            image.load()
            pixels = _deep_pixels(image) if _is_deep(image) else _on_white(image).convert("L" if grey else "RGB")
            pixels = _upright(image, pixels)
        except Exception as error:
            raise _damaged(path, error) from error
    if image_size is not None:
        pixels = _cropped(path, pixels, image_size)
    if pixels.mode == "F":
        array: np.ndarray = np.rint(np.asarray(pixels)).clip(0, 65535).astype(np.uint16)
    else:
        array = np.asarray(pixels)
        if deep:
            array = array * np.uint16(257)  # exact: 255 · 257 = 65535
    if array.ndim == 3:
        return array.transpose(2, 0, 1)
    return array[None] if grey else np.stack([array] * 3)


def _deep_pixels(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """16 bits of grey as PIL's mode F, whose numbers hold them exactly and can be scaled."""
    from PIL import Image
    from PIL.TiffImagePlugin import TiffImageFile

    array = np.asarray(image).astype(np.float32)
    # PIL sees to it in 8 bits only.
    if isinstance(image, TiffImageFile) and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        array = 65535 - array
    clear = image.info.get("transparency")
    if clear is not None:
        array[array == clear] = 65535
    return Image.fromarray(array)


def _on_white(image: "PIL.Image.Image") -> "PIL.Image.Image":
    if not image.has_transparency_data:
        return image
    from PIL import Image

    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def _upright(image: "PIL.Image.Image", pixels: "PIL.Image.Image") -> "PIL.Image.Image":
    from PIL import Image

    try:
        turn = _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:  # a damaged tag turns nothing in viewers either
        turn = None
    return pixels if turn is None else pixels.transpose(getattr(Image.Transpose, turn))


def _cropped(path: str, pixels: "PIL.Image.Image", image_size: int) -> "PIL.Image.Image":
    """The shorter side scaled to ``image_size``, then the middle square."""
    from PIL import Image

    scale = image_size / min(pixels.size)
    size = [max(image_size, round(side * scale)) for side in pixels.size]
    if Image.MAX_IMAGE_PIXELS is not None and size[0] * size[1] > Image.MAX_IMAGE_PIXELS:
        raise DataError(
            f"{shown(path)} has {'×'.join(map(str, pixels.size))} pixels, scaled for image_size={image_size} it would "
            f"have {'×'.join(map(str, size))}; crop it, or pass a smaller image_size"
        )
    left, top = ((side - image_size) // 2 for side in size)
    scaled = pixels.resize(size, Image.Resampling.BICUBIC)
    return scaled.crop((left, top, left + image_size, top + image_size))
