"""After a deployment a site has its own network, and it is the one whose accuracy its node measured."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hardy
from hardy.cli import main
from hardy.errors import HardyError

pytest.importorskip("flwr", reason="the flower extra is not installed")

from test_flower import Grid

from hardy.flower.apps import client_app, run_server
from hardy.flower.site_model import load_site, site_runs

EXPERIMENT = """
name = "wards"
rounds = 3
model = "tiny_cnn"
[training]
steps = 6
batch = 16
rate = 0.1
[engine]
device = "cpu"
[evaluation]
threats = ["pgd-3"]
[network]
clients = 2
"""


def rows(number, count, seed):
    """One-channel images of two classes: a bright left or right half; the second site's are darker."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    images = rng.integers(0, 120, (count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 4 * label : 4 * label + 4] += 70 - 40 * number
    return images, labels


@pytest.fixture(params=["fedbn", "fedrbn"], scope="module")
def deployed(request, tmp_path_factory):
    """A finished run over two sites, the second of which keeps its figures to itself."""
    folder = tmp_path_factory.mktemp(request.param)
    Grid.state = folder / "state"
    grid = Grid([client_app(), client_app()])
    for number, context in enumerate(grid.contexts.values()):
        (x, y), (x_test, y_test) = rows(number, 60, number), rows(number, 40, 10 + number)
        np.savez(folder / f"{number}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        context.node_config |= {"data": str(folder / f"{number}.npz"), "classes": 2}
        if request.param == "fedrbn":
            context.node_config["kind"] = "AT" if number else "ST"
        context.node_config["figures"] = number == 0
    run = run_server(hardy.config.parse(EXPERIMENT, [f"method={request.param}"]), grid, folder / "run", quiet=True)
    Grid.state = None
    return folder, run


def site_of(folder, number):
    (name,) = (name for name in site_runs(folder / "state") if name.endswith(f"client-{number}"))
    return name, load_site(folder / "state", name)


def test_the_exported_network_has_the_accuracy_that_the_node_measured(deployed, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    folder, run = deployed
    number = int(run.engine.plan.method.name == "fedrbn")
    name, found = site_of(folder, number)
    assert found.client == number and found.run.state.round == 3
    assert {"validation", "test", "test/pgd-3"} <= found.figures.keys()
    assert found.evaluate(["pgd-3"]) == {key: found.figures[key] for key in ("test", "test/pgd-3")}
    x, y = rows(number, 40, 10 + number)
    images = torch.from_numpy(x)[:, None].float() / 255
    words = ["site", "export", "--state", str(folder / "state"), "--run", name, "--out"]
    assert main([*words, str(tmp_path / "net.onnx")]) == 0
    predictor = hardy.deploy.OnnxPredictor(tmp_path / "net.json")
    share = float((np.asarray(predictor(images.numpy())).argmax(1) == y).mean())
    assert share == pytest.approx(found.figures["test"], abs=1e-9)
    assert json.loads((tmp_path / "net.json").read_text())["client"] == number
    assert main([*words, str(tmp_path / "net.safetensors")]) == 0
    held = load_file(tmp_path / "net.safetensors")
    assert held.keys() == set(found.run.engine.plan.model_names)
    capsys.readouterr()
    assert main(["site", "evaluate", "--state", str(folder / "state"), "--run", name, "--threats", "pgd-3"]) == 0
    assert f"{found.figures['test/pgd-3']:.1%}   (the node measured" in capsys.readouterr().out
    words = ["site", "evaluate", "--state", str(folder / "state"), "--run", name, "--threats", "pgd-3"]
    assert main([*words, "--metrics", "auroc"]) == 0
    measured = found.evaluate(["pgd-3"], metrics="auroc")
    said = capsys.readouterr().out
    assert f"test/auroc {'':<13} {measured['test/auroc']:6.3f}\n" in said and "test/pgd-3/auroc" in said
    assert main(["site", "runs", "--state", str(folder / "state")]) == 0
    assert f"{name}  wards, client {number}, round 3" in capsys.readouterr().out


def test_sites_have_networks_of_their_own_and_one_kept_its_figures(deployed):
    folder, _ = deployed
    one, other = (site_of(folder, number)[1] for number in (0, 1))
    shared = [site.run.state.shared for site in (one, other)]
    assert all(torch.equal(shared[0][name], shared[1][name]) for name in shared[0])
    private = next(name for name in one.state_dict() if "clean" in name or "norm" in name)
    assert not torch.equal(one.state_dict()[private], other.state_dict()[private])
    assert other.figures["test"] > 0
    told = json.loads((folder / "run" / "summary.json").read_text())
    assert one.figures["test"] == told["standard_accuracy"]["mean"] == told["standard_accuracy"]["worst_client"]
    assert one.figures["test/pgd-3"] == told["robust_accuracy"]["pgd-3"]["mean"]


def test_mistakes_are_named(deployed, tmp_path, capsys):
    folder, _ = deployed
    with pytest.raises(HardyError, match="holds no network: it is not the --state of a node"):
        load_site(tmp_path)
    with pytest.raises(HardyError, match=r"--run is 'x'; .* holds "):
        load_site(folder / "state", "x")
    words = ["site", "export", "--state", str(folder / "state"), "--out"]
    assert main([*words, str(tmp_path / "net.pt")]) == 2
    assert "it must end in .onnx or .safetensors" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "net.safetensors"), "--width", "0.5"]) == 2
    assert "a state_dict holds the whole network" in capsys.readouterr().err
