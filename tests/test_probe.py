"""The layer table against the measures of features taken by hand, on every kind of model and of data."""

import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramlin
import gramlin.probing
from gramlin import fit_linear, normalized_surrogate, probe, surrogate, target_linearity
from gramlin.hooks import input_rows, weight_matrix
from gramlin.models import CNN, MLP
from gramlin.probing import LayerMetric

# The model runs in float64; sums of batches differ by their roundings.
TIGHT = 1e-9


def images(n: int, *shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, (3 * x.flatten(1)[:, :3]).argmax(dim=1)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP([6, 5, 4, 3]).double()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return CNN((2, 6, 4), 3, channels=5).double()


def seen_by_hand(model: nn.Module, x: torch.Tensor) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Input and output of every use of every Linear and Conv2d, with hooks of the test's own."""
    uses: dict[str, list] = {}
    handles = [
        module.register_forward_hook(
            lambda _, args, out, name=name: uses.setdefault(name, []).append((args[0].detach().clone(), out.clone()))
        )
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    model.eval()
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return uses


def entry(table: pd.DataFrame, layer: str, column: str):
    return table.set_index("layer").loc[layer, column]


# ---- the figures ----


def test_rows_of_an_mlp_are_the_measures_of_its_features():
    model, (x, y) = mlp(), images(40, 6)
    table = probe(model, (x, y), batch_size=7)
    assert list(table.columns) == ["layer", "type", "samples", "features", "tl_in", "tl_out", "surrogate", "cka"]
    assert list(table["layer"]) == ["linear1", "linear2", "linear3"]
    assert list(table["features"]) == [6, 5, 4]
    assert set(table["samples"]) == {40}
    for name, [(H, Z)] in seen_by_hand(model, x).items():
        W = dict(model.named_modules())[name].weight
        assert entry(table, name, "tl_in") == pytest.approx(target_linearity(H, y).item(), abs=TIGHT)
        assert entry(table, name, "tl_out") == pytest.approx(target_linearity(Z, y).item(), abs=TIGHT)
        assert entry(table, name, "surrogate") == pytest.approx(surrogate(H, W, y).item(), rel=TIGHT)
        assert entry(table, name, "cka") == pytest.approx(normalized_surrogate(H, W, y).item(), rel=TIGHT)


@pytest.mark.parametrize("kind", ["classes", "matrix", "vector"])
def test_every_kind_of_target_and_a_ridge(kind):
    model, (x, y) = mlp(), images(40, 6)
    targets = {"classes": y, "matrix": x[:, :2] ** 2 + x[:, 2:4], "vector": x[:, 0] ** 2 + x[:, 1]}[kind]
    table = probe(model, (x, targets), ridge=0.5, batch_size=9)
    [(H, _)] = seen_by_hand(model, x)["linear2"]
    assert entry(table, "linear2", "tl_in") == pytest.approx(target_linearity(H, targets, 0.5).item(), abs=TIGHT)
    expected = normalized_surrogate(H, model.linear2.weight, targets).item()
    assert entry(table, "linear2", "cka") == pytest.approx(expected, rel=TIGHT)


@pytest.mark.parametrize("positions", ["pool", "flatten"])
def test_rows_of_a_convolution(positions):
    model, (x, y) = cnn(), images(60, 2, 6, 4)
    table = probe(model, (x, y), positions=positions, batch_size=25)
    assert list(table["layer"]) == ["conv1", "conv2", "conv3", "linear"]
    for name, [(H, Z)] in seen_by_hand(model, x).items():
        layer = dict(model.named_modules())[name]
        if isinstance(layer, nn.Conv2d):
            samples = [maps.mean(dim=(2, 3)) if positions == "pool" else maps.flatten(1) for maps in (H, Z)]
            rows = input_rows(layer, H)  # patches, with the sample's target for each position
            repeated = y.repeat_interleave(len(rows) // len(y))
        else:
            samples, rows, repeated = [H, Z], H, y
        W = weight_matrix(layer.weight)
        assert entry(table, name, "features") == samples[0].shape[1]
        assert entry(table, name, "tl_in") == pytest.approx(target_linearity(samples[0], y).item(), abs=1e-7)
        assert entry(table, name, "tl_out") == pytest.approx(target_linearity(samples[1], y).item(), abs=1e-7)
        assert entry(table, name, "surrogate") == pytest.approx(surrogate(rows, W, repeated).item(), rel=1e-8)
        assert entry(table, name, "cka") == pytest.approx(normalized_surrogate(rows, W, repeated).item(), rel=1e-8)


def test_a_grouped_strided_convolution_has_the_surrogate_of_its_groups():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=1, groups=2).double()
    x, y = images(20, 4, 5, 6)
    rows, weights = input_rows(conv, x), weight_matrix(conv.weight, 2)
    repeated = y.repeat_interleave(rows.shape[1] // 20)
    expected = sum(surrogate(H, W, repeated).item() for H, W in zip(rows, weights, strict=True))
    table = probe(nn.Sequential(conv), (x, y), metrics="surrogate")
    assert entry(table, "0", "surrogate") == pytest.approx(expected, rel=1e-8)


def test_a_linear_layer_hands_on_no_more_than_it_gets():
    # Its output is an affine function of its input; an activation in between can add.
    table = probe(mlp(), images(80, 6))
    assert (table["tl_out"] <= table["tl_in"] + TIGHT).all()
    flat = probe(cnn(), images(200, 2, 6, 4), positions="flatten", metrics=["tl_in", "tl_out"])
    assert (flat["tl_out"] <= flat["tl_in"] + TIGHT).all()
    wide = nn.Sequential(nn.Linear(6, 300), nn.GELU(), nn.Linear(300, 3)).double()
    rising = probe(wide, images(400, 6))
    assert rising["tl_in"][1] > rising["tl_out"][0] + 0.05


def test_tokens_are_pooled_or_flattened_and_rows_for_the_surrogate():
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(4, 5)).double(), images(50, 3, 4)
    pooled, flat = (probe(model, (x, y), positions=positions) for positions in ("pool", "flatten"))
    assert pooled["tl_in"][0] == pytest.approx(target_linearity(x.mean(dim=1), y).item(), abs=TIGHT)
    assert flat["tl_in"][0] == pytest.approx(target_linearity(x.flatten(1), y).item(), abs=TIGHT)
    expected = surrogate(x.reshape(-1, 4), model[0].weight, y.repeat_interleave(3)).item()
    assert pooled["surrogate"][0] == flat["surrogate"][0] == pytest.approx(expected, rel=TIGHT)


class Residual(nn.Module):
    """A block with a skip, a layer used twice, in-place operations, an unused layer, and outputs of any kind."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 3)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        x = x + torch.tanh(self.inner(input=scale * x))
        h = self.inner(x)
        x = x + self.drop(self.norm(F.relu(h, inplace=True)))
        return {"logits": self.head(x), "hidden": (x, None)}


def test_a_residual_model_with_a_shared_layer_and_outputs_of_any_kind():
    torch.manual_seed(0)
    model, (x, y) = Residual().double(), images(30, 4)
    table = probe(model, (x, y), batch_size=8)
    assert list(table["layer"]) == ["inner", "head"]  # in the order of the calls, without the one that is not called
    assert list(table["samples"]) == [60, 30]
    with torch.no_grad():
        middle = x + torch.tanh(model.inner(x))
    both, twice = torch.cat([x, middle]), torch.cat([y, y])
    assert entry(table, "inner", "tl_in") == pytest.approx(target_linearity(both, twice).item(), abs=TIGHT)
    expected = surrogate(both, model.inner.weight, twice).item()
    assert entry(table, "inner", "surrogate") == pytest.approx(expected, rel=TIGHT)


def test_layers_that_are_named_come_in_that_order():
    table = probe(mlp(), images(40, 6), layers=["linear3", "linear1"], metrics=["tl_in"])
    assert list(table["layer"]) == ["linear3", "linear1"]
    assert list(table.columns) == ["layer", "type", "samples", "features", "tl_in"]
    whole = probe(mlp(), images(40, 6), layers="linear1")
    assert entry(whole, "linear1", "tl_in") == entry(table, "linear1", "tl_in")


def test_training_raises_linearity_and_random_labels_have_little():
    x, y = images(600, 6)
    model = mlp()
    before = probe(model, (x, y))
    shuffled = probe(model, (x, y[torch.randperm(600, generator=torch.Generator().manual_seed(0))]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = probe(model, (x, y))
    assert (after["tl_in"][1:] > before["tl_in"][1:] + 0.05).all()
    assert after["tl_in"][0] == pytest.approx(before["tl_in"][0], abs=TIGHT)  # the data themselves
    assert (shuffled["tl_in"] < 0.03).all()


def test_a_dead_layer_has_no_alignment_and_explains_nothing():
    model = mlp()
    nn.init.zeros_(model.linear2.weight)
    table = probe(model, images(40, 6))
    assert math.isnan(entry(table, "linear2", "cka"))
    assert entry(table, "linear2", "tl_out") == entry(table, "linear3", "tl_in") == 0


# ---- held-out data ----


@pytest.mark.parametrize("n", [4, 60], ids=["rows", "sums"])
def test_held_out_columns_score_the_fit_to_the_first_data(n):
    model, (x, y), (x_new, y_new) = mlp(), images(n, 6, seed=3), images(30, 6, seed=4)
    y = y.clone()
    y[:3] = torch.arange(3)
    table = probe(model, (x, y), test_batches=(x_new, y_new), ridge=0.1, batch_size=7)
    assert list(table.columns[-2:]) == ["tl_in_test", "tl_out_test"]
    fitted, new = seen_by_hand(model, x), seen_by_hand(model, x_new)
    for name in fitted:
        for column, side in (("tl_in_test", 0), ("tl_out_test", 1)):
            expected = fit_linear(fitted[name][0][side], y, 0.1).score(new[name][0][side], y_new).item()
            assert entry(table, name, column) == pytest.approx(expected, abs=1e-7)


def test_held_out_scores_of_convolutions_and_of_the_same_data():
    model, data = cnn(), images(100, 2, 6, 4)
    table = probe(model, data, test_batches=data[0], test_targets=data[1])
    assert table["tl_in_test"].to_numpy() == pytest.approx(table["tl_in"].to_numpy(), abs=1e-7)
    assert (probe(model, data, test_batches=images(50, 2, 6, 4, seed=1))["tl_in_test"] < table["tl_in"]).all()


# ---- forms of data ----


def test_all_forms_of_data_are_one():
    model, (x, y) = mlp(), images(40, 6)
    expected = probe(model, (x, y))
    pairs = list(zip(x.split(9), y.split(9), strict=True))
    forms = {
        "a list of two tensors": ([x, y],),
        "a tensor with targets": (x, y),
        "a list of pairs": (pairs,),
        "two pairs": ([(x[:20], y[:20]), (x[20:], y[20:])],),
        "a generator": ((pair for pair in pairs),),
        "inputs with targets": (x.split(9), y),
        "a loader": (DataLoader(TensorDataset(x, y), batch_size=9),),
        "a shuffling loader": (DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True),),
        "a loader of inputs": (DataLoader(TensorDataset(x), batch_size=9), y),
        "tuples": ([((a,), b) for a, b in pairs],),
    }
    for form, arguments in forms.items():
        table = probe(model, *arguments)
        assert list(table["layer"]) == list(expected["layer"]), form
        figures, theirs = table.iloc[:, 2:].to_numpy(dtype=float), expected.iloc[:, 2:].to_numpy(dtype=float)
        assert figures == pytest.approx(theirs, rel=1e-7), form


def test_dictionaries_are_keyword_arguments():
    torch.manual_seed(0)
    model, (x, y) = Residual().double(), images(30, 4)
    named = probe(model, [({"x": x[:20], "scale": 2.0}, y[:20]), ({"x": x[20:], "scale": 2.0}, y[20:])])
    placed = probe(model, [((x, 2.0), y)])
    assert named["tl_in"].to_numpy() == pytest.approx(placed["tl_in"].to_numpy(), abs=TIGHT)
    assert (named["tl_in"] != probe(model, (x, y))["tl_in"])[0]


def test_half_precision_models_are_probed():
    model, (x, y) = mlp(), images(40, 6)
    table = probe(model.bfloat16(), (x.bfloat16(), y))
    assert table["tl_in"].to_numpy() == pytest.approx(probe(model.double(), (x, y))["tl_in"].to_numpy(), abs=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_data_go_to_the_device_of_the_model():
    data = images(40, 6)
    expected = probe(mlp(), data)["tl_in"].to_numpy()
    assert probe(mlp().cuda(), data)["tl_in"].to_numpy() == pytest.approx(expected, abs=1e-7)


def test_a_residual_network_of_torchvision_in_one_line():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=4)
    x = torch.randn(12, 3, 32, 32)
    table = gramlin.probe(model, DataLoader(TensorDataset(x, torch.arange(12) % 4), batch_size=5))
    assert len(table) == 21
    assert list(table["layer"][:2]) == ["conv1", "layer1.0.conv1"]
    assert table["features"].tolist()[-1] == 512
    assert table[["tl_in", "tl_out", "surrogate", "cka"]].notna().all(axis=None)


# ---- left as found ----


class Counting(nn.Module):
    """Draws a random number at each call, whatever its mode, and may fail."""

    def __init__(self, fails: bool):
        super().__init__()
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise RuntimeError("on purpose")
        return x + 0 * torch.rand(1)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_model_is_left_as_it_was_found(fails):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Counting(fails), nn.Linear(4, 3)).double()
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    x, y = images(30, 4)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            probe(model, loader)
    else:
        probe(model, loader, test_batches=loader)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert not model[0].weight.requires_grad
    assert model[4].weight.requires_grad
    assert (model[4].weight.grad == 1).all()
    assert torch.is_grad_enabled()


def test_a_new_metric_is_one_entry_of_the_table(monkeypatch):
    def spread(sums):
        return (sums.moments["inputs"].scatter.trace() / sums.moments["inputs"].count).item()

    monkeypatch.setitem(gramlin.probing.METRICS, "spread", LayerMetric(("inputs",), spread))
    x, y = images(40, 6)
    table = probe(mlp(), (x, y), metrics=["spread"])
    assert table["spread"][0] == pytest.approx(x.var(dim=0, correction=0).sum().item())


def test_flattened_maps_too_large_for_the_limit_say_what_to_do(unchecked):
    model, (x, y) = cnn(), images(60, 2, 6, 4)
    kind = {"positions": "flatten", "layers": ["conv1"], "metrics": ["tl_in"], "batch_size": 10}
    words = (
        r"layer 'conv1': the inputs have 48 features: sums of 30 samples .* GiB.*max_bytes=11832; pass positions='pool'"
    )
    with pytest.raises(ValueError, match=words):
        unchecked.probe(model, (x, y), **kind, max_bytes=8 * 29 * 51)
    # As sums they are never more than this, whatever the number of samples.
    assert unchecked.probe(model, (x, y), **kind, max_bytes=8 * 48 * 51)["features"].tolist() == [48]


# ---- errors: what was wrong, what was got, what to pass ----

X, Y = images(20, 6)
ERRORS = {
    "metric": (dict(metrics=["tl"]), ValueError, "no metric 'tl'; pass some of tl_in, tl_out, surrogate, cka"),
    "no metrics": (dict(metrics=[]), ValueError, "metrics is empty; pass some of tl_in"),
    "positions": (dict(positions="mean"), ValueError, "positions is 'mean'; pass one of 'pool', 'flatten'"),
    "layer": (dict(layers=["linear9"]), ValueError, "no layer 'linear9' in the model; it has flatten, linear1"),
    "kind of layer": (dict(layers=["activation1"]), TypeError, "layer 'activation1' is GELU; only nn.Linear"),
    "no layers": (dict(layers=[]), ValueError, "layers is empty; pass names of layers, or None"),
    "no targets": (dict(batches=X), ValueError, "got 20 inputs and no targets; pass as many targets as inputs"),
    "few targets": (dict(batches=X, targets=Y[:7]), ValueError, "got 20 inputs and 7 targets"),
    "few targets of batches": (dict(batches=X.split(5), targets=Y[:7]), ValueError, "got 10 inputs and more, but 7 t"),
    "few targets in a batch": (dict(batches=[(X, Y[:7])]), ValueError, "a batch has 20 inputs and 7 targets"),
    "many targets": (dict(batches=X[:5].split(5), targets=Y), ValueError, "got 5 inputs and 20 targets"),
    "no pairs": (dict(batches=[X]), TypeError, "a batch is a Tensor; pass batches of \\(inputs, targets\\)"),
    "no batches": (dict(batches=[]), ValueError, "there are no batches; pass at least one"),
    "list of targets": (dict(batches=[(X, [1] * 20)]), TypeError, "targets: got a list; pass a torch.Tensor"),
    "nan": (dict(batches=(X * torch.nan, Y)), ValueError, "layer 'linear1': features: 120 NaN or infinite"),
    "one class": (
        dict(batches=(X, Y * 0)),
        ValueError,
        "layer 'linear1': the targets of all 20 samples are of one class",
    ),
    "class": (dict(num_classes=2), ValueError, "^targets have class 2 with num_classes=2"),
    "ridge": (dict(ridge=-1.0), ValueError, "ridge is -1.0; pass a finite number"),
    "held-out classes": (dict(test_batches=(X, Y + 1)), ValueError, "class 3 with num_classes=3"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_named(case, unchecked):
    arguments, kind, words = ERRORS[case]
    model = mlp()
    with pytest.raises(kind, match=words):
        unchecked.probe(model, **{"batches": (X, Y), **arguments})
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_are_not_called_or_see_no_batch_are_named(unchecked):
    model, (x, y) = Residual().double(), images(30, 4)
    with pytest.raises(ValueError, match="did not call layer 'unused'; name only layers that it calls"):
        unchecked.probe(model, (x, y), layers=["head", "unused"])
    with pytest.raises(ValueError, match=r"ReLU has no nn.Linear or nn.Conv2d layer"):
        unchecked.probe(nn.ReLU(), (x, y))
    windows = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 2)).double()
    with pytest.raises(
        ValueError, match=r"layer '2': got shape \(60, 2\) for 30 targets: its first axis is not the batch"
    ):
        unchecked.probe(windows, (x, y))


# ---- half precision ----


def offset(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Large biases, so that outputs lie near 300 with a spread of about 1: in bfloat16 their spacing is 2."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(300.0)
    return model.to(dtype)


@pytest.mark.parametrize("positions", ["pool", "flatten"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (cnn, (2, 6, 4))], ids=["mlp", "cnn"])
def test_figures_in_half_precision_are_those_of_the_stored_numbers_in_float64(build, shape, dtype, positions):
    model = offset(build(), dtype)
    x, y = images(150, *shape)
    x = x.to(dtype)
    table = probe(model, x, y, positions=positions, metrics=[*gramlin.probing.METRICS], batch_size=150)
    uses = seen_by_hand(model, x)
    for name, [(entered, left)] in uses.items():
        entered, left = entered.double(), left.double()  # from here on all is float64
        if positions == "pool" and entered.ndim == 4:
            pooled = {"tl_in": entered.mean((2, 3)), "tl_out": left.mean((2, 3))}
        else:
            pooled = {"tl_in": entered.flatten(1), "tl_out": left.flatten(1)}
        for column, features in pooled.items():
            assert entry(table, name, column) == pytest.approx(target_linearity(features, y).item(), abs=TIGHT), column
        collapse = gramlin.neural_collapse(pooled["tl_in"], y)
        assert entry(table, name, "nc1") == pytest.approx(collapse["nc1"].item(), rel=1e-6)
        rows = left.movedim(1, -1).flatten(0, -2) if left.ndim == 4 else left
        labels = y.repeat_interleave(len(rows) // len(y))
        expected = surrogate(rows, torch.eye(rows.shape[1]).double(), labels).item()
        assert entry(table, name, "surrogate") == pytest.approx(expected, rel=TIGHT)
