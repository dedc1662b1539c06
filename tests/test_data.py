"""The data sets: what they hold, and that missing or damaged files are named and never read as wrong data."""

import errno
import hashlib
import importlib.util
import io
import os
import pickle
import resource
import struct
import tarfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from gramlin import data

SPLITS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty data directory, which is also where the environment points."""
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def make_tree(tree: Path, *, mode="RGB", suffix="png", size=(5, 4), count=3, classes=("ant", "bee")) -> Path:
    """Write a tree of random images, (width, height) pixels each, of one seed."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in classes:
            (tree / split / name).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
                pixels = generator.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(tree / split / name / f"{index}.{suffix}")
    return tree


def only_cache(root: Path) -> Path:
    (path,) = (root / "cache").iterdir()
    return path


def assert_same(first, second) -> None:
    for split in SPLITS:
        assert torch.equal(getattr(first, split), getattr(second, split))
    assert first.classes == second.classes


def forbid_decoding(monkeypatch) -> None:
    def refuse(*arguments, **options):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)


# ---- The embedded sets --------------------------------------------------------------------------------------------


def test_embedded_fashion_is_balanced_images_of_ten_classes(root):
    sets = data.load("fashion-mnist-mini")
    assert sets.train_inputs.shape == (10_000, 1, 28, 28)
    assert sets.test_inputs.shape == (2_000, 1, 28, 28)
    assert sets.train_targets.bincount().tolist() == [1_000] * 10
    assert sets.test_targets.bincount().tolist() == [200] * 10
    for inputs, targets in ((sets.train_inputs, sets.train_targets), (sets.test_inputs, sets.test_targets)):
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.int64
        assert (inputs.min(), inputs.max()) == (0, 1)
    assert sets.num_classes == len(sets.classes) == 10
    assert sets.classes[9] == "Ankle boot"
    assert sets.licence == "MIT"
    assert not root.exists(), "an embedded set needs no data directory"


def test_embedded_fashion_comes_with_its_licence():
    text = Path(data.__file__).with_name("embedded").joinpath("LICENSE-fashion-mnist").read_text()
    for part in ("MIT", "2017 Zalando SE", "WITHOUT WARRANTY OF ANY KIND", "shall be included in all copies"):
        assert part in text


def test_embedded_fashion_is_the_first_of_each_class_of_the_full_set():
    full = full_set("fashion-mnist")
    mini = data.load("fashion-mnist-mini")
    for split, count in (("train", 1_000), ("test", 200)):
        seen, chosen = Counter(), []
        for index, label in enumerate(getattr(full, f"{split}_targets").tolist()):
            seen[label] += 1
            if seen[label] <= count:
                chosen.append(index)
        assert torch.equal(getattr(mini, f"{split}_inputs"), getattr(full, f"{split}_inputs")[chosen])
        assert torch.equal(getattr(mini, f"{split}_targets"), getattr(full, f"{split}_targets")[chosen])
    assert mini.classes == full.classes


def test_embedding_keeps_the_first_of_each_class_and_gives_the_same_bytes_each_time(tmp_path, monkeypatch):
    path = Path(__file__).parent.parent / "scripts" / "embed_fashion_mnist.py"
    spec = importlib.util.spec_from_file_location("embed_fashion_mnist", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3_000, 1, 2, 3), generator=generator)
    labels = torch.arange(3_000) % 10
    full = data.Dataset("full", pixels / 255, labels, pixels / 255, labels, tuple("abcdefghij"), "random", "none")
    monkeypatch.setattr(script.data, "load", lambda name: full)
    made = []
    for name in ("one", "two"):
        monkeypatch.setattr(script, "TARGET", tmp_path / name / "set.npz")
        script.main()
        made.append(script.TARGET.read_bytes())
    assert made[0] == made[1]
    with zipfile.ZipFile(script.TARGET) as file:
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    arrays = np.load(script.TARGET)
    assert np.array_equal(arrays["test_inputs"], pixels[:2_000].numpy())
    assert np.array_equal(arrays["train_targets"], labels.numpy())
    assert arrays["train_inputs"].dtype == np.uint8


def test_a_damaged_embedded_file_is_named_by_the_error(tmp_path):
    whole = Path(data.__file__).with_name("embedded").joinpath("fashion-mnist-mini.npz").read_bytes()
    path = tmp_path / "copy.npz"
    for content in (flipped(whole, len(whole) // 3), flipped(whole, 200), whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        with pytest.raises(data.DataError, match=r"copy\.npz.*reinstall"):
            data._read_arrays(path, "reinstall gramlin")


def test_digits_keep_every_class_in_proportion_and_every_image_once():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    sets = data.load("digits")
    assert sets.train_inputs.shape == (1_437, 1, 8, 8)
    assert sets.test_inputs.shape == (360, 1, 8, 8)
    shares = sets.test_targets.bincount() / torch.from_numpy(labels).bincount()
    assert (shares - 360 / 1_797).abs().max() < 0.01
    ours = torch.cat([sets.train_inputs, sets.test_inputs]).reshape(-1, 64).mul(16).numpy()
    theirs = Counter((*row, label) for row, label in zip(pixels.tolist(), labels.tolist(), strict=True))
    classes = torch.cat([sets.train_targets, sets.test_targets]).tolist()
    assert Counter((*row, label) for row, label in zip(ours.tolist(), classes, strict=True)) == theirs


@pytest.mark.parametrize("name", ["digits", "swiss-roll", "staircase", "modular-addition"])
def test_loading_twice_gives_the_same_values(name):
    assert_same(data.load(name), data.load(name))


# ---- The generators -----------------------------------------------------------------------------------------------


def test_swiss_roll_radius_rises_with_the_target():
    points, target = data.swiss_roll(500, noise=0.0, seed=3)
    radius = points.norm(dim=1)[target.squeeze(1).argsort()]
    assert (radius.diff() > -1e-6).all()
    shuffled = target[torch.randperm(500, generator=torch.Generator().manual_seed(0))]
    assert not (points.norm(dim=1)[shuffled.squeeze(1).argsort()].diff() > -1e-6).all()


def test_swiss_roll_target_is_the_angle_of_the_points():
    turns = 1.25
    points, target = data.swiss_roll(300, turns=turns)
    angle = 1.5 * torch.pi + 2 * torch.pi * turns * (0.5 + target.squeeze(1) / 12**0.5)
    direction = torch.stack([angle.cos(), angle.sin()], dim=1)
    torch.testing.assert_close(points / points.norm(dim=1, keepdim=True), direction, atol=1e-4, rtol=0)


def test_swiss_roll_has_scale_one_and_shapes_of_a_plane_and_a_line():
    points, target = data.swiss_roll(20_000)
    assert (points.shape, target.shape) == ((20_000, 2), (20_000, 1))
    assert points.square().mean().item() == pytest.approx(1, abs=0.02)
    assert target.mean().item() == pytest.approx(0, abs=0.02)
    assert target.std().item() == pytest.approx(1, abs=0.02)


def test_swiss_roll_noise_moves_points_by_its_standard_deviation_and_leaves_the_target():
    clean, target = data.swiss_roll(5_000, seed=1)
    noisy, same_target = data.swiss_roll(5_000, noise=0.25, seed=1)
    assert torch.equal(target, same_target)
    assert (noisy - clean).std().item() == pytest.approx(0.25, rel=0.03)


def test_generators_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = data.swiss_roll(10, seed=7)[0], data.staircase(10, seed=7)[0]
    state = torch.random.get_rng_state()
    second = data.swiss_roll(10, seed=7)[0], data.staircase(10, seed=7)[0]
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left alone"
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(data.swiss_roll(10, seed=8)[0], first[0])
    assert not torch.equal(data.staircase(10, seed=8)[0], first[1])


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_staircase_is_the_sum_of_its_leading_products(degree):
    inputs, target = data.staircase(50, dimension=6, degree=degree, seed=2)
    assert set(inputs.unique().tolist()) == {-1.0, 1.0}
    for row, value in zip(inputs.tolist(), target.tolist(), strict=True):
        total = 0.0
        for length in range(1, degree + 1):
            product = 1.0
            for factor in row[:length]:
                product *= factor
            total += product
        assert value == [total]


@pytest.mark.parametrize("degree", [0, 7])
def test_staircase_of_impossible_degree_is_refused(degree):
    with pytest.raises(ValueError, match=rf"degree is {degree}; pass a whole number from 1 to the dimension, 6"):
        data.staircase(5, dimension=6, degree=degree)


def test_loaded_staircase_has_the_stated_size():
    sets = data.load("staircase")
    assert sets.train_inputs.shape == (1_000, 10)
    assert sets.train_targets.shape == (1_000, 1)
    assert sets.classes is None
    with pytest.raises(ValueError, match="staircase has real-valued targets"):
        _ = sets.num_classes


def test_modular_addition_holds_every_pair_once_across_its_splits():
    sets = data.load("modular-addition")
    assert len(sets.test_inputs) == round(0.3 * 61**2)
    inputs, sums = torch.cat([sets.train_inputs, sets.test_inputs]), torch.cat([sets.train_targets, sets.test_targets])
    pairs = inputs.reshape(-1, 2, 61).argmax(dim=2).tolist()
    assert torch.equal(inputs.sum(dim=1), torch.full((61**2,), 2.0))
    assert sorted(map(tuple, pairs)) == [(x, y) for x in range(61) for y in range(61)]
    assert sums.tolist() == [(x + y) % 61 for x, y in pairs]
    assert sums.dtype == torch.int64
    assert sets.num_classes == 61


BAD_DRAWS = {
    "n of 0": ("swiss_roll", (0,), {}, "n is 0; pass a whole number of at least 1"),
    "negative n": ("staircase", (-1,), {}, "n is -1; pass a whole"),
    "fractional n": ("swiss_roll", (1.5,), {}, "n is 1.5; pass a whole"),
    "n as text": ("staircase", ("3",), {}, "n is '3'; pass a whole"),
    "no n": ("swiss_roll", (None,), {}, "n is None; pass a whole"),
    "true n": ("staircase", (True,), {}, "n is True; pass a whole"),
    "negative noise": ("swiss_roll", (3,), {"noise": -0.5}, r"noise is -0\.5; pass a number from 0 to 1e\+06"),
    "NaN noise": ("swiss_roll", (3,), {"noise": float("nan")}, "noise is nan; pass a number"),
    "noise as text": ("swiss_roll", (3,), {"noise": "1"}, "noise is '1'; pass a number"),
    "no turns": ("swiss_roll", (3,), {"turns": 0}, "turns is 0; pass a number from 0.01 to 1000"),
    "infinite turns": ("swiss_roll", (3,), {"turns": float("inf")}, "turns is inf; pass a number"),
    "turns beyond float32": ("swiss_roll", (3,), {"turns": 1e200}, r"turns is 1e\+200; pass a number"),
    "negative seed": ("swiss_roll", (3,), {"seed": -1}, "seed is -1; pass a whole number of at least 0"),
    "fractional seed": ("staircase", (3,), {"seed": 1.5}, "seed is 1.5; pass a whole"),
    "no seed": ("staircase", (3,), {"seed": None}, "seed is None; pass a whole"),
    "large seed": ("staircase", (3,), {"seed": 2**64}, r"seed is \d+; pass a whole number below 2\*\*64"),
    "no dimension": ("staircase", (3,), {"dimension": 0}, "dimension is 0; pass a whole number of at least 1"),
    "fractional dimension": ("staircase", (3,), {"dimension": 2.5}, "dimension is 2.5; pass a whole"),
    "fractional degree": ("staircase", (3,), {"degree": 1.5}, "degree is 1.5; pass a whole number from 1 to .* 10"),
    "degree as text": ("staircase", (3,), {"degree": "3"}, "degree is '3'; pass a whole"),
    "modulus of 0": ("modular_addition", (0,), {}, "modulus is 0; pass a whole number of at least 1"),
    "negative modulus": ("modular_addition", (-1,), {}, "modulus is -1; pass a whole"),
    "no modulus": ("modular_addition", (None,), {}, "modulus is None; pass a whole"),
}


@pytest.mark.parametrize("case", BAD_DRAWS)
def test_what_cannot_be_drawn_is_named(case, unchecked):
    name, arguments, options, words = BAD_DRAWS[case]
    with pytest.raises(ValueError, match=words):
        getattr(unchecked.data, name)(*arguments, **options)


def test_counts_may_be_of_any_integer_type(unchecked):
    for n in (np.int64(4), np.uint8(4), torch.tensor(4)):
        assert torch.equal(unchecked.data.swiss_roll(n)[0], data.swiss_roll(4)[0])
        assert torch.equal(unchecked.data.staircase(4, dimension=n, degree=n)[1], data.staircase(4, dimension=4)[1])
    inputs, classes = data.modular_addition(1)
    assert (inputs.tolist(), classes.tolist()) == ([[1.0, 1.0]], [0])


# ---- Names, arguments, directory ----------------------------------------------------------------------------------


def test_an_unknown_name_gets_the_nearest_and_all_known_ones():
    with pytest.raises(
        ValueError, match=r"'fashion-mnits'.*did you mean 'fashion-mnist'.*digits.*cifar10-jpeg.*folder:PATH"
    ):
        data.load("fashion-mnits")
    with pytest.raises(ValueError, match="there is no data set 'mnits'"):
        data.get("mnits")


def test_image_size_is_refused_where_it_means_nothing(tmp_path):
    with pytest.raises(ValueError, match="image_size is for folders of images; leave it out for 'digits'"):
        data.load("digits", image_size=8)
    with pytest.raises(ValueError, match="image_size is 0; pass the side in pixels"):
        data.load(f"folder:{make_tree(tmp_path / 'tree')}", image_size=0)


@pytest.mark.parametrize("size", [-1, 1.5, True, "3"])
def test_an_image_size_that_is_no_whole_number_is_refused(size, root, tmp_path, unchecked):
    tree = make_tree(tmp_path / "tree")
    with pytest.raises(ValueError, match=rf"image_size is {size!r}; pass the side in pixels, a whole number"):
        unchecked.data.load(f"folder:{tree}", image_size=size)
    assert unchecked.data.load(f"folder:{tree}", image_size=np.int64(3)).train_inputs.shape == (6, 3, 3, 3)


@pytest.mark.parametrize("name", [None, 3, b"digits", Path("/images")])
def test_a_name_that_is_no_string_is_refused(name, unchecked):
    for call in (unchecked.data.load, unchecked.data.get):
        with pytest.raises(TypeError) as caught:
            call(name)
        assert str(caught.value) == f"name is {name!r}; pass a string, one of `gramlin data list` or 'folder:PATH'"


def test_names_that_are_misspelt_empty_or_without_a_path_are_refused_in_a_line():
    with pytest.raises(ValueError, match=r"no data set 'mnst' \(did you mean 'mnist'\?\)"):
        data.load("mnst")
    with pytest.raises(ValueError, match="no data set ''; pass one of"):
        data.load("")
    for name in ("folder:", "folder: "):
        with pytest.raises(ValueError, match=rf"name is '{name}', without a path; pass 'folder:PATH', or 'folder:\.'"):
            data.load(name)
    with pytest.raises(ValueError, match="the folder is '~nobody-here/x', a home that is not known here"):
        data.load("folder:~nobody-here/x")


def test_a_folder_in_the_users_home_is_found(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tree = make_tree(tmp_path / "tree")
    assert_same(data.load("folder:~/tree"), data.load(f"folder:{tree}"))


@pytest.mark.parametrize("device", ["banana", "cuda:99", "meta", "", None, 3.5])
def test_a_device_that_is_not_there_is_named_with_those_that_are(device, root, tmp_path, unchecked, monkeypatch):
    tree = make_tree(tmp_path / "tree")
    forbid_decoding(monkeypatch)
    for name in ("digits", f"folder:{tree}"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 the words are compared whole
            unchecked.data.load(name, device=device)
        assert str(caught.value).startswith(f"device is {device!r}, which PyTorch does not have here; it has cpu")
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="device is 'cuda', which PyTorch does not have here; it has cpu"):
        data.load("digits", device="cuda")


def test_the_data_directory_is_the_argument_then_the_environment_then_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAMLIN_DATA", str(tmp_path / "environment"))
    assert data.data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data.data_directory() == tmp_path / "environment"
    monkeypatch.delenv("GRAMLIN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.data_directory().name == "gramlin"
    monkeypatch.setenv("GRAMLIN_DATA", "")
    assert data.data_directory().name == "gramlin", "an empty variable is not set"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRAMLIN_DATA", "~/data")
    assert data.data_directory() == tmp_path / "data"


def test_a_data_directory_that_is_no_folder_is_named(tmp_path, monkeypatch, unchecked):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("GRAMLIN_DATA", str(file))
    for call in (data.load, data.get):
        with pytest.raises(ValueError, match=rf"the folder of data, {file}, is a file; set \$GRAMLIN_DATA to a folder"):
            call("mnist")
    with pytest.raises(ValueError, match=rf"the folder of data, {file}, is a file; pass the path of a folder"):
        data.load("mnist", data_dir=file)
    assert data.load("digits").num_classes == 10, "a set that is made here needs no directory"
    for wrong in ("", 3, b"data"):
        with pytest.raises(ValueError, match=rf"data_dir is {wrong!r}; pass the path of a folder, or None"):
            unchecked.data.load("mnist", data_dir=wrong)
    with pytest.raises(ValueError, match="data_dir is '~nobody-here', a home that is not known here"):
        data.load("mnist", data_dir="~nobody-here")


def test_a_data_set_is_shown_in_a_line_without_its_values():
    assert repr(data.load("digits")) == "<digits: 1437 + 360 inputs of 1×8×8, 10 classes>"
    assert repr(data.load("swiss-roll")) == "<swiss-roll: 1000 + 1000 inputs of 2, real targets>"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn"])
def test_missing_data_are_reported_with_directory_layout_and_command(name, root):
    with pytest.raises(data.DataError) as caught:
        data.load(name)
    layout = {
        "mnist": "MNIST/raw/",
        "fashion-mnist": "FashionMNIST/raw/",
        "cifar10": "cifar-10-batches-py/",
        "cifar100": "cifar-100-python/",
        "svhn": "{train,test}_32x32.mat",
    }
    for part in (str(root), layout[name], f"`gramlin data get {name}`"):
        assert part in str(caught.value)
    assert not root.exists(), "looking for data makes no folder"


def test_missing_jpeg_cifar_is_reported_with_the_layout_to_make(root):
    for call in (data.load, data.get):
        with pytest.raises(data.DataError) as caught:
            call("cifar10-jpeg")
        assert str(root / "cifar10-jpeg/{train,test}/CLASS/*.jpg") in str(caught.value)
        assert "cannot be downloaded" in str(caught.value)


def test_listing_shows_what_is_present(root):
    rows = {row["name"]: row for row in data.list_datasets()}
    assert rows["mnist"]["present"] == "no"
    assert rows["digits"]["present"] != "no"
    assert rows["cifar10-jpeg"]["present"] == "no"
    make_tree(root / "cifar10-jpeg", suffix="jpg")
    assert {row["name"]: row for row in data.list_datasets()}["cifar10-jpeg"]["present"] == "yes"
    for name in ("fashion-mnist-mini", "digits", "swiss-roll", "staircase", "modular-addition"):
        sets = data.load(name)
        row = rows[name]
        assert (row["train"], row["test"]) == (len(sets.train_inputs), len(sets.test_inputs))
        assert row["inputs"] == "×".join(map(str, sets.train_inputs.shape[1:]))


def test_a_failed_download_names_the_set_and_the_directory(root, monkeypatch):
    def no_network(*arguments, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(data, "_torchvision_class", lambda name: no_network)
    with pytest.raises(data.DataError, match=r"mnist could not be downloaded into .*data: no route to host"):
        data.get("mnist")


def test_a_failed_download_is_told_in_a_line(root, tmp_path, monkeypatch):
    def no_network(*arguments, **options):
        raise RuntimeError("Error downloading train.gz:\n<urlopen error>\n")

    with monkeypatch.context() as patch:
        patch.setattr(data, "_torchvision_class", lambda name: no_network)
        with pytest.raises(
            data.DataError, match=r"mnist could not be .*: Error downloading train\.gz: <urlopen error>$"
        ):
            data.get("mnist")
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataError, match=r"mnist could not be downloaded into .*file/data: .*Not a directory"):
        data.get("mnist", data_dir=tmp_path / "file" / "data")


def test_loading_never_downloads(root, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", refuse)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", refuse)
    for name in ("mnist", "cifar10"):
        with pytest.raises(data.DataError):
            data.load(name)


# ---- Sets that torchvision knows ----------------------------------------------------------------------------------


def full_set(name: str):
    """The full set, where its files are; the test is skipped elsewhere."""
    try:
        return data.load(name)
    except data.DataError as error:
        if "is not in the data directory" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_full_sets_have_their_published_sizes(name):
    sets = full_set(name)
    assert sets.train_inputs.shape == (60_000, 1, 28, 28)
    assert sets.test_inputs.shape == (10_000, 1, 28, 28)
    assert sets.test_targets.bincount().sum() == 10_000
    assert sets.num_classes == 10


def write_idx(path: Path, array: np.ndarray) -> str:
    """Write an idx file of bytes and return its MD5."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.tobytes())
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def small_mnist(root, monkeypatch):
    """Files as MNIST's but of 5 and 3 images, which pass for whole by having their sums made known."""
    generator = np.random.default_rng(0)
    arrays, sums = {}, {}
    for part, count in (("train", 5), ("t10k", 3)):
        arrays[part] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8)
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            name = f"{part}-{kind}-ubyte"
            sums[name] = write_idx(root / "MNIST" / "raw" / name, array)
    monkeypatch.setitem(data._IDX_MD5, "mnist", sums)
    return arrays


def test_mnist_values_are_the_bytes_of_the_files_over_255(small_mnist):
    sets = data.load("mnist")
    for split, part in (("train", "train"), ("test", "t10k")):
        pixels, labels = small_mnist[part]
        expected = torch.from_numpy(pixels / np.float32(255))[:, None]
        torch.testing.assert_close(getattr(sets, f"{split}_inputs"), expected, atol=0, rtol=0)
        assert getattr(sets, f"{split}_targets").tolist() == labels.tolist()


def test_files_of_torchvisions_old_versions_are_not_read_in_place_of_the_checked_ones(small_mnist, root):
    # torchvision takes processed/*.pt, where they are, and never looks at the files whose sums were checked.
    folder = root / "MNIST" / "processed"
    folder.mkdir()
    for name in ("training.pt", "test.pt"):
        torch.save((torch.full((2, 28, 28), 99, dtype=torch.uint8), torch.ones(2, dtype=torch.long)), folder / name)
    sets = data.load("mnist")
    assert len(sets.train_inputs) == 5
    assert torch.equal(sets.test_inputs[:, 0], torch.from_numpy(small_mnist["t10k"][0] / np.float32(255)))


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "junk", "missing"])
@pytest.mark.parametrize("name", ["t10k-labels-idx1-ubyte", "train-images-idx3-ubyte"])
def test_a_damaged_mnist_file_is_named_with_the_way_out(damage, name, small_mnist, root):
    path = root / "MNIST" / "raw" / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        damaged = {"flipped": flipped(whole, len(whole) - 1), "truncated": whole[:-1], "empty": b"", "junk": b"<html>"}
        path.write_bytes(damaged[damage])
    for call in (data.load,) if damage == "missing" else (data.load, data.get):
        with pytest.raises(data.DataError) as caught:
            call("mnist")
        assert str(path) in str(caught.value)
        assert "`gramlin data get mnist`" in str(caught.value)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_files_of_another_set_under_the_right_names_are_refused(name, root):
    folder = root / {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name] / "raw"
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", np.zeros((2, 28, 28), np.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.zeros(2, np.uint8))
    with pytest.raises(data.DataError, match="ubyte is damaged or half downloaded"):
        data.load(name)


@pytest.fixture
def small_cifar(root, monkeypatch):
    """Batches as CIFAR-10's, of 2 images each, their sums made known to torchvision."""
    known, folder = torchvision.datasets.CIFAR10, root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    pixels = {}

    def write(name: str, content: dict) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    lists = []
    for names in (known.train_list, known.test_list):
        written = []
        for name, _ in names:
            pixels[name] = generator.integers(0, 256, (2, 3 * 32 * 32), dtype=np.uint8)
            written.append(write(name, {"data": pixels[name], "labels": [3, 7]}))
        lists.append(written)
    meta = write("batches.meta", {"label_names": [f"class {index}" for index in range(10)]})
    monkeypatch.setattr(known, "train_list", lists[0])
    monkeypatch.setattr(known, "test_list", lists[1])
    monkeypatch.setattr(known, "meta", {**known.meta, "md5": meta[1]})
    return pixels


def test_cifar_images_are_channels_then_rows_then_columns(small_cifar):
    sets = data.load("cifar10")
    assert sets.train_inputs.shape == (10, 3, 32, 32)
    expected = small_cifar["test_batch"].reshape(2, 3, 32, 32) / np.float32(255)
    torch.testing.assert_close(sets.test_inputs, torch.from_numpy(expected), atol=0, rtol=0)
    assert sets.train_targets.tolist() == [3, 7] * 5
    assert sets.classes[3] == "class 3"


def test_a_damaged_cifar_batch_is_named_and_never_unpickled(small_cifar, root):
    path = root / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(flipped(path.read_bytes(), 40))
    with pytest.raises(data.DataError, match=r"data_batch_3 is damaged.*`gramlin data get cifar10`"):
        data.load("cifar10")


class Payload:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_payload_of_these_tests_works(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_a_pickle_in_the_place_of_a_cifar_batch_is_named_and_not_executed(name, small_cifar, root, tmp_path):
    path = root / "cifar-10-batches-py" / name
    path.write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    for call in (data.load, data.get):
        with pytest.raises(data.DataError, match=rf"{name} is damaged.*`gramlin data get cifar10`"):
            call("cifar10")
    assert not (tmp_path / "executed").exists()


def test_a_pickle_in_the_cache_is_named_and_not_executed(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    data.load(name)
    cache = only_cache(root)
    with np.load(cache) as file:
        arrays = dict(file)
    np.savez(cache, **{**arrays, "classes": np.array([Payload(tmp_path / "executed")], dtype=object)})
    with pytest.raises(data.DataError, match="Object arrays cannot be loaded") as caught:
        data.load(name)
    assert str(caught.value).startswith(str(cache))
    assert not (tmp_path / "executed").exists()


def test_an_archive_with_members_outside_is_not_unpacked(root, tmp_path, monkeypatch):
    def served(url, path, **options):
        with tarfile.open(path, "w:gz") as archive:
            for name in ("../../outside", "cifar-10-batches-py/data_batch_1"):
                member = tarfile.TarInfo(name)
                member.size = 4
                archive.addfile(member, io.BytesIO(b"evil"))

    monkeypatch.setattr(torchvision.datasets.utils, "_get_redirect_url", lambda url, **options: url)
    monkeypatch.setattr(torchvision.datasets.utils, "_urlretrieve", served)
    with pytest.raises(data.DataError, match=r"cifar10 could not be downloaded into .*corrupted"):
        data.get("cifar10")
    assert [path.name for path in root.iterdir()] == ["cifar-10-python.tar.gz"]
    assert not (tmp_path / "outside").exists()


def test_a_folder_in_the_place_of_a_file_is_named(small_cifar, root):
    path = root / "cifar-10-batches-py" / "data_batch_2"
    path.unlink()
    path.mkdir()
    with pytest.raises(data.DataError, match=r"data_batch_2 cannot be read \(Is a directory\)"):
        data.load("cifar10")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cifar10", "cifar-10-batches-py/test_batch"),
        ("cifar100", "cifar-100-python/train"),
        ("svhn", "train_32x32.mat"),
    ],
)
def test_a_half_downloaded_set_is_named(name, path, root):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(b"half")
    with pytest.raises(data.DataError) as caught:
        data.load(name)
    assert str(root) in str(caught.value)
    assert f"`gramlin data get {name}`" in str(caught.value)


# ---- Folders of images --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_folder_values_are_the_pixels_over_255(mode, channels, root, tmp_path):
    tree = make_tree(tmp_path / "tree", mode=mode)
    sets = data.load(f"folder:{tree}")
    assert sets.train_inputs.shape == (6, channels, 4, 5)
    assert sets.classes == ("ant", "bee")
    assert sets.train_targets.tolist() == sets.test_targets.tolist() == [0, 0, 0, 1, 1, 1]
    index = 0
    for name in ("ant", "bee"):
        for number in range(3):
            pixels = np.asarray(Image.open(tree / "test" / name / f"{number}.png")).reshape(4, 5, channels)
            expected = torch.from_numpy(pixels / np.float32(255)).permute(2, 0, 1)
            assert torch.equal(sets.test_inputs[index], expected)
            index += 1


def test_folder_agrees_with_torchvision(root, tmp_path):
    tree = make_tree(tmp_path / "tree", suffix="jpg", size=(16, 12))
    sets = data.load(f"folder:{tree}")
    theirs = torchvision.datasets.ImageFolder(tree / "train", transform=torchvision.transforms.ToTensor())
    assert torch.equal(sets.train_inputs, torch.stack([image for image, _ in theirs]))
    assert sets.train_targets.tolist() == theirs.targets
    assert list(sets.classes) == theirs.classes


def test_one_colour_image_makes_the_set_colour(root, tmp_path):
    tree = make_tree(tmp_path / "tree", mode="L")
    grey = data.load(f"folder:{tree}")
    Image.fromarray(np.full((4, 5, 3), (10, 20, 30), np.uint8)).save(tree / "test" / "bee" / "2.png")
    colour = data.load(f"folder:{tree}")
    assert colour.train_inputs.shape == (6, 3, 4, 5)
    assert torch.equal(colour.train_inputs, grey.train_inputs.expand(-1, 3, -1, -1))
    assert colour.test_inputs[5, :, 0, 0].mul(255).round().tolist() == [10, 20, 30]


def test_a_relative_path_is_taken_from_the_working_directory(root, tmp_path, monkeypatch):
    tree = make_tree(tmp_path / "here" / "tree")
    monkeypatch.chdir(tmp_path / "here")
    assert_same(data.load("folder:tree"), data.load(f"folder:{tree}"))


def test_the_jpeg_cifar_set_says_that_it_is_lossy(root):
    make_tree(root / "cifar10-jpeg", suffix="jpg", size=(32, 32))
    sets = data.load("cifar10-jpeg")
    assert sets.name == "cifar10-jpeg"
    assert sets.train_inputs.shape == (6, 3, 32, 32)
    assert "JPEG" in sets.source
    assert data.get("cifar10-jpeg").startswith("ready: <cifar10-jpeg: 6 + 6 inputs of 3×32×32")


@pytest.mark.parametrize("split", ["train", "test"])
def test_differing_sizes_are_refused_by_naming_the_first_that_differs(split, root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    odd = tree / split / "bee" / "1.png"
    Image.fromarray(np.zeros((7, 6, 3), np.uint8)).save(odd)
    with pytest.raises(data.DataError, match=r"6×7 pixels.*5×4.*image_size=") as caught:
        data.load(f"folder:{tree}")
    assert str(caught.value).startswith(str(odd))


def test_splits_of_different_sizes_are_refused_by_naming_a_file(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    for path in (tree / "test").rglob("*.png"):
        Image.fromarray(np.zeros((7, 6, 3), np.uint8)).save(path)
    with pytest.raises(data.DataError, match="image_size=") as caught:
        data.load(f"folder:{tree}")
    assert str(caught.value).startswith(str(tree / "test" / "ant" / "0.png"))


@pytest.mark.parametrize("size", [(30, 20), (20, 30), (20, 20)])
def test_image_size_scales_the_shorter_side_and_crops_the_centre(size, root, tmp_path):
    # A white square of a third of the shorter side in the middle stays there; the ends that are cropped are red.
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: (height - 20) // 2], pixels[(height + 20) // 2 :] = (255, 0, 0), (255, 0, 0)
    pixels[:, : (width - 20) // 2], pixels[:, (width + 20) // 2 :] = (255, 0, 0), (255, 0, 0)
    pixels[height // 2 - 4 : height // 2 + 4, width // 2 - 4 : width // 2 + 4] = 255
    tree = make_tree(tmp_path / "tree")
    for path in tree.rglob("*.png"):
        Image.fromarray(pixels).save(path)
    image = data.load(f"folder:{tree}", image_size=10).train_inputs[0]
    assert image.shape == (3, 10, 10)
    assert image[1, 4:6, 4:6].min() > 0.95
    assert image[1:, 0, 0].max() < 0.05
    # Scaling by a half lets the filter see two pixels past the crop; one pixel in, nothing red is left.
    assert image[0, 1, 1:-1].max() < 0.05
    assert image[0, 1:-1, 1].max() < 0.05


def test_image_size_makes_differing_sizes_one_and_is_cached_apart(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    Image.fromarray(np.zeros((9, 4, 3), np.uint8)).save(tree / "train" / "ant" / "0.png")
    assert data.load(f"folder:{tree}", image_size=6).train_inputs.shape == (6, 3, 6, 6)
    assert data.load(f"folder:{tree}", image_size=3).train_inputs.shape == (6, 3, 3, 3)
    assert len(list((root / "cache").iterdir())) == 2


def test_classes_that_train_lacks_are_named(root, tmp_path):
    tree = make_tree(tmp_path / "tree", classes=("ant", "bee", "wasp"))
    for name in ("bee", "wasp"):
        (tree / "train" / name).rename(tmp_path / name)
    with pytest.raises(data.DataError, match=r"tree: test has classes that train lacks, bee, wasp; add images of them"):
        data.load(f"folder:{tree}")


def test_a_class_without_images_is_named(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    for split in ("train", "test"):
        (tree / split / "cow").mkdir()
    (tree / "train" / "cow" / "notes.txt").write_text("moo")
    with pytest.raises(data.DataError, match=r"train/cow has no images \(\.jpg"):
        data.load(f"folder:{tree}")


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_tree_without_a_split_is_told_the_layout(missing, root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    (tree / missing).rename(tree / "elsewhere")
    with pytest.raises(data.DataError, match=rf"{missing} is not a folder; expected .*train/CLASS.*test/CLASS"):
        data.load(f"folder:{tree}")


def test_splits_without_classes_are_refused(root, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "tree" / split).mkdir(parents=True)
    with pytest.raises(data.DataError, match="train has no folders of images; expected one a class"):
        data.load(f"folder:{tmp_path / 'tree'}")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_cut_short_is_named_and_nothing_is_cached(suffix, root, tmp_path):
    tree = make_tree(tmp_path / "tree", suffix=suffix, size=(40, 33))
    path = tree / "test" / "ant" / f"1.{suffix}"
    whole = path.read_bytes()
    for length in (0, 1, 30, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(data.DataError) as caught:
            data.load(f"folder:{tree}")
        assert str(caught.value).startswith(str(path))
        assert not (root / "cache").exists()


def test_a_file_that_only_looks_like_an_image_is_named(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    (tree / "train" / "bee" / "page.png").write_text("<html>404</html>")
    with pytest.raises(data.DataError, match=r"bee/page\.png is not an image"):
        data.load(f"folder:{tree}")


def test_files_that_are_no_images_are_left_out(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    before = data.load(f"folder:{tree}")
    (tree / "train" / "bee" / "notes.txt").write_text("not an image")
    (tree / "train" / "README").write_text("not a class")
    assert_same(data.load(f"folder:{tree}"), before)


def test_images_of_more_than_eight_bits_are_not_clipped(root, tmp_path):
    tree = make_tree(tmp_path / "tree", mode="L")
    path = tree / "train" / "ant" / "1.png"
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(path)
    assert torch.equal(data.load(f"folder:{tree}").train_inputs[1], torch.full((1, 4, 5), 40_000 / 65535))
    path.unlink()
    Image.fromarray(np.full((4, 5), 40_000, np.int32)).save(path.with_suffix(".tif"))
    with pytest.raises(data.DataError, match=r"ant/1\.tif has .* other numbers than of 8 or 16 bits"):
        data.load(f"folder:{tree}")


def test_decoding_shows_no_progress_off_a_terminal(root, tmp_path, capfd):
    data.load(f"folder:{make_tree(tmp_path / 'tree')}")
    assert capfd.readouterr() == ("", "")


# ---- The cache ----------------------------------------------------------------------------------------------------


def test_the_second_load_decodes_nothing_and_gives_the_same_values(root, tmp_path, monkeypatch):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    first = data.load(name)
    forbid_decoding(monkeypatch)
    assert_same(data.load(name), first)


@pytest.mark.parametrize("change", ["content", "time", "added", "removed", "renamed"])
def test_a_changed_tree_is_decoded_anew(change, root, tmp_path, monkeypatch):
    tree = make_tree(tmp_path / "tree")
    before = data.load(f"folder:{tree}")
    path = tree / "train" / "ant" / "2.png"
    stat = path.stat()
    if change == "content":
        Image.fromarray(np.full((4, 5, 3), 51, np.uint8)).save(path)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "time":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "added":
        path.with_name("3.png").write_bytes(path.read_bytes())
    elif change == "removed":
        path.unlink()
    else:
        path.rename(path.with_name("0-first.png"))
    after = data.load(f"folder:{tree}")
    assert len(list((root / "cache").iterdir())) == 2
    if change == "content":
        assert torch.equal(after.train_inputs[2], torch.full((3, 4, 5), 0.2))
    assert len(after.train_inputs) == len(before.train_inputs) + {"added": 1, "removed": -1}.get(change, 0)


def test_a_byte_flipped_anywhere_in_the_cache_is_reported_or_harmless(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    first = data.load(name)
    cache = only_cache(root)
    whole = cache.read_bytes()
    refusals = []
    for position in range(0, len(whole), 7):
        cache.write_bytes(flipped(whole, position))
        try:
            assert_same(data.load(name), first)
        except data.DataError as error:
            refusals.append(str(error))
    assert len(refusals) > len(whole) / 7 / 2
    assert all(refusal.startswith(str(cache)) and "delete it" in refusal for refusal in refusals)
    cache.unlink()
    assert_same(data.load(name), first)


def test_a_flipped_pixel_in_the_cache_is_reported(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree', size=(64, 64))}"
    data.load(name)
    cache = only_cache(root)
    whole = cache.read_bytes()
    cache.write_bytes(flipped(whole, len(whole) // 4))  # well inside the training images
    with pytest.raises(data.DataError, match="CRC") as caught:
        data.load(name)
    assert str(caught.value).startswith(str(cache))


def test_a_cache_header_that_claims_fewer_rows_is_reported(root, tmp_path):
    # NumPy would read six rows' worth of twelve and never come to where the sum is checked.
    name = f"folder:{make_tree(tmp_path / 'tree', size=(40, 40), count=6)}"
    data.load(name)
    cache = only_cache(root)
    whole = cache.read_bytes()
    assert whole.count(b"(12, 3, 40, 40)") == 2
    cache.write_bytes(whole.replace(b"(12, 3, 40, 40)", b"(10, 3, 40, 40)", 1))
    with pytest.raises(data.DataError, match="CRC") as caught:
        data.load(name)
    assert str(caught.value).startswith(str(cache))


def test_a_cache_cut_short_anywhere_is_reported(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    data.load(name)
    cache = only_cache(root)
    whole = cache.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        cache.write_bytes(whole[:length])
        with pytest.raises(data.DataError) as caught:
            data.load(name)
        assert str(caught.value).startswith(str(cache))


def test_a_cache_of_other_arrays_is_reported(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    data.load(name)
    cache = only_cache(root)
    np.savez(cache, train_inputs=np.zeros(3))
    with pytest.raises(data.DataError, match=r"damaged.*delete it"):
        data.load(name)


def test_a_cache_of_arrays_that_do_not_fit_together_is_reported(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    data.load(name)
    cache = only_cache(root)
    with np.load(cache) as file:
        arrays = dict(file)
    for wrong in (
        {"train_inputs": arrays["train_inputs"] / 255},
        {"test_inputs": arrays["test_inputs"][:, 0]},
        {"train_targets": arrays["train_targets"][:-1]},
        {"test_targets": arrays["test_targets"] + 1},
        {"train_targets": arrays["train_targets"] - 1},
        {"classes": np.arange(2)},
        {"classes": np.array("ant")},
    ):
        np.savez(cache, **{**arrays, **wrong})
        with pytest.raises(data.DataError, match=r"damaged \(its arrays do not fit together: .*delete it") as caught:
            data.load(name)
        assert str(caught.value).startswith(str(cache))


@contextmanager
def files_of_at_most(size: int):
    """Let every write beyond the size fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


UNKEPT = "the decoded images could not be kept in .*{}.* made anew at each load; .* set GRAMLIN_DATA to another folder"


def test_a_disk_that_is_full_leaves_a_warning_the_data_and_no_file(root, tmp_path, small_mnist):
    tree = make_tree(tmp_path / "tree", size=(40, 30))
    for name in (f"folder:{tree}", "mnist"):
        with files_of_at_most(3_000), pytest.warns(UserWarning, match=UNKEPT.format("File too large")):
            sets = data.load(name)
        assert list((root / "cache").iterdir()) == []
        assert_same(data.load(name), sets)
        only_cache(root).unlink()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("function", ["mkdir", "fsync", "replace"])
def test_a_data_directory_that_cannot_be_written_leaves_a_warning_and_the_data(
    function, number, root, tmp_path, monkeypatch
):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    name = f"folder:{make_tree(tmp_path / 'tree')}"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.warns(UserWarning, match=UNKEPT.format(os.strerror(number))) as caught:
            sets = data.load(name)
    assert len(caught) == 1
    assert not list(root.rglob("*.*")), "nothing half written is left"
    assert_same(data.load(name), sets)


def test_a_data_directory_below_a_file_leaves_a_warning_and_the_data(tmp_path):
    tree = make_tree(tmp_path / "tree")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=UNKEPT.format("Not a directory")):
        sets = data.load(f"folder:{tree}", data_dir=tmp_path / "file" / "data")
    assert_same(data.load(f"folder:{tree}", data_dir=tmp_path / "data"), sets)


def test_a_directory_with_spaces_and_other_letters_is_made_and_used(tmp_path, monkeypatch):
    directory = tmp_path / "not there" / "Daten ü 蟻"
    name = f"folder:{make_tree(tmp_path / 'tree')}"
    first = data.load(name, data_dir=directory)
    assert only_cache(directory).suffix == ".npz"
    forbid_decoding(monkeypatch)
    assert_same(data.load(name, data_dir=directory), first)


def test_loads_at_the_same_time_agree_and_leave_one_file(root, tmp_path):
    name = f"folder:{make_tree(tmp_path / 'tree', size=(30, 20))}"
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(data.load, [name] * 8))
    for sets in loaded[1:]:
        assert_same(sets, loaded[0])
    assert only_cache(root).suffix == ".npz"


def test_a_clock_that_is_set_back_does_not_bring_back_old_images(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    path = tree / "train" / "ant" / "0.png"
    data.load(f"folder:{tree}")
    Image.fromarray(np.full((4, 5, 3), 51, np.uint8)).save(path)
    os.utime(path, (0, 0))
    assert torch.equal(data.load(f"folder:{tree}").train_inputs[0], torch.full((3, 4, 5), 0.2))


def test_an_interrupted_write_leaves_no_file(root, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    name = f"folder:{make_tree(tmp_path / 'tree')}"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            data.load(name)
    assert list((root / "cache").iterdir()) == []
    data.load(name)
    assert only_cache(root).suffix == ".npz"


# ---- Standardizing ------------------------------------------------------------------------------------------------


def test_standardized_channels_have_mean_zero_and_variance_one_over_the_training_split(root, tmp_path):
    sets = data.load(f"folder:{make_tree(tmp_path / 'tree', size=(7, 9))}")
    scaled = data.standardize(sets)
    for channel in range(3):
        values = scaled.train_inputs[:, channel]
        assert values.mean().item() == pytest.approx(0, abs=1e-6)
        assert values.std().item() == pytest.approx(1, abs=1e-6)
        raw = sets.train_inputs[:, channel]
        torch.testing.assert_close(
            scaled.test_inputs[:, channel],
            (sets.test_inputs[:, channel] - raw.mean()) / raw.std(),
            atol=1e-5,
            rtol=1e-5,
        )


def test_a_constant_channel_cannot_be_standardized(root, tmp_path):
    tree = make_tree(tmp_path / "tree")
    for path in tree.rglob("*.png"):
        Image.fromarray(np.full((4, 5, 3), 64, np.uint8)).save(path)
    sets = data.load(f"folder:{tree}")
    with pytest.raises(ValueError, match="constant"):
        data.standardize(sets)
    # The rounding of the mean of many equal numbers is no variance.
    many = replace(sets, train_inputs=torch.full((5_000, 3, 8, 8), 77 / 255))
    with pytest.raises(ValueError, match="constant"):
        data.standardize(many)


def test_one_pixel_has_no_variance_and_what_is_no_data_set_is_named(unchecked):
    digits = data.load("digits")
    with pytest.raises(ValueError, match="constant"):
        data.standardize(replace(digits, train_inputs=torch.rand(1, 1, 1, 1)))
    for wrong in (None, digits.train_inputs):
        with pytest.raises(
            TypeError, match=f"dataset is a {type(wrong).__name__}; pass what gramlin.data.load returns"
        ):
            unchecked.data.standardize(wrong)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "mnist", "fashion-mnist"])
def test_the_catalogue_names_the_files_that_torchvision_reads(name, tmp_path):
    entry = data.CATALOGUE[name]
    known = data._torchvision_class(name)
    if name in data._IDX_MD5:
        expected = {f"{known.__name__}/raw/{file}" for file in data._IDX_MD5[name]}
    elif name == "svhn":
        expected = {known.split_list[split][1] for split in ("train", "test")}
    else:
        files = [*known.train_list, *known.test_list, (known.meta["filename"], "")]
        expected = {f"{known.base_folder}/{file}" for file, _ in files}
    assert set(entry.files) == expected
    assert all(len(md5) == 32 for md5 in data._md5_sums(entry, tmp_path).values())
