"""Every Byzantine attack against its formula, written once more in plain numpy; and who the hostile clients are."""

import dataclasses
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from conftest import experiment, federation, fit, net
from hardy import config, papers
from hardy.core.messages import Slot, Updates, Work
from hardy.core.partition import Role
from hardy.errors import HardyError
from hardy.faults import byzantine
from hardy.faults.byzantine import affected_tensors, corrupt
from hardy.faults.injection import Faults
from hardy.runs.prepare import prepare

ROLES = {"w": Role.WEIGHT, "mean": Role.NORM_MEAN, "var": Role.NORM_VAR, "count": Role.COUNTER}
HOSTILE = {1, 4}
HONEST = [0, 2, 3]


def scene(bases=1, clients=5):
    draw = torch.Generator().manual_seed(0)
    slots = [Slot(client, base) for client in reversed(range(clients)) for base in range(bases)]
    clients_of = [slot.client for slot in slots]

    def random(*shape):
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    shared = {"w": random(len(slots), 2, 3), "mean": random(len(slots), 4), "var": random(len(slots), 4)}
    sent = {"w": random(bases, 2, 3), "mean": random(bases, 4), "var": random(bases, 4)}
    updates = Updates(
        slots=slots,
        shared={**shared, "count": torch.arange(len(slots))},
        reported={"own.mean": random(len(slots), 4)},
        weights=torch.tensor(clients_of).double() + 10,
        steps=torch.full((len(slots),), 3),
        loss=random(len(slots)),
    )
    work = Work(
        round=0,
        rate=0.1,
        slots=slots,
        shared={**sent, "count": torch.zeros(bases, dtype=torch.int64)},
        reported={"own.mean": random(clients, bases, 4)},
    )
    return updates, work


def attacked(attack, affects="both", bases=1, aggregate=None, hostile=HOSTILE):
    """{(name, client, base): (what it sends, what it would have sent)} and the updates."""
    updates, work = scene(bases)
    roles = affected_tensors(affects, {**ROLES, "own.mean": Role.NORM_MEAN})
    said = corrupt(attack, updates, work, hostile=hostile, roles=roles, aggregate=aggregate)
    return updates, work, said


def row(updates, name, client, base=0):
    values = {**updates.shared, **updates.reported}[name]
    return values[list(updates.slots).index(Slot(client, base))].numpy()


def naive(name, honest, own, sent):
    """One number of one tensor, as the papers write it: (weight, mean, variance) of each attack."""
    mean = sum(honest) / len(honest)
    deviation = (sum((h - mean) ** 2 for h in honest) / (len(honest) - 1)) ** 0.5
    return {
        "sign_flipping": (sent - (own - sent), -own, own),
        "fall_of_empires": (sent - 3.0 * (mean - sent), -3.0 * mean, own),
        "a_little_is_enough": (mean + 1.5 * deviation,) * 3,
        "mimic": (honest[0],) * 3,
        "stale": (sent,) * 3,
        "not_finite": (float("-inf"),) * 3,
        "label_flipping": (own,) * 3,
        "tiny_loss": (own,) * 3,
        "inflated_count": (own,) * 3,
    }[name]


ATTACKS = {
    "sign_flipping": byzantine.sign_flipping(),
    "fall_of_empires": byzantine.fall_of_empires(factor=3.0),
    "a_little_is_enough": byzantine.a_little_is_enough(factor=1.5),
    "mimic": byzantine.mimic(),
    "stale": byzantine.stale(),
    "not_finite": byzantine.not_finite(value="-inf"),
    "label_flipping": byzantine.label_flipping(),
    "tiny_loss": byzantine.tiny_loss(),
    "inflated_count": byzantine.inflated_count(),
}


@pytest.mark.parametrize("affects", ["weights", "statistics", "both"])
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_formula(name, affects):
    updates, work, said = attacked(ATTACKS[name], affects, bases=2)
    for tensor, place in (("w", 0), ("mean", 1), ("var", 2), ("own.mean", 1)):
        spoken = affects == "both" or (affects == "weights") == (tensor == "w")
        for slot in updates.slots:
            given = row(updates, tensor, slot.client, slot.base)
            expected = given
            if slot.client in HOSTILE and spoken:
                honest = [row(updates, tensor, client, slot.base) for client in HONEST]
                sent = {**work.shared, **work.reported}[tensor]
                sent = sent[slot.client, slot.base] if tensor == "own.mean" else sent[slot.base]
                values = zip(*(h.flat for h in honest), strict=True), given.flat, sent.numpy().flat
                expected = [naive(name, h, own, s)[place] for h, own, s in zip(*values, strict=True)]
            np.testing.assert_allclose(
                row(said, tensor, slot.client, slot.base).ravel(), np.ravel(expected), rtol=1e-13
            )
    assert torch.equal(said.shared["count"], updates.shared["count"])


def test_figures():
    lying = torch.tensor([slot.client in HOSTILE for slot in scene()[0].slots])
    updates, _, said = attacked(byzantine.tiny_loss(loss=1e-9))
    assert said.loss.tolist() == torch.where(lying, 1e-9, updates.loss).tolist()
    updates, _, said = attacked(byzantine.inflated_count(factor=7.0))
    assert said.weights.tolist() == torch.where(lying, 7 * updates.weights, updates.weights).tolist()


def test_the_search_climbs_to_the_edge_of_what_a_rule_follows():
    def search(moved):
        return byzantine.a_little_is_enough().tune(byzantine.Trial(moved, lambda attack: []))

    for edge in (0.3, 2.7, 13.0):
        found = search(lambda attack, edge=edge: attack.factor if attack.factor <= edge else 0.0).factor
        assert 0.9 * edge < found <= edge
    assert search(lambda attack: 1 / (1 + abs(attack.factor - 0.2))).factor == pytest.approx(0.2, rel=0.02)
    assert search(lambda attack: attack.factor).factor == pytest.approx(16 * 2**4)  # a mean follows without end
    assert search(lambda attack: float("nan")).factor == 1.0
    assert byzantine.a_little_is_enough(factor=3.0).tune(byzantine.Trial(None, None)).factor == 3.0


def test_the_search_asks_how_far_the_rule_is_moved():
    """A rule that leaves out replies further than 0.8 from the middle: the hostile clients stay just inside."""

    def wary(updates):
        def kept(values):
            far = (values - values.median(0).values).flatten(1).norm(dim=1)
            return values[far <= 0.8].mean(0, keepdim=True)

        return {name: kept(value) if name == "w" else value[:1] for name, value in updates.shared.items()}

    updates, _, said = attacked(byzantine.a_little_is_enough(), "weights", aggregate=wary)
    values = said.shared["w"]
    far = (values - values.median(0).values).flatten(1).norm(dim=1)
    lying = torch.tensor([slot.client in HOSTILE for slot in updates.slots])
    assert (far[lying] > 0.7).all() and (far[lying] <= 0.8).all()


def test_without_honest_neighbours_hostile_clients_look_at_each_other():
    updates, _, said = attacked(byzantine.mimic(), hostile=set(range(5)))
    np.testing.assert_array_equal(row(said, "w", 3), row(updates, "w", 0))
    updates, _, said = attacked(
        byzantine.a_little_is_enough(factor=2.0), hostile={0, 1, 2, 3}
    )  # a single one does not deviate
    np.testing.assert_array_equal(row(said, "w", 3), row(updates, "w", 4))


def test_hostile_clients_are_drawn_once_and_grow_in_number():
    chosen = [Faults(hostile=n, byzantine=byzantine.mimic()).hostile_clients(7, 20) for n in range(1, 20)]
    assert all(len(hostile) == n for n, hostile in enumerate(chosen, 1))
    assert all(one < two for one, two in pairwise(chosen))
    assert chosen[4] != Faults(hostile=5, byzantine=byzantine.mimic()).hostile_clients(8, 20)
    assert Faults(hostile=(3, 1, 3), byzantine=byzantine.mimic()).hostile_clients(7, 4) == {1, 3}


def test_flipped_labels_are_the_hostile_clients_own():
    """Honest clients that hold the same rows keep the right labels, and nothing given is written to."""
    data = federation()
    clients = (*data.clients[:3], dataclasses.replace(data.clients[3], train=data.clients[0].train))
    data = dataclasses.replace(data, clients=clients)
    before = data.y_train.copy()
    spoilt = Faults(hostile=(3,), byzantine=byzantine.label_flipping()).add_hostile_clients(data, 0)
    assert np.array_equal(data.y_train, before)
    for number in range(3):
        assert np.array_equal(spoilt.y_train[spoilt.clients[number].train], before[clients[number].train])
    flipped = spoilt.clients[3].train
    assert np.array_equal(spoilt.y_train[flipped], 2 - before[clients[0].train])
    assert np.array_equal(spoilt.x_train[flipped], data.x_train[clients[0].train])
    assert np.array_equal(spoilt.clients[3].test, clients[3].test)


def test_added_clients_leave_all_rows_to_the_honest():
    data = federation()
    joined = Faults(hostile=5, added=True, byzantine=byzantine.sign_flipping()).add_hostile_clients(data, 0)
    assert joined.clients[:4] == data.clients and len(joined.clients) == 9
    assert np.array_equal(joined.clients[8].train, data.clients[0].train)
    assert not len(joined.clients[8].test) and not len(joined.clients[8].validation)
    assert Faults(hostile=5, added=True, byzantine=byzantine.sign_flipping()).hostile_clients(0, 9) == set(range(4, 9))
    run = fit(papers.fedavg(), rounds=1, faults=Faults(hostile=5, added=True, byzantine=byzantine.stale()))
    assert run.figures.latest["by_client"][4:] == [None] * 5


def test_an_attack_without_effect_is_honest():
    """One client that copies itself: joining all lanes into one changes nothing in a rule that collects."""
    honest = fit(papers.fednova(), rounds=2)
    same = fit(papers.fednova(), rounds=2, faults=Faults(hostile=2, byzantine=byzantine.inflated_count(factor=1.0)))
    # not to the last bit on every processor: rows that lie elsewhere in memory may be added in another order
    torch.testing.assert_close(same.state.shared, honest.state.shared, rtol=0, atol=1e-15)


def test_impossible_wishes_are_refused():
    mimic = byzantine.mimic()
    for faults, message in (
        ({"hostile": 4, "byzantine": mimic}, "faults.hostile is 4 of 4 clients; at least one must be honest"),
        ({"hostile": (9,), "byzantine": mimic}, "faults.hostile names client 9; there are 4"),
        (
            {"hostile": 1, "byzantine": mimic, "affects": "statistics"},
            "faults.affects is 'statistics', but method 'fedbn' sends no such",
        ),
        ({"hostile": 1}, "faults.hostile is 1, but faults.byzantine is absent. Known attacks: sign_flipping"),
        ({"hostile": -1, "byzantine": mimic}, "faults.hostile is -1; it must be 0 or more"),
        ({"hostile": (1,), "added": True, "byzantine": mimic}, "say how many"),
        ({"byzantine": mimic}, r"faults.byzantine is Mimic(), but faults.hostile is 0, so it has no effect. Set"),
        ({"hostile": (), "byzantine": mimic}, r"faults.byzantine is Mimic(), but faults.hostile is (), so it has no"),
        ({"added": True}, "faults.added is True, but faults.hostile is 0, so it has no effect"),
        ({"affects": "weights"}, "faults.affects is 'weights', but faults.hostile is 0, so it has no effect"),
        (
            {"hostile": 1, "byzantine": byzantine.tiny_loss(), "affects": "weights"},
            "faults.affects is 'weights', but tiny_loss changes no tensors, so it has no effect",
        ),
    ):
        with pytest.raises(HardyError, match=re.escape(message)):
            prepare(experiment(faults=Faults(**faults)), method=papers.fedbn(), model=net, data=federation())
    with pytest.raises(HardyError, match=r"fall_of_empires factor \(τ\) is -1; it must be above 0"):
        byzantine.fall_of_empires(factor=-1)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_toml_round_trip(name):
    affects = "weights" if ATTACKS[name].changes_tensors else "both"
    made = experiment(faults=Faults(hostile=(1, 2), affects=affects, byzantine=ATTACKS[name]))
    assert config.parse(made.to_toml()).faults == made.faults
    assert config.parse(f"[faults]\nhostile = 3\nbyzantine = '{name}'").faults.hostile == 3
