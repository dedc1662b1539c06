"""Folders of images as users have them: every kind of file is read as a viewer shows it, or refused by name."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps

from gramlin import data, images
from tests.test_data import assert_same, make_tree

# Rows and columns differ in number and in values, so that no turn or flip goes unseen.
STEPS = (np.arange(20, dtype=np.uint16) * 3_449 + 5).reshape(4, 5)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """An empty data directory."""
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def tree(tmp_path) -> Path:
    """Two classes, ant and bee, of three grey images each, in both splits."""
    return make_tree(tmp_path / "tree", mode="L")


def one(tree: Path, content: bytes | Image.Image, suffix: str = "png", **options) -> torch.Tensor:
    """The image that a tree's only training image is read as."""
    folder = make_tree(tree, count=1, mode="L", classes=("ant",)) / "train" / "ant"
    (folder / "0.png").unlink()
    path = folder / f"0.{suffix}"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path, **options)
    for name in (tree / "test" / "ant").iterdir():
        name.unlink()
    (tree / "test" / "ant" / path.name).write_bytes(path.read_bytes())
    sets = data.load(f"folder:{tree}")
    assert torch.equal(sets.train_inputs, sets.test_inputs)
    return sets.train_inputs[0]


def refusal(tree: Path, **options) -> str:
    with pytest.raises(data.DataError) as caught:
        data.load(f"folder:{tree}", **options)
    message = str(caught.value)
    assert message.isprintable(), "one line, and nothing that a terminal cannot show"
    return message


def png(width: int, height: int, depth: int, colour: int, rows: bytes, before: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    transparent = chunk(b"tRNS", before) if before else b""
    return b"\x89PNG\r\n\x1a\n" + header + transparent + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_png(array: np.ndarray, colour: int = 0, before: bytes = b"") -> bytes:
    """PNG of 16 bits: grey (colour 0), or RGB (2)."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return png(array.shape[1], array.shape[0], 16, colour, rows, before)


def tiff(array: np.ndarray, *, order: str = "<", photometric: int = 1, bits: int = 0, sign: int = 1) -> bytes:
    """An uncompressed grey TIFF of one strip; photometric 0 for "0 is white", sign 1 unsigned, 2 signed, 3 float."""
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder(order)))
    height, width = array.shape
    tags = [(256, width), (257, height), (258, bits or 8 * array.itemsize), (259, 1), (262, photometric), (273, 0)]
    tags += [(277, 1), (278, height), (279, array.nbytes), (339, sign)]
    start = 8 + 2 + 12 * len(tags) + 4
    short = {"<": "<HHIHH", ">": ">HHIHH"}[order]
    fields = b"".join(struct.pack(short, tag, 3, 1, start if tag == 273 else value, 0) for tag, value in tags)
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HIH", 42, 8, len(tags))
    return head + fields + struct.pack(f"{order}I", 0) + array.tobytes()


def pgm(array: np.ndarray, largest: int) -> bytes:
    return b"P5 %d %d %d\n" % (array.shape[1], array.shape[0], largest) + array.astype(">u2").tobytes()


# ---- Kinds of images ----------------------------------------------------------------------------------------------


def test_cmyk_palette_and_one_bit_are_the_colours_that_a_viewer_shows(tmp_path):
    colours = np.array(
        [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]], [[0, 0, 0], [255, 255, 0]]], np.uint8
    )
    image, expected = Image.fromarray(colours), torch.from_numpy(colours).permute(2, 0, 1) / 255
    assert torch.equal(one(tmp_path / "palette", image.convert("P", palette=Image.Palette.ADAPTIVE)), expected)
    # A JPEG of small blocks of pure colours is far from exact; a TIFF is.
    assert torch.equal(one(tmp_path / "cmyk", image.convert("CMYK"), "tif"), expected)
    plain = Image.new("RGB", (16, 16), (200, 40, 90))
    jpeg = one(tmp_path / "jpeg", plain.convert("CMYK"), "jpg")
    torch.testing.assert_close(jpeg.mean((1, 2)) * 255, torch.tensor([200.0, 40.0, 90.0]), atol=3, rtol=0)
    bits = one(tmp_path / "bits", Image.fromarray(np.eye(3, 4, dtype=np.uint8) * 255).convert("1"))
    assert torch.equal(bits, torch.eye(3, 4)[None])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_and_not_what_lies_under_it(mode, tmp_path):
    # Black ink on a transparent ground: with transparency dropped, all of it is black.
    ink = np.zeros((3, 4, 4), np.uint8)
    ink[1, 2, 3] = 255
    image = Image.fromarray(ink)
    if mode == "P":
        image = Image.fromarray(ink[..., 3] // 255).convert("P")
        image.putpalette([0, 0, 0] * 2)
        read = one(tmp_path / "tree", image, transparency=0)
    else:
        read = one(tmp_path / "tree", image.convert(mode))
    assert read.shape == (1 if mode == "LA" else 3, 3, 4)
    expected = torch.ones(3, 4)
    expected[1, 2] = 0
    assert torch.equal(read, expected.expand_as(read))


def test_half_transparent_is_half_way_to_white_and_opaque_is_exact(tmp_path):
    pixels = np.array([[[100, 0, 255, 128], [3, 77, 254, 255]]], np.uint8)
    read = one(tmp_path / "tree", Image.fromarray(pixels))[:, 0] * 255
    torch.testing.assert_close(read[:, 0], torch.tensor([177.0, 127.0, 255.0]), atol=1, rtol=0)
    assert read[:, 1].round().tolist() == [3, 77, 254]


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_orientation_says(orientation, suffix, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.kron(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40, np.ones((8, 8), np.uint8)))
    path = tmp_path / f"image.{suffix}"
    image.save(path, exif=exif)
    with path.open("rb") as file, Image.open(file) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("L"))
    read = one(tmp_path / "tree", path.read_bytes(), suffix)
    assert np.array_equal(read[0].mul(255).round().numpy().astype(np.uint8), expected)
    assert (expected.shape == (24, 16)) == (orientation > 4)


def test_deep_images_are_turned_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    read = one(tmp_path / "tree", Image.fromarray(STEPS), exif=exif)
    assert np.array_equal(read[0].mul(65535).round().numpy(), np.rot90(STEPS, -1))


def test_a_damaged_orientation_turns_nothing(tmp_path):
    image = Image.fromarray((STEPS // 257).astype(np.uint8))
    read = one(tmp_path / "tree", image, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff")
    assert torch.equal(read[0].mul(255).round(), torch.from_numpy(np.array(image)).float())


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("png", deep_png(STEPS)),
        ("tif", tiff(STEPS)),
        ("tiff", tiff(STEPS, order=">")),
        ("tif", tiff(65535 - STEPS, photometric=0)),
        ("pgm", pgm(STEPS, 65535)),
    ],
)
def test_grey_of_sixteen_bits_keeps_its_steps(suffix, content, tmp_path):
    read = one(tmp_path / "tree", content, suffix)
    assert read.dtype == torch.float32
    assert torch.equal(read, torch.from_numpy(STEPS.astype(np.float32) / 65535)[None])
    assert_same(*(data.load(f"folder:{tmp_path / 'tree'}") for _ in range(2)))  # from the cache, too


def test_twelve_bits_in_a_format_that_says_so_are_of_its_largest_value(tmp_path):
    read = one(tmp_path / "tree", pgm(np.array([[0, 1, 4095]]), 4095), "pgm")
    torch.testing.assert_close(read[0, 0], torch.tensor([0, 1 / 4095, 1]), atol=1 / 65535, rtol=0)


def test_a_transparent_grey_of_sixteen_bits_is_white(tmp_path):
    read = one(tmp_path / "tree", deep_png(STEPS, before=struct.pack(">H", STEPS[2, 3])))
    expected = STEPS.astype(np.float32) / 65535
    expected[2, 3] = 1
    assert torch.equal(read[0], torch.from_numpy(expected))


def test_eight_and_sixteen_bits_in_one_folder_are_both_exact(tree):
    before = data.load(f"folder:{tree}")
    (tree / "test" / "bee" / "2.png").write_bytes(deep_png(STEPS))
    mixed = data.load(f"folder:{tree}")
    assert torch.equal(mixed.train_inputs, before.train_inputs)
    assert torch.equal(mixed.test_inputs[:5], before.test_inputs[:5])
    assert torch.equal(mixed.test_inputs[5, 0], torch.from_numpy(STEPS.astype(np.float32) / 65535))
    Image.fromarray(np.full((4, 5, 3), (10, 20, 30), np.uint8)).save(tree / "train" / "ant" / "0.png")
    coloured = data.load(f"folder:{tree}")
    assert torch.equal(coloured.test_inputs, mixed.test_inputs.expand(-1, 3, -1, -1))
    assert torch.equal(coloured.train_inputs[0, :, 0, 0], torch.tensor([10.0, 20.0, 30.0]) / 255)


def test_colours_of_sixteen_bits_are_read_with_eight(tmp_path):
    colours = np.stack([STEPS, STEPS[::-1], STEPS[:, ::-1]], axis=2)
    read = one(tmp_path / "tree", deep_png(colours, colour=2))
    assert np.array_equal(read.mul(255).round().permute(1, 2, 0).numpy(), colours >> 8)


@pytest.mark.parametrize(
    "content",
    [
        tiff(STEPS.astype(np.int16), sign=2),
        tiff(STEPS.astype(np.uint32)),
        tiff(STEPS.astype(np.float32), sign=3),
        tiff(np.resize(STEPS.astype(np.uint8), (4, 8)), bits=12)[:-2],
    ],
)
def test_numbers_without_a_known_white_are_refused(content, tree):
    path = tree / "train" / "ant" / "1.tif"
    path.write_bytes(content)
    message = refusal(tree)
    assert message.startswith(f"{path} has signed, fractional or other numbers than of 8 or 16 bits")
    assert message.endswith("convert it to 8 or 16 bits")


def test_scaling_sixteen_bits_keeps_steps_order_and_range(tmp_path):
    # A ramp of 64 steps, all within one step of 8 bits, and one from black to white.
    fine = np.tile(np.arange(64, dtype=np.uint16) * 4 + 30_000, (64, 1))
    whole = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    for name, ramp in (("fine", fine), ("whole", whole)):
        tree = make_tree(tmp_path / name, count=1, mode="L")
        for path in tree.rglob("*.png"):
            path.write_bytes(deep_png(ramp))
        row = data.load(f"folder:{tree}", image_size=48).train_inputs[0, 0, 24]
        assert (row.diff() > 0).all()
        assert row.min() >= 0
        assert row.max() <= 1
        reference = np.interp((np.arange(48) + 0.5) * 64 / 48 - 0.5, np.arange(64), ramp[0])[4:-4] / 65535
        # PIL's cubic follows a straight ramp to within 0.03 of a step, beside the rounding to 16 bits.
        tolerance = (0.03 * int(ramp[0, 1] - ramp[0, 0]) + 1.5) / 65535
        torch.testing.assert_close(row[4:-4], torch.from_numpy(reference).float(), atol=tolerance, rtol=0)


def test_scaling_is_the_same_in_eight_and_sixteen_bits_but_for_rounding(tmp_path):
    trees = [make_tree(tmp_path / name, mode="L", size=(30, 20)) for name in ("eight", "sixteen")]
    for path in trees[1].rglob("*.png"):
        path.write_bytes(deep_png(np.asarray(Image.open(path)).astype(np.uint16) * 257))
    eight, sixteen = (data.load(f"folder:{tree}", image_size=9).train_inputs for tree in trees)
    # PIL rounds 8 bits after each of its two passes; bounds on rows and columns clip in both.
    torch.testing.assert_close(eight, sixteen, atol=1.5 / 255, rtol=0)


@pytest.mark.parametrize(("suffix", "options"), [("tif", {}), ("png", {}), ("webp", {"lossless": True})])
def test_images_of_several_pages_are_refused_with_their_number(suffix, options, tree):
    pages = [Image.new("RGB", (5, 4), colour) for colour in ("red", "green", "blue")]
    path = tree / "train" / "bee" / f"pages.{suffix}"
    pages[0].save(path, save_all=True, append_images=pages[1:], **options)
    assert refusal(tree).startswith(f"{path} has 3 pages or frames; save each")


def test_photographs_with_a_preview_are_read(tmp_path):
    photograph, preview = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 255, 0))
    read = one(tmp_path / "tree", photograph, "jpg", format="MPO", save_all=True, append_images=[preview])
    assert read.shape == (3, 8, 8)
    assert read[0].min() > 0.9


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_images_too_large_to_decode_safely_are_named_with_their_pixels(side, tree, root):
    path = tree / "train" / "ant" / "1.png"
    path.write_bytes(png(side, side, 8, 0, b"\0" * 100))
    message = refusal(tree)
    assert message.startswith(f"{path} is too large")
    for part in (f"{side**2} pixels", "scale it down or delete it", "PIL.Image.MAX_IMAGE_PIXELS"):
        assert part in message
    assert not (root / "cache").exists()


def test_an_image_that_scaling_would_blow_up_is_named(tree):
    path = tree / "train" / "ant" / "0.png"
    Image.new("L", (1, 60_000)).save(path)
    message = refusal(tree, image_size=224)
    assert message.startswith(f"{path} has 1×60000 pixels, scaled for image_size=224 it would have 224×13440000; crop")
    assert data.load(f"folder:{tree}", image_size=2).train_inputs.shape == (6, 1, 2, 2)


def test_an_empty_file_is_named(tree):
    path = tree / "test" / "bee" / "0.png"
    path.write_bytes(b"")
    assert refusal(tree) == f"{path} is empty (0 bytes); replace or delete it"


def test_nothing_in_a_file_is_handed_to_another_program(tree, monkeypatch):
    def run(*arguments, **options):
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    path = tree / "train" / "ant" / "1.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n")
    assert refusal(tree).startswith(f"{path} is not an image of a kind that is read (JPEG, PNG,")


# ---- Folders and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".ipynb_checkpoints", ".git", "__MACOSX"])
def test_hidden_folders_are_no_classes_and_hold_no_images(name, tree):
    before = data.load(f"folder:{tree}")
    for folder in (tree / "train", tree / "test" / "ant"):
        (folder / name).mkdir()
        (folder / name / "copy.png").write_bytes((tree / "train" / "ant" / "0.png").read_bytes())
    assert_same(data.load(f"folder:{tree}"), before)


@pytest.mark.parametrize("name", ["._0.jpg", ".DS_Store", ".broken.png", "Thumbs.db", "notes.txt"])
def test_hidden_files_and_those_that_are_no_images_are_left_out(name, tree):
    before = data.load(f"folder:{tree}")
    for folder in (tree, tree / "train", tree / "train" / "ant"):
        (folder / name).write_bytes(b"\0\5\x16\7")
    assert_same(data.load(f"folder:{tree}"), before)


def test_folders_in_a_class_and_links_out_of_the_tree_are_followed(tree, tmp_path):
    before = data.load(f"folder:{tree}")
    (tree / "train" / "bee").rename(tmp_path / "elsewhere")
    (tree / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "sub").mkdir()
    (tmp_path / "elsewhere" / "2.png").rename(tmp_path / "elsewhere" / "sub" / "2.png")
    assert_same(data.load(f"folder:{tree}"), before)


@pytest.mark.parametrize("target", ["tree", "tree/train", "tree/train/ant", "elsewhere"])
@pytest.mark.parametrize("place", ["train", "train/ant"])
def test_a_link_to_a_folder_that_it_lies_in_is_named(target, place, tree, tmp_path):
    link = tree / place / "loop"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "back").symlink_to(tree)
    link.symlink_to(tmp_path / target)
    if (place, target) == ("train", "tree/train/ant"):
        # Another class of the same images is odd, and has an end.
        (tree / "test" / "loop").symlink_to(tree / "test" / "ant")
        assert data.load(f"folder:{tree}").num_classes == 3
        return
    named = link / "back" if target == "elsewhere" else link
    message = refusal(tree)
    assert message.startswith(f"{named} is a link to {tmp_path}/tree")
    assert message.endswith("delete the link")


@pytest.mark.parametrize("target", ["itself", "/nowhere"])
@pytest.mark.parametrize("place", ["train/cow", "test/cow", "train/ant/more", "test/bee/9.png"])
def test_a_link_that_leads_nowhere_is_named(place, target, tree):
    (tree / place).symlink_to((tree / place).name if target == "itself" else target)
    message = refusal(tree)
    assert message.startswith(f"{tree / place} is a link that cannot be followed")
    assert message.endswith("mend or delete it")


def test_a_pipe_with_the_name_of_an_image_is_named_and_not_waited_for(tree):
    path = tree / "train" / "ant" / "stream.png"
    os.mkfifo(path)
    assert refusal(tree).startswith(f"{path} is a pipe")


@pytest.mark.parametrize("where", [".", "train", "train/ant"])
def test_a_file_in_the_place_of_a_folder_is_named(where, tree, tmp_path):
    (tree / where).rename(tmp_path / "elsewhere")
    (tree / where).write_text("not a folder")
    if where == "train/ant":
        assert refusal(tree).startswith(f"{tree}: test has classes that train lacks, ant;")
    else:
        assert refusal(tree).startswith(f"{tree / 'train'} is not a folder; expected {tree}/train/CLASS/*")


def test_a_folder_with_the_name_of_an_image_is_looked_through(tree):
    before = data.load(f"folder:{tree}")
    folder = tree / "train" / "ant" / "2.png"
    content = folder.read_bytes()
    folder.unlink()
    folder.mkdir()
    (folder / "2.png").write_bytes(content)
    assert_same(data.load(f"folder:{tree}"), before)


def test_what_may_not_be_read_is_named(tree, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("bee"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(tree) == f"{tree}/train/bee cannot be read (Permission denied); allow reading, or leave it out"
    monkeypatch.undo()
    monkeypatch.setenv("GRAMLIN_DATA", str(tree.parent / "data"))

    def closed(path, mode):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(images, "open", closed, raising=False)
    assert refusal(tree) == f"{tree}/train/ant/0.png cannot be read (Permission denied); allow reading, or mend it"


@pytest.mark.parametrize("name", ["a nt", "Ameise ü", "蟻", "a,b;c'd"])
def test_names_of_any_letters_are_read(name, tree):
    before = data.load(f"folder:{tree}")
    moved = tree.rename(tree.with_name(f"{name} tree"))
    for split in ("train", "test"):
        (moved / split / "ant").rename(moved / split / name)
        (moved / split / name / "0.png").rename(moved / split / name / f"{name}.PNG")
    sets = data.load(f"folder:{moved}")
    assert set(sets.classes) == {name, "bee"}
    label = sets.classes.index(name)
    assert sets.train_targets.bincount().tolist() == [3, 3]
    order = sets.train_inputs[sets.train_targets == label].flatten(1).sum(dim=1).sort().values
    assert torch.equal(order, before.train_inputs[:3].flatten(1).sum(dim=1).sort().values)


def test_undecodable_names_are_read_and_shown_escaped(tree):
    name = os.fsdecode(b"a\xff\n")
    before = data.load(f"folder:{tree}")
    for split in ("train", "test"):
        try:
            (tree / split / "ant").rename(tree / split / name)
        except OSError:
            pytest.skip("this file system has no such names")
    sets = data.load(f"folder:{tree}")
    assert sets.classes == (name, "bee")
    assert torch.equal(sets.train_inputs, before.train_inputs)
    (tree / "train" / name / "1.png").write_bytes(b"broken")
    assert r"\udcff\n" in refusal(tree)


@pytest.mark.parametrize("suffix", ["PNG", "Png", "JPG", "jPeG", "TIFF"])
def test_suffixes_are_read_in_any_case(suffix, tmp_path):
    assert one(tmp_path / "tree", Image.new("L", (5, 4)), suffix).shape == (1, 4, 5)


# ---- Classes ------------------------------------------------------------------------------------------------------


def test_the_test_split_may_lack_a_class_and_the_others_keep_their_number(tmp_path):
    tree = make_tree(tmp_path / "tree", classes=("ant", "bee", "cow"))
    for path in (tree / "test" / "bee").iterdir():
        path.unlink()
    (tree / "test" / "bee").rmdir()
    sets = data.load(f"folder:{tree}")
    assert sets.classes == ("ant", "bee", "cow")
    assert sets.train_targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sets.test_targets.tolist() == [0, 0, 0, 2, 2, 2]
    assert_same(data.load(f"folder:{tree}"), sets)


def test_a_folder_of_one_class_loads(tmp_path):
    tree = make_tree(tmp_path / "tree", classes=("ant",))
    sets = data.load(f"folder:{tree}")
    assert (sets.classes, sets.num_classes) == (("ant",), 1)
    assert sets.train_targets.tolist() == [0, 0, 0]


# ---- The cache ----------------------------------------------------------------------------------------------------


def test_images_kept_under_other_rules_of_decoding_are_decoded_anew(tree, root, monkeypatch):
    data.load(f"folder:{tree}")
    monkeypatch.setattr(data, "DECODING", images.DECODING + 1)
    data.load(f"folder:{tree}")
    assert len(list((root / "cache").iterdir())) == 2


def test_a_tree_with_a_long_name_is_kept(tmp_path, root):
    data.load(f"folder:{make_tree(tmp_path / ('n' * 250))}")
    assert len(list((root / "cache").iterdir())) == 1
