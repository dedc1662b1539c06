"""Target Linearity beside one product of its features, a probe beside a forward pass, the surrogate beside (n, n).

Run with ``-s`` to see the tables. Times are the fastest of interleaved rounds in one process, as ratios to the first
row of each table; memory is how far the process's rises during a call. Nothing here is asserted on a clock.
"""

import ctypes
import gc
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from gramlin import (
    NeuralCollapse,
    TargetLinearity,
    neural_collapse,
    normalized_surrogate,
    probe,
    surrogate,
    target_linearity,
)
from gramlin.models import CNN, MLP

ROUNDS = 7
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
N, D, K, MANY = 50_000, 256, 10, 1000


def features(n=N, d=D, dtype=torch.float32, classes=K):
    g = torch.Generator().manual_seed(0)
    H = torch.randn(n, d, generator=g, dtype=dtype)
    y = torch.cat([(H[part] @ torch.randn(d, classes, generator=g).to(dtype)).argmax(dim=1) for part in
                   torch.arange(n - classes).split(4096)])  # fmt: skip
    return H, torch.cat([y, torch.arange(classes)])  # no class is without samples


def streamed(metric, H, y, batch):
    for part in zip(H.split(batch), y.split(batch), strict=True):
        metric.update(*part)
    return metric.compute()


def fastest(functions, rounds=ROUNDS):
    """Milliseconds of each function: the rounds go through all of them in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def peak_megabytes(function):
    """How far the process's memory rises during the call, above what it holds before (Linux)."""

    def kilobytes(key):
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory freed earlier is used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = kilobytes("VmRSS")
    function()
    return (kilobytes("VmHWM") - before) / 1024


def table(title, times, memory=None):
    print(f"\n{title}, {torch.get_num_threads()} CPU threads")
    print(f"  {'':<26}{'ms':>10}{'ratio':>8}" + ("" if memory is None else f"{'MB':>10}"))
    first = next(iter(times.values()))
    for name, t in times.items():
        print(f"  {name:<26}{t:>10.2f}{t / first:>8.2f}" + ("" if memory is None else f"{memory[name]:>10.1f}"))


def double_product(H, y):
    H = H.double()
    return H.mT @ H


LINEARITY = {
    "HᵀH in float64": double_product,  # first: every sum of a measure is in float64
    "HᵀH": lambda H, y: H.mT @ H,
    "target_linearity": target_linearity,
    "TargetLinearity, 4096": lambda H, y: streamed(TargetLinearity(), H, y, 4096),
    "TargetLinearity, 512": lambda H, y: streamed(TargetLinearity(), H, y, 512),
    "TargetLinearity, 64": lambda H, y: streamed(TargetLinearity(), H, y, 64),
    "neural_collapse": neural_collapse,
    "NeuralCollapse, 4096": lambda H, y: streamed(NeuralCollapse(int(y.max()) + 1), H, y, 4096),
    "probe, tl_in": lambda H, y: probe(nn.Linear(D, 1), H, y, metrics=["tl_in"], batch_size=4096),
}


@LINUX
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("classes", [K, MANY])
def test_linearity_beside_one_product_of_its_features(classes, dtype, capsys):
    H, y = features(dtype=dtype, classes=classes)
    calls = {
        name: partial(f, H, y) for name, f in LINEARITY.items() if not (dtype == torch.float64 and "probe" in name)
    }
    times, memory = fastest(calls), {name: peak_megabytes(call) for name, call in calls.items()}
    with capsys.disabled():
        table(f"Target Linearity, n = {N:,}, d = {D}, K = {classes}, {dtype}", times, memory)


def by_pairs_of_samples(H, W, y):
    n = len(H)
    Y = nn.functional.one_hot(y, K).to(H.dtype)
    H, Y = H - H.mean(dim=0), Y - Y.mean(dim=0)
    gram, target_gram = (H @ W.mT) @ (H @ W.mT).mT, Y @ Y.mT
    assert gram.shape == (n, n)
    return (gram * target_gram).sum() / K, (gram * target_gram).sum() / (gram.norm() * target_gram.norm())


SURROGATES = {
    "(n, n) matrices": by_pairs_of_samples,
    "surrogate": surrogate,
    "normalized_surrogate": normalized_surrogate,
}


@LINUX
def test_surrogate_beside_matrices_over_pairs_of_samples(capsys):
    H, y = features(5000, dtype=torch.float64)
    W = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    calls = {name: partial(f, H, W, y) for name, f in SURROGATES.items()}
    times, memory = fastest(calls, rounds=3), {name: peak_megabytes(call) for name, call in calls.items()}
    with capsys.disabled():
        table(f"surrogate, n = 5,000, d = k = {D}, K = {K}, float64", times, memory)


PROBED = {
    "MLP 784-256-256-256-256-10": (lambda: MLP([784, 256, 256, 256, 256, 10]), (1, 28, 28), 10_000),
    "CNN 16-16-16, 32×32": (lambda: CNN((3, 32, 32), 10), (3, 32, 32), 5_000),
    "ResNet-18, 64×64": (lambda: resnet18(num_classes=10), (3, 64, 64), 500),
}


@torch.no_grad()
def forward(model, x):
    model.eval()
    for part in x.split(256):
        model(part)


@LINUX
@pytest.mark.parametrize("name", PROBED)
def test_probe_of_all_layers_beside_a_forward_pass(name, capsys):
    build, shape, n = PROBED[name]
    torch.manual_seed(0)
    model, x, y = build(), torch.randn(n, *shape), torch.arange(n) % 10
    calls = {
        "forward": partial(forward, model, x),
        "probe, tl_in": partial(probe, model, x, y, metrics=["tl_in"]),
        "probe": partial(probe, model, x, y),
    }
    times, memory = fastest(calls, rounds=3), {kind: peak_megabytes(call) for kind, call in calls.items()}
    with capsys.disabled():
        table(f"{name}, {n:,} samples", times, memory)


@pytest.mark.parametrize("kind", LINEARITY)
def test_linearity_for_the_record(benchmark, kind):
    """The same calls through pytest-benchmark, whose tables and files compare runs."""
    H, y = features()
    benchmark.group = f"Target Linearity, n = {N:,}, d = {D}, K = {K}"
    benchmark.pedantic(LINEARITY[kind], (H, y), rounds=ROUNDS, warmup_rounds=1)
