"""Code of a user's own by name: found, kept with its hash, and never imported because somebody else named it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import hardy
from conftest import experiment, federation
from hardy import config, user_code
from hardy.cli import main
from hardy.core.json_files import write_sealed
from hardy.errors import HardyError
from hardy.flower.node import Given, Node
from hardy.models import tiny_cnn
from hardy.runs.sweep import read_sweep

MINE = '''
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
from hardy.attacks.base import Attack
from hardy.core.method import Method
from hardy.core.protocols import Objective, Optimiser
from hardy.data.splits import iid
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Focal(Objective):
    """Cross-entropy in which sure answers count less."""

    gamma: float = 2.0

    def loss(self, net, private, batch, key):
        each = F.cross_entropy(net(batch.x, statistics="batch", key=key), batch.y, reduction="none")
        return ((1 - (-each).exp()) ** self.gamma * each).mean()


@dataclass(frozen=True, kw_only=True)
class Sign(Optimiser):
    def update(self, gradient, state, params, received, rate, key):
        return {name: value.sign() * 0.01 for name, value in gradient.items()}, state


@dataclass(frozen=True, kw_only=True)
class Brighter(Attack):
    epsilon: float = 0.1

    def perturb(self, forward, x, y, key):
        return (x + self.epsilon).clip(0, 1)


class Net(nn.Module):
    def __init__(self, num_classes=10, wide=4):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, wide, 3, stride=4), nn.BatchNorm2d(wide)
        self.fc = nn.Linear(wide * 49, num_classes)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).relu().flatten(1))


def mine(*, gamma: float = 1.0) -> Method:
    return Method(name="mine", objective=Focal(gamma=gamma))


def dealt():
    return iid()


def broken(*, gamma: float = 1.0) -> Method:
    return 1 / 0


def empty():
    return 3
'''

WHOLE = """
rounds = 1
method = { name = "mine.py:mine", gamma = 3 }
model = { name = "mine.py:Net", wide = 8 }
optimiser = { name = "chain", links = ["mine.py:Sign", "sgd"] }

[data]
split = "mine.py:dealt"
limit = 40

[training]
steps = 1

[engine]
name = "sequential"
device = "cpu"

[evaluation]
threats = ["mine.py:Brighter@0.2"]
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder with code and an experiment that names it; no code was named before."""
    monkeypatch.setenv("HARDY_HOME", str(tmp_path / "home"))
    for name in ("_permitted", "_refused", "_loaded", "_recorded"):
        monkeypatch.setattr(user_code, name, {})
    monkeypatch.setattr(user_code, "_listed", [])
    monkeypatch.setattr(user_code, "_warned", set())
    monkeypatch.setattr(user_code, "_named", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "x.toml").write_text(WHOLE)
    return folder


def another_machine(monkeypatch, tmp_path):
    """As if nothing had been named or imported here."""
    monkeypatch.setenv("HARDY_HOME", str(tmp_path / "elsewhere"))
    another_process(monkeypatch)


def another_process(monkeypatch):
    for name in ("_permitted", "_refused", "_loaded", "_recorded"):
        monkeypatch.setattr(user_code, name, {})
    monkeypatch.setattr(user_code, "_named", set())


def failing(text: str) -> str:
    """Code that leaves a mark when it runs."""
    return f"import pathlib\npathlib.Path({text!r}).write_text('ran')\n{MINE}"


def test_a_run_by_name_is_found_again_from_elsewhere(study, tmp_path, monkeypatch, caplog, capsys):
    assert main(["run", str(study / "x.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "experiment: mine, 1 rounds" in shown and "mine.py:Brighter@0.2" in shown
    another_process(monkeypatch)
    monkeypatch.chdir("/")
    run = hardy.load(tmp_path / "run")
    assert run.engine.plan.method.objective.gamma == 3
    assert run.engine.plan.model.fc.in_features == 8 * 49
    assert type(run.experiment.optimiser.links[0]).__name__ == "Sign"
    assert not caplog.records
    assert main(["evaluate", str(tmp_path / "run"), "--threats", "fgsm", "--limit", "3", "--no-checks", "--quiet"]) == 0
    (study / "mine.py").write_text(MINE + "\n# edited\n")
    another_process(monkeypatch)
    hardy.load(tmp_path / "run")
    (record,) = caplog.records
    assert record.getMessage() == f"{study / 'mine.py'} has changed since the run began; its results may differ."


def test_the_hash_is_that_of_the_file(study, tmp_path):
    from hashlib import sha256

    text = config.read(study / "x.toml").to_toml()
    assert f'file = "{study / "mine.py"}"\nsha256 = "{sha256(MINE.encode()).hexdigest()}"' in text
    assert f'[code."{study / "mine.py"}:mine"]' in text


def test_a_strangers_run_folder_runs_no_code(study, tmp_path, monkeypatch, capsys):
    mark = tmp_path / "mark"
    (study / "mine.py").write_text(failing(str(mark)))
    assert main(["run", str(study / "x.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert mark.exists()
    mark.unlink()
    for command in (["evaluate"], ["resume"], ["export", "--out", str(tmp_path / "m.onnx")], ["run"]):
        another_machine(monkeypatch, tmp_path)
        capsys.readouterr()
        place = tmp_path / "run" / "config.toml" if command == ["run"] else tmp_path / "run"
        assert main([command[0], str(place), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert "is not imported. A run folder may come from anybody" in said and said.count("\n") == 1
        assert f"--import {study / 'mine.py'}" in said
        assert not mark.exists()
    assert main(["compare", str(tmp_path / "run"), "--out", str(tmp_path / "c.html")]) == 0
    assert not mark.exists()
    words = ["--threats", "fgsm", "--limit", "2", "--no-checks", "--quiet", "--import", str(study / "mine.py")]
    assert main(["evaluate", str(tmp_path / "run"), *words]) == 0
    assert mark.exists()


def test_installed_functions_are_not_called_either(study, tmp_path, monkeypatch):
    """A stranger knows where the standard library lies; what it does with arguments of his must not happen."""
    mark = tmp_path / "mark"
    config.read(study / "x.toml")
    text = f'model = {{ name = "os:mkdir", path = "{mark}" }}\n[versions]\nhardy = "0"\n'
    (study / "other.toml").write_text(text)
    for source in (study / "other.toml", "parse"):
        with pytest.raises(HardyError, match="'os:mkdir' is not imported"):
            chosen = config.parse(text) if source == "parse" else config.read(source)
            hardy.fit(chosen)
    assert not mark.exists()


def test_code_of_another_machine_stands_in_by_its_name(study, tmp_path, monkeypatch):
    assert main(["run", str(study / "x.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    (study / "mine.py").rename(copy / "mine.py")
    another_machine(monkeypatch, tmp_path)
    user_code.import_code(str(copy / "mine.py"))
    assert hardy.load(tmp_path / "run").engine.plan.method.name == "mine"


# Seeds and sweeps


@pytest.mark.parametrize(("place", "home"), [("mine.py", "home"), ("own_module_of_a_test", "home/of/nobody")])
def test_seeds_find_every_part_that_the_experiment_names(study, tmp_path, monkeypatch, place, home):
    """Not the method alone; also where nothing can be remembered at home."""
    if home != "home":
        (tmp_path / "home").write_text("no folder")
        monkeypatch.setenv("HARDY_HOME", str(tmp_path / home))
    (study / "own_module_of_a_test.py").write_text(MINE)
    (study / "x.toml").write_text(WHOLE.replace("mine.py", place))
    assert main(["run", str(study / "x.toml"), "--seeds", "2", "--out", str(tmp_path / "many"), "--quiet"]) == 0
    for seed in range(2):
        assert hardy.load(tmp_path / "many" / f"seed-{seed}").engine.plan.model.fc.in_features == 8 * 49


def test_a_sweep_over_code_of_ones_own_goes_on_elsewhere(study, tmp_path, monkeypatch, capsys):
    (study / "below").mkdir()
    monkeypatch.chdir(study / "below")
    short = ["rounds=1", "training.steps=1", "data.limit=40", "data.validation=0.1", "engine.device=cpu"]
    vary = ["--vary", "method=../mine.py:mine,fedavg", "--vary", "method.objective=focal"]
    out = tmp_path / "sweep"
    assert main(["sweep", "demo", *short, *vary, "--import", "../mine.py", "--out", str(out), "--quiet"]) == 0
    assert "method=../mine.py:mine" in capsys.readouterr().out
    record = json.loads((out / "sweep.json").read_text())
    for row in record["settings"]:
        del row["validation_accuracy"]
    del record["sha256"]
    write_sealed(out / "sweep.json", record)
    (out / "setting-1" / "config.toml").unlink()  # as if it had not begun
    shutil.rmtree(out / "setting-1" / "checkpoint")
    another_process(monkeypatch)
    monkeypatch.chdir("/")
    assert main(["resume", str(out), "--quiet"]) == 0
    assert "failed" not in json.dumps(read_sweep(out))
    assert hardy.load(out / "setting-1").engine.plan.method.objective.gamma == 2


@pytest.mark.parametrize("kind", ["seeds", "sweep"])
def test_a_strangers_folder_of_runs_runs_no_code(study, tmp_path, monkeypatch, capsys, kind):
    """Neither its experiment, without the lines that show where it comes from, nor the settings in sweep.json."""
    mark, out = tmp_path / "mark", tmp_path / "many"
    (study / "evil.py").write_text(failing(str(mark)))
    first = out / "setting-1" if kind == "sweep" else out
    first.mkdir(parents=True)
    (first / "experiment.toml").write_text(f'method = "{study}/evil.py:mine"\nrounds = 1\n')
    setting = {"folder": "setting-1", "overrides": [f"method={study}/evil.py:mine"]}
    write_sealed(out / f"{kind}.json", {"seeds": [0, 1]} if kind == "seeds" else {"seeds": 1, "settings": [setting]})
    assert main(["resume", str(out), "--quiet"]) == 2
    assert "is not imported. A run folder may come from anybody" in capsys.readouterr().err
    assert not mark.exists()
    if kind == "sweep":
        write_sealed(out / "sweep.json", {"seeds": 1, "settings": [{**setting, "folder": "../elsewhere"}]})
        assert main(["resume", str(out), "--quiet"]) == 2
        assert "cannot read" in capsys.readouterr().err


MEASURED = '''
from dataclasses import dataclass
from hardy.core.metric import Metric
from hardy.data.capacity import Capacity
from hardy.data.shifts import Shift


@dataclass(frozen=True, kw_only=True)
class Zeros(Metric):
    """Share of the rows whose label is below `under`."""

    under: int = 1

    def measure(self, logits, labels):
        return float((labels < self.under).double().mean())


@dataclass(frozen=True, kw_only=True)
class Negative(Shift):
    """A film negative."""

    def apply(self, x, key):
        return 1 - x


@dataclass(frozen=True, kw_only=True)
class OneRich(Capacity):
    """Everybody has a quarter, the last one all."""

    def deal(self, clients, rng):
        return [0.25] * (clients - 1) + [1.0]
'''


def test_metrics_shifts_and_capacities_of_ones_own(study, tmp_path, monkeypatch):
    (study / "own.py").write_text(MEASURED)
    (study / "x.toml").write_text(
        'rounds = 1\nmethod = { name = "heterofl" }\n'
        '[data]\nlimit = 40\nshift = "own.py:Negative"\ncapacity = { name = "own.py:OneRich", shuffled = false }\n'
        '[training]\nsteps = 1\n[engine]\nname = "sequential"\ndevice = "cpu"\n'
        '[evaluation]\nmetrics = [{ name = "own.py:Zeros", under = 10 }]\n'
    )
    from hardy.runs.prepare import federation as dealt

    plain = dealt(config.parse("data.limit = 40"))
    assert main(["run", str(study / "x.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    another_process(monkeypatch)
    monkeypatch.chdir("/")
    run = hardy.load(tmp_path / "run")
    assert [client.capacity for client in run.engine.data.clients] == [0.25] * 9 + [1.0]
    for mine, usual in zip(run.engine.data.clients, plain.clients, strict=True):
        assert np.array_equal(run.engine.data.x_train[mine.train], 255 - plain.x_train[usual.train])
    (found,) = run.summary()["metrics"].values()
    assert found["mean"] == 1.0  # every label is below 10
    words = ["--metrics", f"{study}/own.py:Zeros", "--no-checks", "--quiet"]
    assert main(["evaluate", str(tmp_path / "run"), *words]) == 0
    labels = run.engine.data.y_test
    shares = [float((labels[client.test] < 1).mean()) for client in run.engine.data.clients]
    told = json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]
    (found,) = told.values()
    assert found["by_client"] == pytest.approx(shares)


def test_plain_functions_are_metrics_and_callbacks(study, tmp_path, monkeypatch, capsys):
    (study / "own.py").write_text(
        "def first(logits, labels):\n    return (labels == 0).double().mean()\n\n\n"
        "def second(logits, labels):\n    return (labels == 1).double().mean()\n\n\n"
        "def enough(run, line):\n    return line['round'] == 2\n\n\n"
        "def three(one, two, more):\n    return 1\n"
    )
    monkeypatch.chdir(study)
    short = [
        "rounds=4",
        "evaluation.every=1",
        "data.limit=40",
        "training.steps=1",
        "engine.device=cpu",
        'callbacks=["own.py:enough"]',
    ]
    words = ["run", "demo", *short, 'evaluation.metrics=["own.py:first"]', "--out", "run", "--quiet"]
    assert main(words) == 0
    saved = config.read("run/config.toml")
    assert config.parse(saved.to_toml(), allow=user_code.USER) == saved
    run = hardy.load("run")
    assert run.state.round == 2 and run.summary()["stopped"] == "callback 'enough' asked for it"
    assert 0 < run.summary()["metrics"]["first"]["mean"] < 1
    another_process(monkeypatch)
    words = ["evaluate", "run", "--metrics", "own.py:second", "--no-checks", "--quiet"]
    assert main(words) == 0 and "second" in capsys.readouterr().out
    assert main(["run", "demo", 'evaluation.metrics=["own.py:three"]']) == 2
    assert "evaluation.metrics[0] needs a value for 'one'" in capsys.readouterr().err


# Nodes


def node(text, **own):
    return Node(text, tuple({"client": 0, "state": "", **own}.items()), Given(data=federation()))


def test_a_node_imports_nothing_that_the_server_names(study, tmp_path):
    mark = tmp_path / "mark"
    (study / "mine.py").write_text(failing(str(mark)))
    asked = replace(experiment(), model={"name": "tiny_cnn", "width": 0.25})
    for change in (
        {"method": f"{study}/mine.py:mine"},
        {"method": {"name": "fedavg", "objective": f"{study}/mine.py:Focal"}},
        {"model": {"name": "os:mkdir", "path": str(mark)}},
        {"imports": (f"{study}/mine.py",)},
        {"data": replace(asked.data, split=f"{study}/mine.py:dealt")},
    ):
        text = config.dump(config.to_table(replace(asked, **change)))
        with pytest.raises(HardyError, match="This node imports no code that the server's experiment names") as refused:
            node(text)
        assert "read it, and start the node again with allow_import=... at the end of `hardy deploy node`" in str(
            refused.value
        )
        assert not mark.exists(), change
    text = config.dump(config.to_table(asked)) + f'\n[evaluation]\nthreats = ["{study}/mine.py:Brighter"]'
    text = text.replace("\n[evaluation]\nevery", "\n[removed]\nevery")
    with pytest.raises(HardyError):
        node(text)
    assert not mark.exists()


def test_a_server_imports_what_its_user_named(study, tmp_path, monkeypatch):
    text = config.read(study / "x.toml").to_toml()
    another_process(monkeypatch)
    assert config.parse(text, allow=user_code.SERVER).method["name"] == f"{study}/mine.py:mine"
    another_machine(monkeypatch, tmp_path)
    with pytest.raises(HardyError, match="write the app again on the server, with `hardy deploy app`"):
        config.parse(text, allow=user_code.SERVER)


def test_a_node_imports_what_its_own_configuration_lists(study, tmp_path):
    asked = replace(experiment(), method="/srv/study/mine.py:mine", model={"name": "tiny_cnn", "width": 0.25})
    text = config.dump(config.to_table(asked))
    made = node(text, allow_import=str(study / "mine.py"))
    assert made.engine.plan.method.name == "mine"
    with pytest.raises(HardyError, match="This node imports no code"):
        node(text.replace("mine.py:mine", "other.py:mine"), allow_import=str(study / "mine.py"))
    with pytest.raises(HardyError, match="This node imports no code"):
        node(text.replace("/srv/study/mine.py:mine", "os:getcwd"), allow_import="os.path")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('method = "mine.py:mien"', "unknown name in"),
        ('method = "nowhere.py:mine"', "cannot read the code in"),
        ('method = "no_such_module:mine"', "there is no module 'no_such_module' to import"),
        ('method = "mine.py:broken"', "method mine.py:broken failed: {study}/mine.py, line 57: ZeroDivisionError"),
        ('method = "mine.py:empty"', "method mine.py:empty gives int; it must be a hardy.Method"),
        ('method = "syntax.py:mine"', "{study}/syntax.py, line 2: SyntaxError"),
        ('method = "raises.py:mine"', "{study}/raises.py, line 3: ValueError: no luck"),
        ('method = { name = "fedavg", objective = "mine.py:Net" }', "method.objective mine.py:Net is no objective"),
        ('model = "mine.py:mine"', "model mine.py:mine gives Method; it must be a torch.nn.Module"),
        ('model = "fixed.py:Net"', "model fixed.py:Net answers two images with [2, 7]; it must be [2, 10]"),
        ('imports = ["raises.py"]', "{study}/raises.py, line 3: ValueError: no luck"),
        ('evaluation.threats = ["mine.py:Net"]', "threat mine.py:Net is no attack"),
        ('method = { name = "split_mix", width = 0.25 }\nmodel = "mine.py:Net"', "takes no width"),
    ],
)
def test_mistakes(study, tmp_path, capsys, change, message):
    (study / "syntax.py").write_text("x = 1\ndef mine(:\n")
    (study / "raises.py").write_text("def f():\n    x = 1\n    raise ValueError('no\\nluck')\n\n\nf()\n")
    (study / "fixed.py").write_text(MINE.replace("num_classes=10, wide=4", "wide=4").replace("num_classes)", "7)"))
    (study / "x.toml").write_text(f"rounds = 1\nengine.device = 'cpu'\n{change}\n")
    assert main(["run", str(study / "x.toml"), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert message.format(study=study) in said
    assert said.count("\n") == 1 and "Traceback" not in said


def test_parts_of_ones_own_are_described(study, monkeypatch, capsys):
    monkeypatch.chdir(study)
    assert main(["parts", "mine.py:Focal"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("mine.py:Focal\n\nCross-entropy in which sure answers count less.") and "gamma = 2" in said
    assert main(["parts", "mine.py:mine"]) == 0 and "gamma = 1" in capsys.readouterr().out
    assert main(["parts", "mine.py:Focl"]) == 2 and "Did you mean 'Focal'?" in capsys.readouterr().err


def test_imports_give_parts_their_names(study, tmp_path, monkeypatch):
    monkeypatch.chdir(study)
    words = ["rounds=1", "training.steps=1", "data.limit=20", "engine.device=cpu", "method.objective=focal"]
    assert (
        main(["run", "demo", "--alone", *words, "--import", "mine.py", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    saved = config.read(tmp_path / "run" / "config.toml")
    assert saved.imports == (str(study / "mine.py"),)
    assert hardy.load(tmp_path / "run").engine.plan.method.objective.gamma == 2


def test_a_module_beside_the_experiment(study, tmp_path, monkeypatch):
    package = study / "own_package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(MINE)
    (study / "x.toml").write_text('model = "own_package_of_a_test.nets:Net"\nrounds = 1\ntraining.steps = 1\n')
    run = hardy.fit(study / "x.toml", ["data.limit=20", "engine.device=cpu"], out=tmp_path / "run", quiet=True)
    assert run.engine.plan.model.fc.in_features == 4 * 49
    code = "import hardy, sys; print(hardy.load(sys.argv[1]).engine.plan.model.fc.in_features)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout.strip() == "196"


def test_a_source_of_ones_own(study):
    (study / "rows.py").write_text(
        "import hardy, numpy as np\n"
        "def rows(root=None, *, n: int = 12):\n"
        "    x, y = np.zeros((n, 8, 8, 3), np.uint8), np.arange(n) % 3\n"
        "    return hardy.arrays(x, y, x, y)\n"
    )
    (study / "x.toml").write_text('data.source = { name = "rows.py:rows", n = 9 }\n')
    from hardy.runs.prepare import federation as dealt

    assert len(dealt(config.read(study / "x.toml")).y_train) == 9


def test_an_entry_point(study, monkeypatch):
    from importlib.metadata import EntryPoint

    entry = EntryPoint("objective.sharp", "hardy.parts.objectives:cross_entropy", user_code.GROUP)

    def found(*, group, name=None):
        return [entry] if group == user_code.GROUP and name in (None, entry.name) else []

    monkeypatch.setattr(user_code.importlib.metadata, "entry_points", found)
    made = config.method(config.parse('method = { name = "fedavg", objective = "sharp" }'))
    assert made.objective == hardy.parts.objectives.cross_entropy()
    with pytest.raises(HardyError, match="Did you mean 'sharp'"):
        config.parse('method = { name = "fedavg", objective = "sharpe" }')


# The obvious calls


class Plain(nn.Module):
    """A network without any word of Hardy in it."""

    def __init__(self, classes=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.out = nn.Linear(4 * 36, classes)

    def forward(self, x):
        return self.out(self.layers(x))


SHORT = {"rounds": 1, "training": {"steps": 1}, "engine": {"device": "cpu", "name": "sequential"}, "quiet": True}


def test_fit_by_name():
    run = hardy.fit("demo", {"data.limit": 20}, method="fedprox", model="mlp", data={"clients": 1}, **SHORT)
    assert (run.experiment.method, run.experiment.model, run.experiment.data.clients) == ("fedprox", "mlp", 1)
    assert (run.experiment.data.limit, run.state.round) == (20, 1)
    run = hardy.fit("demo", ["data.limit=20", "rounds=1"], method={"name": "fedprox", "strength": 2}, **SHORT)
    assert run.engine.plan.method.objective.strength == 2


@pytest.mark.parametrize("model", [Plain, Plain(), lambda norm: tiny_cnn(norm=norm, shape=(1, 8, 8), classes=3)])
def test_fit_a_model(model):
    run = hardy.fit(model=model, data=federation(), **SHORT)
    assert run.state.round == 1
    if isinstance(model, nn.Module):
        assert torch.equal(run.engine.plan.start["out.weight"], model.out.weight)  # it starts where the user's is
    assert run.experiment.model == config.FROM_PYTHON


def test_resume_and_load_by_name(study, tmp_path):
    """A run that was given objects may be given names; one that has names keeps them."""
    from hardy import papers

    out = tmp_path / "run"
    short = {**SHORT, "data": {"limit": 20}}
    run = hardy.fit("demo", method=papers.fedprox(strength=2.0), model=tiny, out=out, **short)
    with pytest.raises(HardyError, match=r"pass them to hardy\.resume or hardy\.load"):
        hardy.load(out)
    again = hardy.load(out, method={"name": "fedprox", "strength": 2.0}, model={"name": "tiny_cnn", "width": 0.25})
    assert again.engine.plan.method == run.engine.plan.method
    assert all(torch.equal(tensor, again.state.shared[name]) for name, tensor in run.state.shared.items())
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace("rounds = 1\n", "rounds = 2\n"))
    (study / "own.py").write_text(
        "def net(norm, shape, classes):\n    from hardy.models import tiny_cnn\n"
        "    return tiny_cnn(norm=norm, shape=shape, classes=classes, width=0.25)\n"
    )
    for rounds in (2, 3):  # and once more: the names have not taken the place of what config.toml says
        (out / "config.toml").write_text(text.replace("rounds = 1\n", f"rounds = {rounds}\n"))
        words = {"method": {"name": "fedprox", "strength": 2.0}, "model": f"{study}/own.py:net"}
        assert hardy.resume(out, **words, quiet=True).state.round == rounds
    named = tmp_path / "named"
    hardy.fit("demo", method="fedprox", model="mlp", out=named, **short)
    assert hardy.load(named, method="fedprox", model={"name": "mlp"}).state.round == 1
    with pytest.raises(HardyError, match=r"method is 'fedavg', but .*/named was started with 'fedprox'\. Leave it out"):
        hardy.resume(named, method="fedavg")


def tiny(norm, shape, classes):
    return tiny_cnn(norm=norm, shape=shape, classes=classes, width=0.25)


@pytest.mark.parametrize("torch_rows", [False, True])
def test_fit_rows(torch_rows):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (12, 8, 8, 1)).astype(np.uint8), np.arange(12) % 3
    rows = (x, y, x, y)
    if torch_rows:
        x, y = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
        rows = (x, y, x, y)
    run = hardy.fit(data=rows, method="fedavg", model=Plain, **SHORT)
    assert [len(client.train) + len(client.validation) for client in run.engine.data.clients] == [6, 6]
    run = hardy.fit(data=[rows, rows, rows], model=Plain, **SHORT)
    assert len(run.engine.data.clients) == 3
    with pytest.raises(HardyError, match="must be a bundled name"):
        hardy.fit(3)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("lr", "training.rate"),
        ("epochs", "training.epochs"),
        ("optimizer", "optimiser"),
        ("batch_size", "training.batch"),
        ("strategy", "method"),
        ("num_rounds", "rounds"),
        ("training.lr", "rate"),
        ("training.batch_size", "batch"),
        ("data.num_clients", "clients"),
    ],
)
def test_near_words(key, near):
    with pytest.raises(HardyError, match=f"Did you mean '{near}'"):
        config.parse("", [f"{key}=1"])
    with pytest.raises(HardyError, match=f"Did you mean '{near}'"):
        config.changed(config.Experiment(), {key: 1})


def test_an_override_removes_a_key():
    text = "[data]\nlimit = 3\n"
    assert config.parse(text, ["data.limit="]).data.limit is None
    with pytest.raises(HardyError, match="removes a key that the experiment does not set"):
        config.parse("", ["data.limit="])
    assert config.changed(config.parse(text), ["data.limit=", "rounds="]).rounds == 20
