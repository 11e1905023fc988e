"""Every mistake in an experiment is one line with the value and the remedy."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardy import config, papers
from hardy.attacks.gradient import pgd
from hardy.cli import main
from hardy.errors import HardyError
from hardy.papers.fedavg import proximal
from hardy.papers.fedbn import local
from hardy.parts.aggregators.base import mean

MISTAKES = [
    ("rouns = 3", "unknown key in the experiment 'rouns'. Did you mean 'rounds'?"),
    ("rounds = 0", "rounds is 0; it must be 1 or more"),
    ("rounds = 1.5", "rounds is 1.5; it must be a whole number"),
    ("rounds = true", "rounds is True; it must be a whole number"),
    ("seed = -1", "seed is -1; it must be in [0, 2^63)"),
    ("[training]\nrate = 'fast'", "training.rate is 'fast'; it must be a number"),
    ("[training]\nrate = nan", "training.rate is nan"),
    ("[training]\nrate = -0.1", "training.rate is -0.1; it must be 0 or more"),
    ("[training]\nrates = 0.1", "Did you mean 'rate'?"),
    ("[optimiser]\nmomentum = 1.0", "momentum (μ) of sgd is 1.0; it must be in [0, 1)"),
    ("[training]\nbatch = 0", "training.batch is 0; it must be 1 or more"),
    ("[training]\nremainder = 'kept'", "Did you mean 'keep'?"),
    ("[training]\nrate = '.5'", "training.rate is '.5'; it must be a number, which TOML writes as 0.5."),
    ("[training]\nmilestones = 3", "training.milestones is 3; it must be a list, such as [3]"),
    ("model = 'mine.py'", "model 'mine.py' is a file; name what to take of it, such as mine.py:mine"),
    ("method = { name = 'fedavg', aggregator = 'krum' }", "needs a value for 'f', as in { name = ..., f = ... }"),
    ("[cohort]\nfraction = 0", "cohort.fraction is 0.0; it must be in (0, 1]"),
    ("[cohort]\nclients = 0", "cohort.clients is 0; it must be 1 or more"),
    ("[cohort]\nclients = 99", "cohort.clients is 99, but there are 10 clients to ask"),
    ("[faults]\ndropped = 1.5", "faults.dropped is 1.5; a chance must be in [0, 1]"),
    ("[faults]\ndropped = 0.7\nlate = 0.7", "add up to 1.4"),
    ("[admission]\nlargest_update = 0", "admission.largest_update is 0.0; it must be above 0"),
    ("[engine]\nname = 'vectorized'", "Did you mean 'vectorised'?"),
    ("[engine]\nlane = 0", "engine.lane is 0"),
    ("[engine]\ndevice = 'gpu'", "unknown device 'gpu'. Known: auto, cpu, cuda"),
    ("[engine]\ndevice = 'cuda:99'", "device 'cuda:99' is not there"),
    ("[evaluation]\nevery = 0", "evaluation.every is 0"),
    ("[checkpoint]\nevery = 0", "checkpoint.every is 0"),
    ("method = 'fedbm'", "unknown method 'fedbm'. Did you mean 'fedbn'?"),
    ("[method]\nname = 'fedprox'\nstrenght = 1", "unknown key in method 'strenght'. Did you mean 'strength'?"),
    ("method = { name = 'fedrobust', size = 2 }", "size is 2, but only structures block and low_rank have one"),
    ("[method]\nname = 'fedprox'\nstrength = -1", "proximal strength (μ) is -1.0; it must be 0 or more"),
    ("[method]\nstrength = 1", "method needs a name"),
    ("[method]\nname = 'fedavg'\naggregator = 'medain'", "unknown aggregator 'medain'"),
    ("[method]\nname = 'fedavg'\naggregator = 3", "method.aggregator needs a name"),
    ("[method]\nname = 'fedbn'\naggregator = { name = 'by_role', norm_mean = 'mean' }", "two owners for tensor"),
    ("model = 'tiny_cn'", "Did you mean 'tiny_cnn'?"),
    ("[model]\nname = 'tiny_cnn'\nwidht = 2", "Did you mean 'width'?"),
    ("[model]\nname = 'tiny_cnn'\nwidth = 0", "width"),
    ("[model]\nname = 'tiny_cnn'\nclasses = 3", "unknown key in model 'classes'"),
    ("[data]\nsource = 'mini_digit'", "Did you mean 'mini_digits'?"),
    ("[data]\nsource = 'cifar10'", "cifar10"),
    ("[data]\nsource = { name = 'digits', limt = 3 }", "limt"),
    ("[data]\nsplit = 'dirichlett'", "Did you mean 'dirichlet'?"),
    ("[data]\nsplit = { name = 'dirichlet', alpha = -1 }", "-1"),
    ("[data]\nclients = 0", "clients"),
    ("[data]\nclients = 100000", "100000"),
    ("[data]\nvalidation = 1.5", "1.5"),
    ("[data]\ntest = 'all'", "unknown value for data.test 'all'"),
    ("[data]\nadversarial = 2.0", "adversarial is 2.0"),
    ("[data]\nadversarial = ['pens']", "Did you mean 'pen'?"),
    ("[data]\nadversarial = [3, 10]", "a client's number in data.adversarial is 10; it must be 0 to 9"),
    ("[data]\nadversarial = { pen = 0.2, mail = 1.2 }", "the share of mail in data.adversarial is 1.2"),
    ("[evaluation]\npredict_branch = 'adversarial'", "unknown branch in evaluation 'adversarial'"),
    ("[training]\nbatch = 1", "training.batch is 1, but BatchNorm needs 2 rows"),
    ("[model]\nname = 'mlp'\nhidden = ['a']", "model.hidden[0] is 'a'"),
    ("[method]\nname = 'scaffold'\naggregator = 'mean'", "has no rule for control"),
    ("[evaluation]\nthreats = ['pdg-20']", "Did you mean 'pgd-20'?"),
    ("data = 3", "data is 3; it must be a table"),
    ("rounds = ", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text.replace("\n", " ") for text, _ in MISTAKES])
def test_mistakes(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HARDY_DATA", raising=False)
    path = tmp_path / "e.toml"
    path.write_text(text)
    engine = [] if "[engine]" in text else ["--engine", "sequential"]
    assert main(["run", str(path), "--out", str(tmp_path / "run"), *engine]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1 and "Traceback" not in shown.err and not shown.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds", "'rounds' is not an override; write key=value"),
        ("=3", "is not an override"),
        ("rounds.x=3", "is not a table"),
        ("training.rte=0.1", "Did you mean 'rate'?"),
    ],
)
def test_mistaken_overrides(override, message):
    with pytest.raises(HardyError, match=None) as caught:
        config.parse("rounds = 2", [override])
    assert message in str(caught.value)


def test_missing_files(tmp_path, capsys):
    assert main(["run", "demmo"]) == 2
    assert "Did you mean 'demo'?" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "no.toml")]) == 2
    assert "no experiment file" in capsys.readouterr().err
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert main(["run", str(tmp_path / "binary.toml")]) == 2
    assert "UTF-8" in capsys.readouterr().err
    for command in (["resume"], ["evaluate"]):
        assert main([*command, str(tmp_path)]) == 2
        assert "holds no run" in capsys.readouterr().err
        assert main([*command, str(tmp_path / "nowhere")]) == 2
        assert "hardy run EXPERIMENT" in capsys.readouterr().err


def test_overrides_reach_nested_parts():
    chosen = config.parse("method = 'fedavg'", ["method=fedprox", "method.strength=0.5", "training.rate=1", "name=x y"])
    assert chosen.method == {"name": "fedprox", "strength": 0.5}
    assert (chosen.training.rate, chosen.name) == (1.0, "x y")
    assert config.method(chosen).objective.strength == 0.5


@pytest.mark.parametrize("override", ["evaluation.metrics=[auroc,ece]", "data.source={name=t.csv,drop=[id]}"])
def test_quotes_that_the_shell_took_are_missed(override):
    with pytest.raises(HardyError, match=r"is not valid TOML: .*write the whole in single ones, such as '"):
        config.parse("rounds = 1", [override])


def test_a_part_takes_the_place_of_a_papers_own():
    chosen = config.parse(
        """
        [method]
        name = "fedbn"
        aggregator = { name = "mean", weigh = "uniform" }
        objective = { name = "proximal", inner = "cross_entropy" }
        """
    )
    made = config.method(chosen)
    assert made.aggregator == mean(weigh="uniform")
    assert made.norm == papers.fedbn().norm
    assert made.objective == proximal()


@pytest.mark.parametrize(
    ("method", "overrides", "expected"),
    [
        ("fatavg", ["method.attack.steps=3"], papers.fatavg(attack=pgd(steps=3))),
        ("fedbn", ["method.norm.momentum=0.3"], papers.fedbn(norm=local(momentum=0.3))),
        (  # the objective is the method's own, though it is no argument of fatavg
            "fatavg",
            ["method.objective.AT.attack.steps=3", "method.objective.AT.mix=1"],
            papers.fatavg(attack=pgd(steps=3), mix=1.0),
        ),
    ],
)
def test_a_table_without_a_name_changes_the_methods_own_part(method, overrides, expected):
    chosen = config.parse(f"method = {method!r}", overrides)
    assert config.method(chosen) == expected
    assert config.method(config.parse(chosen.to_toml())) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = { name = 'fatavg', attack = { steps = 3 }, objective = 'trades' }", "method.attack has no effect"),
        ("method = { name = 'fedrbn', weight = 0.8, objective = 'trades' }", "place method.objective takes"),
        ("method = { name = 'fedprox', strength = 1, objective = 'trades' }", None),
        ("method = { name = 'fedrbn', weight = 0.8, objective = { AT = { mix = 1 } } }", None),
    ],
)
def test_an_option_that_is_lost_with_its_part_is_refused(text, message):
    with pytest.raises(HardyError, match=message) if message else contextlib.nullcontext():
        config.parse(text)


def test_an_unknown_option_of_the_methods_own_part():
    with pytest.raises(HardyError, match=r"unknown key in method\.attack 'stepz'\. Did you mean 'step'\?"):
        config.parse("method = 'fatavg'", ["method.attack.stepz=2"])


@pytest.mark.parametrize("name", config.bundled())
def test_bundled_experiments_survive_a_round_trip(name):
    chosen = config.read(name)
    assert config.parse(chosen.to_toml()) == chosen


words = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
WORDS = """rounds seed data model method training cohort faults engine name rate batch clients split source lane
every fraction dropped objective aggregator norm milestones zzz"""
keys = st.sampled_from(WORDS.split())


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, values | st.dictionaries(keys, values, max_size=3), max_size=4))
def test_no_table_makes_a_traceback(table):
    try:
        text = config.dump(table)
        config.parse(text)
    except HardyError as error:
        assert "\n" not in str(error).strip() or "TOML" in str(error)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=3))
def test_no_text_makes_a_traceback(text, overrides):
    with contextlib.suppress(HardyError):
        config.parse(text, overrides)
