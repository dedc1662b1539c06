"""``VirtualCovariance`` and ``whiten`` beside what is done to optimizers: compiled, wrapped, subclassed, copied."""

import copy
import io
import itertools
import math
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Adam, Optimizer

from gramlin import VirtualCovariance, nearest_with_same_gram, polar_factor, whiten
from gramlin.whitening import newton_schulz_polar

# Equal up to the order of a few float64 additions.
ROUNDING = 1e-13


def network() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    return net


def loss_of(model, t=0):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    return model(x).square().mean()


def train(model, optimizer, steps=3, *, start=0, step=None):
    for t in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        (step or optimizer.step)()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def expected_sum(make=SGD, steps=3):
    """The virtual covariance of the first layer, by a loop that uses nothing of the package."""
    net = network()
    optimizer, total = make(net.parameters(), lr=0.1), torch.zeros(5, 5, dtype=torch.float64)
    for t in range(steps):
        optimizer.zero_grad()
        loss_of(net, t).backward()
        cross = net[0].weight.detach().T @ net[0].weight.grad
        total -= 0.1 * (cross + cross.T)
        optimizer.step()
    return total


def whitened_step(make, t=0, **options):
    """Weights after one step of a plain optimizer, the matrices brought back by the definition."""
    net, plain = network(), network()
    train(plain, make(plain.parameters(), lr=0.1, **options), 1, start=t)
    return [
        nearest_with_same_gram(before=p.detach(), after=q.detach()) if p.ndim == 2 else q.detach()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True)
    ]


class Super(SGD):
    def step(self, closure=None):
        return super().step(closure)


class DecayFirst(SGD):
    """Moves the weights itself, then steps: the two hooks see different weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        return super().step(closure)


class Twice(Adam):
    def step(self, closure=None):
        super().step()
        return super().step()


SUBCLASSES = [Super, DecayFirst, Twice]


# ---- a step counts once ----


@pytest.mark.parametrize("make", [SGD, *SUBCLASSES])
def test_virtual_covariance_counts_a_step_once(make):
    net = network()
    optimizer = make(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    train(net, optimizer)
    assert virtual.steps == 3
    torch.testing.assert_close(virtual.shift, expected_sum(make), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make", [SGD, *SUBCLASSES])
def test_a_whitened_step_is_the_whole_outer_step(make):
    net = network()
    optimizer = make(net.parameters(), lr=0.1)
    whiten(optimizer)
    train(net, optimizer, 1)
    for p, expected in zip(net.parameters(), whitened_step(make), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make", [SGD, Super])
def test_an_error_within_a_step_leaves_the_next_ones_right(make):
    # The twin of counting nested steps: a step that ends early must not make the next one look nested.
    def fail(*_):
        raise RuntimeError("stop")

    net = network()
    optimizer = make(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    whiten(optimizer)
    breaking = optimizer.register_step_pre_hook(fail)
    old = weights(net)
    try:
        train(net, optimizer, 1)
    except RuntimeError:  # its traceback keeps the frames of the broken step alive
        assert virtual.steps == 0
        assert same(old, weights(net))
        breaking.remove()
        train(net, optimizer, 1)
    assert virtual.steps == 1
    torch.testing.assert_close(virtual.shift, expected_sum(steps=1), rtol=0, atol=ROUNDING)
    for p, expected in zip(net.parameters(), whitened_step(SGD), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ROUNDING)


def test_a_refused_closure_leaves_no_trace():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    loss_of(net).backward()
    old = weights(net)
    with pytest.raises(ValueError, match="without a closure"):
        optimizer.step(lambda: 1.0)
    assert same(old, weights(net))
    assert virtual.steps == 0
    train(net, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


def test_a_step_that_another_hook_stops_is_not_counted():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    whiten(optimizer)  # after it, so that its refusal comes when the sum has already looked at the gradient
    loss_of(net).backward()
    net[2].bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert virtual.steps == 0
    assert not virtual.shift.any()


def test_two_sums_on_one_optimizer_are_those_of_one_each():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    both = [VirtualCovariance(net[i], optimizer) for i in (0, 2)]
    train(net, optimizer)
    for i, virtual in zip((0, 2), both, strict=True):
        other = network()
        optimizer = SGD(other.parameters(), lr=0.1)
        alone = VirtualCovariance(other[i], optimizer)
        train(other, optimizer)
        assert torch.equal(virtual.shift, alone.shift)
        assert virtual.steps == 3


# ---- optimizers around optimizers ----


class SAM(Optimizer):
    """The public form: the groups are those of the base optimizer, whose step is the second half of a step."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * 0.05 / norm)

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def step(self, closure=None):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Lookahead(Optimizer):
    """The public form, without ``Optimizer.__init__``: its step runs no hooks."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, defaultdict(dict), optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # as one library has it

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        return loss


class Several(Optimizer):
    """Hands its parameters out to a list of optimizers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.parts = [SGD([p], lr=0.1) for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Foreign:
    """Around an optimizer, and none itself."""

    def __init__(self, optimizer):
        self.inner = optimizer
        self.param_groups = optimizer.param_groups


WRAPPERS = {
    "sam": (
        lambda params: SAM(params, SGD, lr=0.1),
        ValueError,
        r"SAM leaves.*SGD in its \.base_optimizer: attach",
    ),
    "lookahead": (lambda params: Lookahead(SGD(params, lr=0.1)), ValueError, r"Lookahead.*\.optimizer: attach to that"),
    "several": (Several, ValueError, r"Several leaves.*SGD in its \.parts: attach to that base"),
    "foreign": (lambda params: Foreign(SGD(params, lr=0.1)), TypeError, r"got a Foreign.*has one, \.inner"),
    "scheduler": (
        lambda params: torch.optim.lr_scheduler.StepLR(SGD(params, lr=0.1), 1),
        TypeError,
        r"got a StepLR; pass the torch\.optim\.Optimizer.*has one, \.optimizer",
    ),
    "none": (lambda params: None, TypeError, "optimizer: got a NoneType"),
    "word": (lambda params: "sgd", TypeError, "optimizer: got a str"),
    "model": (lambda params: nn.Linear(2, 2), TypeError, "optimizer: got a Linear"),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_what_cannot_be_attached_to_says_what_to_attach_to(case, unchecked):
    make, kind, words = WRAPPERS[case]
    net = network()
    wrapper = make(list(net.parameters()))
    with pytest.raises(kind, match=words):
        unchecked.VirtualCovariance(net[0], wrapper)
    with pytest.raises(kind, match=words):
        unchecked.whiten(wrapper)
    for optimizer in (wrapper, getattr(wrapper, "base_optimizer", None)):
        assert not getattr(optimizer, "_optimizer_step_pre_hooks", None)


def test_an_optimizer_whose_step_runs_no_hooks_is_refused():
    class Silent(SGD):
        def __init__(self, params):
            self.param_groups, self.defaults = [{"params": list(params), "lr": 0.1}], {}

        def step(self, closure=None):
            pass

    net = network()
    with pytest.raises(ValueError, match=r"Silent\.step does not run step hooks.*did not call Optimizer\.__init__"):
        VirtualCovariance(net[0], Silent(net.parameters()))
    with pytest.raises(ValueError, match="does not run step hooks"):
        whiten(Silent(net.parameters()))


def sam_steps(net, sam, steps=3):
    for t in range(steps):
        sam.zero_grad()
        loss_of(net, t).backward()
        sam.first_step()
        sam.zero_grad()
        loss_of(net, t).backward()
        yield
        sam.second_step()


def test_sam_is_read_at_its_base_optimizer():
    net = network()
    sam = SAM(net.parameters(), SGD, lr=0.1)
    virtual = VirtualCovariance(net[0], sam.base_optimizer)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for _ in sam_steps(net, sam):
        # The gradient that the step uses, at the weight that it changes.
        cross = sam.state[net[0].weight]["old_p"].T @ net[0].weight.grad
        expected -= 0.1 * (cross + cross.T)
    assert virtual.steps == 3
    torch.testing.assert_close(virtual.shift, expected, rtol=0, atol=ROUNDING)


def test_sam_is_whitened_at_its_base_optimizer():
    nets = network(), network()
    sams = [SAM(net.parameters(), SGD, lr=0.1) for net in nets]
    whiten(sams[0].base_optimizer)
    for net, sam in zip(nets, sams, strict=True):
        for _ in sam_steps(net, sam, 1):
            pass
    for start, p, plain in zip(weights(network()), *(net.parameters() for net in nets), strict=True):
        expected = nearest_with_same_gram(before=start, after=plain.detach()) if p.ndim == 2 else plain
        torch.testing.assert_close(p.detach(), expected.detach(), rtol=0, atol=ROUNDING)


# ---- compiled and wrapped ----


def compiled_layer(net):
    net[0] = torch.compile(net[0], backend="eager")
    return net, net[0]


def compiled_in_place(net):
    net.compile(backend="eager")
    return net, net[0]


def compiled_model(net):
    model = torch.compile(net, backend="eager")
    return model, model.get_submodule("_orig_mod.0")


def parallel_model(net):
    model = nn.DataParallel(net)
    return model, model.module[0]


def parallel_compiled_layer(net):
    net[0] = nn.DataParallel(torch.compile(net[0], backend="eager"))
    return net, net[0]


@pytest.mark.parametrize(
    "wrap", [compiled_layer, compiled_in_place, compiled_model, parallel_model, parallel_compiled_layer]
)
def test_a_layer_of_a_compiled_or_parallel_model_is_the_layer(wrap):
    model, layer = wrap(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    virtual = VirtualCovariance(layer, optimizer)
    train(model, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_of_a_scripted_layer_the_original_is_wanted():
    net = network()
    scripted = torch.jit.script(net)
    optimizer = SGD(scripted.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"RecursiveScriptModule.*of a scripted"):
        VirtualCovariance(getattr(scripted, "0"), optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    virtual = VirtualCovariance(net[0], optimizer)
    train(scripted, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


def compiled_step(model, optimizer):
    return lambda steps: train(model, optimizer, steps, step=torch.compile(optimizer.step, backend="eager"))


def compiled_training(model, optimizer):
    @torch.compile(backend="eager")
    def one(t):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        optimizer.step()

    return lambda steps: [one(t) for t in range(steps)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("compiled", [compiled_step, compiled_training])
@pytest.mark.parametrize("make", [SGD, Super])
def test_a_compiled_step_is_summed_and_whitened(make, compiled, attached):
    torch._dynamo.reset()
    results = []
    for compiling in (False, True):
        net = network()
        optimizer = make(net.parameters(), lr=0.0)
        run = compiled(net, optimizer) if compiling else lambda steps, net=net, opt=optimizer: train(net, opt, steps)
        if attached == "after":
            run(1)  # at rate zero, so that nothing moves
        optimizer.param_groups[0]["lr"] = 0.1
        virtual, handle = VirtualCovariance(net[0], optimizer), whiten(optimizer)
        run(3)
        handle.remove()
        virtual.remove()
        run(1)
        assert virtual.steps == 3
        results.append([virtual.shift, *weights(net)])
    torch.testing.assert_close(*results, rtol=0, atol=ROUNDING)


# ---- copies ----


def pickled(objects):
    return pickle.loads(pickle.dumps(objects))


def saved(objects):
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, pickled, saved]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize(
    "options", [{}, {"keep": "rotation"}, {"solver": newton_schulz_polar}], ids=["gram", "rotation", "solver"]
)
def test_a_copied_optimizer_goes_on_whitening_its_own_parameters(make_copy, options):
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    whiten(optimizer, [net[0].weight], **options)
    train(net, optimizer)
    at_copy = weights(net)
    net_copy, optimizer_copy = make_copy((net, optimizer))
    net_again, optimizer_again = make_copy((net_copy, optimizer_copy))  # before it has made a step
    train(net_copy, optimizer_copy, start=3)
    assert same(weights(net), at_copy)
    train(net, optimizer, start=3)
    train(net_again, optimizer_again, start=3)
    assert same(weights(net), weights(net_copy))
    assert same(weights(net), weights(net_again))
    assert "__getstate__" not in str(optimizer.state_dict())


def test_a_copy_made_while_nothing_is_whitened_makes_plain_steps():
    # The twin: what goes on in a copy is what was attached, and hooks of others stay out of it as torch has it.
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    whiten(optimizer).remove()
    optimizer.register_step_post_hook(lambda *_: None)
    assert "__getstate__" not in vars(optimizer)
    other, other_optimizer = copy.deepcopy((net, optimizer))
    assert not other_optimizer._optimizer_step_post_hooks
    train(other, other_optimizer, 1)
    plain = network()
    train(plain, SGD(plain.parameters(), lr=0.1), 1)
    assert same(weights(other), weights(plain))


def test_whitening_a_copy_anew_takes_the_place_of_what_it_brought():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    whiten(optimizer)
    other, other_optimizer = copy.deepcopy((net, optimizer))
    whiten(other_optimizer, keep="rotation").remove()
    train(other, other_optimizer, 1)
    plain = network()
    train(plain, SGD(plain.parameters(), lr=0.1), 1)
    assert same(weights(other), weights(plain))
    train(net, optimizer, 1)
    assert not same(weights(net), weights(plain))


def test_a_copied_handle_belongs_to_the_copied_optimizer():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    trainer = {"net": net, "optimizer": optimizer, "handle": whiten(optimizer)}
    other = copy.deepcopy(trainer)
    other["handle"].remove()
    assert not other["optimizer"]._optimizer_step_pre_hooks
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_copied_optimizer_adds_nothing_to_the_sum():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    other, other_optimizer = copy.deepcopy((net, optimizer))
    train(other, other_optimizer)
    assert virtual.steps == 0
    train(net, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copied_sum_is_a_record(make_copy):
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    train(net, optimizer)
    record = make_copy(virtual)
    kept = virtual.shift
    train(net, optimizer)
    assert (record.steps, virtual.steps) == (3, 6)
    assert torch.equal(record.shift, kept)
    record.remove()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    record.reset()
    assert not record.shift.any()
    assert virtual.shift.any()


@pytest.mark.parametrize("make", [SGD, Super, Adam])
def test_resuming_from_a_state_dict_is_going_on(make):
    options = {"momentum": 0.9} if make is not Adam else {}
    net = network()
    optimizer = make(net.parameters(), lr=0.1, **options)
    whiten(optimizer)
    train(net, optimizer)
    state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    train(net, optimizer, start=3)
    other = network()
    resumed = make(other.parameters(), lr=0.1, **options)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    whiten(resumed)
    train(other, resumed, start=3)
    assert same(weights(net), weights(other))


# ---- what is attached, to what ----


def test_a_parameter_is_whitened_by_one_at_a_time():
    net = network()
    optimizer = SGD(net.named_parameters(), lr=0.1)
    handle = whiten(optimizer, [net[0].weight])
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is whitened already; call remove\(\)"):
        whiten(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    whiten(optimizer, [net[2].weight])
    handle.remove()
    whiten(optimizer, [net[0].weight])
    train(net, optimizer, 1)
    for p, expected in zip(net.parameters(), whitened_step(SGD), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ROUNDING)


def test_several_groups_and_one_added_later_are_each_at_their_rate():
    net = network()
    optimizer = SGD([{"params": net[2].parameters(), "lr": torch.tensor(0.3)}], lr=0.1)
    whiten(optimizer)
    with pytest.raises(ValueError, match="none of the parameter groups"):
        VirtualCovariance(net[0], optimizer)
    optimizer.add_param_group({"params": net[0].parameters(), "lr": torch.tensor(0.2, dtype=torch.float64)})
    sums = [VirtualCovariance(net[i], optimizer) for i in (0, 2)]
    loss_of(net).backward()
    optimizer.step()
    for virtual, i, rate in zip(sums, (0, 2), (0.2, torch.tensor(0.3).item()), strict=True):
        start = network()
        loss_of(start).backward()
        cross = start[i].weight.detach().T @ start[i].weight.grad
        torch.testing.assert_close(virtual.shift, -rate * (cross + cross.T), rtol=0, atol=ROUNDING)
        plain = start[i].weight.detach() - rate * start[i].weight.grad
        expected = nearest_with_same_gram(before=start[i].weight.detach(), after=plain)
        torch.testing.assert_close(net[i].weight.detach(), expected, rtol=0, atol=ROUNDING)


def test_a_rate_that_is_learned_is_read():
    net = network()
    optimizer = SGD(net.parameters(), lr=torch.tensor(0.1, dtype=torch.float64, requires_grad=True))
    virtual = VirtualCovariance(net[0], optimizer)
    train(net, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


def test_an_optimizer_without_a_rate_is_refused():
    class Free(Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            pass

    net = network()
    with pytest.raises(ValueError, match="Free has no learning rate"):
        VirtualCovariance(net[0], Free(net.parameters()))


def test_differentiable_steps_are_not_whitened_in_silence():
    with pytest.raises(ValueError, match="the optimizer is differentiable, and the rotation is not"):
        whiten(SGD(network().parameters(), lr=0.1, differentiable=True))


def test_a_model_that_becomes_double_is_summed_in_double():
    net = network().float()
    optimizer = SGD(net.parameters(), lr=0.1)
    virtual = VirtualCovariance(net[0], optimizer)
    net.double()
    with torch.no_grad():
        for p, q in zip(net.parameters(), network().parameters(), strict=True):
            p.copy_(q)
    train(net, optimizer)
    torch.testing.assert_close(virtual.shift, expected_sum(), rtol=0, atol=ROUNDING)


# ---- numbers that are not finite ----


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("names", [True, False])
def test_a_bad_gradient_is_named_before_anything_moves(names, where, bad):
    net = network()
    optimizer = SGD(net.named_parameters() if names else net.parameters(), lr=0.1, momentum=0.9)
    whiten(optimizer, [net[0].weight])
    train(net, optimizer, 1)
    loss_of(net).backward()
    name, p = list(net.named_parameters())[where]
    p.grad.view(-1)[1] = bad
    old, state = weights(net), state_of(optimizer)
    called = repr(name) if names else f"{where} of group 0"
    with pytest.raises(FloatingPointError, match=rf"gradient of parameter {called}: 1 NaN or infinite entries of"):
        optimizer.step()
    assert same(old, weights(net))
    torch.testing.assert_close(state_of(optimizer), state, rtol=0, atol=0)
    p.grad.view(-1)[1] = 0.0
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(old, weights(net), strict=True))


@pytest.mark.parametrize("where", range(4))
def test_a_bad_gradient_within_a_closure_gives_the_weights_back(where):
    net = network()
    optimizer = SGD(net.named_parameters(), lr=0.1)
    whiten(optimizer)
    old = weights(net)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        list(net.parameters())[where].grad.view(-1)[0] = math.nan
        return loss

    with pytest.raises(FloatingPointError, match=r"parameter '\d\.\w+' after the step: 1 NaN.*is as it was before"):
        optimizer.step(closure)
    assert same(old, weights(net))


def test_a_stale_bad_gradient_does_not_stop_a_closure():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    whiten(optimizer)
    for p in net.parameters():
        p.grad = torch.full_like(p, math.nan)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    optimizer.step(closure)
    for p, expected in zip(net.parameters(), whitened_step(SGD), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=ROUNDING)


def test_weights_that_overflow_are_given_back():
    net = network()
    optimizer = SGD(
        [{"params": net[0].parameters()}, {"params": [net[2].weight]}, {"params": [net[2].bias], "lr": 1e308}], lr=0.1
    )
    whiten(optimizer)
    loss_of(net).backward()
    net[2].bias.grad.fill_(100.0)
    old = weights(net)
    with pytest.raises(FloatingPointError, match="parameter 0 of group 2 after the step: 3 NaN or infinite"):
        optimizer.step()
    assert same(old, weights(net))


@pytest.mark.parametrize(
    ("solver", "kind", "words"),
    [
        (lambda M: M * math.nan, FloatingPointError, r"'0\.weight' after the step: the rotated weight: 20 NaN"),
        (lambda M: M[:1], FloatingPointError, r"solver's R has shape \(1, 4\); it must be \(4, 4\)"),
        (lambda M: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_solver_that_fails_gives_all_weights_back(solver, kind, words):
    net = network()
    optimizer = SGD(net.named_parameters(), lr=0.1)
    whiten(optimizer, solver=lambda M: polar_factor(M) if M.shape == (3, 3) else solver(M))
    loss_of(net).backward()
    old = weights(net)
    with pytest.raises(kind, match=words):
        optimizer.step()
    assert same(old, weights(net))


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_under_a_gradient_scaler_is_skipped_as_ever(fused):
    net = network().float()
    optimizer = SGD(net.parameters(), lr=0.1, fused=fused)
    whiten(optimizer)
    virtual = VirtualCovariance(net[0], optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(t))
        scaler.scale(net(x).square().mean() * (math.inf if t == 2 else 1)).backward()
        old = weights(net)
        scaler.step(optimizer)
        scaler.update()
        assert same(old, weights(net)) == (t == 2)
    assert virtual.steps == 3


def test_sparse_gradients_and_complex_parameters_beside_the_whitened_are_looked_at_too():
    table = nn.Embedding(7, 3, sparse=True)
    phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    weight = nn.Parameter(torch.eye(3))
    optimizer = SGD([table.weight, phase, weight], lr=0.1)
    whiten(optimizer, [weight])

    def gradients():
        optimizer.zero_grad()
        (table(torch.tensor([1, 2])).sum() + (phase.abs() ** 2).sum() + weight.square().sum()).backward()

    gradients()
    optimizer.step()
    for p, values in ((table.weight, lambda g: g._values()), (phase, lambda g: g)):
        gradients()
        values(p.grad)[0] = math.nan
        with pytest.raises(FloatingPointError, match="the gradient of parameter"):
            optimizer.step()


# ---- refused attachments ----

REFUSED = {
    "tensor": (lambda net: net[0].weight, TypeError, r"params: got a Parameter; pass an iterable.*\[weight\]"),
    "module": (lambda net: net, TypeError, r"params: got a Sequential.*module\.parameters\(\)"),
    "word": (lambda net: "weight", TypeError, "params: got a str"),
    "number": (lambda net: 3, TypeError, "params: got a int"),
    "names": (lambda net: net.named_parameters(), TypeError, "params holds a tuple; pass the parameters themselves"),
    "groups": (lambda net: [{"params": [net[0].weight]}], TypeError, "params holds a dict"),
    "none within": (lambda net: [None], TypeError, "params holds a NoneType"),
    "empty": (lambda net: [], ValueError, "params is empty"),
    "foreign": (lambda net: [net[0].weight, torch.ones(2, 3)], ValueError, r"shape \(2, 3\) that is not in the opt"),
    "lazy": (lambda net: [nn.LazyLinear(3).weight], ValueError, "shape not known yet that is not in the optimizer"),
    "bias": (lambda net: [net[0].weight, net[0].bias], ValueError, r"shape \(4,\): a weight to whiten has 2 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_whitening_leaves_no_hook(case, unchecked):
    params, kind, words = REFUSED[case]
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    before = set(vars(optimizer))
    with pytest.raises(kind, match=words):
        unchecked.whiten(optimizer, params(net))
    for options, kind in (({"solver": None}, TypeError), ({"solver": "svd"}, TypeError), ({"keep": None}, ValueError)):
        with pytest.raises(kind, match=next(iter(options))):
            unchecked.whiten(optimizer, **options)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert set(vars(optimizer)) == before


def test_a_lazy_parameter_is_whitened_once_it_has_a_shape():
    lazy = nn.LazyLinear(3)
    optimizer = SGD(lazy.parameters(), lr=0.1)
    whiten(optimizer)
    with pytest.raises(ValueError, match="lazy parameter, without a shape yet; run the model once"):
        whiten(optimizer, [lazy.weight])
    lazy(torch.randn(8, 5)).square().mean().backward()
    old = lazy.weight.detach().clone()
    plain = old - 0.1 * lazy.weight.grad
    optimizer.step()
    torch.testing.assert_close(lazy.weight.detach(), nearest_with_same_gram(before=old, after=plain))


def test_parameters_without_numbers_are_refused():
    meta = nn.Linear(3, 2, device="meta")
    optimizer = SGD(meta.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: got a tensor without data"):
        whiten(optimizer)
    with pytest.raises(ValueError, match=r"the weight of the layer: got a tensor without data"):
        VirtualCovariance(meta, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


# ---- layers that are no plain layer ----


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(5, 4))


def pruned():
    return prune.l1_unstructured(nn.Linear(5, 4), "weight", amount=0.3)


LAYERS = {
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(5, 4)),
        ValueError,
        "computed by _WeightNorm",
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(5, 4)),
        ValueError,
        "computed by _Orthogonal",
    ),
    "old weight norm": (old_weight_norm, ValueError, "computed from weight_g, weight_v"),
    "pruned": (pruned, ValueError, "computed from weight_orig"),
    "lazy": (lambda: nn.LazyLinear(4), ValueError, "lazy and has no weight yet; run the model once"),
    "norm": (lambda: nn.LayerNorm(5), TypeError, r"LayerNorm.*nn\.Linear and nn\.Conv2d"),
    "none": (lambda: None, TypeError, "NoneType"),
    "word": (lambda: "0", TypeError, "str"),
    "weight": (lambda: nn.Linear(5, 4).weight, TypeError, "Parameter"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_without_a_weight_of_its_own_is_refused(case, unchecked):
    make, kind, words = LAYERS[case]
    layer = make()
    params = list(layer.parameters()) if isinstance(layer, nn.Module) else [torch.ones(2, 3, requires_grad=True)]
    optimizer = SGD(params, lr=0.1)
    with pytest.raises(kind, match=words):
        unchecked.VirtualCovariance(layer, optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_frozen_layer_adds_nothing_until_it_is_thawed():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    net[0].requires_grad_(False)
    virtual = VirtualCovariance(net[0], optimizer)
    train(net, optimizer, 1)
    assert virtual.steps == 0
    net[0].requires_grad_(True)
    train(net, optimizer, 1)
    assert virtual.steps == 1


def test_nothing_is_left_on_layer_or_optimizer_after_remove():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    traces = [set(vars(each)) for each in (net[0], optimizer)]
    virtual, handle = VirtualCovariance(net[0], optimizer), whiten(optimizer)
    train(net, optimizer)
    virtual.remove()
    virtual.remove()
    handle.remove()
    assert [set(vars(each)) for each in (net[0], optimizer)] == traces
    hooks = itertools.chain(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert not list(hooks)
    assert virtual.shift.any()
