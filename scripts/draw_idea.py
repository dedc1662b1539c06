"""Draw the landing page's picture from a real training run; the result is committed.

Usage: python scripts/draw_idea.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F

import gramlin
from gramlin import data, figures
from gramlin.chapters import feature_learning
from gramlin.hooks import record
from gramlin.models import MLP
from gramlin.training import train

TARGET = Path(__file__).parent.parent / "book" / "_static" / "idea.png"


def main() -> None:
    """Train on the Swiss roll until it is half learned, and draw what moved."""
    figures.use_style()
    points, angle = data.swiss_roll(300, seed=0)
    torch.manual_seed(1)
    model = MLP([2, 32, 32, 1], "gelu")
    with torch.no_grad():  # a small first layer, whose Gram matrix has some way to go
        model.linear1.weight *= 0.3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record(model, ["linear1"]) as seen:
        F.mse_loss(model(points), angle).backward()
    virtual = gramlin.VirtualCovariance(model.linear1, optimizer)
    before = model.linear1.weight.detach().clone()
    train(model, optimizer, points, angle, epochs=120, loss=F.mse_loss)
    gram = gramlin.weight_gram(before)
    after = gramlin.weight_gram(model.linear1.weight.detach())
    shown = 3 * points.shape[0] * seen["linear1"].feature_gradients  # each point's own loss, for three units of time
    figure = feature_learning.plot_idea(points, shown, angle[:, 0], gram, after, gram + virtual.shift)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=220, bbox_inches="tight", metadata={"Software": None})
    print(TARGET)


if __name__ == "__main__":
    main()
