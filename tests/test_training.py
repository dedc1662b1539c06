"""The training loop against one written out by hand, and the networks."""

import pytest
import torch
import torch.nn.functional as F

from gramlin.models import CNN, MLP
from gramlin.training import accuracy, train


def toy(n: int = 50):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def toy_model():
    torch.manual_seed(0)
    model = MLP([6, 5, 3], "tanh")
    return model, torch.optim.SGD(model.parameters(), lr=0.2)


def test_training_is_the_textbook_loop():
    inputs, targets = toy()
    model, optimizer = toy_model()
    train(model, optimizer, inputs, targets, epochs=2, batch_size=16, seed=3)

    expected, optimizer = toy_model()
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        order = torch.randperm(50, generator=generator)
        for start in range(0, 50, 16):  # the last batch has 2 samples
            batch = order[start : start + 16]
            optimizer.zero_grad()
            F.cross_entropy(expected(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_full_batches_do_not_depend_on_the_order():
    inputs, targets = toy()
    losses = []
    for seed in (0, 1):
        model, optimizer = toy_model()
        losses.append(train(model, optimizer, inputs, targets, epochs=3, seed=seed)[-1]["train_loss"])
    assert losses[0] == losses[1]


def test_recording_sees_an_evaluated_model_before_and_after_each_epoch():
    model, optimizer = toy_model()
    modes = []

    def record(epoch: int) -> dict:
        modes.append((model.training, torch.is_grad_enabled()))
        return {"twice": 2 * epoch}

    history = train(model, optimizer, *toy(), epochs=2, batch_size=10, record=record)
    assert [(row["epoch"], row["twice"]) for row in history] == [(0, 0), (1, 2), (2, 4)]
    assert history[0]["train_loss"] is None
    assert history[2]["train_loss"] < history[1]["train_loss"]
    assert modes == [(False, False)] * 3
    assert torch.is_grad_enabled()


def test_a_diverging_loss_is_reported_with_its_epoch():
    inputs, _ = toy()
    model = MLP([6, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    with pytest.raises(FloatingPointError, match="epoch 1: lower the learning rate"):
        train(model, optimizer, inputs, torch.zeros(50, 1), epochs=50, batch_size=1, loss=F.mse_loss)


def normalised(*, positions: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3)
    shaped = [torch.nn.Unflatten(1, (3, positions)), norm, torch.nn.Flatten()] if positions > 1 else [norm]
    last = torch.nn.Linear(3 * positions, 3)
    return torch.nn.Sequential(torch.nn.Linear(6, 3 * positions), *shaped, torch.nn.Dropout(), last)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("n", "batch_size", "number"), [(50, 7, 8), (1, None, 1), (1, 7, 1), (50, 1, 50)])
def test_a_batch_of_one_sample_for_batch_norm_is_refused_before_the_first_step(n, batch_size, number, compiled):
    model, (inputs, targets) = normalised(), toy(n)
    trained = torch.compile(model, backend="eager") if compiled else model
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = rf"batch {number} of {number} has one sample \({n} inputs, batch_size={batch_size or n}\), .*drop_last"
    with pytest.raises(ValueError, match=words):
        train(trained, optimizer, inputs, targets, epochs=1, batch_size=batch_size)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training


def test_a_batch_of_one_sample_is_trained_on_where_it_has_several_positions():
    inputs, targets = toy(15)
    model = normalised(positions=2)
    random = torch.get_rng_state()
    history = train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs, targets, epochs=1, batch_size=7)

    expected = normalised(positions=2)
    torch.set_rng_state(random)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    losses = []
    for batch in torch.randperm(15, generator=torch.Generator().manual_seed(0)).split(7):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(expected(inputs[batch]), targets[batch]))
        losses[-1].backward()
        optimizer.step()
    assert len(losses) == 3
    assert history[1]["train_loss"] == pytest.approx(sum(losses).item() / 3)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_other_failures_of_a_model_on_one_sample_pass_unchanged():
    class Failing(torch.nn.BatchNorm1d):
        def forward(self, x):
            raise ValueError("of the model")

    model = torch.nn.Sequential(torch.nn.Linear(6, 3), Failing(3))
    with pytest.raises(ValueError, match=r"^of the model$"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), *toy(15), epochs=1, batch_size=7)


@pytest.mark.parametrize("batch_size", [None, 16])
def test_a_model_that_works_in_place_changes_no_data(batch_size):
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(6, 3))
    inputs, targets = toy()
    kept = inputs.clone()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs, targets, epochs=1, batch_size=batch_size)
    accuracy(model, inputs, targets)
    assert torch.equal(inputs, kept)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"targets": toy()[1][:, None]}, TypeError, r"targets are torch.int64 of shape \(50, 1\)"),
        ({"targets": F.one_hot(toy()[1]).float()}, TypeError, "targets are torch.float32"),
        ({"targets": toy()[1][:49]}, ValueError, r"got inputs \(50, 6\) and 49 targets"),
        ({"inputs": toy()[0][:0], "targets": toy()[1][:0]}, ValueError, "at least one"),
        ({"inputs": toy()[0].numpy()}, TypeError, "inputs: got a ndarray"),
        ({"model": None}, TypeError, "model: got a NoneType; pass an nn.Module"),
        ({"model": torch.nn.Flatten(0)}, ValueError, r"output for 50 inputs is \(300,\); pass a model with scores"),
        ({"batch_size": 0}, ValueError, "batch_size is 0; pass a positive integer"),
    ],
)
def test_what_has_no_accuracy_is_named(unchecked, arguments, kind, words):
    inputs, targets = toy()
    defaults = {"model": toy_model()[0], "inputs": inputs, "targets": targets}
    with pytest.raises(kind, match=words):
        unchecked.training.accuracy(**{**defaults, **arguments})


def test_training_on_nothing_or_on_unequal_rows_is_refused():
    model, optimizer = toy_model()
    with pytest.raises(ValueError, match="50 inputs and 49 targets"):
        train(model, optimizer, toy()[0], toy()[1][:49], epochs=1)
    with pytest.raises(ValueError, match="at least one"):
        train(model, optimizer, toy()[0][:0], toy()[1][:0], epochs=1)
    with pytest.raises(ValueError, match="batch_size is 0; pass a positive integer"):
        train(model, optimizer, *toy(), epochs=1, batch_size=0)


def test_accuracy_counts_in_batches_as_in_one():
    model, _ = toy_model()
    inputs, targets = toy()
    expected = (model(inputs).argmax(1) == targets).float().mean().item()
    assert accuracy(model, inputs, targets, batch_size=7) == pytest.approx(expected)


def test_layers_of_an_mlp_have_the_names_that_the_book_uses():
    assert [name for name, _ in MLP([4, 3, 2]).named_children()] == ["flatten", "linear1", "activation1", "linear2"]
    with pytest.raises(ValueError, match="one of gelu, relu"):
        MLP([4, 3, 2], "swish")
    with pytest.raises(ValueError, match="at least an input and an output"):
        MLP([4])


def test_cnn_has_the_stated_layers():
    model = CNN((3, 9, 14), 7, channels=5)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim > 1] == [
        (5, 3, 3, 3),
        (5, 5, 3, 3),
        (5, 5, 3, 3),
        (7, 5 * 2 * 3),
    ]
    assert model(torch.zeros(2, 3, 9, 14)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((3, 32), 10), r"input_shape is \(3, 32\); pass \(channels, height, width\)"),
        (((1, 3, 8), 10), "at least 4×4 pixels"),
        (((1, 8, 8), 10, 16, "swish"), "activation is 'swish'; pass one of gelu"),
    ],
)
def test_cnn_errors(unchecked, arguments, words):
    with pytest.raises(ValueError, match=words):
        unchecked.models.CNN(*arguments)


@pytest.mark.parametrize("mode", [True, False])
def test_measuring_leaves_each_module_in_its_mode(mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).train(mode)
    model[1].train(not mode)
    x, y = torch.randn(8, 3), torch.arange(8) % 3
    before = model[1].running_mean.clone()
    accuracy(model, x, y)
    assert model[1].running_mean.equal(before)
    assert (model[0].training, model[1].training) == (mode, not mode)


def test_a_weight_that_diverges_in_the_last_step_is_reported():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(FloatingPointError, match="last step"):
        train(model, optimizer, torch.ones(2, 1), torch.zeros(2, 1), epochs=1, loss=torch.nn.functional.mse_loss)
