"""Compiled and wrapped models measure as the model inside; what cannot be measured is refused, and never in part."""

import copy
import warnings

import pandas as pd
import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gramlin import probe, target_linearity
from gramlin.chapters.features import entering
from gramlin.hooks import record
from gramlin.training import accuracy

N, BATCH = 100, 36  # the last batch of 28 has another shape: a compiled model has two graphs
NAMES = ["0", "2.0", "2.2"]


def bare() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 4), nn.Dropout(), nn.Linear(4, 3))
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), block)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(dim=1)


def used(model: nn.Module) -> nn.Module:
    """After a pass with and one without gradients, so that all graphs that a later one could use are compiled."""
    x, _ = data()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        for batch in x.split(BATCH):
            model(batch).sum().backward()
            with torch.no_grad():
                model(batch)
    model.zero_grad()
    return model


def compiled(model: nn.Module, backend="eager") -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def with_a_compiled_block(model: nn.Module) -> nn.Module:
    model[0], model[2] = compiled(model[0]), compiled(model[2])
    return model


WRAPPED = {
    "compiled": lambda model: compiled(model),
    "compiled and used": lambda model: used(compiled(model)),
    "compiled with autograd": lambda model: used(compiled(model, "aot_eager")),
    "used and compiled": lambda model: compiled(used(model)),
    "compiled in place": lambda model: used(compiled_in_place(model)),
    "blocks compiled": lambda model: used(with_a_compiled_block(model)),
    "blocks compiled in a compiled one": lambda model: used(compiled(with_a_compiled_block(model))),
    "data parallel": nn.DataParallel,
    "data parallel of compiled": lambda model: nn.DataParallel(used(compiled(model))),
    "compiled data parallel": lambda model: used(compiled(nn.DataParallel(model))),
    "checkpointed": checkpoint_wrapper,
    "traced to a graph": torch.fx.symbolic_trace,
}


@pytest.fixture
def bare_table() -> pd.DataFrame:
    return probe(bare(), data(), batch_size=BATCH, test_batches=data())


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_has_the_table_of_the_model_inside(kind, bare_table):
    model = WRAPPED[kind](bare())
    pd.testing.assert_frame_equal(probe(model, data(), batch_size=BATCH, test_batches=data()), bare_table)
    assert list(bare_table["layer"]) == NAMES
    assert set(bare_table["samples"]) == {N}
    one = probe(model, data(), layers="2.0", batch_size=BATCH, metrics="tl_in")
    assert one["tl_in"].tolist() == bare_table["tl_in"][1:2].tolist()


def test_hooks_alone_see_nothing_of_a_compiled_model():
    # What the tests here would be blind to, were compiled code not to skip hooks.
    model, seen = used(compiled(bare())), []
    handle = model._orig_mod[2][0].register_forward_hook(lambda _, args, out: seen.append(len(out)))
    with torch.no_grad():
        for batch in data()[0].split(BATCH):
            model(batch)
    handle.remove()
    assert sum(seen) < N


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inner", [lambda model: model, compiled], ids=["bare", "compiled"])
def test_distributed_data_parallel_has_the_table_of_the_model_inside(process_group, inner, bare_table):
    model = nn.parallel.DistributedDataParallel(inner(bare()))
    for each in (model, compiled(model)):
        pd.testing.assert_frame_equal(probe(each, data(), batch_size=BATCH, test_batches=data()), bare_table)
    with record(model) as records:
        model(data()[0]).sum().backward()
    assert list(records) == NAMES
    assert records["2.0"].deltas.shape == (N, 4)
    assert accuracy(model, *data()) == accuracy(bare(), *data())


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_is_recorded_of_a_wrapped_model_is_that_of_the_model_inside(kind):
    inside, model = bare().eval(), WRAPPED[kind](bare()).eval()
    seen = []
    for each in (inside, model):
        with record(each) as records:
            for batch in data()[0].split(BATCH):
                each(batch).square().sum().backward()
        seen.append(records)
    assert list(seen[1]) == NAMES
    for name in NAMES:
        torch.testing.assert_close(seen[1][name].features, seen[0][name].features)
        torch.testing.assert_close(seen[1][name].deltas, seen[0][name].deltas)
        torch.testing.assert_close(seen[1][name].feature_gradients, seen[0][name].feature_gradients)


@pytest.mark.parametrize("kind", ["compiled and used", "compiled in place", "compiled data parallel"])
def test_what_enters_a_wrapped_network(kind):
    x, _ = data()
    expected, output = entering(bare().eval(), ["0", "2.2"], x, 2)
    features, wrapped_output = entering(WRAPPED[kind](bare()).eval(), ["0", "2.2"], x, 2)
    assert list(features) == ["0", "2.2"]
    for name, rows in features.items():
        torch.testing.assert_close(rows, expected[name])
    torch.testing.assert_close(wrapped_output, output)


def test_afterwards_compiled_code_is_used_again_and_no_hook_is_left():
    runs = []

    def counting(graph, _):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    model, (x, y) = compiled(bare().eval(), counting), data()
    model(x)
    before = len(runs)
    probe(model, (x, y))
    with record(model):
        model(x)
    assert len(runs) == before
    with pytest.raises(RuntimeError, match="stop"), record(model):
        raise RuntimeError("stop")
    model(x)
    assert len(runs) == before + 1
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["compiled", "blocks compiled", "data parallel", "compiled data parallel"])
def test_a_wrapped_model_is_left_in_its_modes(kind):
    model = WRAPPED[kind](bare())
    model.train()
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.eval()
    modes = [module.training for module in model.modules()]
    probe(model, data())
    assert [module.training for module in model.modules()] == modes
    assert not dropout.training


# ---- names ----


def test_names_with_a_wrapper_in_them_are_refused_with_the_name_to_pass(unchecked):
    for model, name in (
        (compiled(bare()), "_orig_mod.2.0"),
        (nn.DataParallel(bare()), "module.2.0"),
        (bare(), "module._orig_mod.2.0"),
    ):
        with pytest.raises(ValueError, match=f"no layer '{name}' in the model: .* pass '2.0'"):
            unchecked.probe(model, data(), layers=[name])
        with pytest.raises(ValueError, match=r"pass '2\.0'"), unchecked.hooks.record(model, name):
            pass


def test_a_layer_that_is_itself_called_module_keeps_its_name():
    model = nn.Sequential()
    model.module = nn.Linear(6, 3)
    assert list(probe(model, data())["layer"]) == ["module"]


def test_a_module_in_two_places_has_one_row_and_either_name():
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared))
    table = probe(model, data())
    assert (table["layer"].tolist(), table["samples"].tolist()) == (["0"], [2 * N])
    second = probe(model, data(), layers="2.0")
    assert second["layer"].tolist() == ["2.0"]
    pd.testing.assert_frame_equal(second.drop(columns="layer"), table.drop(columns="layer"))
    x, y = data()
    with torch.no_grad():
        both = torch.cat([x, model[1](shared(x))])
    assert table["tl_in"][0] == pytest.approx(target_linearity(both, torch.cat([y, y])).item(), abs=1e-6)


def test_a_module_that_holds_itself_is_walked_once():
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].parent = model
    with record(model) as records:
        model(data()[0])
    assert list(records) == ["0"]


# ---- all samples, or an error ----


class Choosy(nn.Module):
    """Uses its first layer in batches of some sizes only, and the second as often as it is told."""

    def __init__(self, sizes=(BATCH,), times=1):
        super().__init__()
        self.first, self.second, self.sizes, self.times = nn.Linear(6, 6), nn.Linear(6, 6), sizes, times

    def forward(self, x):
        x = self.first(x) if len(x) in self.sizes else x
        for _ in range(self.times):
            x = torch.tanh(self.second(x))
        return x


def test_a_layer_that_sees_some_of_the_samples_is_an_error_with_both_numbers(unchecked):
    model = Choosy()
    with pytest.raises(ValueError, match=r"layer 'first' saw 72 of 100 samples: .* naming others in layers="):
        unchecked.probe(model, data(), batch_size=BATCH)
    assert probe(model, data(), layers="second", batch_size=BATCH)["samples"].tolist() == [N]
    x, y = data()
    with pytest.raises(ValueError, match="layer 'first' saw 72 of 100 samples"):
        unchecked.probe(model, (x[:BATCH], y[:BATCH]), test_batches=(x, y), batch_size=BATCH)
    with pytest.raises(ValueError, match="did not call layer 'first' on test_batches"):
        unchecked.probe(model, (x[:BATCH], y[:BATCH]), test_batches=(x[:9], y[:9]))
    with pytest.raises(ValueError, match="layer 'first' saw 0 of 100 samples"):
        unchecked.chapters.features.entering(model, ["first"], x, 2)


def test_a_layer_that_is_used_three_times_sees_three_times_the_samples(unchecked):
    model = Choosy(sizes=(BATCH, N - 2 * BATCH), times=3)
    assert probe(model, data(), batch_size=BATCH)["samples"].tolist() == [N, 3 * N]
    with pytest.raises(ValueError, match="'second' is used more than once"):
        unchecked.chapters.features.entering(model, ["second"], data()[0], 2)


def test_an_error_that_the_model_catches_is_reported_all_the_same(unchecked):
    class Catching(Choosy):
        def forward(self, x):
            try:
                return self.first(x * torch.nan)
            except ValueError:
                return self.second(x)

    with pytest.raises(ValueError, match="layer 'first': features: 600 NaN"):
        unchecked.probe(Catching(), data())


def test_an_exception_of_the_model_itself_passes_unchanged(unchecked):
    class Failing(Choosy):
        def forward(self, x):
            raise KeyError("of the model")

    with pytest.raises(KeyError, match=r"^'of the model'$"):
        unchecked.probe(Failing(), data())


def test_a_replica_is_refused_and_a_copy_passed_over(unchecked):
    model, (x, _) = bare(), data()
    replica = model[0]._replicate_for_data_parallel()
    replica._parameters = dict(model[0]._parameters)
    with pytest.raises(ValueError, match=r"layer '0' ran as a replica .* model\.module"), unchecked.hooks.record(model):
        replica(x)
    with record(model) as records:
        model(x)
        copy.deepcopy(model)(x)
    assert records["0"].features.shape == (N, 6)


# ---- models that cannot be measured, and others that only look so ----


def quantized(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model)


def exported(model: nn.Module):
    return torch.export.export(model.eval(), (data()[0],))


# PyTorch is about to retire these ways to turn a model into something else.
OLD_TOOLS = pytest.mark.filterwarnings("ignore:.*(deprecated|not supported)")

ORIGINAL = "pass the nn.Module that it was made of"
REFUSED = {
    "scripted": (lambda: torch.jit.script(bare()), TypeError, f"got a RecursiveScriptModule; .*{ORIGINAL}"),
    "traced": (
        lambda: torch.jit.trace(bare().eval(), data()[0]),
        TypeError,
        f"got a TopLevelTracedModule; .*{ORIGINAL}",
    ),
    "partly scripted": (
        lambda: nn.Sequential(torch.jit.script(bare()), nn.Linear(3, 3)),
        TypeError,
        f"layer '0' is torch.jit.*RecursiveScriptModule: it cannot be recorded; .*{ORIGINAL}",
    ),
    "exported": (lambda: exported(bare()), TypeError, f"got a ExportedProgram; .*{ORIGINAL}"),
    "graph of exported": (lambda: exported(bare()).module(), ValueError, f"has no nn.Linear or .*{ORIGINAL}"),
    "quantized": (lambda: quantized(bare()), TypeError, f"layer '0' is torch.ao.nn.quantized.*{ORIGINAL}"),
    "partly quantized": (
        lambda: nn.Sequential(nn.Linear(6, 6), quantized(bare())),
        TypeError,
        f"layer '1.0' is torch.ao.nn.quantized.*{ORIGINAL}",
    ),
    "empty": (nn.Sequential, ValueError, "Sequential has no nn.Linear or nn.Conv2d layer"),
    "nothing": (lambda: None, TypeError, "model: got a NoneType; pass an nn.Module"),
    "a name": (lambda: "model", TypeError, "model: got a str; pass an nn.Module"),
    "a class": (lambda: nn.Linear, TypeError, "model: got a type; pass an nn.Module"),
    "a function": (lambda: bare().forward, TypeError, "model: got a method; pass an nn.Module"),
}


@OLD_TOOLS
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_hooks_cannot_see_into_are_named(kind, unchecked):
    build, error, words = REFUSED[kind]
    model = build()
    with pytest.raises(error, match=words):
        unchecked.probe(model, data())
    with pytest.raises(error, match=words), unchecked.hooks.record(model):
        pass


@OLD_TOOLS
def test_other_layers_of_a_partly_quantized_model_are_measured(unchecked):
    model = nn.Sequential(nn.Linear(6, 6), quantized(bare()), torch.jit.script(nn.Tanh()))
    assert probe(model, data(), layers="0")["samples"].tolist() == [N]
    with pytest.raises(TypeError, match=rf"layer '1.0' is torch\.ao.*Linear; only nn\.Linear.*{ORIGINAL}"):
        unchecked.probe(model, data(), layers="1.0")
    assert probe(nn.Sequential(nn.Linear(6, 6), model[2]), data())["layer"].tolist() == ["0"]


def test_a_model_without_shapes_or_numbers_is_named_and_left_as_it_is(unchecked):
    lazy = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"0\.weight of the model has no shape yet; run the model once"):
        unchecked.probe(lazy, data())
    assert lazy[0].has_uninitialized_params()
    assert torch.equal(torch.get_rng_state(), state)
    lazy(data()[0])
    assert probe(lazy, data())["samples"].tolist() == [N, N]
    with pytest.raises(ValueError, match="the model is on the meta device"):
        unchecked.probe(bare().to("meta"), data())


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_layers_are_measured(norm):
    model = bare()
    norm(model[0])
    x, y = data()
    with torch.no_grad():
        expected = target_linearity(model.eval()[0](x), y).item()
    assert probe(model, (x, y))["tl_out"][0] == pytest.approx(expected, abs=1e-6)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.unused, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen.requires_grad_(False)
        self.without = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.frozen(x))
        with torch.no_grad():
            x = torch.tanh(self.without(x))
        return self.head(x)


def test_frozen_layers_have_features_and_say_why_they_have_no_gradient(unchecked):
    model, (x, y) = Frozen(), data()
    assert probe(model, (x, y))["layer"].tolist() == ["frozen", "without", "head"]
    with unchecked.hooks.record(model) as records:
        model(x).sum().backward()
    assert records["head"].deltas.shape == (N, 3)
    for name in ("frozen", "without"):
        assert records[name].features.shape == (N, 6)
        with pytest.raises(ValueError, match=rf"output of layer '{name}' has no gradient: .*requires_grad_\(\)"):
            _ = records[name].deltas
    for read in ("features", "deltas", "feature_gradients"):
        with pytest.raises(ValueError, match="layer 'unused' was not called"):
            getattr(records["unused"], read)


# ---- inference mode ----


def test_inference_mode_changes_nothing_in_any_order(bare_table):
    x, y = data()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    with torch.inference_mode():
        made_inside, inputs, targets = bare(), x.clone(), y.clone()
        inside = probe(bare(), (x, y), batch_size=BATCH, test_batches=(x, y))

    def first_inside():
        with torch.inference_mode():
            yield batches[0]
        yield from batches[1:]

    def last_inside():
        yield from batches[:-1]
        with torch.inference_mode():
            yield batches[-1]

    for table in (
        inside,
        probe(made_inside, (x, y), batch_size=BATCH, test_batches=(x, y)),
        probe(bare(), (inputs, targets), batch_size=BATCH, test_batches=(inputs, targets)),
        probe(bare(), first_inside(), test_batches=last_inside()),
        probe(bare(), last_inside(), test_batches=first_inside()),
    ):
        pd.testing.assert_frame_equal(table, bare_table)
    assert not torch.is_inference_mode_enabled()


def test_what_is_recorded_in_inference_mode_stays_what_it_was():
    layer = nn.Linear(6, 3)
    with torch.inference_mode(), record(layer) as records:
        x = data()[0].clone()
        layer(x)
        x.zero_()  # such a tensor counts no changes
    assert records[""].features.equal(data()[0])


def test_an_input_that_is_overwritten_after_the_block_is_noticed():
    layer, x = nn.Linear(6, 3), data()[0]
    with record(layer) as records:
        layer(x)
    x.zero_()
    with pytest.raises(ValueError, match="the input of layer '' was changed in place"):
        _ = records[""].features
