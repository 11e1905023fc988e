"""Over a network the numbers are those of the other engines, and nothing private leaves a node."""

import dataclasses
import json
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hardy
from conftest import SHAPE, assert_close, everything, experiment, federation, fit, net, with_momentum
from hardy import papers
from hardy.attacks.threats import parse_threat
from hardy.config import DataChoice, EvaluationChoice, NetworkChoice
from hardy.config.experiment import ServerChoice
from hardy.core.cohort import Cohort
from hardy.core.partition import Placement, Role
from hardy.core.training import Training
from hardy.data.augmentation import crop_flip
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.faults.backdoors import backdoor, pixel_pattern
from hardy.faults.injection import Faults
from hardy.flower import membership, network_engine, wire
from hardy.models import tiny_cnn
from hardy.parts.aggregators.base import pipeline
from hardy.parts.aggregators.memories import delayed_momentum
from hardy.parts.aggregators.robust import trimmed_mean
from hardy.parts.aggregators.stages import nearest_neighbour_mixing, truncated_weights
from hardy.parts.aggregators.trust import fltrust
from hardy.parts.compression import eight_bit, half_precision, top_k

pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from hardy.flower.apps import client_app, for_network, run_server, server_app
from hardy.flower.deployment import NODES, SITE
from hardy.flower.memory import Memory
from hardy.flower.node import Given, Node
from hardy.runs.profiles import Profile

FLOWER = EngineChoice(name="flower", device="cpu", precision="float64")


class Grid:
    """Flower's Grid, with the nodes in this process: a message is answered when its reply is asked for."""

    state = None
    """folder of the nodes' private tensors"""

    def __init__(self, apps):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.apps = dict(enumerate(apps, 100))
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"client": n, "state": str(self.state)},
                state=RecordDict(),
                run_config={},
            )
            for n, node in enumerate(self.apps)
        }
        self.waiting, self.replies, self.sent = {}, [], 0
        self.spoil = lambda node, kind, reply: reply
        """what a hostile or broken node makes of its reply; None: it never answers"""

    def get_node_ids(self):
        return list(self.apps)

    def push_messages(self, messages):
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = str(self.sent)
            self.waiting[str(self.sent)] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, numbers):
        found = []
        for number in numbers:
            if (message := self.waiting.pop(number, None)) is not None:
                node, kind = message.metadata.dst_node_id, message.metadata.message_type
                if node not in self.apps:
                    continue
                reply = self.apps[node](message, self.contexts[node])
                self.replies.append(reply)
                if (reply := self.spoil(node, kind, reply)) is not None:
                    found.append(reply)
        return found


class Clock:
    """The server's time passes only while it waits, so that no test depends on how busy the machine is."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def in_one_process(folder, monkeypatch):
    """Nodes keep their state in the folder, and waiting takes no time."""
    made = Clock()
    monkeypatch.setattr(Grid, "state", folder / "nodes")
    for module in (membership, network_engine):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch):
    return in_one_process(tmp_path, monkeypatch)


def run_over(grid, method, *, model=net, out=None, **changes):
    changes = {"network": NetworkChoice(clients=len(grid.apps), deadline=2.0), "engine": FLOWER, **changes}
    return run_server(experiment(**changes), grid, out, method=with_momentum(method), model=model, quiet=True)


def grid_of(method, data=None, *, model=net):
    data, method = data or federation(), with_momentum(method)
    return Grid([client_app(method=method, model=model, data=data) for _ in data.clients])


def nodes_own(grid, run):
    """The private tensors of all nodes, [C, B, ...]."""
    names = run.engine.plan.names(Placement.PRIVATE)
    first = run.engine.cast(run.engine.plan.first(Placement.PRIVATE, 1, run.engine.plan.method.budget.bases))
    held = [Memory(grid.state, run.engine.token, n).before(run.state.round) or first for n in range(len(grid.apps))]
    return {name: torch.cat([h[name] for h in held]) for name in names}


def test_every_method_is_the_same_on_every_engine(method):
    options = {"cohort": Cohort(fraction=0.75), "faults": Faults(dropped=0.1, crashed=0.1, late=0.1), "rounds": 2}
    options["training"] = Training(rate=0.1, batch=4)
    if method.pooled:
        with pytest.raises(HardyError, match="over a network nobody holds them"):
            run_over(grid_of(method), method, **options)
        return
    one = fit(method, **options)
    many = fit(method, engine=EngineChoice(name="vectorised", device="cpu", precision="float64"), **options)
    grid = grid_of(method)
    far = run_over(grid, method, **options)
    found = everything(far, nodes_own(grid, far))
    assert_close(everything(one), found, 1e-9)
    assert_close(everything(many), found, 1e-9)
    assert one.figures.latest == far.figures.latest
    assert one.figures.lost == far.figures.lost
    assert (one.figures.bytes_up, one.figures.bytes_down) == (far.figures.bytes_up, far.figures.bytes_down)


def test_augmented_images_are_the_same_at_the_nodes():
    method = papers.fedbn()
    options = {"data": DataChoice(augmentation=crop_flip(padding=2)), "rounds": 2, "training": Training(batch=4)}
    one = hardy.fit(experiment(**options), method=with_momentum(method), model=net, data=federation(), quiet=True)
    grid = grid_of(method)
    far = run_over(grid, method, **options)
    assert_close(everything(one), everything(far, nodes_own(grid, far)), 1e-9)


@pytest.mark.parametrize(
    "method", [papers.fedrbn(), papers.fedrobust(), papers.fedbn(), papers.scaffold()], ids=lambda m: m.name
)
def test_nothing_private_leaves_a_node(method):
    data = federation()
    grid = grid_of(method, data)
    run = run_over(grid, method, rounds=2)
    plan = run.engine.plan
    allowed = {*plan.names(Placement.SHARED), *plan.names(Placement.REPORTED)}
    private = nodes_own(grid, run)
    assert private and len(grid.replies) == 4 * (1 + 2 + 2)
    hidden = [row.ravel() for tensor in private.values() for row in tensor if len(row.unique()) > 2]
    pixels = [(x / 255.0).ravel() for x in data.x_train]
    for reply in grid.replies:
        content = reply.content
        for name, record in content.array_records.items():
            arrays = wire.unpack_arrays(content, name)
            assert name.partition("/")[0] in ("shared", "reported") and set(arrays) <= allowed
            assert list(record) == ["tensors"]
            sent = [array.ravel() for array in arrays.values()]
            assert {a.dtype.kind for a in sent} <= {"f"} | ({"i"} if Role.COUNTER in plan.roles.values() else set())
            for values in sent:
                assert not any(len(own) == len(values) and np.allclose(own, values, atol=1e-12) for own in hidden)
                assert not any(len(x) == len(values) and np.allclose(x, values, atol=2e-3) for x in pixels)
        figures = {name: dict(record) for name, record in content.metric_records.items()}
        for record in figures.values():
            assert set(record) <= {"round", "examples", "steps", "loss", "validation", "test"}
            assert all(isinstance(value, int | float) for value in record.values())  # no list could hold labels
        said = {key for record in content.config_records.values() for key in record}
        assert said <= {"profile"}


def test_an_error_on_a_node_does_not_quote_what_is_private(tmp_path, monkeypatch, caplog):
    train = Node.train

    def fail(self, content, memory):
        if self.number == 1:
            raise ValueError("pixels 17 4 99")
        return train(self, content, memory)

    monkeypatch.setattr(Node, "train", fail)
    run_over(grid_of(papers.fedavg()), papers.fedavg(), rounds=1, out=tmp_path / "run")
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "ValueError; the node's own log says more" in line and "pixels" not in line
    assert "ValueError: pixels 17 4 99" in caplog.text


def test_a_round_asked_twice_starts_where_it_started(tmp_path):
    """The server dies after the nodes have trained and before its checkpoint; the nodes are restarted meanwhile."""
    method, data = papers.fedrbn(), federation()
    whole = fit(method, data=data)
    first = grid_of(method, data)

    def die(node, kind, reply):
        if kind == "train" and reply.content.metric_records["figures/0"]["round"] == 2 and node == 102:
            raise KeyboardInterrupt
        return reply

    first.spoil = die
    with pytest.raises(KeyboardInterrupt):
        run_over(first, method, out=tmp_path / "run")
    again = run_over(grid_of(method, data), method, out=tmp_path / "run")
    assert again.state.round == 4
    assert_close({**whole.state.shared, **whole.state.reported}, {**again.state.shared, **again.state.reported}, 1e-9)
    assert whole.figures.latest == again.figures.latest


def test_a_server_that_lost_its_newest_checkpoint_repeats_two_rounds(tmp_path):
    method, data = papers.fedrbn(), federation()
    run_over(grid_of(method, data), method, out=tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoint").glob("round-*"))
    (newest / "record.json").write_text("torn")
    grid = grid_of(method, data)
    again = run_over(grid, method, out=tmp_path / "run")
    whole = fit(method, data=data)
    assert_close(everything(whole), everything(again, nodes_own(grid, again)), 1e-9)


def test_a_run_of_another_engine_is_not_gone_on_with(tmp_path):
    fit(papers.fedbn(), out=tmp_path / "run", rounds=1)
    with pytest.raises(HardyError, match=r"holds a run but no network\.json"):
        run_over(grid_of(papers.fedbn()), papers.fedbn(), out=tmp_path / "run")


def test_a_node_remembers_three_rounds(tmp_path):
    memory = Memory(str(tmp_path), "abc", 0)
    assert memory.before(0) == {}
    for round in (0, 2, 3, 5):
        memory.keep(round, {"w": torch.tensor(float(round))})
    assert [memory.before(round)["w"].item() for round in (3, 4, 5, 6)] == [2, 3, 3, 5]
    with pytest.raises(HardyError, match="back at round 3; this client remembers its private tensors from round 4 on"):
        memory.before(2)
    memory.keep(3, {"w": torch.tensor(30.0)})  # the server went back: what was round 5 is gone
    assert memory.before(9)["w"] == 30
    with pytest.raises(HardyError, match="letters and digits"):
        Memory(str(tmp_path), "../abc", 0)


def rewrite(reply, change, record="shared/0"):
    """The tensors of a reply, changed by a function of their dict."""
    arrays = wire.unpack_arrays(reply.content, record)
    change(arrays)
    reply.content[record] = wire.pack(arrays)


def first_of(arrays):
    return next(iter(arrays))


def _nan(reply):
    rewrite(reply, lambda arrays: arrays.update({name: array * np.nan for name, array in arrays.items()}))


def _renamed(reply):
    rewrite(reply, lambda arrays: arrays.update(other=arrays.pop(first_of(arrays))))


def _reshaped(reply):
    rewrite(reply, lambda arrays: arrays.update({first_of(arrays): arrays[first_of(arrays)][..., None]}))


def _inflated(reply):
    reply.content.metric_records["figures/0"]["examples"] = 10**12


def _garbled(reply):
    next(iter(reply.content.array_records["shared/0"].values())).data = b"\x80\x04no array"


def _emptied(reply):
    reply.content = RecordDict()


def _replayed(reply):
    reply.content.metric_records["figures/0"]["round"] -= 1


LIES = {
    "not finite": _nan,
    "lacks": _renamed,
    "has shape": _reshaped,
    "claims 1e+12": _inflated,
    "adds 'bytes that cannot be read'": _garbled,
    "belongs to round None": _emptied,
    "belongs to round ": _replayed,
}


@pytest.mark.parametrize("reason", [*LIES, "silent", "cannot be read"])
def test_a_broken_node_changes_nothing_for_the_others(reason, tmp_path):
    method, data = papers.fedbn(), federation()
    grid = grid_of(method, data)

    def spoil(node, kind, reply):
        if node == 101 and kind == "train":
            if reason == "silent":
                return None
            if reason == "cannot be read":
                raise ValueError("object header")
            LIES[reason](reply)
        return reply

    grid.spoil = spoil
    run = run_over(grid, method, rounds=2, out=tmp_path / "run", network=NetworkChoice(clients=4, deadline=0.5))
    absent = fit(method, data=data, rounds=2, faults=_Without(client=1))
    assert_close(absent.state.shared, run.state.shared, 1e-9)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert lines.count(reason) == 2, lines


def test_what_a_reply_says_beside_what_was_asked_is_not_looked_at():
    method = papers.fedavg()
    grid = grid_of(method)

    def chat(node, kind, reply):
        if kind == "train":
            reply.content.metric_records["figures/0"]["more"] = 1.0
            reply.content["else"] = wire.pack({"w": torch.ones(3)})
        return reply

    grid.spoil = chat
    run = run_over(grid, method, rounds=1)
    assert_close(fit(method, rounds=1).state.shared, run.state.shared, 1e-9)
    assert run.figures.lost == {}


def test_an_evaluation_of_another_round_does_not_count(caplog):
    method = papers.fedavg()
    grid = grid_of(method)

    def spoil(node, kind, reply):
        if node == 101 and kind == "evaluate":
            reply.content.metric_records["accuracy"]["round"] = 1
        return reply

    grid.spoil = spoil
    run = run_over(grid, method, rounds=2)
    assert [value is None for value in run.figures.latest["by_client"]] == [False, True, False, False]
    assert "round 2, evaluate: client 1 refused" in caplog.text


HONEST = {"client": 0, "domain": "a", "kind": "", "capacity": 1.0, "train": 9, "validation": 1, "test": 2}
HONEST |= {"shape": [1, 8, 8], "classes": ["0", "1"]}


@pytest.mark.parametrize(
    "lie",
    [
        "[" * 10**5,
        {"train": float("inf")},
        {"train": -1},
        {"client": 4},
        {"shape": [10**9, 10**9, 10**9]},
        {"kind": "XX"},
        {"capacity": float("nan")},
        {"classes": 3},
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_is_refused(lie):
    assert Profile.read(json.dumps({**HONEST, "domain": "a\n\x1b[31m" + "b" * 999}), 4).domain == "a  [31m" + "b" * 93
    assert Profile.read(json.dumps({**HONEST, "classes": ["a\x1b[2J", "\n"]}), 4).classes == ("a [2J", " ")
    with pytest.raises(ValueError) as refused:
        Profile.read(lie if isinstance(lie, str) else json.dumps(HONEST | lie), 4)
    assert len(str(refused.value)) < 300


@dataclasses.dataclass(frozen=True)
class _Without(Faults):
    client: int = 0

    def sample_faults(self, seed, round, cohort):
        return {self.client: "dropped"}


def test_nodes_leave_and_come_back(caplog):
    method = papers.fedavg()
    grid = grid_of(method)
    gone = {}

    def leave(node, kind, reply):
        if kind == "evaluate" and node == 103:
            turn = reply.content.metric_records["accuracy"]["round"]
            if turn == 1:
                gone[101] = grid.apps.pop(101)
            elif turn == 2:
                grid.apps |= gone
        return reply

    grid.spoil = leave
    run = run_over(grid, method, rounds=4, network=NetworkChoice(clients=4, deadline=0.5))
    assert run.figures.lost == {"away": 2}  # in the round after it left, and while it introduces itself again
    assert run.state.round == 4


def test_a_node_that_cannot_take_part_is_asked_again(caplog, clock):
    method = papers.fedavg()
    grid = grid_of(method)
    tries = []

    def stumble(node, kind, reply):
        if kind == "query" and node == 101:
            tries.append(node)
            if len(tries) < 3:
                reply.content = RecordDict()
        return reply

    grid.spoil = stumble
    assert run_over(grid, method, rounds=1).figures.lost == {}
    assert caplog.text.count("node 101 is refused: no profile in it") == 2 and clock.now > 120


def test_too_few_replies_are_asked_for_again_then_given_up(caplog, clock):
    method = papers.fedavg()
    grid = grid_of(method)
    grid.spoil = lambda node, kind, reply: None if kind == "train" and node != 100 else reply
    with pytest.raises(HardyError, match=r"1 replies within 60 s, but network.replies is 3"):
        run_over(grid, method, network=NetworkChoice(clients=4, deadline=25.0, replies=3, patience=60.0))
    assert 60 < clock.now < 90  # three times asked
    assert caplog.text.count("asking again") == 1 and caplog.text.count("client 2 silent") == 1


def test_a_number_is_claimed_once(caplog):
    method = papers.fedavg()
    grid = grid_of(method)
    grid.apps[104] = grid.apps[100]
    grid.contexts[104] = dataclasses.replace(grid.contexts[100], node_id=104)
    run_over(grid, method, rounds=1, network=NetworkChoice(clients=4))
    assert "node 104 is refused: node 100 is client 0 already" in caplog.text


def test_a_number_belongs_to_the_certificate_it_was_issued_to(tmp_path, monkeypatch, caplog):
    """Client 1's key with client 0's number in its settings: neither counts, and the run waits for the real ones."""
    grid = grid_of(papers.fedavg())
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({"0": 101, "1": 100, "2": 102, "3": 103}))
    monkeypatch.setenv(NODES, str(nodes))
    with pytest.raises(HardyError, match=r"clients \[0, 1\] did not register"):
        run_over(grid, papers.fedavg(), network=NetworkChoice(clients=4, deadline=2.0, patience=1.0))
    assert "node 100 is refused: its certificate is not that of client 0" in caplog.text


def test_a_node_that_is_started_again_takes_its_own_place_at_once(tmp_path, monkeypatch):
    grid = grid_of(papers.fedavg())
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps({str(n): 100 + n for n in range(4)}))
    monkeypatch.setenv(NODES, str(nodes))
    roll = run_over(grid, papers.fedavg(), rounds=1).engine.roll
    grid.apps[200], grid.contexts[200] = grid.apps[100], grid.contexts[100]  # the old one is still thought to be online
    nodes.write_text(json.dumps({"0": 200, "1": 101, "2": 102, "3": 103}))
    roll.refresh()
    assert roll.refresh()[0] == 200


def test_a_changed_experiment_is_not_gone_on_with(tmp_path):
    out = tmp_path / "run"
    run_over(grid_of(papers.fedavg()), papers.fedavg(), out=out, rounds=1)
    changed = {"training": Training(rate=0.5, batch=4), "rounds": 1}
    with pytest.raises(
        HardyError, match=r"holds a run of another experiment: .*training.rate is 0.5, not 0.1\. .*--out of"
    ):
        run_over(grid_of(papers.fedavg()), papers.fedavg(), out=out, **changed)
    again = run_over(grid_of(papers.fedavg()), papers.fedavg(), out=out, rounds=1)  # nothing left to do
    assert again.state.round == 1
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace("rate = 0.1", "rate = 0.5"))
    with pytest.raises(
        HardyError, match=r"is not the experiment of its checkpoint: training.rate was 0.1, is 0.5.*new run"
    ):
        run_over(
            grid_of(papers.fedavg()), papers.fedavg(), out=out, rounds=1, training=Training(rate=0.5, batch=4, epochs=2)
        )


def test_a_server_that_is_open_runs_nothing(tmp_path, monkeypatch):
    """A SuperLink that was started with Flower's own command, on a port that answers to anybody."""
    monkeypatch.delenv(NODES, raising=False)
    (tmp_path / "experiment.toml").write_text(for_network(experiment(rounds=1)).to_toml())
    grid, context = grid_of(papers.fedavg()), SimpleNamespace(run_config={"out": str(tmp_path / "run")}, run_id=1)
    with pytest.raises(
        HardyError, match="this SuperLink was not started by `hardy deploy server`: its port would answer"
    ):
        server_app(tmp_path / "experiment.toml")(grid, context)
    assert not grid.sent and not (tmp_path / "run").exists()


def test_a_site_answers_only_about_the_experiment_it_agreed_to(tmp_path, monkeypatch):
    """The server's text is compared before anything in it is looked up; a threat it adds is not run either."""
    (tmp_path / "agreed.toml").write_text(for_network(experiment(rounds=1)).to_toml())
    data = federation()
    apps = [client_app(tmp_path / "agreed.toml", model=net, data=data) for _ in data.clients]
    grid = Grid(apps)
    said = []

    def ask(asked):
        message = Message(wire.message({}, experiment=asked.to_toml()), 100, "query")
        try:
            return wire.settings(grid.apps[100](message, grid.contexts[100]).content)
        except HardyError as error:
            said.append(str(error))

    ask(for_network(experiment(rounds=1)))
    assert "was not started by `hardy deploy node`" in said.pop()
    monkeypatch.setenv(SITE, str(tmp_path))
    assert "profile" in ask(for_network(experiment(rounds=1)))
    ask(for_network(experiment(rounds=1, model="os:system")))
    assert "another experiment than the app this site agreed to: model is 'os:system', not" in said.pop()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["sent", "not answered"]
    with pytest.raises(HardyError, match="names no experiment, so the server could ask for any"):
        message = Message(wire.message({}, experiment=experiment().to_toml()), 100, "query")
        client_app(model=net, data=data)(message, grid.contexts[100])


def test_nodes_measure_their_own_robustness():
    method, data = papers.fedbn(), federation()
    run = fit(method, data=data, rounds=2)
    near = hardy.evaluate(run, "fgsm", checks=False, quiet=True)["robust_accuracy"]["fgsm"]
    far = run_over(grid_of(method, data), method, rounds=2, evaluation=EvaluationChoice(threats=("fgsm",)))
    assert far.robust["fgsm"] == {key: near[key] for key in far.robust["fgsm"]}


def test_nodes_measure_metrics_at_home():
    """The same figures as on one machine, to the last bit; clients that keep their norms too."""
    choice = EvaluationChoice(metrics=("auroc", "ece"), threats=("fgsm@16/255",), select_metric="auroc")
    method = papers.fedbn()
    near = fit(method, rounds=2, evaluation=choice).summary()
    far = run_over(grid_of(method), method, rounds=2, evaluation=choice).summary()
    for summary in (far, near):
        del summary["best"]["validation_accuracy"]  # the median of what nodes say; on one machine the mean
    for key in ("metrics", "robust_metrics", "best"):
        assert far[key] == near[key] and far[key]


def test_a_metric_out_of_its_bounds_is_not_believed(monkeypatch):
    from hardy.parts.metrics import AUROC

    monkeypatch.setattr(AUROC, "measure", lambda self, logits, labels: 7.0)
    choice = EvaluationChoice(metrics=("auroc",))
    found = run_over(grid_of(papers.fedavg()), papers.fedavg(), rounds=1, evaluation=choice).summary()["metrics"]
    assert found["auroc"]["mean"] is None and found["auroc"]["missing"] == [0, 1, 2, 3]


def test_an_attack_that_fails_costs_no_other_figures(caplog, monkeypatch):
    def fail(*_):
        raise HardyError("this attack fails")

    monkeypatch.setattr(type(parse_threat("pgd-3").attack), "perturb", fail)
    method, data, choice = papers.fedbn(), federation(), EvaluationChoice(select="pgd-3")
    near = fit(method, data=data, rounds=1)
    far = run_over(grid_of(method, data), method, rounds=1, evaluation=choice)
    assert far.figures.latest == near.figures.latest
    assert "client 0, evaluate: this attack fails" in caplog.text


def test_the_best_round_is_chosen_by_the_median_of_what_nodes_say(tmp_path):
    """One that says 1.0 of the first round and 0.0 of all others would choose it by the mean."""
    method, choice = papers.fedbn(), EvaluationChoice(select="FGSM@ 0.3")
    grid = grid_of(method)

    def boast(node, kind, reply):
        if kind == "evaluate" and node == 103:
            said = reply.content.metric_records["accuracy"]
            for name in set(said) - {"round"}:
                said[name] = 1.0 if said["round"] == 1 else 0.0
        return reply

    grid.spoil = boast
    best = run_over(grid, method, rounds=4, evaluation=choice, out=tmp_path / "run").figures.best
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [float(np.median(line["selection_accuracy"]["by_client"])) for line in lines]
    assert best["round"] == scores.index(max(scores)) + 1 and best["validation_accuracy"] == max(scores)


def test_a_trial_reads_the_experiment_alone(tmp_path):
    """Nothing from Python: nodes take their client's rows of the experiment's own data."""
    asked = hardy.config.parse(
        'rounds = 1\nmethod = "fedrbn"\n[data]\nclients = 1\nlimit = 40\n'
        'source = { name = "mini_digits", domains = ["mail", "pen"] }\nadversarial = ["mail"]\n'
        '[training]\nsteps = 2\nbatch = 8\n[engine]\ndevice = "cpu"\nprecision = "float64"\n'
        "[network]\ndeadline = 60.0\nclients = 2\n"
    )
    here = dataclasses.replace(asked.engine, name="sequential")
    near = hardy.fit(dataclasses.replace(asked, engine=here, network=NetworkChoice()), quiet=True)
    grid = Grid([client_app() for _ in near.engine.data.clients])
    far = run_server(asked, grid, tmp_path / "run", quiet=True)
    assert_close(near.state.shared, far.state.shared, 1e-9)
    assert_close(near.state.reported, far.state.reported, 1e-9)
    assert near.figures.latest == far.figures.latest
    with pytest.raises(HardyError, match="holds a run of another experiment: rounds is 2, not 1"):
        run_server(dataclasses.replace(asked, rounds=2), grid, tmp_path / "run", quiet=True)
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"wire": {"0": {"down": ' in line
    assert "on the wire: client" in (tmp_path / "run" / "report.html").read_text()


def wider(norm):
    return tiny_cnn(norm=norm, shape=SHAPE, classes=3, width=2.0)


@pytest.mark.parametrize(
    "rule", [half_precision(), eight_bit(block=64), top_k(share=0.1)], ids=lambda rule: type(rule).__name__
)
def test_compressed_updates_are_small_and_what_is_lost_is_sent_later(rule):
    method, data = papers.fedavg(), federation()
    plain, small = (
        run_over(
            grid_of(method, data, model=wider),
            method,
            model=wider,
            rounds=6,
            network=NetworkChoice(clients=4, compression=c),
        )
        for c in (None, rule)
    )
    up = [run.engine.account({"lost": {}})["wire"]["0"]["up"] for run in (plain, small)]
    assert up[1] < up[0] / 2
    start = plain.engine.plan.first(Placement.SHARED, 1)
    moved, apart = (
        sum((a[n] - b[n].double()).square().sum() for n in plain.engine.plan.trained) ** 0.5
        for a, b in ((plain.state.shared, start), (plain.state.shared, small.state.shared))
    )
    assert apart < {"HalfPrecision": 1e-3, "EightBit": 0.02, "TopK": 0.7}[type(rule).__name__] * moved


@pytest.mark.parametrize("size", [1, 7, 8, 1000])
def test_eight_bits_are_off_by_half_a_step_of_their_block(size):
    change = torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-6, 6, (size,))
    rule = eight_bit(block=8)
    pieces = rule.compress(change)
    assert pieces["value"].dtype == torch.int8 and pieces["value"].numel() == size
    for start in range(0, size, 8):
        part = slice(start, start + 8)
        error = (rule.expand(pieces, change) - change)[part].abs().max()
        assert error <= change[part].abs().max() / 254 * (1 + 1e-4)
    with pytest.raises(HardyError, match="block of eight_bit is 0"):
        eight_bit(block=0)
    assert not rule.expand(rule.compress(torch.zeros(9)), torch.zeros(9)).any()


def test_error_feedback_sends_everything_in_the_end():
    change, lost, sent = torch.randn(50, dtype=torch.float64), {}, torch.zeros(50, dtype=torch.float64)
    for turn in range(30):
        new = {"w": change if turn == 0 else torch.zeros_like(change)}
        pieces, lost = wire.compress(top_k(share=0.1), new, {"w": torch.zeros_like(change)}, lost, ["w"])
        sent += wire.expand(top_k(share=0.1), pieces, {"w": torch.zeros_like(change)}, ["w"])["w"]
    torch.testing.assert_close(sent, change)


def test_pieces_that_fit_nothing_are_refused():
    sent = {"w": torch.zeros(4)}
    for came in ({}, {"w:value": np.ones(2)}, {"w:value": np.ones(2), "w:index": np.array([0, 9])}, {"w:index": "x"}):
        assert "w" not in wire.expand(top_k(), came, sent, ["w"])


def test_pieces_do_not_unpack_to_all_memory():
    """A column times a row would be a matrix, and a scale for each of 1024 numbers a thousand times what came."""
    sent, many = {"w": torch.zeros(4)}, np.ones(10**5, np.float32)
    column = {"w:value": many[:, None].astype(np.float16), "w:scale": many[None]}
    blocks = {"w:value": np.ones(4, np.int8), "w:scale": many}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rule, came in ((half_precision(), column), (eight_bit(block=10**4), blocks)):
        assert "w" not in wire.expand(rule, came, sent, ["w"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 10**5  # KiB; 40 GB and 4 GB were asked for


def test_nodes_bring_their_own_data(tmp_path):
    rng = np.random.default_rng(0)
    grid = Grid([client_app(), client_app()])
    for number, context in enumerate(grid.contexts.values()):
        sizes = {"train": 20 + number, "test": 6}
        arrays = {f"x_{part}": rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) for part, n in sizes.items()}
        labels = {f"y_{part}": rng.integers(0, 3, n) for part, n in sizes.items()}
        np.savez(tmp_path / f"{number}.npz", **arrays, **labels)
        context.node_config |= {
            "data": str(tmp_path / f"{number}.npz"),
            "classes": 3,
            "domain": f"ward-{number}",
            "kind": "AT" if number else "ST",
        }
    asked = hardy.config.parse(
        'rounds = 1\nmethod = "fedrbn"\n[network]\nclients = 2\n[training]\nsteps = 1\nbatch = 8'
    )
    run = run_server(asked, grid, tmp_path / "run", quiet=True)
    assert [(c.domain, c.kind, len(c.train)) for c in run.engine.data.clients] == [
        ("ward-0", "ST", 18),
        ("ward-1", "AT", 19),
    ]
    assert run.figures.latest["by_domain"].keys() == {"ward-0", "ward-1"}
    assert '"labels"' not in (tmp_path / "run" / "clients.json").read_text()
    with pytest.raises(HardyError, match=r"kept their .* at home"):
        hardy.load(tmp_path / "run", data=federation(sizes=(18, 19)))
    for settings, said in {
        (("colour", "red"),): "'colour' is unknown",
        (("kind", "at"),): "it must be AT or ST",
        (("data", "nowhere.npz"),): "no such file or folder",
        (("source", "mini_digits"),): r"name a folder for them: state=",
    }.items():
        with pytest.raises(HardyError, match=said):
            Node(asked.to_toml(), (("client", 0), *settings), Given())


def test_the_network_of_a_deployment_can_be_had_without_its_rows(tmp_path):
    grid, rng = Grid([client_app(), client_app()]), np.random.default_rng(0)
    for number, context in enumerate(grid.contexts.values()):
        x, y = rng.integers(0, 256, (20, 8, 8), dtype=np.uint8), rng.integers(0, 3, 20)
        np.savez(tmp_path / f"{number}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        context.node_config |= {"data": str(tmp_path / f"{number}.npz"), "classes": 3}
    asked = hardy.config.parse(
        'rounds = 1\nmethod = "fedavg"\nmodel = "tiny_cnn"\n[training]\nsteps = 1\nbatch = 8\n'
        "[network]\nclients = 2\npatience = 20.0"
    )
    run = run_server(asked, grid, tmp_path / "run", quiet=True)
    loaded = hardy.load(tmp_path / "run")
    assert_close(loaded.state.shared, run.state.shared, 0)
    assert loaded.customise()(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(HardyError, match="let the nodes measure"):
        hardy.evaluate(tmp_path / "run")
    pytest.importorskip("onnx", reason="the export extra is not installed")
    manifest = loaded.export(tmp_path / "net.onnx")
    assert json.loads(manifest.read_text())["settings"][0]["standard_accuracy"]["mean"] is None


def test_hostile_clients_and_rules_that_remember_are_the_same_over_a_network(tmp_path):
    """Poisoned rows, weights cut, momenta of clients that were not asked, and how well the backdoor works."""
    stages = (truncated_weights(f=1, share=0.4), delayed_momentum(), nearest_neighbour_mixing(f=1, weigh="samples"))
    rule = pipeline(pre=stages, rule=trimmed_mean(f=1, weigh="samples"))
    method = papers.fedavg().replace(aggregator=rule)
    attack = backdoor(trigger=pixel_pattern(size=2), target=1, boost=2.0)
    options = {"faults": Faults(hostile=(1,), byzantine=attack), "cohort": Cohort(clients=3), "rounds": 3}
    one, far = fit(method, **options), run_over(grid_of(method), method, **options)
    assert_close(everything(one), everything(far), 1e-9)
    assert one.figures.metrics["backdoor_success"]["by_client"] == far.figures.metrics["backdoor_success"]["by_client"]


def test_a_server_with_rows_of_its_own_trusts_the_same_over_a_network(tmp_path):
    data = federation()
    x, y = data.x_train[:20].transpose(0, 2, 3, 1), data.y_train[:20]
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    server = ServerChoice(rows=12, source=str(tmp_path / "own.npz"))
    method = papers.fedavg().replace(aggregator=fltrust())
    one, far = fit(method, rounds=2, server=server), run_over(grid_of(method), method, rounds=2, server=server)
    assert_close(everything(one), everything(far), 1e-9)
    with pytest.raises(HardyError, match=r"Give server\.source"):
        run_over(grid_of(method), method, rounds=1, server=ServerChoice(rows=4))
