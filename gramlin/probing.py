"""A layer table for any model: Target Linearity, the surrogate and their kin, in one pass over the data."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gramlin.checks import check_finite, check_tensor
from gramlin.collapse import MEASURES, check_classes
from gramlin.hooks import chosen_layers, unwrapped, watching
from gramlin.linearity import HeldOut, LinearFit, alignment_of, fit_of, frobenius_norm, linearity_of, surrogate_of
from gramlin.moments import Moments, target_values, to_cpu_without_float64
from gramlin.training import check_batch_size, evaluating

POSITIONS = ("pool", "flatten")


@dataclass
class LayerSums:
    """What a metric of the table is computed from: the moments of one layer, over all batches and uses.

    Attributes:
        name: the layer's name in the model.
        layer: the layer itself.
        ridge: the penalty that was asked for.
        samples: rows of the moments, a sample a use.
        width: d, the number of input features of a sample.
        moments: by view, for the views that the chosen metrics need. ``"inputs"`` and ``"outputs"``: a row a sample,
            positions pooled or flattened. ``"output_rows"``: a row a position, with its sample's target.
            ``"target_rows"``: for real targets, those of ``"output_rows"`` as features.
    """

    name: str
    layer: nn.Module
    ridge: float
    samples: int = 0
    width: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerMetric:
    """A column of the table: the views of a layer that it needs, and its value.

    Attributes:
        views: keys of ``LayerSums.moments``.
        value: the entry, from a layer's sums.
        fit: for a metric with a held-out value, the fit to the first view that other data are scored with.
    """

    views: tuple[str, ...]
    value: Callable[[LayerSums], float]
    fit: Callable[[LayerSums], LinearFit] | None = None


def _target_linearity(view: str) -> LayerMetric:
    return LayerMetric(
        (view,),
        lambda sums: linearity_of(sums.moments[view], sums.ridge).item(),
        lambda sums: fit_of(sums.moments[view], sums.ridge),
    )


def _surrogate(sums: LayerSums) -> float:
    # W HᵀY = ZᵀY: the outputs have it, without the products of the much wider inputs.
    return surrogate_of(sums.moments["output_rows"].cross).item()


def _alignment(sums: LayerSums) -> float:
    rows = sums.moments["output_rows"]
    if not rows.squares.any():
        return math.nan
    target_size = rows.class_scatter_norm if rows.are_classes else frobenius_norm(sums.moments["target_rows"].scatter)
    return alignment_of(rows.cross, rows.scatter, target_size).item()


def _collapse(name: str) -> LayerMetric:
    def value(sums: LayerSums) -> float:
        moments = sums.moments["inputs"]
        check_classes(moments)
        return MEASURES[name](moments).item() if moments.squares.any() else math.nan

    return LayerMetric(("inputs",), value)


# The table of metrics; another module adds a column with one more entry.
METRICS: dict[str, LayerMetric] = {
    "tl_in": _target_linearity("inputs"),
    "tl_out": _target_linearity("outputs"),
    "surrogate": LayerMetric(("output_rows",), _surrogate),
    "cka": LayerMetric(("output_rows", "target_rows"), _alignment),
    **{name: _collapse(name) for name in MEASURES},
}


def probe(
    model: nn.Module,
    batches: Any,
    targets: Tensor | None = None,
    *,
    layers: Iterable[str] | None = None,
    metrics: Iterable[str] = ("tl_in", "tl_out", "surrogate", "cka"),
    test_batches: Any = None,
    test_targets: Tensor | None = None,
    ridge: float = 0.0,
    positions: str = "pool",
    num_classes: int | None = None,
    batch_size: int = 256,
    max_bytes: int = 4 * 2**30,
) -> pd.DataFrame:
    """Measure layers of a model in one pass over the data: a row a layer, a column a metric.

    The model runs in evaluation mode and without gradients, on its own device, and is left as it was found, also by a
    call that fails: modes, gradients, hooks, and torch's random state. It gets a copy of each batch, so that layers
    that work in place change nothing of yours. Nothing is kept of a batch but its sums. The model's outputs are never
    looked at. In evaluation mode dropout is off, and batch normalisation uses its running statistics: the table is that
    of the network as it predicts. In training mode every feature behind such a layer would be another.

    Metrics:
        ``tl_in``: Target Linearity of the features that enter the layer, what its weight multiplies; after an
            activation, these are the activated features of the layer before.
        ``tl_out``: that of what leaves the layer, its pre-activations. An affine function of what enters, hence never
            more than ``tl_in`` if features are flattened or the layer is linear.
        ``surrogate``: ``gramlin.surrogate`` of the input rows H and the weight. Computed as (1/K)‖ZᵀY‖²_F.
        ``cka``: ``gramlin.normalized_surrogate`` of the same; NaN if the outputs are constant.
        ``nc1``, ``nc2_equinorm``, ``nc2_equiangular``, ``nc2_etf``: those of ``gramlin.neural_collapse``, of the
            features that enter the layer, for classes; NaN if these are constant.

    Positions: a sample that a layer sees at many positions (the pixels of a convolution's map, the tokens of a
    sequence) is one row for Target Linearity and collapse: by default the average over positions, a feature a channel;
    with ``positions="flatten"`` all of them, channels · height · width features. Mind that Target Linearity without
    ridge is 1, and says nothing, where there are as many features as samples. For the surrogate and the CKA each
    position (of a convolution, each patch) is a row, with the target of its sample.

    Numbers: those that a layer gets and hands on, as they are stored. In half precision ``tl_out``, ``surrogate`` and
    ``cka`` are of outputs that have been rounded, as the next layer gets them. Nothing else is rounded: each sum and
    average here is in float64.

    Layers: every layer of the table has seen every sample, as often as the model uses it. A module in several places
    has one row, under its first name (or the one that ``layers`` has), with the samples of all its uses: its figures
    are of all these features together. Modules that share a weight only have a row each. The table of a model that is
    compiled, or wrapped by ``nn.DataParallel`` or ``DistributedDataParallel``, is that of the model inside, with the
    same names; compiled code is not used.

    Several processes: ``probe`` measures what its own process gets. A ``DistributedSampler`` repeats samples until all
    processes have as many, and these count twice; with ``DataLoader(data, sampler=range(rank, len(data), world_size))``
    each sample is in one process, once. For one table of all the data, run ``probe`` in one process on all of them.

    Args:
        model: any ``nn.Module`` whose layers see samples along the first axis; not one that is scripted or exported.
        batches: an iterable of (inputs, targets), such as a ``DataLoader``; one pair of tensors; or, with ``targets``,
            a tensor of all inputs or an iterable of inputs. Inputs that are a dictionary or a tuple are passed on as
            keyword or positional arguments; they may hold other containers, dataclasses, and what is no tensor.
        targets: of all samples in order, real (n, K) or (n,) or integer classes (n,); None if batches have them.
        layers: names as in ``model.named_modules()``, without those of wrappers; by default every ``nn.Linear`` and
            ``nn.Conv2d`` that the model calls, in the order in which it first calls them.
        metrics: columns, of those in ``gramlin.probing.METRICS``.
        test_batches: held-out data, in any of the forms of ``batches``: the fit to ``batches`` is scored on them, in
            the columns ``tl_in_test`` and ``tl_out_test``. A second pass.
        test_targets: as ``targets``.
        ridge: as in ``gramlin.target_linearity``.
        positions: "pool" or "flatten".
        num_classes: K for classes; by default the largest class seen + 1.
        batch_size: of the parts in which a tensor of all inputs is passed through the model.
        max_bytes: refuse to keep more than this in sums, of all layers together. A layer of d features needs
            8 · min(n, d) · (d + K) bytes for each of ``tl_in`` and ``tl_out``, and several times that while it is
            solved.

    Returns:
        A table with the columns ``layer``, ``type``, ``samples`` (the rows of Target Linearity, one for each sample and
        use), ``features`` (d), and one for each metric.

    Raises:
        ValueError: an unknown layer, metric or value of ``positions``; a named layer that is not called, a layer that
            is called on some batches only, or no layer at all; a model on the meta device, or with layers that have no
            shape yet; more memory than ``max_bytes``; batches and targets that do not fit; as in
            ``gramlin.target_linearity``, with the layer's name.
        TypeError: a layer that is neither ``nn.Linear`` nor ``nn.Conv2d``; a model that is scripted, exported or
            quantized; batches that are not pairs, or without a tensor.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> probe(model, (torch.randn(50, 4), torch.arange(50) % 2))[["layer", "features", "samples"]]
          layer  features  samples
        0     0         4       50
        1     2         3       50
    """
    chosen = _chosen_metrics(metrics)
    _check_options(positions, num_classes, batch_size, max_bytes)
    if test_batches is None and test_targets is not None:
        raise ValueError("test_targets came without test_batches; pass both, or neither")
    modules = chosen_layers(model, layers)
    model = unwrapped(model)
    _check_has_values(model)
    pairs = _pairs("batches", batches, targets, batch_size)
    test_pairs = None if test_batches is None else _pairs("test_batches", test_batches, test_targets, batch_size)
    seen: dict[str, LayerSums] = {}
    views = dict.fromkeys(view for metric in chosen.values() for view in metric.views)

    def add(name: str, entered: Tensor, left: Tensor, targets: Tensor) -> None:
        sums = seen.setdefault(name, LayerSums(name, modules[name], ridge))
        sums.samples += len(targets)
        sums.width = _width(sums.layer, entered, positions)
        for view in views:
            rows = _view(view, sums.layer, entered, left, targets, positions)
            if rows is None:
                continue
            moments = sums.moments.setdefault(view, Moments(num_classes if view != "target_rows" else None))
            _check_memory(name, view, moments, rows, seen.values(), max_bytes)
            moments.update(*rows)

    missing = _pass(model, modules, pairs, num_classes, add)
    if missing and (layers is not None or not seen):
        raise ValueError(f"the model did not call layer {missing[0]!r}; name only layers that it calls")

    order = [name for name in modules if name in seen] if layers is not None else list(seen)
    table = pd.DataFrame([_row(seen[name], chosen) for name in order])
    if test_pairs is None:
        return table

    scores: dict[tuple[str, str], HeldOut] = {}
    for name, sums in seen.items():
        for metric_name, metric in chosen.items():
            if metric.fit is not None:
                scores[name, metric_name] = HeldOut(metric.fit(sums))

    def score(name: str, entered: Tensor, left: Tensor, targets: Tensor) -> None:
        for metric_name, metric in chosen.items():
            if metric.fit is not None:
                rows = _view(metric.views[0], modules[name], entered, left, targets, positions)
                assert rows is not None  # only a view that is not fitted may have none
                scores[name, metric_name].update(*rows)

    missing = _pass(model, {name: modules[name] for name in order}, test_pairs, num_classes, score)
    if missing:
        raise ValueError(f"the model did not call layer {missing[0]!r} on test_batches; name only layers that it calls")
    for metric_name in dict.fromkeys(metric_name for _, metric_name in scores):
        table[f"{metric_name}_test"] = [scores[name, metric_name].score().item() for name in order]
    return table


def _chosen_metrics(metrics: Iterable[str]) -> dict[str, LayerMetric]:
    if not isinstance(metrics, Iterable):
        raise TypeError(f"metrics: got a {type(metrics).__name__}; pass some of {', '.join(METRICS)}")
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in names:
        if not isinstance(name, str) or name not in METRICS:
            raise ValueError(f"no metric {name!r}; pass some of {', '.join(METRICS)}")
    if not names:
        raise ValueError(f"metrics is empty; pass some of {', '.join(METRICS)}")
    return {name: METRICS[name] for name in names}


def _check_options(positions: str, num_classes: int | None, batch_size: int, max_bytes: int) -> None:
    if positions not in POSITIONS:
        raise ValueError(f"positions is {positions!r}; pass one of {', '.join(map(repr, POSITIONS))}")
    Moments(num_classes)  # refuses what is no number of classes
    check_batch_size(batch_size)
    if not isinstance(max_bytes, Real):
        raise TypeError(f"max_bytes: got a {type(max_bytes).__name__}; pass a number of bytes")


# ---- data ----


def _pairs(name: str, batches: Any, targets: Tensor | None, batch_size: int) -> Iterator[tuple[Any, Tensor]]:
    """Batches of (inputs, targets), from any of the forms that ``probe`` takes."""
    if targets is None and isinstance(batches, Sequence) and len(batches) == 2:
        first, second = batches
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            batches, targets = first, second
    if targets is not None:
        _check_targets(targets)
    if isinstance(batches, Tensor):
        check_tensor("inputs", batches)
        n = len(batches) if batches.ndim else 0
        if targets is None or len(targets) != n:
            got = "no targets" if targets is None else f"{len(targets)} targets"
            raise ValueError(f"got {n} inputs and {got}; pass as many targets as inputs")
        return zip(batches.split(batch_size), targets.split(batch_size), strict=True)
    numpy = type(batches).__module__ == "numpy"
    if isinstance(batches, (str, bytes, Mapping)) or numpy or not _is_iterable(batches):
        raise TypeError(
            f"{name}: got {_described(batches)}; pass an iterable of (inputs, targets), such as a DataLoader, or a "
            "tensor of all inputs and targets="
        )
    return _checked_pairs(batches) if targets is None else _with_targets(batches, targets)


def _checked_pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Tensor]]:
    for batch in batches:
        if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)) or len(batch) != 2:
            raise TypeError(
                f"a batch is {_described(batch)}; pass batches of (inputs, targets), or targets= beside the inputs; a "
                "single pair goes in a list, [(inputs, targets)]"
            )
        yield batch[0], batch[1]


def _with_targets(batches: Iterable[Any], targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
    start = 0
    for inputs in batches:
        lengths = _lengths(inputs)
        length = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1 or length is None:
            raise ValueError(
                f"a batch has tensors of several lengths, {_listed(lengths)}; pass inputs whose tensors have a sample "
                "a row, or batches of (inputs, targets)"
            )
        stop = start + length
        if stop > len(targets):
            raise ValueError(f"got {stop} inputs and more, but {len(targets)} targets; pass as many as inputs")
        yield inputs, targets[start:stop]
        start = stop
    if start != len(targets):
        raise ValueError(f"got {start} inputs and {len(targets)} targets; pass as many targets as inputs")


def _check_targets(targets: Any) -> None:
    check_tensor("targets", targets)
    if targets.ndim == 0:
        raise ValueError(
            "targets have shape (); pass those of a batch of samples, (n,) or (n, K); a data set goes into a DataLoader"
        )


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def _described(value: Any) -> str:
    kind = type(value)
    if isinstance(value, Mapping):
        return f"a {kind.__name__} with the keys {', '.join(map(repr, value))}"
    if isinstance(value, (list, tuple)):
        inner = dict.fromkeys(type(each).__name__ for each in value)
        return f"a {kind.__name__} of {len(value)} ({', '.join(inner) or 'nothing'})"
    hint = " (of NumPy arrays: torch.from_numpy(array))" if kind.__module__ == "numpy" else ""
    return f"a {kind.__name__}{hint}"


def _lengths(inputs: Any) -> dict[str, int | None]:
    """The length of the first axis of each tensor in a batch, by its place; None for an object that moves itself."""
    lengths: dict[str, int | None] = {}

    def note(place: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            lengths[place] = None
        elif value.ndim:
            lengths[place] = value.size(0)
        return value

    _mapped(note, inputs)
    if not lengths:
        raise TypeError(f"inputs: got {_described(inputs)}; pass a tensor with a sample a row, or a container of some")
    return lengths


def _listed(lengths: dict[str, int | None]) -> str:
    return ", ".join(f"{place} of {'unknown length' if n is None else n}" for place, n in lengths.items())


def _moved(inputs: Any, device: torch.device) -> Any:
    """A copy of the inputs on the device: what the model changes in place is not the caller's."""

    def move(place: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.copy(value).to(device)  # some move themselves in place
        if value.is_meta:
            raise ValueError(f"{place}: got a tensor without data (meta); pass one that holds numbers")
        return value.to(device, copy=True)

    return _mapped(move, inputs)


def _mapped(function: Callable[[str, Any], Any], inputs: Any) -> Any:
    """The inputs with the function's value for each tensor, in containers of the same kinds; it gets the place, too.

    So are objects that are no container, but have a ``to`` of their own. Other leaves stay what they are.
    """

    def walk(place: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(place, value)
        if isinstance(value, Mapping):
            entries = {key: walk(f"{place}[{key!r}]", each) for key, each in value.items()}
            return _refilled(value, entries.items()) if isinstance(value, MutableMapping) else entries
        if is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value) if hasattr(value, each.name)]
            new = copy.copy(value)
            for name in names:  # also of a frozen one
                object.__setattr__(new, name, walk(f"{place}.{name}", getattr(value, name)))
            return new
        if callable(getattr(value, "to", None)) and not isinstance(value, type):
            return function(place, value)
        if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, (tuple, MutableSequence)):
            return value
        items = [walk(f"{place}[{index}]", each) for index, each in enumerate(value)]
        if isinstance(value, tuple):
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        return _refilled(value, enumerate(items))

    try:
        return walk("inputs", inputs)
    except RecursionError:
        raise ValueError("inputs: got a container that holds itself; pass a batch without such a reference") from None


def _refilled(container: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    new = copy.copy(container)
    for key, value in items:
        new[key] = value
    return new


# ---- the pass over the data ----


def _check_has_values(model: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"{name} of the model has no shape yet; run the model once, on any batch, before probe")
    if tensors and all(tensor.is_meta for tensor in tensors.values()):
        raise ValueError("the model is on the meta device, without numbers; load it on another, e.g. with to_empty()")


def _pass(
    model: nn.Module,
    modules: dict[str, nn.Module],
    pairs: Iterable[tuple[Any, Tensor]],
    num_classes: int | None,
    observe: Callable[[str, Tensor, Tensor, Tensor], None],
) -> list[str]:
    """Run the model on every batch, and show (name, input, output, targets) of each use of a layer to ``observe``.

    Returns:
        The layers that were not called.

    Raises:
        ValueError: among others, if a layer has seen some of the batches, but not all.
    """
    tensors = [*model.parameters(), *model.buffers()]
    device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    current: Tensor
    called: set[str] = set()
    failures: list[Exception] = []
    total, seen = 0, dict.fromkeys(modules, 0)

    def see(name: str, entered: Tensor, left: Tensor) -> None:
        try:
            _check_samples(modules[name], entered, left, len(current))
            observe(name, entered, left, current.to(left.device))
        except (ValueError, TypeError) as error:
            failures.append(type(error)(f"layer {name!r}: {error}"))
            raise failures[0] from error
        called.add(name)

    with _left_as_found(model), watching(modules, see):
        for inputs, targets in pairs:
            _check_batch(inputs, targets, num_classes)
            current = targets.to(device)
            called.clear()
            _run(model, _moved(inputs, device))
            if failures:  # the model caught it, and went on
                raise failures[0]
            total += len(targets)
            for name in called:
                seen[name] += len(targets)
    if not total:
        raise ValueError("there are no batches; pass at least one")
    for name, count in seen.items():
        if count not in (0, total):
            raise ValueError(
                f"layer {name!r} saw {count} of {total} samples: the model does not use it on every batch; leave it "
                "out by naming others in layers="
            )
    return [name for name, count in seen.items() if count == 0]


def _check_batch(inputs: Any, targets: Any, num_classes: int | None) -> None:
    _check_targets(targets)
    lengths = _lengths(inputs)
    if len(targets) not in lengths.values() and None not in lengths.values():
        got = next(iter(lengths.values())) if len(set(lengths.values())) == 1 else _listed(lengths)
        raise ValueError(f"a batch has {got} inputs and {len(targets)} targets; pass as many of both")
    if len(targets) == 0:
        raise ValueError("a batch is empty; pass batches of at least one sample")
    target_values(targets, num_classes)  # here, since a wrong target is no fault of a layer
    if targets.is_floating_point():
        check_finite("targets", targets)


def _check_samples(layer: nn.Module, entered: Any, left: Any, n: int) -> None:
    check_tensor("inputs", entered)
    check_tensor("outputs", left)
    batched = entered.ndim == 4 if isinstance(layer, nn.Conv2d) else entered.ndim > 1
    if not batched or len(entered) != n or len(left) != n:
        raise ValueError(
            f"got shape {tuple(entered.shape)} for {n} targets: its first axis is not the batch; leave the layer out "
            "by naming others in layers="
        )


def _run(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        wrong = [key for key in inputs if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"inputs have the key {wrong[0]!r}; pass names of the model's arguments as keys")
        model(**inputs)
    elif isinstance(inputs, (list, tuple)) and not hasattr(inputs, "to"):
        model(*inputs)
    else:
        model(inputs)


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; the modes of all submodules and torch's random state come back."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), evaluating(model):
        yield


# ---- what of a layer is measured ----


def _view(
    view: str, layer: nn.Module, entered: Tensor, left: Tensor, targets: Tensor, positions: str
) -> tuple[Tensor, Tensor] | None:
    """Features and targets of one view of ``LayerSums``; None where it is not needed."""
    if view == "inputs":
        return _sample_features(layer, entered, positions), targets
    if view == "outputs":
        return _sample_features(layer, left, positions), targets
    if view == "target_rows" and not targets.is_floating_point():
        return None
    rows = _channels_last(layer, left).flatten(0, -2)
    repeated = targets.repeat_interleave(len(rows) // len(targets), dim=0)
    if view == "output_rows":
        return rows, repeated
    matrix, _ = target_values(repeated)
    return matrix, matrix[:, :1]  # moments have targets; these are not used


def _channels_last(layer: nn.Module, maps: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    return maps.movedim(1, -1) if isinstance(layer, nn.Conv2d) else maps


def _sample_features(layer: nn.Module, maps: Float[Tensor, "B ..."], positions: str) -> Float[Tensor, "B d"]:
    if positions == "flatten":
        return maps.flatten(1)
    maps = _channels_last(layer, maps)
    inner = tuple(range(1, maps.ndim - 1))
    return to_cpu_without_float64(maps).mean(dim=inner, dtype=torch.float64) if inner else maps


def _width(layer: nn.Module, entered: Float[Tensor, "B ..."], positions: str) -> int:
    return math.prod(entered.shape[1:]) if positions == "flatten" else _channels_last(layer, entered).shape[-1]


def _check_memory(
    name: str, view: str, moments: Moments, rows: tuple[Tensor, Tensor], every: Iterable[LayerSums], max_bytes: int
) -> None:
    d, n = rows[0].shape[1], moments.count + len(rows[0])
    needed = 8 * min(n, d) * (d + moments.num_targets)
    others = sum(each.nbytes for sums in every for each in sums.moments.values() if each is not moments)
    if needed + others > max_bytes:
        raise ValueError(
            f"the {view} have {d} features: sums of {n} samples take {needed / 2**30:.2g} GiB, with other layers "
            f"{(needed + others) / 2**30:.2g} GiB, more than max_bytes={max_bytes}; pass positions='pool', fewer "
            "layers, or a larger max_bytes"
        )


def _row(sums: LayerSums, chosen: dict[str, LayerMetric]) -> dict[str, Any]:
    row = {
        "layer": sums.name,
        "type": type(sums.layer).__name__,
        "samples": sums.samples,
        "features": sums.width,
    }
    try:
        return row | {name: metric.value(sums) for name, metric in chosen.items()}
    except ValueError as error:
        raise ValueError(f"layer {sums.name!r}: {error}") from error
