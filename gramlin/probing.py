"""A layer table for any model: Target Linearity, the surrogate and their kin, in one pass over the data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramlin.collapse import MEASURES, check_classes
from gramlin.hooks import chosen_layers
from gramlin.linearity import HeldOut, LinearFit, alignment_of, fit_of, linearity_of
from gramlin.moments import Moments, target_matrix
from gramlin.training import evaluating

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
    cross = sums.moments["output_rows"].cross
    return (cross.square().sum() / cross.shape[1]).item()


def _alignment(sums: LayerSums) -> float:
    rows = sums.moments["output_rows"]
    if not rows.squares.any():
        return math.nan
    target_scatter = rows.class_scatter if rows.are_classes else sums.moments["target_rows"].scatter
    return alignment_of(rows.cross, rows.scatter, target_scatter).item()


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

    The model runs in evaluation mode and without gradients, on its own device, and is left as it was found: modes,
    gradients, hooks, and torch's random state. Nothing is kept of a batch but its sums. The model's outputs are never
    looked at.

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
    position (of a convolution, each patch) is a row, with the target of its sample. A layer that is used several times
    has the rows of all uses.

    Args:
        model: any ``nn.Module`` whose layers see samples along the first axis.
        batches: an iterable of (inputs, targets), such as a ``DataLoader``; one pair of tensors; or, with ``targets``,
            a tensor of all inputs or an iterable of inputs. Inputs that are a dictionary or a tuple are passed on as
            keyword or positional arguments.
        targets: of all samples in order, real (n, K) or (n,) or integer classes (n,); None if batches have them.
        layers: names as in ``model.named_modules()``; by default every ``nn.Linear`` and ``nn.Conv2d`` that the model
            calls, in the order in which it first calls them.
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
        ValueError: an unknown layer, metric or value of ``positions``; a named layer that is not called, or no layer
            at all; more memory than ``max_bytes``; batches and targets that do not fit; as in
            ``gramlin.target_linearity``, with the layer's name.
        TypeError: a layer that is neither ``nn.Linear`` nor ``nn.Conv2d``; batches that are not pairs.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> probe(model, (torch.randn(50, 4), torch.arange(50) % 2))[["layer", "features", "samples"]]
          layer  features  samples
        0     0         4       50
        1     2         3       50
    """
    chosen = _chosen_metrics(metrics)
    if positions not in POSITIONS:
        raise ValueError(f"positions is {positions!r}; pass one of {', '.join(map(repr, POSITIONS))}")
    modules = chosen_layers(model, layers)
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

    _pass(model, modules, _pairs(batches, targets, batch_size), add)
    missing = [name for name in modules if name not in seen]
    if missing and (layers is not None or not seen):
        raise ValueError(f"the model did not call layer {missing[0]!r}; name only layers that it calls")

    order = [name for name in modules if name in seen] if layers is not None else list(seen)
    table = pd.DataFrame([_row(seen[name], chosen) for name in order])
    if test_batches is None:
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
                scores[name, metric_name].update(*rows)

    _pass(model, {name: modules[name] for name in order}, _pairs(test_batches, test_targets, batch_size), score)
    for metric_name in dict.fromkeys(metric_name for _, metric_name in scores):
        table[f"{metric_name}_test"] = [scores[name, metric_name].score().item() for name in order]
    return table


def _chosen_metrics(metrics: Iterable[str]) -> dict[str, LayerMetric]:
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(f"no metric {name!r}; pass some of {', '.join(METRICS)}")
    if not names:
        raise ValueError(f"metrics is empty; pass some of {', '.join(METRICS)}")
    return {name: METRICS[name] for name in names}


# ---- data ----


def _pairs(batches: Any, targets: Tensor | None, batch_size: int) -> Iterator[tuple[Any, Tensor]]:
    """Batches of (inputs, targets), from any of the forms that ``probe`` takes."""
    if targets is None and isinstance(batches, Sequence) and len(batches) == 2:
        first, second = batches
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            batches, targets = first, second
    if isinstance(batches, Tensor):
        if targets is None or len(targets) != len(batches):
            got = "no targets" if targets is None else f"{len(targets)} targets"
            raise ValueError(f"got {len(batches)} inputs and {got}; pass as many targets as inputs")
        yield from zip(batches.split(batch_size), targets.split(batch_size), strict=True)
    elif targets is None:
        for batch in batches:
            if not isinstance(batch, Sequence) or len(batch) != 2:
                raise TypeError(
                    f"a batch is a {type(batch).__name__}; pass batches of (inputs, targets), or targets= beside the "
                    "inputs"
                )
            yield batch[0], batch[1]
    else:
        start = 0
        for inputs in batches:
            stop = start + _batch_length(inputs)
            if stop > len(targets):
                raise ValueError(f"got {stop} inputs and more, but {len(targets)} targets; pass as many as inputs")
            yield inputs, targets[start:stop]
            start = stop
        if start != len(targets):
            raise ValueError(f"got {start} inputs and {len(targets)} targets; pass as many targets as inputs")


def _batch_length(inputs: Any) -> int:
    while not isinstance(inputs, Tensor):
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {key: _moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return [_moved(value, device) for value in inputs]
    return inputs


# ---- the pass over the data ----


def _pass(
    model: nn.Module,
    modules: dict[str, nn.Module],
    pairs: Iterable[tuple[Any, Tensor]],
    observe: Callable[[str, Tensor, Tensor, Tensor], None],
) -> None:
    """Run the model on every batch, and show (name, input, output, targets) of each use of a layer to ``observe``."""
    device = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    current: Tensor

    def hook_of(name: str):
        def hook(layer: nn.Module, args: tuple, kwargs: dict, left: Tensor) -> None:
            entered = args[0] if args else kwargs["input"]
            if len(entered) != len(current):
                raise ValueError(
                    f"layer {name!r} got shape {tuple(entered.shape)} for {len(current)} targets: its first axis is "
                    "not the batch; leave the layer out by naming others in layers="
                )
            try:
                observe(name, entered, left, current.to(left.device))
            except (ValueError, TypeError) as error:
                raise type(error)(f"layer {name!r}: {error}") from error

        return hook

    with _left_as_found(model, device):
        handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()]
        try:
            empty = True
            for inputs, targets in pairs:
                if not isinstance(targets, Tensor):
                    raise TypeError(f"targets are a {type(targets).__name__}; pass a torch.Tensor")
                if isinstance(inputs, Tensor) and len(inputs) != len(targets):
                    raise ValueError(
                        f"a batch has {len(inputs)} inputs and {len(targets)} targets; pass as many of both"
                    )
                empty = False
                inputs, current = _moved(inputs, device), targets.to(device)
                if isinstance(inputs, Mapping):
                    model(**inputs)
                elif isinstance(inputs, list):
                    model(*inputs)
                else:
                    model(inputs)
            if empty:
                raise ValueError("there are no batches; pass at least one")
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _left_as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode and no gradients inside; the modes of all submodules and torch's random state come back."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), evaluating(model):
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
    matrix = target_matrix(repeated)
    return matrix, matrix[:, :1]  # moments have targets; these are not used


def _channels_last(layer: nn.Module, maps: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    return maps.movedim(1, -1) if isinstance(layer, nn.Conv2d) else maps


def _sample_features(layer: nn.Module, maps: Float[Tensor, "B ..."], positions: str) -> Float[Tensor, "B d"]:
    if positions == "flatten":
        return maps.flatten(1)
    maps = _channels_last(layer, maps)
    inner = tuple(range(1, maps.ndim - 1))
    return maps.mean(dim=inner, dtype=torch.promote_types(maps.dtype, torch.float32)) if inner else maps


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
