"""Own data all the way: a run on them, its folder, its report, its attacks, its nodes."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

import hardy
from conftest import everything, experiment, federation, fit, net
from hardy import papers
from hardy.attacks.gradient import pgd
from hardy.cli import main
from hardy.config import DataChoice, EvaluationChoice
from hardy.core.box import inputs
from hardy.core.federation import Client, Federation
from hardy.core.training import Training
from hardy.data.given import as_data
from hardy.data.shifts import camera, with_shift
from hardy.errors import HardyError
from hardy.flower.node import Given, _data
from hardy.models import mlp
from hardy.parts.adversarial import adversarial, fast, free
from hardy.parts.norms import batch
from hardy.report.pictures import displayable, row_labels
from hardy.runs.prepare import federation as dealt
from hospital import CLASSES, write_sites

SHORT = ["rounds=1", "model.width=0.25", "engine.name=sequential", "engine.device=cpu", "evaluation.every=1"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """A run on three sites, one of them with one scan, in a folder of its own."""
    folder = tmp_path_factory.mktemp("hospitals")
    write_sites(folder / "sites", {"north": 12, "south": 8, "tiny": 1})
    assert (
        main(["run", "demo", "--alone", f"data.source={folder / 'sites'}", *SHORT, "--out", str(folder / "run")]) == 0
    )
    return folder


def test_every_file_is_a_client_and_a_site_with_one_scan_takes_part(hospitals):
    clients = json.loads((hospitals / "run/clients.json").read_text())
    assert [(c["domain"], c["train"], c["validation"], c["test"]) for c in clients] == [
        ("north", 11, 1, 6),
        ("south", 8, 0, 4),
        ("tiny", 1, 0, 0),
    ]
    figures = json.loads((hospitals / "run/summary.json").read_text())["standard_accuracy"]
    north, south, tiny = figures["by_client"]
    assert tiny is None and "tiny" not in figures["by_domain"] and figures["images"] == 10
    assert figures["mean"] == pytest.approx((north + south) / 2) and figures["worst_client"] == min(north, south)
    line = json.loads((hospitals / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["cohort"] == 3 and line["lost"] == {}


def test_class_names_are_in_the_summary_the_report_and_the_pictures(hospitals):
    assert json.loads((hospitals / "run/summary.json").read_text())["classes"] == list(CLASSES)
    report = (hospitals / "run/report.html").read_text()
    assert "a column is a class (benign, malignant)" in report and ">benign</text>" in report
    labels = row_labels((hospitals / "run/pictures/samples.png").read_bytes())
    assert [label.partition(":")[0] for label in labels] == ["north", "south", "tiny"]
    assert labels[2] == "tiny: benign"


def test_a_run_finds_its_data_again_from_anywhere(hospitals, tmp_path, monkeypatch, capsys):
    shutil.copytree(hospitals, tmp_path / "h")
    config = tmp_path / "h/run/config.toml"
    config.write_text(config.read_text().replace(str(hospitals), str(tmp_path / "h")))
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "h/run", "--threats", "pgd-1"]) == 0
    (tmp_path / "h/sites").rename(tmp_path / "moved")
    assert main(["evaluate", "h/run", "--threats", "pgd-1"]) == 2
    assert "h/sites' here. If it moved, name the folder it is in now: --data FOLDER" in capsys.readouterr().err
    (tmp_path / "archive").mkdir()
    (tmp_path / "moved").rename(tmp_path / "archive/sites")
    assert main(["evaluate", "h/run", "--threats", "pgd-1", "--data", "archive"]) == 0
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 2"))
    assert main(["resume", "h/run", "--data", "archive"]) == 0
    assert hardy.load("h/run", data_folder="archive").state.round == 2


def test_a_named_folder_of_data_is_remembered(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 28, 28), np.uint8), np.arange(20) % 10
    (tmp_path / "store").mkdir()
    np.savez(tmp_path / "store/mnist.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    monkeypatch.delenv("HARDY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "demo", "--alone", "data.source=mnist", *SHORT, "--out", "run", "--data", "store"]) == 0
    assert hardy.load("run").experiment.data.folder == str(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["resume", "run"]) == 2
    assert f"the data folder {tmp_path / 'store'} is not there. If it moved" in capsys.readouterr().err
    assert main(["resume", "run", "--data", "elsewhere"]) == 0


def test_a_range_has_no_effect_on_named_sources():
    with pytest.raises(HardyError, match=r"data\.range has no effect on mini_digits, whose images are bytes"):
        hardy.fit(experiment(data=DataChoice(range=(0.0, 255.0))))


def test_numbers_train_like_the_bytes_they_are():
    """float32 in [0, 1] and bytes are two ways to store the same images: the same bits come out in float32."""
    data = federation()
    floats = dataclasses.replace(
        data, x_train=data.x_train / np.float32(255), x_test=(data.x_test / 255.0).astype(np.float32)
    )
    engine = dataclasses.replace(experiment().engine, precision="float32")
    first, second = (everything(fit(papers.fedbn(), data=d, rounds=2, engine=engine)) for d in (data, floats))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_one_row_is_shown_twice_and_two_are_not():
    rng = np.random.default_rng(0)
    assert [batch.tolist() for batch in Training(batch=4, epochs=2).batches(np.array([7]), rng, 0)] == [[7, 7]] * 2
    assert [batch.tolist() for batch in Training(batch=4, steps=3).batches(np.array([7]), rng, 0)] == [[7, 7]] * 3
    assert Training(batch=4, epochs=2).examples(1, 0) == 4 and Training(batch=4).local_steps(1, 0) == 1
    assert [batch.tolist() for batch in Training(batch=1).batches(np.array([7]), rng, 0)] == [[7]]
    assert len(Training(batch=4).batches(np.array([7, 8]), rng, 0)[0]) == 2


@pytest.mark.parametrize(
    "method", [papers.fedavg(), papers.fedbn(), papers.fedrbn(), papers.fbn()], ids=lambda m: m.name
)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_with_one_row_trains_and_stays_finite(method, engine):
    data = federation()
    alone = dataclasses.replace(data.clients[0], train=data.clients[0].train[:1], kind="AT")
    odd = dataclasses.replace(data, clients=(alone, *data.clients[1:]))
    if method.name == "fedrbn":
        odd = dataclasses.replace(odd, clients=tuple(dataclasses.replace(c, kind=c.kind or "ST") for c in odd.clients))
    else:
        odd = dataclasses.replace(odd, clients=tuple(dataclasses.replace(c, kind="") for c in odd.clients))
    chosen = dataclasses.replace(experiment().engine, name=engine)
    run = fit(method, data=odd, rounds=2, engine=chosen)
    assert all(tensor.isfinite().all() for tensor in everything(run).values() if tensor.is_floating_point())
    assert run.last_line["lost"] == {}


# Feature vectors


def vectors(rows=60):
    """Two classes apart in the second of three features, far from [0, 1]."""
    rng = np.random.default_rng(0)
    y = np.arange(rows) % 2
    return rng.normal(0, 1, (rows, 3)) + np.stack([np.full(rows, 5.0), 6.0 * y, np.full(rows, -3.0)], 1), y


def vector_run(data, method=None, **changes):
    chosen = experiment(rounds=6, data=DataChoice(clients=2, split="iid"), **changes)
    return hardy.fit(chosen, method=method or papers.fedavg(), model=_mlp, data=data, quiet=True)


def _mlp(norm):
    return mlp(norm=norm, shape=(3,), classes=2, hidden=(8,))


def test_vectors_train_and_attacks_leave_the_unit_box_but_not_the_ball(tmp_path):
    run = vector_run(vectors())
    assert run.figures.latest["mean"] > 0.7
    with pytest.raises(HardyError, match=r"radius of pgd is 8/255, .* these data have no range\. Give a radius"):
        hardy.evaluate(run, "pgd-3")
    with pytest.raises(HardyError, match="attack square changes images, but the data are vectors of 3 features"):
        hardy.evaluate(run, "autoattack@0.5")
    with pytest.raises(HardyError, match="attack fab needs inputs of a known range"):
        hardy.evaluate(run, "fab-t@0.5")
    clean, near, far = (
        hardy.evaluate(run, f"pgd-5@{radius}")["robust_accuracy"][f"pgd-5@{radius}"]["mean"] for radius in (0.01, 1, 20)
    )
    assert clean > near > far == 0, "in the unit box, which holds no row, no radius could move them"
    attack, x = pgd(epsilon=0.5, step=0.2, steps=4), torch.tensor([[50.0, 2, 0]])
    with inputs(bounded=False):
        moved = attack.perturb(
            lambda z: z @ torch.tensor([[1.0, -1], [0, 1], [0, 0]]), x, torch.tensor([0]), torch.tensor(1)
        )
    assert 0 < float((moved - x).abs().max()) <= 0.5 + 1e-5


def test_vectors_with_a_range_stay_in_the_box():
    data = as_data(vectors(), value_range=(-100.0, 100.0))
    run = vector_run(data)
    assert run.engine.data.bounded and 0 <= run.engine.data.x_train.min() <= run.engine.data.x_train.max() <= 1
    assert "pgd-2" in hardy.evaluate(run, "pgd-2,apgd-ce-2,fab-t-2,mim-2,cw-2")["robust_accuracy"]
    with pytest.raises(HardyError, match="attack square changes images"):
        hardy.evaluate(run, "autoattack")


@pytest.mark.parametrize("objective", [adversarial(), fast(), free()], ids=lambda o: type(o).__name__)
def test_training_attacks_on_vectors_need_a_radius(objective):
    with pytest.raises(HardyError, match=r"the radius of (pgd|free) is 8/255"):
        vector_run(vectors(), papers.fedavg().replace(objective=objective))
    with pytest.raises(HardyError, match="radius of fgsm is 8/255"):
        vector_run(vectors(), evaluation=EvaluationChoice(threats=("fgsm",)))
    told = adversarial(attack=pgd(epsilon=0.5, step=0.2, steps=2))
    assert vector_run(vectors(), papers.fedavg().replace(objective=told)).state.round == 6


@pytest.mark.parametrize("model", sorted(set(hardy.models.MODELS) - {"mlp"}))
def test_networks_for_images_refuse_vectors(model):
    with pytest.raises(HardyError, match=r"needs images, but the data are vectors of 3 features\. Take"):
        hardy.fit(experiment(model=model), data=vectors(), quiet=True)


def test_what_changes_images_refuses_vectors():
    with pytest.raises(HardyError, match=r"data\.shift changes images"):
        hardy.fit(experiment(model="mlp", data=DataChoice(shift="camera")), data=vectors(), quiet=True)
    with pytest.raises(HardyError, match="an affine shift needs images"):
        vector_run(vectors(), papers.fedrobust())
    with pytest.raises(HardyError, match=r"scale mean \(1, 2\), std \(1,\) does not fit 3 feature\(s\)"):
        mlp(shape=(3,), scale=((1, 2), (1,)))
    scaled = mlp(shape=(3,), classes=2, hidden=(), scale=((50, 0, 0), (10, 1, 1)))
    assert scaled.scale(torch.tensor([[60.0, 2, 3]])).tolist() == [[1, 2, 3]]


# Runs without test rows, pictures of many channels, shifts of numbers


def test_a_list_of_clients_is_the_federation_and_none_needs_test_rows(tmp_path):
    rng = np.random.default_rng(0)
    data = [(rng.random((n, 8, 8, 2)), np.arange(n) % 3, [], []) for n in (6, 9)]
    run = hardy.fit(experiment(rounds=1, model="tiny_cnn"), data=data, out=tmp_path / "run", quiet=True)
    assert [len(client.train) for client in run.engine.data.clients] == [6, 9]
    figures = json.loads((tmp_path / "run/summary.json").read_text())["standard_accuracy"]
    assert figures["mean"] is None and figures["by_client"] == [None, None]
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(("channels", "shown"), [(1, 1), (2, 1), (3, 3), (7, 3)])
def test_pictures_of_any_number_of_channels(channels, shown):
    x = np.linspace(-0.5, 1.5, 4 * channels * 9).reshape(4, channels, 3, 3)
    picture = displayable(x)
    assert picture.shape == (4, 3, 3, shown) and picture.dtype == np.uint8
    assert (picture.min(), picture.max()) == (0, 255)


def test_a_shift_of_numbers_is_that_of_bytes_without_the_rounding():
    data = federation()
    floats = dataclasses.replace(
        data, x_train=(data.x_train / 255).astype(np.float32), x_test=(data.x_test / 255).astype(np.float32)
    )
    bytewise, exact = (with_shift(d, camera(), seed=1) for d in (data, floats))
    assert exact.x_train.dtype == np.float32
    assert np.abs(exact.x_train - bytewise.x_train / 255).max() <= 0.5 / 255 + 1e-6


# Nodes


def test_a_node_takes_every_kind_of_own_data(tmp_path):
    folder = write_sites(tmp_path / "sites", {"north": 20, "south": 10})
    chosen = experiment(data=DataChoice(validation=0.2))

    def node(**own):
        return _data(chosen, {"client": 1, **own}, Given())

    data = node(data=str(folder / "south.npz"))
    assert (data.classes, data.shape, data.x_train.dtype) == (CLASSES, (1, 16, 16), np.float32)
    assert (len(data.clients[0].train), len(data.clients[0].validation), len(data.clients[0].test)) == (8, 2, 5)
    assert node(data=str(folder / "south.npz"), classes="malignant,benign").classes == CLASSES[::-1]
    assert len(node(data=str(folder)).clients[0].train) == 24
    (tmp_path / "t.csv").write_text("a,b,stage\n1,2,one\n3,4,two\n5,6,two\n")
    chosen = experiment(data=DataChoice(source={"name": "x.csv", "label": "stage"}, range=(0.0, 10.0)))
    data = node(data=str(tmp_path / "t.csv"))
    assert (data.classes, data.shape, data.bounded) == (("one", "two"), (2,), True)
    with pytest.raises(HardyError, match="there is no such file or folder on this node"):
        node(data=str(tmp_path / "absent.npz"))


def test_a_given_federation_of_vectors_is_dealt_as_it_is():
    x, y = vectors(10)
    data = Federation(
        name="v",
        classes=("0", "1"),
        x_train=x.astype(np.float32),
        y_train=y,
        x_test=x.astype(np.float32),
        y_test=y,
        clients=(Client(domain="a", train=np.arange(10), validation=np.arange(0), test=np.arange(10)),),
        bounded=False,
    )
    assert data.shape == (3,) and vector_run(data).state.round == 6


def test_sites_are_dealt_otherwise_where_a_split_is_named(tmp_path):
    folder = write_sites(tmp_path / "sites", {"north": 20, "south": 10})
    as_they_are = dealt(experiment(data=DataChoice(source=str(folder), validation=0.0)))
    assert [len(client.train) for client in as_they_are.clients] == [20, 10]
    pooled = dealt(experiment(data=DataChoice(source=str(folder), split="iid", clients=3, pooled=True, validation=0.0)))
    assert [len(client.train) for client in pooled.clients] == [10, 10, 10]


def test_python_data_of_a_plain_net_reach_a_run():
    x, y = torch.rand(30, 1, 8, 8), torch.arange(30) % 3
    run = hardy.fit(
        experiment(rounds=1, data=DataChoice(clients=2)), data=(x, y), method=papers.fedavg(), model=net, quiet=True
    )
    assert sum(len(client.train) + len(client.validation) for client in run.engine.data.clients) == 24


def test_one_test_row_has_no_figure_where_the_batch_normalises():
    data = federation()
    held = [0, 1, 4, 4]
    clients = tuple(dataclasses.replace(c, test=c.test[:n]) for c, n in zip(data.clients, held, strict=True))
    method = papers.fedavg(norm=batch(inference_statistics="batch"))
    run = fit(method, data=dataclasses.replace(data, clients=clients), rounds=1)
    first, second, *others = run.figures.latest["by_client"]
    assert first is None and second is None and all(value is not None for value in others)
    assert run.figures.latest["images"] == 8
