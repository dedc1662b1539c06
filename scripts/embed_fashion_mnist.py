"""Make the embedded image set from the full Fashion-MNIST: run once, result committed.

Takes the first 1,000 training and the first 200 test images of each class, in the order of the files: balanced,
fixed, and nobody's choice. The file is the same to the byte each time it is made.

Usage: python scripts/embed_fashion_mnist.py   (needs `gramlin data get fashion-mnist`)
"""

import io
import zipfile
from pathlib import Path

import numpy as np

from gramlin import data

TARGET = Path(__file__).parent.parent / "gramlin" / "embedded" / "fashion-mnist-mini.npz"


def first_of_each_class(inputs, targets, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pick the first ``count`` samples of each class, keeping the order of the file."""
    targets = targets.numpy()
    chosen = np.sort(np.concatenate([np.flatnonzero(targets == label)[:count] for label in range(10)]))
    return (inputs.numpy()[chosen] * 255).round().astype(np.uint8), targets[chosen].astype(np.uint8)


def main() -> None:
    """Write the file and say how large it is."""
    full = data.load("fashion-mnist")
    train_inputs, train_targets = first_of_each_class(full.train_inputs, full.train_targets, 1000)
    test_inputs, test_targets = first_of_each_class(full.test_inputs, full.test_targets, 200)
    arrays = {
        "train_inputs": train_inputs,
        "train_targets": train_targets,
        "test_inputs": test_inputs,
        "test_targets": test_targets,
        "classes": np.array(full.classes),
    }
    TARGET.parent.mkdir(exist_ok=True)
    # np.savez would write today's date; NumPy reads any zip of .npy files, and LZMA is its smallest.
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_LZMA) as file:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            file.writestr(zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)), buffer.getvalue(), zipfile.ZIP_LZMA)
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
