"""Warm start: from a run, its folder, tensors and modules; what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hardy
from conftest import SHAPE, assert_close, everything, experiment, federation, net
from hardy import HardyError, papers
from hardy.models import adopt
from hardy.parts.adversarial import adversarial
from hardy.parts.norms import dual
from hardy.runs.prepare import prepare
from hardy.runs.warm_start import warm_start


def fit(method=None, model=net, data=None, out=None, rounds=1, **more):
    chosen = experiment(rounds=rounds)
    method, data = method or papers.fedavg(), data or federation()
    return hardy.fit(chosen, method=method, model=model, data=data, out=out, quiet=True, **more)


def started(init, method=None, model=net, **more):
    """A run before its first round."""
    run = prepare(experiment(), method=method or papers.fedavg(), model=model, data=federation())
    warm_start(run, init, **more)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit(papers.fedbn(), out=tmp_path_factory.mktemp("warm") / "run", rounds=2)


def test_a_run_and_its_folder_are_the_same_start(trained):
    """Shared tensors and every client's own are those of the trained run."""
    for init in (trained, trained.folder, str(trained.folder)):
        run = started(init, papers.fedbn())
        assert_close(everything(run), everything(trained), 0)
        assert run.state.round == 0


def test_other_placements(trained):
    """FedBN's norms become FedAvg's as their mean over clients; back, every client gets that."""
    run = started(trained, papers.fedavg())
    own = next(name for name in trained.engine.store if name.endswith("clean.mean"))
    torch.testing.assert_close(run.state.shared[own][0], trained.engine.store[own].mean((0, 1)))
    back = started(run, papers.fedbn())
    for client in range(4):
        torch.testing.assert_close(back.engine.store[own][client], run.state.shared[own])
    both = started(run, papers.fedavg(norm=dual(), objective=adversarial(branch="adversarial")))
    other = own.replace("clean", "adversarial")
    torch.testing.assert_close(both.state.shared[other], run.state.shared[own])


def plain(classes=3):
    torch.manual_seed(1)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    module = nn.Sequential(*body, nn.Linear(16, classes))
    with torch.no_grad():
        module[1].running_mean.uniform_(-1, 1)
        module[1].running_var.uniform_(1, 2)
    return module


def adopted(classes):
    return lambda norm: adopt(plain(classes), norm, shape=SHAPE)


def test_a_module_answers_the_same_before_the_first_round(tmp_path):
    """As itself, its state_dict, and that in two kinds of file; torch's names of batch norms are understood."""
    torch.manual_seed(3)
    module = plain().double()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor))
    module.eval()
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    torch.save(module.state_dict(), tmp_path / "m.pt")
    x = torch.rand(5, *SHAPE).double()
    for init in (module, module.state_dict(), tmp_path / "m.safetensors", str(tmp_path / "m.pt")):
        run = started(init, model=adopted(3))
        torch.testing.assert_close(run.customise()(x), module(x))


def test_a_network_of_hardys_own_comes_back_as_a_module():
    """run.module() has the constants of InputScale, which are those of the model; others are refused."""
    first = fit(papers.fedavg(), rounds=1)
    module = first.module()
    run = started(module)
    assert_close(run.state.shared, first.state.shared, 1e-6)  # the module is in float32
    module.scale.mean += 0.1
    with pytest.raises(HardyError, match=r"scale\.mean has no place in the model"):
        started(module)


def test_another_number_of_classes():
    module = plain(7)
    with pytest.raises(HardyError, match=r"5.weight is \(7, 16\), here \(3, 16\).*init_head=False"):
        started(module, model=adopted(3))
    run = started(module, model=adopted(3), head=False)
    fresh = prepare(experiment(), method=papers.fedavg(), model=adopted(3), data=federation())
    assert run.state.shared["5.weight"].equal(fresh.state.shared["5.weight"])
    torch.testing.assert_close(run.state.shared["0.weight"][0], module[0].weight.double())


class Holder(nn.Module):
    pass


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("nowhere", "there is no such run folder or file"),
        (3, "init is a int; give a run, its folder"),
        ({"a": 3}, "is no state_dict: it must map names to tensors"),
        ({}, "0.weight is not there; 0.bias is not there; 1.weight is not there; and 5 more"),
        ({**plain().state_dict(), "extra": torch.zeros(1)}, "extra has no place in the model"),
    ],
)
def test_what_does_not_fit_is_named(init, message):
    with pytest.raises(HardyError, match=message):
        started(init, model=adopted(3))


def test_a_file_that_holds_no_tensors(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"nothing")
    (tmp_path / "m.safetensors").write_bytes(b"nothing")
    torch.save(Holder(), tmp_path / "whole.pt")
    for name, message in (
        ("m.pt", "holds more than tensors|cannot be read"),
        ("m.safetensors", "cannot be read as tensors"),
        ("whole.pt", r"Save model.state_dict\(\) instead"),
    ):
        with pytest.raises(HardyError, match=message):
            started(tmp_path / name, model=adopted(3))


def test_a_warm_run_stopped_before_its_first_round_goes_on_warm(tmp_path, trained):
    """The start is saved, so that the folder it came from may be gone."""

    def broken(run, line):
        raise RuntimeError("first round")

    with pytest.raises(HardyError, match="first round"):
        fit(papers.fedbn(), init=trained, out=tmp_path / "run", rounds=2, callbacks=[broken])
    for newer in (tmp_path / "run" / "checkpoint").glob("round-000001"):
        for file in newer.iterdir():
            file.unlink()
        newer.rmdir()
    again = hardy.resume(tmp_path / "run", method=papers.fedbn(), model=net, data=federation(), quiet=True)
    whole = fit(papers.fedbn(), init=trained, rounds=2)
    assert_close(everything(again), everything(whole), 0)
    assert 'init = "from Python"' in (tmp_path / "run" / "config.toml").read_text()


def test_from_the_command_line(tmp_path, capsys):
    from hardy.cli import main

    usual = ["rounds=1", "data.limit=40", "engine.device=cpu", "--quiet"]
    assert main(["run", "demo", "--alone", *usual, "--out", str(tmp_path / "a")]) == 0
    assert main(["run", "demo", "--alone", *usual, f"init={tmp_path / 'a'}", "--out", str(tmp_path / "b")]) == 0
    losses = [json.loads((tmp_path / name / "metrics.jsonl").read_text())["loss"] for name in "ab"]
    assert losses[1] != losses[0] and f'init = "{tmp_path / "a"}"' in (tmp_path / "b" / "config.toml").read_text()
    assert main(["run", "demo", "--alone", *usual, "init_head=false", "--out", str(tmp_path / "c")]) == 2
    assert "init_head is false, but there is no init" in capsys.readouterr().err
