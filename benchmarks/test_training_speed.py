"""An epoch of the book's training loop beside the textbook one: a DataLoader over torchvision's kind of data set.

The same MLP, data (the embedded Fashion-MNIST images) and batch size, timed in one run: read the ratio of the rows. The
textbook is met with and without standardised pixels; the book standardises a whole split once, before it trains.
"""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor

from gramlin import data
from gramlin.models import MLP
from gramlin.training import train

BATCH = 64


@pytest.fixture(scope="module")
def images():
    return data.load("fashion-mnist-mini")


def model_and_optimizer():
    torch.manual_seed(0)
    model = MLP([784, 256, 256, 10], "gelu")
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.95)


@pytest.mark.benchmark(group="one epoch on 10,000 images")
def test_book_loop(benchmark, images):
    split = data.standardize(images)
    model, optimizer = model_and_optimizer()
    benchmark.pedantic(
        train,
        (model, optimizer, split.train_inputs, split.train_targets),
        {"epochs": 1, "batch_size": BATCH},
        rounds=5,
        warmup_rounds=1,
    )


class Pictures(torch.utils.data.Dataset):
    """Gives a picture as torchvision's MNIST does: stored as bytes, made an image when asked for, then transformed."""

    def __init__(self, images, transform):
        self.pixels = (images.train_inputs[:, 0] * 255).round().to(torch.uint8)
        self.targets = images.train_targets
        self.transform = transform

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pixels[index].numpy())), int(self.targets[index])


@pytest.mark.parametrize("standardised", [False, True], ids=["pixels", "standardised"])
@pytest.mark.benchmark(group="one epoch on 10,000 images")
def test_textbook_loop(benchmark, images, standardised):
    mean, std = images.train_inputs.mean().item(), images.train_inputs.std().item()
    transform = Compose([ToTensor(), Normalize((mean,), (std,))]) if standardised else ToTensor()
    loader = DataLoader(Pictures(images, transform), batch_size=BATCH, shuffle=True)
    model, optimizer = model_and_optimizer()

    def epoch():
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    benchmark.pedantic(epoch, rounds=5, warmup_rounds=1)
