"""The clock of the simulation: who is late, how long a round takes, and who is online."""

from math import log

import numpy as np
import pytest

import hardy
from conftest import federation, fit, net
from hardy import papers
from hardy.core.clock import Clock, ClockChoice
from hardy.core.cohort import Cohort
from hardy.core.messages import Slot
from hardy.errors import HardyError

SLOTS = [Slot(0), Slot(1), Slot(2)]


def clock(**options):
    """Clients 0, 1, 2 compute 1, 2, 3 s; 100 bytes go each way."""
    return Clock(ClockChoice(speed=1.0, **options), 0, macs=lambda _, slot: slot.client + 1.0, traffic=lambda slot: 100)


@pytest.mark.parametrize(
    ("options", "lost", "late", "seconds"),
    [
        ({}, {}, [], 3.0),
        ({"up": 100.0, "down": 50.0}, {}, [], 6.0),  # 3 s of work, 1 s up, 2 s down
        ({"deadline": 2.5}, {}, [2], 2.5),
        ({"enough": 2}, {}, [2], 2.0),
        ({"enough": 1, "deadline": 2.5}, {}, [1, 2], 1.0),
        ({"enough": 3, "deadline": 2.5}, {}, [2], 2.5),
        ({}, {2: "late"}, [], 2.0),  # nobody waits for who will not come
        ({"deadline": 10.0}, {2: "crashed"}, [], 10.0),  # until the deadline: nobody knows
        ({"deadline": 0.5}, {}, [0, 1, 2], 0.5),
    ],
)
def test_late_clients_and_the_length_of_a_round(options, lost, late, seconds):
    slots = [slot for slot in SLOTS if lost.get(slot.client) != "crashed"]
    found, took = clock(**options).end(0, slots, lost)
    assert list(found) == late and set(found.values()) <= {"late"} and took == pytest.approx(seconds)


def test_several_slots_of_a_client_take_their_sum():
    assert clock().seconds(0, [Slot(1, 0), Slot(1, 1)]) == {1: 4.0}


def test_speeds_are_log_normal_and_a_clients_own():
    spread = clock(spread=0.5)
    logs = np.array([log(spread.seconds(0, [Slot(k)])[k] / (k + 1)) for k in range(1000)])
    assert abs(np.median(logs)) < 0.08 and abs(logs.std() - 0.5) < 0.05
    assert spread.seconds(0, [Slot(5)]) == spread.seconds(9, [Slot(5)])


def test_as_many_are_online_as_the_hour_says():
    day = clock(online=0.4, swing=0.5)

    def share(hour):
        online = day.online_at(hour * 3600.0)
        return np.mean([online(k) for k in range(1000)])

    assert abs(share(2) - 0.6) < 0.06 and abs(share(14) - 0.2) < 0.06
    world = clock(online=0.4, swing=0.5, zones=24)
    online = world.online_at(2 * 3600.0)
    assert abs(np.mean([online(k) for k in range(1000)]) - 0.4) < 0.06
    assert clock().online_at(0.0) is None


def test_cohorts_are_drawn_among_those_online():
    online = clock(online=0.3).online_at(0.0)
    drawn = Cohort(clients=50).sample(0, 0, 100_000, online)
    assert len(drawn) == 50 and all(map(online, drawn)) and drawn == sorted(set(drawn))
    assert Cohort(clients=5).sample(0, 0, 5, lambda client: client == 3) == [3]


def test_when_rounds_begin_is_found_again_from_nothing():
    options = {"clock": ClockChoice(speed=1e4, spread=0.5, online=0.5, swing=0.5), "cohort": Cohort(clients=2)}
    run = fit(papers.fedavg(), rounds=4, data=federation((8, 8, 8, 8, 8, 8)), **options)
    begun = [run.server.clock.start(number, run.server.ask) for number in range(5)]
    other = fit(papers.fedavg(), rounds=1, data=federation((8, 8, 8, 8, 8, 8)), **options)
    assert [other.server.clock.start(number, other.server.ask) for number in range(5)] == begun
    assert begun[4] == pytest.approx(run.figures.clock_seconds) and begun[1] > 0


def test_over_selection_is_quicker_and_late_replies_do_not_count():
    data = federation((8, 8, 8, 8, 8, 8))
    options = {"data": data, "rounds": 3, "cohort": Cohort(clients=4)}
    slow = fit(papers.fedavg(), clock=ClockChoice(speed=1e4, spread=1.0), **options)
    quick = fit(papers.fedavg(), clock=ClockChoice(speed=1e4, spread=1.0, enough=2), **options)
    assert quick.figures.lost == {"late": 6} and not slow.figures.lost
    assert 0 < quick.figures.clock_seconds < slow.figures.clock_seconds
    assert quick.summary()["clock"]["seconds"] == quick.figures.clock_seconds
    assert quick.last_line["clock_seconds"] > 0


def test_the_time_to_an_accuracy_is_noted(tmp_path):
    run = fit(papers.fedavg(), rounds=3, clock=ClockChoice(speed=1e4, target=0.01), out=tmp_path / "run")
    reached = run.summary()["clock"]["reached"]
    assert reached["round"] == 1 and 0 < reached["seconds"] < run.figures.clock_seconds
    loaded = hardy.load(tmp_path / "run", method=papers.fedavg(), model=net, data=federation())
    assert loaded.summary()["clock"] == run.summary()["clock"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deadline": 3.0}, "speed is 0"),
        ({"speed": 1.0, "up": 0.0}, "clock.up is 0"),
        ({"speed": 1.0, "enough": 0}, "clock.enough is 0"),
        ({"speed": 1.0, "online": 0.9, "swing": 0.5}, "at most 1"),
        ({"speed": 1.0, "zones": 3}, "no effect"),
        ({"speed": -1.0}, "clock.speed is -1"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(HardyError, match=said):
        ClockChoice(**options)


@pytest.mark.parametrize(
    ("clock", "cohort", "said"),
    [
        (ClockChoice(speed=1.0, enough=4), Cohort(), "so it has no effect"),
        (ClockChoice(speed=1.0, online=0.5), Cohort(fraction=0.5, sampling="poisson"), "sampling = fixed"),
    ],
)
def test_what_has_no_effect_is_refused(clock, cohort, said):
    with pytest.raises(HardyError, match=said):
        fit(papers.fedavg(), rounds=1, clock=clock, cohort=cohort)
