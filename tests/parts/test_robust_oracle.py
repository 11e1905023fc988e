"""Agreement with byzfl, which is no dependency: pip install --no-deps byzfl==0.0.11, or its folder on PYTHONPATH.

Arrays are given to it, since it rounds tensors to float32. Where definitions differ:
- Krum and MultiKrum count the n − f − 1 nearest others there, the paper's n − f − 2 here: our f is its f + 1. MultiKrum
  keeps n − f there, whatever the count; `keep` says so here.
- GeometricMedian starts at zero there and among the updates here: compared where both have converged.
- MDA takes the first of several sets of least diameter there, the tightest here: compared where there is one.
- Clipping, ARC and CenteredClipping measure from zero there, from what was sent down here: zeros are sent.
"""

import itertools
import sys
import types

import numpy as np
import pytest
import torch

from hardy.core import random
from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators import robust
from hardy.parts.aggregators import stages as mixing

sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))  # it would need torchvision and seaborn
byzfl = pytest.importorskip("byzfl", reason="the oracle of this file, byzfl, is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = [(10, 1), (10, 3), (11, 2), (23, 5)]  # n, f
WIDTH = 300


def draw(count: int, seed: int, width: int = WIDTH) -> np.ndarray:
    """Honest updates around a point, and a few that are further out than the rest."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, width)) * rng.uniform(0.5, 2.0, (count, 1)) + rng.standard_normal(width)


def given(matrix: np.ndarray) -> tuple[Updates, RoundContext]:
    stacked, count = torch.from_numpy(matrix), len(matrix)
    updates = Updates(
        slots=[Slot(client) for client in range(count)],
        shared={"w": stacked},
        reported={},
        weights=torch.ones(count),
        steps=torch.ones(count),
        loss=torch.ones(count),
    )
    sent = {"w": torch.zeros_like(stacked[:1])}
    return updates, RoundContext(shared=sent, roles={"w": Role.WEIGHT}, bases=1, clients=count)


def ours(rule, matrix: np.ndarray) -> np.ndarray:
    return rule.combine(*given(matrix))["w"].numpy()


def staged(stage, matrix: np.ndarray) -> np.ndarray:
    return stage.apply(*given(matrix), {})[0].matrix.numpy()


def agree(mine: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-12)


@pytest.fixture(params=SIZES, ids=str)
def size(request):
    return request.param


@pytest.fixture(params=range(3))
def seed(request):
    return request.param


def test_median_and_trimmed_mean(size, seed):
    n, f = size
    matrix = draw(n, seed)
    agree(ours(robust.coordinate_median(), matrix), byzfl.Median()(matrix.copy()))
    agree(ours(robust.trimmed_mean(f=f), matrix), byzfl.TrMean(f=f)(matrix.copy()))


def test_many_clients():
    matrix = draw(60, 0)
    agree(ours(robust.coordinate_median(), matrix), byzfl.Median()(matrix.copy()))
    agree(ours(robust.trimmed_mean(f=20), matrix), byzfl.TrMean(f=20)(matrix.copy()))


def test_tensors_in_float32():
    matrix = draw(12, 0).astype(np.float32)
    theirs = byzfl.TrMean(f=3)(torch.from_numpy(matrix.copy())).numpy()
    np.testing.assert_allclose(ours(robust.trimmed_mean(f=3), matrix), theirs, rtol=1e-5, atol=1e-6)


def test_geometric_median(size, seed):
    matrix = draw(size[0], seed)
    theirs = byzfl.GeometricMedian(nu=1e-6, T=2000)(matrix.copy())
    agree(ours(robust.geometric_median(iterations=2000), matrix), theirs)


def test_krum_and_multi_krum(size, seed):
    n, f = size
    matrix = draw(n, seed)
    agree(ours(robust.krum(f=f), matrix), byzfl.Krum(f=f + 1)(matrix.copy()))
    agree(ours(robust.multi_krum(f=f, keep=n - f - 1), matrix), byzfl.MultiKrum(f=f + 1)(matrix.copy()))


@pytest.mark.parametrize("iterations", [1, 4])
@pytest.mark.parametrize("radius", [1.0, 20.0, 1e3])
def test_centred_clipping(size, seed, radius, iterations):
    matrix = draw(size[0], seed)
    theirs = byzfl.CenteredClipping(L=iterations, tau=radius)(matrix.copy())
    agree(ours(robust.centred_clipping(radius=radius, iterations=iterations), matrix), theirs)


def test_minimum_diameter():
    compared = 0
    for (n, f), seed in itertools.product(SIZES[:3], range(6)):
        matrix = draw(n, seed, width=3)
        apart = np.linalg.norm(matrix[:, None] - matrix, axis=2)
        sets = itertools.combinations(range(n), n - f)
        diameters = sorted(apart[np.ix_(rows, rows)].max() for rows in sets)
        if diameters[0] < diameters[1]:
            agree(ours(robust.minimum_diameter(f=f), matrix), byzfl.MDA(f=f)(matrix.copy()))
            compared += 1
    assert compared >= 6


def test_nearest_neighbour_mixing(size, seed):
    n, f = size
    matrix = draw(n, seed)
    agree(staged(mixing.nearest_neighbour_mixing(f=f), matrix), byzfl.NNM(f=f)(matrix.copy()))


@pytest.mark.parametrize("bucket", [1, 2, 3])
def test_bucketing(size, bucket, monkeypatch):
    matrix = draw(size[0], 0)
    order = random.stream(0, 0, "buckets", 0).permutation(len(matrix))
    monkeypatch.setattr(np.random, "permutation", lambda rows: rows[order])
    agree(staged(mixing.bucketing(size=bucket), matrix), byzfl.Bucketing(s=bucket)(matrix.copy()))


def test_clipping(size, seed):
    n, f = size
    matrix = draw(n, seed)
    agree(staged(mixing.clipping(radius=20.0), matrix), byzfl.Clipping(c=20.0)(matrix.copy()))
    agree(staged(mixing.adaptive_clipping(f=f), matrix), byzfl.ARC(f=f)(matrix.copy()))
