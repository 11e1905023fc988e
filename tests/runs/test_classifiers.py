"""Any classifier is measured: modules, functions, ONNX files, two classes and more."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hardy
from conftest import SHAPE, fit
from hardy import papers
from hardy.attacks.threats import parse_threat
from hardy.cli import main
from hardy.core import random
from hardy.errors import HardyError
from hardy.models import adopt

AUTOATTACK = "autoattack@0.1,steps=5,queries=20"


def linear(classes, scale=4.0):
    """A classifier whose margin at an image is known: logits are `scale` times the pixels 0 .. classes - 1."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, classes, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(scale * torch.eye(classes, 16))
    return net


def images(classes, count=40):
    """Images whose brightest class pixel leads by 0.1 or by 0.5, and their labels."""
    y = torch.arange(count) % classes
    lead = torch.where(torch.arange(count) < count // 2, 0.1, 0.5)
    x = torch.full((count, 1, 4, 4), 0.3)
    x.flatten(1)[torch.arange(count), y] += lead
    return x, y


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("threat", [AUTOATTACK, "pgd-20@0.1", "apgd-t@0.1,steps=20", "fab-t@0.1,steps=5", "cw-20@0.1"])
def test_a_linear_classifier_falls_where_its_margin_ends(classes, threat):
    """At radius ε each of two pixels moves by ε: a lead of 0.1 falls to 0.1, one of 0.5 stands."""
    found = hardy.evaluate(linear(classes), images(classes), threat, checks=False)
    assert found["standard_accuracy"] == {"mean": 1.0, "standard_error": 0.0, "images": 40}
    robust = found["robust_accuracy"][threat]
    assert robust["mean"] == 0.5 and robust["standard_error"] == pytest.approx(math.sqrt(0.25 / 40))
    few = [note for note in robust["notes"] if note.startswith(f"{classes} classes")]
    assert bool(few) == (threat.startswith(("auto", "apgd", "fab")))


def test_dlr_of_few_classes():
    """By hand: two logits, their difference; three, divided by first less third, but at a target the difference."""
    from hardy.attacks.autoattack import dlr

    two, three = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0, 0.0]])
    y, target = torch.tensor([0]), torch.tensor([1])
    assert dlr(two, y).tolist() == [2.0] and dlr(two, y, target).tolist() == [2.0]
    assert dlr(three, y).tolist() == pytest.approx([2 / 3]) and dlr(three, y, target).tolist() == [2.0]


def test_a_module_is_measured_in_evaluation_mode_and_left_as_it_was():
    net = nn.Sequential(linear(3), nn.Dropout(0.9)).train()
    net[0].eval()
    assert hardy.evaluate(net, images(3))["standard_accuracy"]["mean"] == 1.0
    assert net.training and net[1].training and not net[0].training


def test_metrics_clean_and_under_threats():
    """Who falls keeps the wrong answer, so accuracy among the metrics is the robust one."""
    threat = "pgd-20@0.1"
    found = hardy.evaluate(linear(3), images(3), threat, metrics="accuracy,auroc", checks=False)
    assert found["metrics"] == {"accuracy": 1.0, "auroc": 1.0}
    attacked = found["robust_metrics"][threat]
    assert attacked["accuracy"] == found["robust_accuracy"][threat]["mean"] == 0.5 and 0.5 < attacked["auroc"] < 1
    one_class = hardy.evaluate(linear(3), (images(3)[0][::3], images(3)[1][::3]), metrics=["auroc"])
    assert one_class["metrics"] == {"auroc": None}
    assert "metrics" not in hardy.evaluate(linear(3), images(3))
    with pytest.raises(HardyError, match="Did you mean 'auroc'"):
        hardy.evaluate(linear(3), images(3), metrics="aurok")


def test_red_flags_are_raised():
    x, y = images(3)

    def random_answers(x):
        return linear(3)(x) + torch.rand(1)

    found = hardy.evaluate(random_answers, (x, y), "pgd-2")
    assert "random_output" in {flag["name"] for flag in found["flags"]}
    assert "flags" not in hardy.evaluate(linear(3), (x, y), "pgd-2", checks=False)


class Decides(nn.Module):
    """Control flow that depends on the data: vmap cannot run it, so attacks take their targets one by one."""

    def __init__(self):
        super().__init__()
        self.inner = linear(3)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


@pytest.mark.parametrize("threat", ["apgd-t@0.1,steps=20", "fab-t@0.1,steps=5"])
def test_a_network_that_vmap_cannot_run_is_attacked_too(threat):
    assert hardy.evaluate(Decides(), images(3), threat, checks=False)["robust_accuracy"][threat]["mean"] == 0.5


def test_data_come_in_many_forms(tmp_path):
    x, y = images(3)
    bytes_last = (x.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(tmp_path / "x.npz", x=bytes_last, y=y.numpy())
    forms = [
        (x, y),
        (bytes_last, y.numpy()),
        torch.utils.data.TensorDataset(x, y),
        tmp_path / "x.npz",
        str(tmp_path / "x.npz"),
        (x[y > 0], y[y > 0]),  # no image of the first class: labels are not counted anew
    ]
    for data in forms:
        assert hardy.evaluate(linear(3), data)["standard_accuracy"]["mean"] == 1.0
    assert hardy.evaluate(linear(3), (x, y), limit=7)["standard_accuracy"]["images"] == 7


def test_the_attacks_are_those_of_a_run():
    """The same PGD, by hand."""
    net, (x, y) = linear(3), images(3)
    threat = parse_threat("pgd-3@0.1")
    key = random.fold(torch.tensor(0), "evaluate", threat.name, "")
    attacked = threat.attack.perturb(net, x, y, random.fold(key, 0))
    expected = float((net(attacked).argmax(1) == y).double().mean())
    assert hardy.evaluate(net, (x, y), "pgd-3@0.1", checks=False)["robust_accuracy"]["pgd-3@0.1"]["mean"] == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hardy.evaluate(linear(3)), "a classifier is measured on data"),
        (lambda: hardy.evaluate(linear(2), images(3)), "labels run from 0 to 2; allowed are 0 to 1"),
        (lambda: hardy.evaluate(nn.Flatten(0), images(3)), r"answers 2 images with \[32\]; it must be \[N, classes\]"),
        (lambda: hardy.evaluate(linear(1), images(3)), r"with \[2, 1\].* One logit z of two classes"),
        (lambda: hardy.evaluate(nn.Linear(3, 2), images(3)), r"cannot run on inputs of shape \[1, 4, 4\]"),
        (lambda: hardy.evaluate(linear(3), images(3), "pgd-7@8"), "radius of pgd is 8, .*Did you mean 8/255"),
        (
            lambda: hardy.evaluate(lambda x: np.asarray(x).reshape(len(x), -1)[:, :3], images(3), "pgd-7"),
            r"'pgd-7' needs gradients \(pgd-7\), and this classifier gives none.*square.*run\.module",
        ),
        (lambda: hardy.evaluate("nowhere.onnx", images(3)), "nowhere.onnx is not there"),
        (lambda: hardy.evaluate(3, images(3)), "int is no classifier"),
        (lambda: hardy.evaluate(linear(3), images(3), limit=0), "limit is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(HardyError, match=message):
        call()


class Mine(nn.Module):
    """A user's own class."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.last(F.dropout(F.relu(self.norm(self.conv(x))).flatten(1), 0.1, self.training))


@pytest.mark.parametrize("method", [papers.fedbn(), papers.fedavg()], ids=["fedbn", "fedavg"])
def test_back_to_pytorch(method):
    """fit, run.module, a fresh object of the class, hardy.evaluate: the accuracy of the summary."""
    run = fit(method, model=lambda norm: adopt(Mine(), norm, shape=SHAPE), rounds=2)
    data = run.engine.data
    for client, expected in enumerate(run.summary()["standard_accuracy"]["by_client"]):
        module = run.module(client=client)
        assert type(module) is Mine and not module.training
        fresh = Mine()
        fresh.load_state_dict(module.state_dict())
        rows = data.clients[client].test
        x, y = torch.from_numpy(data.x_test[rows]) / 255, torch.from_numpy(data.y_test[rows])
        found = hardy.evaluate(fresh, (x, y), channels="first")["standard_accuracy"]
        assert found["mean"] == pytest.approx(expected) and found["images"] == len(rows)


def test_modules_of_hardys_networks_and_what_is_no_module():
    run = fit(papers.fedavg(), rounds=1)
    module, x = run.module(), torch.rand(5, *SHAPE)
    assert isinstance(module.norm1, nn.BatchNorm2d) and "norm1.running_var" in module.state_dict()
    torch.testing.assert_close(module(x), run.customise()(x).float())
    mixed = fit(papers.split_mix(width=0.25), rounds=1)
    with pytest.raises(HardyError, match=r"mean of 4 networks.*width = 0\.25"):
        mixed.module()
    torch.testing.assert_close(mixed.module(width=0.25)(x), mixed.customise(width=0.25)(x).float())
    with pytest.raises(HardyError, match=r"width 0\.5 is a part of the network"):
        fit(papers.heterofl(widths=(0.5, 1.0)), rounds=1).module(client=0, width=0.5)


@pytest.fixture
def onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is an extra (export)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is an extra (export)")
    path = tmp_path / "net.onnx"
    torch.onnx.export(linear(3), (images(3)[0][:4],), str(path), dynamo=True, external_data=False, verbose=False)
    return path


@pytest.mark.filterwarnings("ignore")
def test_an_onnx_file_from_elsewhere(onnx, tmp_path, capsys):
    x, y = images(3)
    found = hardy.evaluate(onnx, (x, y), "square-200@0.2", checks=False)  # its batch is fixed to 4 images
    assert found["standard_accuracy"]["mean"] == 1.0
    assert found["robust_accuracy"]["square-200@0.2"]["mean"] == 0.5
    with pytest.raises(HardyError, match=r"'autoattack' needs gradients \(apgd_ce\)"):
        hardy.evaluate(onnx, (x, y), "autoattack")
    np.savez(tmp_path / "x.npz", x=(x.permute(0, 2, 3, 1) * 255).round().byte().numpy(), y=y.numpy())
    arguments = ["evaluate", str(onnx), "--data", str(tmp_path / "x.npz")]
    assert main([*arguments, "--threats", "square-200@0.2"]) == 0
    shown = capsys.readouterr().out
    assert "standard accuracy  100.0% ± 0.0%  of 40 images" in shown and "50.0% ± 7.9%" in shown
    written = json.loads((tmp_path / "net.evaluation.json").read_text())
    assert written["robust_accuracy"]["square-200@0.2"]["mean"] == 0.5
    assert main([*arguments, "--metrics", "auroc,ece"]) == 0
    assert "auroc  1.000\nece    0." in capsys.readouterr().out
    assert main(arguments[:2]) == 2 and "--data x.npz" in capsys.readouterr().err
    assert main([*arguments, "--part", "train"]) == 2 and "--part is for a run" in capsys.readouterr().err
    assert main([*arguments, "--threats", "pgd-7"]) == 2 and "needs gradients" in capsys.readouterr().err
