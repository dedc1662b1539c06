"""Whitening: solvers side by side, by layer shape, and what a whitened step costs beside a plain one.

Run with ``-s`` to see the tables. Times are the fastest of interleaved rounds in one process, as ratios to the first
row of each table; nothing here is asserted on a clock. The errors are those of
``gramlin.chapters.whitening.compare_solvers``.
"""

import functools
import itertools
import time

import pytest
import torch
from torch import nn

from gramlin.chapters.whitening import compare_solvers
from gramlin.whitening import nearest_with_same_gram, newton_schulz_polar, polar_factor, whiten

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
SHAPES = [(256, 3072), (256, 784), (256, 256), (10, 256), (512, 784)]
ROUNDS = 15


def batches(inputs, device, size=64):
    """Ten noisy prototypes: a problem an MLP learns in a few hundred steps."""
    g = torch.Generator().manual_seed(0)
    prototypes = torch.randn(10, inputs, generator=g)
    while True:
        y = torch.randint(0, 10, (size,), generator=g)
        yield (0.2 * prototypes[y] + torch.randn(size, inputs, generator=g)).to(device), y.to(device)


def mlp(sizes, device):
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1]).to(device)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained_step(shape, device, steps=200):
    """The weight of this shape in an MLP after some training, before and after one step (chapter 2's settings)."""
    k, d = shape
    sizes = (d, k, 10) if k > 10 and d != 256 else (784, 256, 256, 10)
    model = mlp(sizes, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.95)
    handle = whiten(optimizer)
    data = batches(sizes[0], device)
    for _ in range(steps):
        train_step(model, optimizer, *next(data))
    handle.remove()
    weight = next(p for p in model.parameters() if p.shape == shape)
    before = weight.detach().clone()
    train_step(model, optimizer, *next(data))
    return before, weight.detach().clone()


def svd_polar(M):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


# From weights before and after the plain step to the rotated weight.
SOLVERS = {
    "newton-schulz-10": lambda W, P: newton_schulz_polar(W @ P.mT) @ P,
    "svd": lambda W, P: svd_polar(W @ P.mT) @ P,
    "polar_factor": lambda W, P: (polar_factor(W.double() @ P.double().mT) @ P.double()).to(P.dtype),
    "whiten": lambda W, P: nearest_with_same_gram(before=W, after=P),
}


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def fastest(functions, device, rounds=ROUNDS):
    """Milliseconds of each function: the rounds go through all of them in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            wait(device)
            start = time.perf_counter()
            function()
            wait(device)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_solvers(shape, device, capsys):
    W, P = trained_step(shape, device)
    values = torch.linalg.svdvals(W.double())
    times = fastest({name: lambda f=f: f(W, P) for name, f in SOLVERS.items()}, device)
    table = compare_solvers({f"{shape[0]}x{shape[1]}": (W, P)}, SOLVERS).droplevel("weight")
    table.insert(0, "ms", times)
    table.insert(1, "ratio", table["ms"] / times["newton-schulz-10"])
    with capsys.disabled():
        print(
            f"\n{shape[0]}x{shape[1]} on {device}, {torch.get_num_threads()} CPU threads: cond(W) "
            f"{values[0] / values[-1]:.0e}, step {(P - W).norm() / W.norm():.0e} |W|"
        )
        print(table.to_string(float_format="{:.2g}".format))


@functools.cache
def steps_of(inputs, device, settle=200):
    """One training step of each kind, of models that have trained for a while, and go on training as they are timed."""
    kinds = {
        "plain": None,
        "newton-schulz-10": {"solver": newton_schulz_polar},
        "svd": {"solver": svd_polar},
        "whiten": {},
    }
    steps = {}
    for name, options in kinds.items():
        model = mlp((inputs, 256, 256, 10), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.95)
        data = list(itertools.islice(batches(inputs, device), settle))
        if options is not None:
            whiten(optimizer, **options)
        for batch in data:
            train_step(model, optimizer, *batch)
        again = itertools.cycle(data)
        steps[name] = lambda model=model, optimizer=optimizer, again=again: train_step(model, optimizer, *next(again))
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inputs", [784, 3072])
def test_step_of_an_mlp(inputs, device, capsys):
    times = fastest(steps_of(inputs, device), device)
    with capsys.disabled():
        print(f"\nMLP {inputs}-256-256-10, batch 64, on {device}, {torch.get_num_threads()} CPU threads")
        print(f"  {'step':<18}{'ms':>8}{'ratio':>8}")
        for name, t in times.items():
            print(f"  {name:<18}{t:>8.2f}{t / times['plain']:>8.2f}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "newton-schulz-10", "svd", "whiten"])
@pytest.mark.parametrize("inputs", [784, 3072])
def test_step_of_an_mlp_for_the_record(benchmark, inputs, kind, device):
    """The same steps through pytest-benchmark, whose tables and files compare runs."""
    step = steps_of(inputs, device)[kind]
    benchmark.group = f"MLP step, {inputs} inputs, {device}"

    def one():
        step()
        wait(device)

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=2)
