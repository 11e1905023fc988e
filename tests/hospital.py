"""A network of hospitals: 16-bit one-channel scans, one .npz a site, classes by name, a scanner of its own each."""

from pathlib import Path

import numpy as np

CLASSES = ("benign", "malignant")


def scans(rows: int, *, side: int = 16, gain: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint16 [rows, side, side] and labels as words: a malignant scan has a bright spot. The classes take turns."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    grid = np.arange(side)
    x = rng.normal(9000, 2500, (rows, side, side))
    for row in np.flatnonzero(labels):
        down, across = rng.integers(side // 4, 3 * side // 4, 2)
        far = (grid[:, None] - down) ** 2 + (grid - across) ** 2
        x[row] += 28000 * np.exp(-far / (side / 5) ** 2)
    return (gain * x).clip(0, 65535).astype(np.uint16), np.array(CLASSES)[labels]


def write_sites(folder: Path, sites: dict[str, int] | None = None, *, side: int = 16) -> Path:
    """One file a site: name -> training rows, half as many test rows, and a scanner brighter than the last one's."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, rows) in enumerate((sites or {"north": 40, "south": 24}).items()):
        x, y = scans(rows, side=side, gain=1 + 0.4 * number, seed=2 * number)
        x_test, y_test = scans(rows // 2, side=side, gain=1 + 0.4 * number, seed=2 * number + 1)
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return folder
