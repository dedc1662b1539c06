"""An epoch of the book's training loop beside the textbook one: a DataLoader over PIL images with ToTensor.

The same MLP, data (the embedded Fashion-MNIST images) and batch size, timed in one run: read the ratio of the two rows.
"""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_tensor

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
    model, optimizer = model_and_optimizer()
    benchmark.pedantic(
        train,
        (model, optimizer, images.train_inputs, images.train_targets),
        {"epochs": 1, "batch_size": BATCH},
        rounds=5,
        warmup_rounds=1,
    )


@pytest.mark.benchmark(group="one epoch on 10,000 images")
def test_textbook_loop(benchmark, images):
    pixels = (images.train_inputs[:, 0] * 255).round().to(torch.uint8).numpy()
    pictures = [Image.fromarray(picture) for picture in pixels]

    class Pictures(torch.utils.data.Dataset):
        def __len__(self):
            return len(pictures)

        def __getitem__(self, index):
            return to_tensor(pictures[index]), int(images.train_targets[index])

    loader = DataLoader(Pictures(), batch_size=BATCH, shuffle=True)
    model, optimizer = model_and_optimizer()

    def epoch():
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    benchmark.pedantic(epoch, rounds=5, warmup_rounds=1)
