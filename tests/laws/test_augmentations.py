"""What must hold for every augmentation of the registry, whoever writes it."""

import pytest
import torch

import hardy
from conftest import assert_close, everything, experiment, federation, net, shortened
from hardy import papers
from hardy.config import DataChoice
from hardy.core.training import Training
from hardy.engines import EngineChoice
from hardy.engines.vectorised import Vectorised
from hardy.registry import PARTS

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64", lane=3)
METHODS = (papers.split_mix(width=0.25), papers.fedrobust())


@pytest.fixture(params=sorted(PARTS["augmentation"]))
def choice(request):
    return DataChoice(augmentation=PARTS["augmentation"][request.param]())


def fit(choice, method, **changes):
    chosen = {"rounds": 2, "training": Training(rate=0.1, batch=4), **changes}
    out = chosen.pop("out", None)
    given = {"method": shortened(method), "model": net, "data": federation()}
    return hardy.fit(experiment(data=choice, **chosen), **given, out=out, quiet=True)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_engines_agree(choice, method, monkeypatch):
    one = everything(fit(choice, method))
    assert_close(one, everything(fit(choice, method, engine=VECTORISED)), 1e-9)
    monkeypatch.setattr(Vectorised, "fixed", True)
    assert_close(one, everything(fit(choice, method, engine=VECTORISED)), 1e-9)
    plain = everything(fit(DataChoice(), method))
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in one.items())


def test_resuming_is_exact(choice, tmp_path):
    method = papers.fedbn()
    whole = fit(choice, method, rounds=3)
    fit(choice, method, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    resumed = hardy.resume(tmp_path / "run", method=shortened(method), model=net, data=federation(), quiet=True)
    assert_close(everything(whole), everything(resumed), 0)


def test_images_stay_in_the_box(choice):
    """Also where they fill it; and images of one colour, in any number, come back as so many of their size."""
    for count in (1, 5):
        x = torch.stack([torch.full((3, 9, 12), float(n % 2)) for n in range(count)])
        out = choice.augmentation.apply(x, torch.tensor(count))
        assert out.shape == x.shape and out.dtype == x.dtype
        assert 0 <= out.min() <= out.max() <= 1


def test_many_slots_in_one_call(choice):
    x, keys = torch.rand(3, 4, 2, 9, 9), torch.tensor([1, 2, 2])
    many = torch.vmap(choice.augmentation.apply)(x, keys)
    assert_close(
        {"x": many}, {"x": torch.stack([choice.augmentation.apply(a, k) for a, k in zip(x, keys, strict=True)])}, 0
    )


def test_no_look_at_values(choice):
    """As captured steps need it: it runs on tensors without data."""
    out = choice.augmentation.apply(
        torch.zeros(4, 3, 9, 9, device="meta"), torch.zeros((), dtype=torch.int64, device="meta")
    )
    assert out.shape == (4, 3, 9, 9)
