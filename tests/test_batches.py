"""Batches of every kind reach the model as they are, and those that cannot be counted are refused by name."""

import copy
import dataclasses
import math
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gramlin import probe, target_linearity
from gramlin.hooks import record

N = 20
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(dim=1)
PATHS = [f"images/{number:03}.png" for number in range(N)]
Pair = namedtuple("Pair", ["x", "path"])


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    path: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    path: Any
    extra: Any = dataclasses.field(init=False)  # and never set


class Encoding(UserDict):
    """As a tokenizer returns."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}  # in place, and tensors only
        return self


class Graph:
    """An object that is no container, and moves itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


class Reading(nn.Module):
    """A layer on what a function takes from the model's arguments, which are kept for the test."""

    def __init__(self, read=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read, self.got = nn.Linear(6, 3), read, None

    def forward(self, *args, **kwargs):
        self.got = args[0] if args else kwargs
        return self.layer(self.read(*args, **kwargs))


EXPECTED = probe(Reading(), (X, Y))
KINDS = {
    "a dictionary that begins with names": ({"path": PATHS, "x": X}, lambda path, x: x),
    "a dictionary with one name": ({"path": "images", "x": X, "none": None, "number": 3}, lambda x, **rest: x),
    "a tuple with names": ((PATHS, X), lambda path, x: x),
    "a tuple of dictionaries": (({"path": PATHS}, {"x": X}), lambda a, b: b["x"]),
    "a named tuple in a list": ([Pair(X, PATHS)], lambda batch: batch.x),
    "a plain dataclass": (Plain(X, PATHS), lambda batch: batch.x),
    "a frozen dataclass": (Frozen(X, (None, "a")), lambda batch: batch.x),
    "a dataclass in a dictionary": ({"batch": Plain({"x": [X]})}, lambda batch: batch.x["x"][0]),
    "what a tokenizer returns": (Encoding({"path": PATHS, "x": X}, encodings=[1]), lambda path, x: x),
    "that in a tuple": ((Encoding({"path": PATHS, "x": X}, encodings=[1]),), lambda batch: batch["x"]),
    "an ordered dictionary": (OrderedDict(x=X, path=PATHS), lambda x, path: x),
    "a dictionary with defaults": ([defaultdict(list, x=X)], lambda batch: batch["x"]),
    "a dictionary that does not change": ([MappingProxyType({"x": X})], lambda batch: batch["x"]),
    "a queue": ([deque([X, PATHS], maxlen=2)], lambda batch: batch[0]),
    "a list of a user's": ([UserList([X])], lambda batch: batch[0]),
    "a scalar first": ((torch.tensor(2.0), X), lambda scale, x: x),
    "lists of lists": ([[[[], [X]]]], lambda batch: batch[0][1][0]),
    "one tensor twice": ({"x": X, "y": X}, lambda x, y: x),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["pairs", "targets"])
def test_batches_of_every_kind_give_the_same_table(kind, form):
    inputs, read = KINDS[kind]
    model = Reading(read)
    table = probe(model, [(inputs, Y)]) if form == "pairs" else probe(model, [inputs], Y)
    pd.testing.assert_frame_equal(table, EXPECTED)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_gets_is_of_the_same_kind_and_a_copy(kind):
    inputs, _ = KINDS[kind]
    model = Reading(lambda inputs, x: x)
    probe(model, [((inputs, X), Y)])
    assert type(model.got) is type(inputs)
    for mine, theirs in zip(leaves(inputs), leaves(model.got), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
        elif not isinstance(mine, MappingProxyType):
            assert mine == theirs
    for each in (model.got, *model.got) if isinstance(model.got, tuple) else (model.got,):
        assert getattr(each, "encodings", [1]) == [1]


def leaves(value: Any) -> list:
    """A plain walk of the test's own."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "items"):
        return [leaf for key in value for leaf in (key, *leaves(value[key]))]
    if isinstance(value, (tuple, list, deque, UserList)):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def test_an_object_that_moves_itself_is_left_where_it_was(unchecked):
    graph = Graph(X)
    pd.testing.assert_frame_equal(probe(Reading(lambda graph: graph.x), [(graph, Y)]), EXPECTED)
    assert graph.x is X
    with pytest.raises(ValueError, match="several lengths, inputs of unknown length; pass"):
        unchecked.probe(Reading(), [graph], Y)


def test_packed_sequences_stay_packed():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.layer = nn.RNN(6, 5), nn.Linear(5, 3)

        def forward(self, sequences):
            assert isinstance(sequences, PackedSequence)
            return self.layer(self.cell(sequences)[1][0])

    x = torch.randn(4, N, 6, generator=torch.Generator().manual_seed(0))
    packed = pack_padded_sequence(x, torch.arange(N) % 4 + 1, enforce_sorted=False)
    model = Recurrent()
    with torch.no_grad():
        expected = target_linearity(model.cell(packed)[1][0], Y).item()
    assert probe(model, [(packed, Y)])["tl_in"][0] == pytest.approx(expected, abs=1e-6)


def test_graphs_have_other_tensors_than_samples():
    # Of a pair the targets say how many samples there are; each layer is held to that.
    edges = torch.randint(N, (2, 50), generator=torch.Generator().manual_seed(0))
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(50), (N, N), check_invariants=True)
    model = Reading(lambda x, edges, adjacency: x + 0 * (adjacency @ x)[edges[0]].sum())
    pd.testing.assert_frame_equal(probe(model, [((X, edges, adjacency), Y)]), EXPECTED)


# ---- batches that are refused ----


def held_by_itself() -> dict:
    batch: dict = {"x": X}
    batch["self"] = [batch]
    return batch


REFUSED = {
    "two lengths": (
        ([{"x": X, "mask": {"left": X[:7]}}], Y),
        ValueError,
        r"several lengths, inputs\['x'\] of 20, inputs\['mask'\]\['left'\] of 7; pass",
    ),
    "two lengths in a dataclass": (([Plain(X, X[:7])], Y), ValueError, r"inputs\.x of 20, inputs\.path of 7"),
    "none of the targets' length": (
        ([({"x": X[:9], "y": X[:8]}, Y)],),
        ValueError,
        r"a batch has inputs\['x'\] of 9, inputs\['y'\] of 8 inputs and 20 targets",
    ),
    "no tensor": (([({"path": PATHS}, Y)],), TypeError, "inputs: got a dict with the keys 'path'; pass a tensor"),
    "no tensor with targets": (([PATHS], Y), TypeError, r"inputs: got a list of 20 \(str\); pass a tensor"),
    "a scalar": (([(torch.tensor(1.0), Y)],), TypeError, "inputs: got a Tensor; pass a tensor with a sample a row"),
    "a string": (([("image", Y)],), TypeError, "inputs: got a str; pass a tensor"),
    "an array": (([(X.numpy(), Y)],), TypeError, r"inputs: got a ndarray \(of NumPy arrays: torch\.from_numpy"),
    "a pair of arrays": (((X.numpy(), Y.numpy()),), TypeError, r"a batch is a ndarray \(of NumPy arrays: torch\.from"),
    "an array of all": ((X.numpy(), Y), TypeError, r"batches: got a ndarray \(of NumPy arrays: torch\.from_numpy"),
    "targets in an array": ((X, Y.numpy()), TypeError, r"targets: got a ndarray; pass .* torch\.from_numpy"),
    "targets in a list": ((X, Y.tolist()), TypeError, r"targets: got a list; pass a torch\.Tensor"),
    "a target": (([(X, Y[0])],), ValueError, r"targets have shape \(\); pass those of a batch .* into a DataLoader"),
    "a data set": ((TensorDataset(X, Y),), ValueError, "a data set goes into a DataLoader"),
    "holds itself": (([held_by_itself()], Y), ValueError, "inputs: got a container that holds itself"),
    "holds itself in a pair": (([(held_by_itself(), Y)],), ValueError, "inputs: got a container that holds itself"),
    "keys": (([({1: X}, Y)],), TypeError, "inputs have the key 1; pass names of the model's arguments"),
    "one dictionary": (([{"x": X, "labels": Y}],), TypeError, "a batch is a dict with the keys 'x', 'labels'; pass"),
    "three": (([(X, Y, PATHS)],), TypeError, r"a batch is a tuple of 3 \(Tensor, list\); pass"),
    "text": ((["ab", "cd"],), TypeError, "a batch is a str; pass"),
    "nothing": ((None,), TypeError, r"^batches: got a NoneType; pass an iterable of \(inputs, targets\)"),
    "a word": (("x",), TypeError, "^batches: got a str; pass an iterable"),
    "two letters": (("xy",), TypeError, "^batches: got a str; pass an iterable"),
    "a number": ((5,), TypeError, "^batches: got a int; pass an iterable"),
    "a batch for all": (({"x": X}, Y), TypeError, "^batches: got a dict with the keys 'x'; pass an iterable"),
    "empty": (((X[:0], Y[:0]),), ValueError, "a batch is empty"),
    "meta": (([({"x": X.to("meta")}, Y)],), ValueError, r"inputs\['x'\]: got a tensor without data \(meta\)"),
    "sparse": (([(X.to_sparse(), Y)],), TypeError, r"layer 'layer': inputs: got a tensor of layout torch.sparse_coo"),
    "sparse of all": (((X.to_sparse(), Y),), TypeError, "^inputs: got a tensor of layout torch.sparse_coo"),
    "nan": (((X * math.nan, Y),), ValueError, "layer 'layer': features: 120 NaN"),
    "targets nan": (((X, X * math.nan),), ValueError, "^targets: 120 NaN"),
    "targets of yes and no": (((X, Y > 0),), TypeError, r"^targets are torch\.bool"),
    "targets below": (((X, Y - 1),), ValueError, "^targets have class -1"),
    "transposed": (([(X.T, torch.arange(6) % 3)],), ValueError, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_batch_is_named_and_leaves_no_trace(case, unchecked):
    arguments, kind, words = REFUSED[case]
    model = nn.Sequential(OrderedDict(layer=nn.Linear(6, 3), norm=nn.BatchNorm1d(3), drop=nn.Dropout()))
    if words is None:
        model, words = Reading(lambda x: x.T[:, :6].reshape(-1, 6)), r"layer 'layer': got shape \(20, 6\) for 6 targets"
    before, random = copy.deepcopy(model), torch.get_rng_state()
    with pytest.raises(kind, match=words):
        unchecked.probe(model, *arguments)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )
    assert [each.training for each in model.modules()] == [each.training for each in before.modules()]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


OPTIONS = {
    "batch_size": (dict(batch_size=0), ValueError, "batch_size is 0; pass a positive integer"),
    "part of a sample": (dict(batch_size=2.5), ValueError, "batch_size is 2.5; pass a positive integer"),
    "max_bytes": (dict(max_bytes="1 GB"), TypeError, "max_bytes: got a str; pass a number of bytes"),
    "num_classes": (dict(num_classes=2.5), ValueError, "^num_classes is 2.5"),
    "metrics": (dict(metrics=5), TypeError, "metrics: got a int; pass some of tl_in"),
    "a list of metrics": (dict(metrics=[["tl_in"]]), ValueError, r"no metric \['tl_in'\]; pass some of tl_in"),
    "layers": (dict(layers=5), TypeError, "layers: got a int; pass names of layers, or None for all"),
    "a layer": (dict(layers=[nn.Linear(6, 3)]), TypeError, "layers: got a Linear among them; pass names"),
    "test_targets alone": (dict(test_targets=Y), ValueError, "test_targets came without test_batches; pass both"),
    "test_batches": (dict(test_batches=5), TypeError, "^test_batches: got a int; pass an iterable"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_are_refused_say_what_to_pass(case, unchecked):
    arguments, kind, words = OPTIONS[case]
    with pytest.raises(kind, match=words):
        unchecked.probe(Reading(), X, Y, **arguments)


# ---- in place ----


class Overwriting(nn.Module):
    """Works in place before and behind each of its layers."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 3, dtype=dtype)

    def forward(self, x):
        x.mul_(2)
        y = self.first(x)
        x.zero_()
        y.tanh_()
        return self.second(y).zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, N], ids=["rows", "sums"])
def test_layers_are_measured_as_they_were_and_the_batch_stays(dtype, n):
    model, x, y = Overwriting(dtype), X[:n].to(dtype), torch.arange(n) % 3
    kept = x.clone()
    table = probe(model, (x, y), batch_size=3, metrics=["tl_in", "tl_out"])
    assert torch.equal(x, kept)
    with torch.no_grad():
        h = [2 * x, model.first(2 * x), model.first(2 * x).tanh()]
        expected = [target_linearity(each, y).item() for each in (h[0], h[2], h[1], model.second(h[2]))]
    assert [*table["tl_in"], *table["tl_out"]] == pytest.approx(expected, abs=1e-5)


def test_a_first_layer_that_works_in_place_changes_no_batch_of_any_form():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    kept = X.clone()
    first = probe(model, (X, Y))
    pairs = list(zip(X.split(7), Y.split(7), strict=True))
    for form in (
        (X, Y),
        (pairs,),
        (X.split(7), Y),
        ([((X,), Y)],),
        ([{"input": X}], Y),
        (DataLoader(TensorDataset(X, Y)),),
    ):
        table = probe(model, *form, test_batches=(X, Y))
        assert table["tl_in"][0] == pytest.approx(first["tl_in"][0], abs=1e-9)
        assert table["tl_in_test"][0] == pytest.approx(first["tl_in"][0], abs=1e-6)
        assert torch.equal(X, kept)


def test_a_recorded_input_is_that_which_entered_or_an_error(unchecked):
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    with record(model) as records, torch.no_grad():
        model(X)
    with torch.no_grad():
        assert torch.equal(records["2"].features, F.relu(model[0](X)))
    kept, overwriting = X.clone(), Overwriting(torch.float32)

    def run():
        with unchecked.hooks.record(overwriting), torch.no_grad():
            overwriting(kept)

    with pytest.raises(ValueError, match="the input of layer 'first' was changed in place"):
        run()
    assert not overwriting.first._forward_hooks


# ---- sizes ----


def test_a_last_batch_of_one_sample_is_measured_like_the_others():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model(X)  # running statistics
    expected = probe(model, (X, Y))
    for batch_size in (N - 1, 1):
        table = probe(model, (X, Y), batch_size=batch_size, test_batches=(X, Y))
        assert table["samples"].tolist() == [N, N]
        for column in ("tl_in", "tl_out", "surrogate", "cka"):
            assert table[column].tolist() == pytest.approx(expected[column].tolist(), rel=1e-5)


def test_a_sampler_that_pads_counts_samples_twice_and_a_range_does_not():
    dataset, world = TensorDataset(X, Y), 3
    samplers = {
        "padded": [DistributedSampler(dataset, world, rank, shuffle=False) for rank in range(world)],
        "range": [range(rank, N, world) for rank in range(world)],
    }
    counts = {
        kind: sum(probe(Reading(), DataLoader(dataset, 4, sampler=each))["samples"][0] for each in ranks)
        for kind, ranks in samplers.items()
    }
    assert counts == {"padded": 21, "range": N}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.uint16, torch.uint32, torch.uint64])
def test_classes_of_any_width_are_classes(dtype):
    pd.testing.assert_frame_equal(
        probe(Reading(), (X, Y.to(dtype)), batch_size=7), probe(Reading(), (X, Y), batch_size=7)
    )


def test_many_classes_are_never_one_hot():
    # As a matrix, the targets of all positions would take 4 GB.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 2, 5, 5, generator=generator)
    y = torch.randint(200_000, (100,), generator=generator)
    table = probe(nn.Sequential(nn.Conv2d(2, 3, 1)), (x, y))
    assert table["features"].tolist() == [2]
    assert table[["tl_in", "tl_out", "surrogate", "cka"]].notna().all(axis=None)


def test_maps_without_a_batch_axis_are_refused(unchecked):
    model = Reading(lambda x: x[:, 0])
    model.layer = nn.Conv2d(4, 2, 1)
    with pytest.raises(ValueError, match=r"layer 'layer': got shape \(4, 5, 5\) for 4 targets: its first axis is not"):
        unchecked.probe(model, (torch.randn(4, 1, 5, 5), torch.arange(4) % 2))
