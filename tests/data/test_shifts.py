"""Device shifts: seeded, one for all images of a device, kept as bytes, and the same on every engine."""

import dataclasses

import numpy as np
import pytest
import torch

import hardy
from conftest import federation, fit
from hardy import papers
from hardy.attacks.devices import unseen_camera
from hardy.attacks.threats import parse_threat as threat
from hardy.config import DataChoice, Experiment, parse
from hardy.core import random
from hardy.data.shifts import camera, device, gaussian_affine, seen, with_shift
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.runs.api import evaluate

NOTHING = {"blur": 0.0, "colour": 0.0, "contrast": 0.0, "brightness": 0.0, "gamma": 0.0}


def images(count: int = 6, side: int = 12) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def only(**one: float):
    return camera(**{**NOTHING, **one})


def test_without_strength_a_device_sees_what_is_there():
    data = federation()
    for shift in (camera(strength=0.0), gaussian_affine(strength=0.0), only()):
        same = with_shift(data, shift, seed=3, test=True)
        for before, after in zip(data.clients, same.clients, strict=True):
            for part in ("train", "validation"):
                first, second = data.x_train[getattr(before, part)], same.x_train[getattr(after, part)]
                assert np.array_equal(first, second)
            assert np.array_equal(data.x_test[before.test], same.x_test[after.test])


def test_each_client_has_its_own_device_and_the_seed_tells_which():
    data = federation()
    everyone = data.clients[0]
    alike = dataclasses.replace(data, clients=(everyone, everyone))  # two clients who hold the same rows
    taken = [with_shift(alike, camera(), seed=seed) for seed in (0, 0, 1)]
    first, second = (taken[0].x_train[client.train] for client in taken[0].clients)
    assert not np.array_equal(first, second)
    assert np.array_equal(taken[0].x_train, taken[1].x_train)
    assert not np.array_equal(taken[0].x_train, taken[2].x_train)
    assert taken[0].x_test is data.x_test and taken[0].x_train.dtype == np.uint8
    for client in taken[0].clients:
        assert np.array_equal(taken[0].y_train[client.train], data.y_train[everyone.train])
        assert np.array_equal(taken[0].y_train[client.validation], data.y_train[everyone.validation])


def test_what_a_camera_does():
    x, key = images(), device(0, 0)
    grey = torch.full_like(x, 0.5)
    brighter = only(brightness=0.3).apply(grey, key)
    assert 0 < (brighter - 0.5).abs().max() <= 0.3 and brighter.std() < 1e-12
    torch.testing.assert_close(only(contrast=1.0).apply(grey, key), grey)  # mid-grey stays
    stretched = only(contrast=0.5).apply(0.5 + 0.1 * (x - 0.5), key) - 0.5
    factor = stretched / (0.1 * (x - 0.5))
    torch.testing.assert_close(factor, factor.mean().expand_as(factor))
    cast = only(colour=0.5).apply(grey, key)[0, :, 0, 0]
    assert len(set(cast.tolist())) == 3 and 0.5 * np.exp(-0.5) <= cast.min() <= cast.max() <= 0.5 * np.exp(0.5)
    power = only(gamma=0.5).apply(x, key).log() / x.log()
    torch.testing.assert_close(power, power.mean().expand_as(power))
    point = torch.zeros(1, 3, 13, 13, dtype=torch.float64)
    point[..., 6, 6] = 1.0
    spread = only(blur=3.0).apply(point, key)
    torch.testing.assert_close(spread.sum(), point.sum(), rtol=1e-3, atol=1e-3)  # light is spread, not lost
    assert spread.amax() < 0.9 and torch.equal(spread[0, 0], spread[0, 0].T)


def test_the_gaussian_shift_is_affine_with_the_authors_spread():
    shift, key = gaussian_affine(strength=0.02), device(0, 1)
    x = 0.3 + 0.4 * images(side=16)  # far from the box, where clipping would bend it
    half, mixed = shift.apply(x, key), shift.apply(0.25 * x[:1] + 0.75 * x[1:2], key)
    torch.testing.assert_close(mixed, 0.25 * half[:1] + 0.75 * half[1:2])
    offset = 2 * (shift.apply(torch.full_like(x[:1], 0.5), key) - 0.5)  # of images in [-1, 1]
    assert offset.std().item() == pytest.approx(0.02, rel=0.1)
    turned = 2 * (half - x) - offset
    length = (2 * x - 1).flatten(1).norm(dim=1) / np.sqrt(x[0].numel())
    assert (turned.flatten(1).std(1) / length).mean().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("shift", [camera(), gaussian_affine(strength=0.1)], ids=lambda s: type(s).__name__)
def test_shifts_run_under_vmap_and_stay_in_the_box(shift):
    x = torch.stack([images(), images().flip(0)])
    keys = torch.stack([device(0, 0), device(0, 1)])
    together = torch.vmap(shift.apply)(x, keys)
    for one, images_of_one, key in zip(together, x, keys, strict=True):
        torch.testing.assert_close(one, shift.apply(images_of_one, key))
    assert 0 <= together.min() <= together.max() <= 1


def test_a_shift_in_an_experiment(tmp_path):
    """Training rows are shifted, test rows are not unless asked; the report pictures the devices."""
    x, y = (images(40, 8) * 255).byte().permute(0, 2, 3, 1).numpy(), np.arange(40) % 2
    given = hardy.arrays({"day": (x[:30], y[:30], x[30:], y[30:])})
    usual = "rounds = 1\n[training]\nsteps = 1\n[engine]\nname = 'sequential'\n"
    table = usual + "[data]\nshift_test = {}\n[data.shift]\nname = 'camera'\nblur = 2.0\n"
    folders = [tmp_path / name for name in ("plain", "moved", "all_moved")]
    plain, moved, all_moved = (
        hardy.fit(parse(text), data=given, out=folder, quiet=True).engine.data
        for text, folder in zip((usual, table.format("false"), table.format("true")), folders, strict=True)
    )
    first = plain.clients[0]
    expected = seen(plain.x_train[first.train], camera(blur=2.0), device(0, 0))
    assert np.array_equal(moved.x_train[moved.clients[0].train], expected)
    assert np.array_equal(moved.x_test, plain.x_test)
    assert not np.array_equal(all_moved.x_test[all_moved.clients[0].test], plain.x_test[first.test])
    assert not (folders[0] / "pictures" / "devices.png").exists()
    assert b"as client 1 takes them" in (folders[1] / "pictures" / "devices.png").read_bytes()


def test_mistakes():
    with pytest.raises(HardyError, match="contrast of a shift is -1"):
        camera(contrast=-1.0)
    with pytest.raises(HardyError, match="Did you mean 'camera'"):
        hardy.fit(Experiment(rounds=1, data=DataChoice(shift="camra")), quiet=True)
    with pytest.raises(HardyError, match="cannot shift a federation that is given"):
        hardy.fit(Experiment(rounds=1, data=DataChoice(shift="camera")), data=federation(), quiet=True)
    with pytest.raises(HardyError, match="limit is 16384"):
        gaussian_affine().apply(torch.zeros(1, 3, 80, 80), device(0, 0))


def test_unseen_devices_take_turns():
    """Each image is taken by one of the devices, all of them other than those of training."""
    x, key = images(7), torch.tensor(5)
    attack = unseen_camera(devices=3)
    taken = attack.perturb(lambda z: z, x, torch.zeros(7), key)
    alone = [camera().apply(x, random.fold(key, number)) for number in range(3)]
    for at, image in enumerate(taken):
        torch.testing.assert_close(image, alone[at % 3][at])
        assert not torch.allclose(image, alone[(at + 1) % 3][at])
    assert attack.joint and threat("camera-3@0.5,blur=2").attack == unseen_camera(devices=3, strength=0.5, blur=2.0)
    with pytest.raises(HardyError, match="devices is 0"):
        threat("camera@devices=0")


def test_unseen_devices_are_a_plain_accuracy_on_both_engines():
    """Every image counts, also those that were misread before."""
    found = []
    for name in ("sequential", "vectorised"):
        run = fit(papers.fedavg(), rounds=2, engine=EngineChoice(name=name, device="cpu", precision="float64"))
        found.append(evaluate(run, "camera-2,camera-2@0,gaussian@0.3", checks=False, quiet=True))
    assert found[0]["robust_accuracy"] == found[1]["robust_accuracy"]
    assert found[0]["robust_accuracy"]["camera-2@0"]["by_client"] == found[0]["standard_accuracy"]["by_client"]
