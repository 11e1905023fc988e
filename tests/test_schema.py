"""The JSON schema takes what Hardy reads and refuses what Hardy refuses for a key, a type or a name."""

import inspect
import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import hardy
from conftest import experiment, federation, net
from hardy import config
from hardy.cli import main
from hardy.config.schema import experiment_schema
from hardy.config.writing import dump, to_table
from hardy.data.sources import SOURCES
from hardy.registry import KINDS, PARTS
from hardy.reproduce.definition import read_table
from hardy.user_code import USER

ROOT = Path(__file__).parents[1]
BUNDLED = sorted((Path(hardy.__file__).parent / "bundled").glob("*.toml"))
FILES = {path: tomllib.loads(path.read_text()) for path in sorted((ROOT / "experiments").rglob("*.toml"))}
TABLES = [path for path, table in FILES.items() if "rows" in table and "experiment" in table]
EXPERIMENTS = [path for path, table in FILES.items() if "data" in table]


@pytest.fixture(scope="module")
def schema():
    made = json.loads(json.dumps(experiment_schema(), allow_nan=False))
    Draft202012Validator.check_schema(made)
    return made


@pytest.fixture(scope="module")
def mistakes(schema):
    """Where a text departs from the schema, as keys with dots."""

    def found(text, known=schema):
        errors = Draft202012Validator(known).iter_errors(tomllib.loads(text))
        return [".".join(map(str, error.absolute_path)) for error in errors]

    return found


def test_published_experiments_are_valid(mistakes):
    assert len(BUNDLED) >= 2 and len(EXPERIMENTS) > 10
    for path in (*BUNDLED, *EXPERIMENTS):
        assert not mistakes(path.read_text("utf-8")), path


@pytest.mark.slow
def test_rows_of_tables_are_valid_as_a_run_would_write_them(mistakes, schema, monkeypatch):
    for kind, parts in PARTS.items():
        monkeypatch.setitem(PARTS, kind, dict(parts))  # a table's own parts are gone afterwards
    for path in TABLES:
        table = read_table(path)
        known = json.loads(json.dumps(experiment_schema() if table.code else schema))  # with the table's own parts
        for row in table.rows_of():
            chosen = hardy.read(path.parent / table.experiment, table.overrides_of(row), check=False)
            assert not mistakes(chosen.to_toml(), known), f"{table.name}: {row}"


def test_config_of_a_run_is_valid(mistakes, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import math\nfrom torch import nn\n\n"
        "def net(classes, shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))\n"
    )
    text = "rounds = 1\nmodel = 'mine.py:net'\noptimiser = { weight_decay = 0.1 }\ncallbacks = ['early_stopping']\n"
    text += "training = { steps = 1 }\ndata = { limit = 20 }\nevaluation.metrics = ['auroc', 'ece']\n"
    (tmp_path / "own.toml").write_text(text)
    hardy.fit(hardy.read(tmp_path / "own.toml"), out=tmp_path / "run", quiet=True)
    hardy.fit(experiment(rounds=1), data=federation(), model=net, out=tmp_path / "python", quiet=True)
    for folder, table in (("run", "code"), ("python", "versions")):
        written = (tmp_path / folder / "config.toml").read_text("utf-8")
        assert f"[{table}" in written and not mistakes(written), written


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model = 'mine:net'",
        "method = { name = 'my folder/mine.py:method', anything = 1 }",
        "method = { name = 'sfat', slack = { alpha = 0.1 }, budget = 'full' }",
        "optimiser = { name = 'chain', links = [{ name = 'clip', norm = 1 }, 'sgd'] }",
        "optimiser = { momentum = 0.9 }",
        "method = { name = 'fatbn', attack = { steps = 3 }, norm = { momentum = 0.3 } }",
        "method = { name = 'fedavg', aggregator = { name = 'by_name', default = 'mean' } }",
        "data.source = 'images/ward.npz'",
        "data.source = { name = 'images/ward.csv', label = 'sick' }",
        "data.adversarial = { mnist = 0.2 }",
        "data.range = [0, 4095]",
        "faults = { hostile = [1, 2], byzantine = 'mimic' }",
        "evaluation.threats = ['pgd-10@l2,eps=0.5', 'mine.py:Noise@4/255']",
    ],
)
def test_what_may_be_written(mistakes, text):
    assert not mistakes(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("round = 3", ""),
        ("rounds = 'three'", "rounds"),
        ("rounds = 2.5", "rounds"),
        ("data.pooled = 1", "data.pooled"),
        ("data.range = [0.0]", "data.range"),
        ("data.test = 'all'", "data.test"),
        ("training.lr = 0.1", "training"),
        ("training.milestones = 3", "training.milestones"),
        ("training.milestones = ['a']", "training.milestones.0"),
        ("model = { name = 'tiny_cnn', classes = 3 }", "model"),
        ("method = 'fedavgg'", "method"),
        ("method = { name = 'fedavgg' }", "method"),
        ("method = { name = 'fedprox', strong = 1 }", "method"),
        ("method = { name = 'fedprox', strength = 'much' }", "method"),
        ("method = { name = 'fedavg', optimiser = 'sgd' }", "method"),
        ("method = { name = 'fedavg', aggregator = { name = 'pipeline', pre = ['slak'] } }", "method"),
        ("method = { name = 'fedavg', aggregator = 'krum' }", "method"),
        ("method = { name = 'sfat', slack = { name = 'slack' } }", "method"),
        ("optimiser = { beta1 = 0.9 }", "optimiser"),
        ("faults.byzantine = 'mimik'", "faults.byzantine"),
        ("callbacks = ['early_stop']", "callbacks.0"),
    ],
)
def test_mistakes_are_found_where_they_are_and_by_hardy_too(mistakes, text, where):
    assert mistakes(text) == [where]
    with pytest.raises(hardy.HardyError):
        built = config.parse(text, allow=USER)
        if built.model != "tiny_cnn":
            hardy.fit(built, quiet=True)  # a model's options are read with its data


def test_a_known_source_takes_only_its_own_options(mistakes):
    assert not mistakes("data.source = { name = 'digits', limit = 9 }")
    assert mistakes("data.source = { name = 'digits', limmit = 9 }") == ["data.source"]


def reached(schema):
    """Kinds that a path of references leads to from the top, with the names and tables of their parts."""
    kinds, todo = {}, [schema | {"$defs": {}}]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            kind = node.get("$ref", "").removeprefix("#/$defs/")
            if kind and kind not in kinds:
                kinds[kind] = schema["$defs"][kind]
                todo.append(kinds[kind])
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    return kinds


def test_every_part_is_reached_with_all_its_options(schema):
    kinds = reached(schema)
    assert {*kinds} == {*schema["$defs"]} == {*PARTS, "source", "threat", "reference"}
    for kind, parts in PARTS.items():
        tables = {one["properties"]["name"].get("const"): one for one in kinds[kind]["anyOf"] if "properties" in one}
        assert {*parts} == {*tables} - {None}
        for name, factory in parts.items():
            options = {*tables[name]["properties"]} - {"name"}
            taken = {*inspect.signature(factory).parameters} - {"optimiser" if kind == "method" else ""}
            expected = {"model": taken - {"norm", "classes", "shape"}}.get(kind, taken)
            assert options == expected | ({"norm", "objective", "budget", "aggregator"} if kind == "method" else set())
            assert all(len(tables[name]["properties"][key].get("description", "")) > 5 for key in taken & options)
            assert len(tables[name]["description"]) > 10, name
    assert {*SOURCES} == {*kinds["source"]["anyOf"][0]["enum"]}


def test_every_part_as_a_run_writes_it_is_valid(schema):
    written = 0
    for kind in set(KINDS.values()):
        checked = Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})
        for name, factory in PARTS[kind].items():
            needed = [one for one in inspect.signature(factory).parameters.values() if one.default is one.empty]
            assert checked.is_valid(name) == (not needed), (kind, name)
            if needed or name == "chain":  # no chain is empty
                continue
            table = tomllib.loads(dump({"part": to_table(factory())}))["part"]
            assert checked.is_valid(table), (kind, name, table)
            written += 1
    assert written > 60


def test_the_command_prints_or_writes_it_with_parts_of_ones_own(schema, tmp_path, capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    (tmp_path / "focal.py").write_text(
        "from dataclasses import dataclass\nfrom hardy.core.metric import Metric\nfrom hardy.registry import part\n\n"
        "@part('metric')\n@dataclass(frozen=True, kw_only=True)\nclass SchemaFocal(Metric):\n"
        "    '''Of a test.'''\n    gamma: float = 2.0\n    '''how much easy rows count less'''\n"
    )
    out = tmp_path / "hardy.schema.json"
    try:
        assert main(["schema", "--import", str(tmp_path / "focal.py"), "--out", str(out)]) == 0
    finally:
        PARTS["metric"].pop("schema_focal", None)
    assert capsys.readouterr().out == f"written: {out}\n"
    own = Draft202012Validator(json.loads(out.read_text("utf-8")))
    named = {"evaluation": {"metrics": [{"name": "schema_focal", "gamma": 1.0}]}}
    assert own.is_valid(named) and not Draft202012Validator(schema).is_valid(named)
    assert main(["schema", "--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "none" in capsys.readouterr().err
