"""An experiment made ready to run: its rows dealt, its method bound to its model, everything checked."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from hardy import config
from hardy.attacks.base import Attack, refuse_inputs, refuse_usual_radius
from hardy.attacks.threats import parse_threat
from hardy.config import FROM_PYTHON, Experiment, construct, convert, named
from hardy.core import random, tensors
from hardy.core.clock import Clock
from hardy.core.engine import Measures, RunEngine, Trains
from hardy.core.federation import LISTED, MOST_MEASURED, Federation, LazyClients
from hardy.core.messages import Slot
from hardy.core.method import Method, Plan
from hardy.core.partition import Placement
from hardy.core.protocols import Objective, walk, within
from hardy.core.server import PipelinedServer, Server
from hardy.core.spending import privacy_spent, refuse_leaks
from hardy.data import sources
from hardy.data.capacity import Capacity, with_capacity
from hardy.data.dataset import Dataset
from hardy.data.given import OwnData, as_data
from hardy.data.kinds import with_kinds
from hardy.data.own_files import locate
from hardy.data.population import populate
from hardy.data.server_rows import own_rows, take_rows
from hardy.data.shifts import Shift, with_shift
from hardy.data.splits import federate
from hardy.engines import DeviceData
from hardy.engines.sequential import Sequential
from hardy.errors import HardyError
from hardy.evaluation.measure import LocalMeasure
from hardy.evaluation.serving import chosen_branch, refuse_common, refuse_robustness
from hardy.parts.aggregators.trust import trusts_server
from hardy.registry import find
from hardy.runs.costs import image_macs
from hardy.runs.networks import OwnModel, model_builder
from hardy.runs.run import Run, RunTotals
from hardy.runs.unseen import refuse_held_out

_LOG = logging.getLogger("hardy")


class NetworkEngine(RunEngine, Measures, Protocol):
    """An engine whose clients are elsewhere: they train and measure there."""


Connect = Callable[[Plan, Federation], NetworkEngine]
"""makes one"""


def prepare(
    experiment: Experiment,
    *,
    method: Method | None = None,
    model: OwnModel | config.Table | str | None = None,
    data: OwnData | None = None,
    data_folder: Path | str | None = None,
    network: Connect | None = None,
) -> Run:
    """Everything built and checked, nothing trained."""
    given = data is not None and network is None
    data = None if data is None else as_data(data, value_range=None if network else experiment.data.range)
    if data is None and network is None:
        experiment = with_data_place(experiment, data_folder)
    data = _dealt(experiment, data, data_folder, given=given)
    data = _with_sample(experiment, data, far=network is not None)
    data, own_data = _with_server_rows(experiment, data, data_folder, far=network is not None)
    if network is None:  # nodes bring their own
        data = experiment.faults.add_hostile_clients(data, experiment.seed)
    else:
        data = replace(data, bounded=len(data.shape) == 3 or experiment.data.range is not None)
    plan = bind(experiment, data, method, model)
    if experiment.data.held_out:
        if network is not None or not data.held_out:
            raise HardyError(
                "data.held_out takes domains out of a data set on this machine; over a network, and with a federation "
                "that is given, nobody holds their rows. Leave it out."
            )
        refuse_held_out(plan, experiment.data.held_out_statistics)
    _refuse_attacks(experiment, plan.method, data)
    device = experiment.engine.find_device()
    counted: dict[Objective, int] = {}
    kind = PipelinedServer if device.type == "cuda" and network is None else Server
    server = kind(
        plan=plan,
        clients=data.clients,
        seed=experiment.seed,
        cohort=experiment.cohort,
        faults=experiment.faults,
        admission=experiment.admission.for_network(len(data.clients)) if network else experiment.admission,
        training=experiment.training,
        drift=experiment.evaluation.drift,
        clock=_clock(experiment, plan, data, counted, far=network is not None),
    )
    for warning in server.check():
        _LOG.warning(warning)
    refuse_leaks(server, over_network=network is not None)
    _refuse_evaluation(experiment, plan, server, far=network is not None)
    if own_data is not None:
        server = replace(server, own=_server_engine(experiment, plan, own_data, device))
    engine: RunEngine
    measures: Measures
    if network is not None:
        engine = measures = network(plan, data)
    else:
        device_data = DeviceData(data, device, experiment.engine.precision, experiment.data.augmentation)
        engine = here = experiment.engine.make(plan, device_data, experiment.training, seed=experiment.seed)
        measures = LocalMeasure(here)
    state = server.start(engine.new_store)
    state = replace(
        state,
        shared=engine.cast(state.shared),
        memory=engine.cast(state.memory),
    )
    if method:
        experiment = replace(experiment, method=FROM_PYTHON)
    if model is not None:
        experiment = replace(experiment, model=FROM_PYTHON)
    if given:
        experiment = replace(experiment, data=replace(experiment.data, source=FROM_PYTHON))
    # what `auto` chose is kept: a resumed run must not choose again
    experiment = replace(experiment, engine=replace(experiment.engine, name=engine.name))
    return Run(
        experiment=experiment,
        server=server,
        engine=engine,
        measures=measures,
        state=state,
        figures=RunTotals(),
        counted=counted,
    )


def _dealt(
    experiment: Experiment, data: Federation | Dataset | None, folder: Path | str | None, *, given: bool
) -> Federation:
    """Who holds which rows."""
    if not isinstance(data, Federation):
        return federation(experiment, data, folder)
    if given and experiment.data.shift is not None:
        raise HardyError("data.shift cannot shift a federation that is given; use hardy.data.shifts.with_shift on it.")
    if given and experiment.data.capacity is not None:
        raise HardyError("data.capacity cannot be dealt to a federation that is given; use with_capacity on it.")
    if experiment.population.clients:
        raise HardyError("[population] draws clients from a data set; a federation that is given has its own.")
    return data


def _clock(
    experiment: Experiment, plan: Plan, data: Federation, counted: dict[Objective, int], *, far: bool
) -> Clock | None:
    if isinstance(data.clients, LazyClients) and plan.method.pooled:
        raise HardyError(f"method {plan.method.name!r} trains on all rows as one; a population has no end of them.")
    if not experiment.clock.speed:
        return None
    if far:
        raise HardyError("[clock] simulates the clients' time; over a network it is what it is. Leave it out.")
    if plan.method.pooled:
        raise HardyError(f"[clock] times clients, and method {plan.method.name!r} pools their rows. Leave it out.")
    asked = experiment.cohort.size(len(data.clients))
    if (enough := experiment.clock.enough) is not None and enough >= asked:
        raise HardyError(
            f"clock.enough is {enough}, and {asked} clients are asked, so it has no effect. Ask more (cohort), or "
            "leave it out."
        )
    if experiment.clock.online < 1 and experiment.cohort.sampling == "poisson":
        raise HardyError(
            f"clock.online is {experiment.clock.online:g} beside cohort.sampling = poisson, in which every client has "
            "a chance of its own, online or not. Take cohort.sampling = fixed."
        )
    return Clock(
        experiment.clock,
        experiment.seed,
        macs=partial(_slot_macs, experiment, plan, data, counted),
        traffic=partial(_slot_bytes, plan, data),
    )


def _slot_macs(
    experiment: Experiment, plan: Plan, data: Federation, counted: dict[Objective, int], round_number: int, slot: Slot
) -> float:
    client = data.clients[slot.client]
    objective = plan.objective(client, round_number)
    if objective not in counted:
        counted[objective] = image_macs(plan, objective, data.shape, len(data.classes), experiment.data.augmentation)
    return counted[objective] * experiment.training.examples(len(client.train), round_number)


def _slot_bytes(plan: Plan, data: Federation, slot: Slot) -> int:
    """What a slot is sent, and sends back, in float32."""
    part = plan.submodels.sizes(data.clients[slot.client].capacity) if plan.submodels else {}
    sent = tensors.select(plan.start, (*plan.names(Placement.SHARED), *plan.names(Placement.REPORTED)))
    return round(sum(part.get(name, value.numel()) * value.element_size() for name, value in sent.items()))


def _with_sample(experiment: Experiment, data: Federation, *, far: bool) -> Federation:
    """Which clients are measured and listed: all, or some of very many."""
    count, asked = len(data.clients), experiment.evaluation.clients
    if far:
        if asked is not None:
            raise HardyError(f"evaluation.clients is {asked}; over a network every node measures itself. Leave it out.")
        return data
    if asked is not None and asked > count:
        raise HardyError(f"evaluation.clients is {asked}, but there are {count} clients. Ask for fewer.")
    size = asked or (count if count <= MOST_MEASURED else LISTED)
    if size == count:
        return data
    drawn = random.stream(experiment.seed, "measured").choice(count, size, replace=False)
    return replace(data, sample=tuple(sorted(drawn.tolist())))


def _refuse_evaluation(experiment: Experiment, plan: Plan, server: Server, *, far: bool) -> None:
    """What cannot be measured of this method, or not over a network."""
    if experiment.clock.online < 1 and privacy_spent(server, 1):
        raise HardyError(
            f"clock.online is {experiment.clock.online:g}: who is asked then hangs on who is online, and the privacy "
            "account counts on cohorts drawn among all. Leave it out."
        )
    if experiment.server.rows and experiment.server.source is None and privacy_spent(server, 1):
        raise HardyError(
            f"server.rows is {experiment.server.rows}: the server takes them from the clients, and no noise covers "
            "what it learns from them. Give it a server.source of its own."
        )
    choice = experiment.evaluation
    _refuse_server_rows(experiment, plan)
    for measuring in (*choice.metrics, *choice.diagnosis):
        measuring.check(plan.method, server.setting)
    for branch in (choice.attack_branch, choice.predict_branch):
        chosen_branch(plan.method.norm, branch, "branch in evaluation")
    for level in choice.robustness:
        refuse_robustness(level, plan.method.norm)
    if any(parse_threat(threat).attack.common for threat in (*choice.threats, *choice.selecting)):
        refuse_common(plan)
        if far:
            raise HardyError("a threat with common=true needs all clients' images; over a network nobody has them.")


def _with_server_rows(
    experiment: Experiment, data: Federation, folder: Path | str | None, *, far: bool
) -> tuple[Federation, Federation | None]:
    """The clients' rows without those of the server, and these."""
    choice = experiment.server
    if not choice.rows:
        return data, None
    if choice.source is None:
        if far:
            raise HardyError("over a network the server holds none of the clients' rows. Give server.source.")
        return take_rows(data, choice.rows, experiment.seed)
    name, options = named(choice.source, "server.source")
    dataset = sources.load_dataset(name, _root(experiment, folder), value_range=experiment.data.range, **options)
    alone = federate(dataset, find("split", "iid")(), clients=1, pooled=True, validation=0.0, seed=experiment.seed)
    return data, own_rows(alone, choice.rows, experiment.seed, data)


def _refuse_server_rows(experiment: Experiment, plan: Plan) -> None:
    """Refuses rows of the server's that no rule uses, and a rule that lacks them."""
    using = [part for part in walk(plan.aggregator) if trusts_server(part)]
    if using and not experiment.server.rows:
        raise HardyError(
            "aggregator fltrust compares clients with training on rows of the server's own, but "
            "server.rows is 0. Set it, such as server.rows = 100."
        )
    if experiment.server.rows and not using:
        raise HardyError(
            f"server.rows is {experiment.server.rows}, but no rule compares clients with the server's own training. "
            "Take the aggregator fltrust, or leave [server] out."
        )


def _server_engine(experiment: Experiment, plan: Plan, data: Federation, device: torch.device) -> Trains:
    """Trains on the server's own rows as a client would, one base after another."""
    if kept := [name for name, where in plan.placement.items() if where is not Placement.SHARED]:
        raise HardyError(
            f"method {plan.method.name!r} keeps tensors with its clients ({kept[0]}, ...), and the server has none for "
            "its own rows. Usual fix: norm batch, and an optimiser born anew each round."
        )
    seed = int(random.stream(experiment.seed, "server").integers(2**62))
    return Sequential(plan, DeviceData(data, device, experiment.engine.precision), experiment.training, seed=seed)


def _refuse_attacks(experiment: Experiment, method: Method, data: Federation) -> None:
    """Refuses attacks, in training or evaluation, that cannot work on such inputs."""
    evaluation = experiment.evaluation
    for attack in (parse_threat(threat).attack for threat in (*evaluation.threats, *evaluation.selecting)):
        refuse_inputs(attack, data.shape, bounded=data.bounded)
    for inner in within(method):
        if isinstance(inner, Attack):
            refuse_inputs(inner, data.shape, bounded=data.bounded)
        else:
            refuse_usual_radius(inner, bounded=data.bounded)


def bind(
    experiment: Experiment,
    data: Federation,
    method: Method | None = None,
    model: OwnModel | config.Table | str | None = None,
) -> Plan:
    """The experiment's method on its model, or on those given; the same first tensors wherever it is called."""
    if method is not None and experiment.optimiser is not None:
        raise HardyError(
            f"optimiser is {experiment.optimiser}, but the method given as an object has one of its own, which counts. "
            "Give it to the method, or leave it out."
        )
    if experiment.data.augmentation is not None:
        experiment.data.augmentation.check(data.shape, experiment.training)
    chosen = method or config.method(experiment)
    build = model_builder(experiment.model if model is None else model, data, chosen.budget.base_width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        try:
            return chosen.bind(build, data.shape, experiment.training.batch)
        except (RuntimeError, ValueError, OverflowError, ZeroDivisionError, MemoryError) as error:
            raise HardyError(f"model {experiment.model!r} cannot be built for inputs {data.shape}: {error}") from error


def federation(experiment: Experiment, dataset: Dataset | None = None, folder: Path | str | None = None) -> Federation:
    """Who holds which rows of the experiment's data, or of a data set given."""
    choice = experiment.data
    if dataset is None:
        name, options = named(choice.source, "data.source")
        if name == FROM_PYTHON:
            raise HardyError("this run was started from Python with data of its own; pass them to resume or load.")
        dataset = sources.load_dataset(name, _root(experiment, folder), value_range=choice.range, **options)
    if experiment.population.clients:
        return populate(
            dataset,
            experiment.population,
            validation=choice.validation,
            limit=choice.limit,
            seed=experiment.seed,
            adversarial=choice.adversarial,
            capacity=None if choice.capacity is None else convert(choice.capacity, Capacity, "data.capacity"),
            shift=None if choice.shift is None else convert(choice.shift, Shift, "data.shift"),
            shift_test=choice.shift_test,
        )
    name, options = named(choice.split or ("natural" if dataset.natural else "blocks"), "data.split")
    rule = construct(find("split", name), options, "data.split")
    dealt = federate(
        dataset,
        rule,
        clients=choice.clients,
        pooled=choice.pooled,
        validation=choice.validation,
        test=choice.test,
        limit=choice.limit,
        held_out=choice.held_out,
        seed=experiment.seed,
    )
    if choice.shift is not None:
        shift = convert(choice.shift, Shift, "data.shift")
        dealt = with_shift(dealt, shift, seed=experiment.seed, test=choice.shift_test)
    if choice.capacity is not None:
        dealt = with_capacity(dealt, convert(choice.capacity, Capacity, "data.capacity"), experiment.seed)
    return with_kinds(dealt, choice.adversarial, pooled=choice.pooled)


def with_data_place(experiment: Experiment, folder: Path | str | None = None) -> Experiment:
    """The experiment with the place of its data in full, so that the run finds them again from anywhere."""
    name, options = named(experiment.data.source, "data.source")
    root = _root(experiment, folder)
    if name in sources.SOURCES:
        place = str(root.absolute()) if root and sources.SOURCES[name].layouts else None
        return replace(experiment, data=replace(experiment.data, folder=place))
    if (found := locate(name, root)) is None:
        return experiment
    source = {"name": str(found), **options} if options else str(found)
    return replace(experiment, data=replace(experiment.data, source=source, folder=None))


def _root(experiment: Experiment, folder: Path | str | None) -> Path | None:
    """The folder of real data: the one given, the one the experiment remembers, or that of HARDY_DATA."""
    known = experiment.data.folder
    if folder is None and known is not None and not Path(known).expanduser().is_dir():
        raise HardyError(f"the data folder {known} is not there. If it moved, name it: --data FOLDER.")
    chosen = folder or known
    return sources.data_root(Path(chosen) if chosen else None)
