"""Crops and flips: what they do to an image, where they act and where not."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import hardy
from conftest import experiment, federation, net
from hardy import config, papers
from hardy.config import DataChoice, EvaluationChoice
from hardy.core.training import Training
from hardy.data.augmentation import Augmentation, crop_flip
from hardy.errors import HardyError
from hardy.parts.norms import absent, batch
from hardy.runs.costs import image_macs
from hardy.runs.prepare import prepare


def moved(image, down, right, mirrored):
    """By hand: padded with black, cropped, mirrored; independent of the gather in crop_flip."""
    image = image[:, :, ::-1] if mirrored else image
    padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    return padded[:, down : down + image.shape[1], right : right + image.shape[2]]


def test_each_image_is_cropped_and_mirrored_in_its_own_way():
    rng = np.random.default_rng(0)
    x = rng.random((400, 2, 5, 7)).astype(np.float32)
    out = crop_flip(padding=2).apply(torch.from_numpy(x), torch.tensor(3)).numpy()
    seen = {}
    for image, found in zip(x, out, strict=True):
        ways = [(d, r, f) for d in range(5) for r in range(5) for f in (False, True)]
        (way,) = [way for way in ways if np.array_equal(moved(image, *way), found)]
        seen[way] = seen.get(way, 0) + 1
    assert len(seen) == 50  # every offset, mirrored and not: 8 of each are expected
    mirrored = sum(count for (_, _, f), count in seen.items() if f)
    assert abs(mirrored - 200) < 4 * 10  # four deviations of 400 coins
    again = crop_flip(padding=2).apply(torch.from_numpy(x), torch.tensor(4)).numpy()
    assert not np.array_equal(out, again)


def test_parts_of_it_alone():
    x = torch.rand(64, 1, 6, 6)
    flipped = crop_flip(padding=0).apply(x, torch.tensor(1))
    same = [torch.equal(a, b) for a, b in zip(x, flipped, strict=True)]
    assert 0 < sum(same) < 64
    assert all(one or torch.equal(a.flip(-1), b) for one, a, b in zip(same, x, flipped, strict=True))
    cropped = crop_flip(padding=1, flip=False).apply(x, torch.tensor(1))
    ways = [(d, r, False) for d in range(1, 4) for r in range(1, 4)]
    for image, found in zip(x.numpy(), cropped.numpy(), strict=True):
        assert any(np.array_equal(moved(image, *way), found) for way in ways)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{ name = 'crop_flip', padding = 0, flip = false }", "has no effect"),
        ("{ name = 'crop_flip', padding = -1 }", "must be 0 or more pixels"),
        ("{ name = 'crop_flip', padding = 28 }", "It must be below 28"),
        ("'crop_flop'", "Did you mean 'crop_flip'"),
    ],
)
def test_what_would_not_work_is_refused(table, message):
    with pytest.raises(HardyError, match=message):
        prepare(config.parse(f"rounds = 1\ndata.augmentation = {table}"))


def test_replays_and_vectors_are_refused():
    choice = DataChoice(augmentation=crop_flip(padding=1))
    with pytest.raises(HardyError, match=r"training\.replays is 2: it shows the same images again"):
        hardy.fit(
            experiment(data=choice, training=Training(batch=4, replays=2)),
            method=papers.fatfree(),
            model=net,
            data=federation(),
            quiet=True,
        )
    rows, labels = np.random.default_rng(0).random((40, 6)).astype(np.float32), np.arange(40) % 2
    with pytest.raises(HardyError, match=r"data\.augmentation changes images, but the data are vectors of 6 features"):
        hardy.fit(experiment(data=choice), data=(rows, labels, rows, labels), quiet=True)


def test_evaluation_and_statistics_see_images_as_they_are():
    """With rate 0 nothing is learnt: whatever differs would come from images that were changed."""

    def figures(choice, method):
        run = hardy.fit(
            experiment(
                data=choice,
                rounds=1,
                training=Training(rate=0.0, batch=4),
                evaluation=EvaluationChoice(threats=("fgsm",), metrics=("loss",)),
            ),
            method=method,
            model=net,
            data=federation(),
            quiet=True,
        )
        found = run.summary()
        return json.dumps([found["standard_accuracy"], found["robust_accuracy"], found["metrics"]])

    for norm in ("absent", "recomputed"):
        made = absent() if norm == "absent" else batch(inference_statistics=norm)
        method = papers.fedavg(norm=made)
        plain, changed = (figures(c, method) for c in (DataChoice(), DataChoice(augmentation=crop_flip(padding=2))))
        assert plain == changed


@dataclass(frozen=True, kw_only=True)
class _Blurred(Augmentation):
    """A product, so that costs have something to count."""

    def apply(self, x, key):
        return x @ torch.full((x.shape[-1], x.shape[-1]), 1 / x.shape[-1], dtype=x.dtype, device=x.device)


def test_an_own_augmentation_and_its_costs(tmp_path):
    plan = papers.fedavg().bind(net, (1, 8, 8))
    plain = image_macs(plan, plan.method.objective, (1, 8, 8), 3)
    assert image_macs(plan, plan.method.objective, (1, 8, 8), 3, crop_flip(padding=1)) == plain
    assert image_macs(plan, plan.method.objective, (1, 8, 8), 3, _Blurred()) == plain + 8 * 8 * 8
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\nfrom hardy.data.augmentation import Augmentation\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Negative(Augmentation):\n"
        "    def apply(self, x, key):\n        return 1 - x\n"
    )
    words = ["rounds=1", "data.limit=20", "training.steps=1", "engine.device=cpu", "training.rate=0.1"]
    own = hardy.fit(hardy.read("demo", [*words, f"data.augmentation={tmp_path}/own.py:Negative"]), quiet=True)
    plain = hardy.fit(hardy.read("demo", words), quiet=True)
    assert not torch.equal(own.state.shared["fc.weight"], plain.state.shared["fc.weight"])
