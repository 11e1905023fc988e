"""Runs: rounds, progress, figures, checkpoints, resuming."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from numpy.typing import NDArray
from torch import Tensor

from hardy import afterwards, config, costs, evaluation, folders, projections
from hardy.afterwards import Estimate
from hardy.config import FROM_PYTHON, Experiment, construct, convert, named
from hardy.data.dataset import Dataset
from hardy.data.shifts import Shift, shifted
from hardy.data.sources import data_root
from hardy.data.sources import load as load_source
from hardy.data.splits import Federation, federate, with_kinds
from hardy.diagnosis import diagnose
from hardy.engines import Engine, Flower, Resident
from hardy.errors import HardyError, unknown
from hardy.method import Method, Model, Plan
from hardy.models.count import parameters
from hardy.models.net import Mixture
from hardy.parts.budget import Capacity, with_capacity
from hardy.parts.objective import Objective
from hardy.predictor import Predictor
from hardy.progress import Progress
from hardy.registry import find
from hardy.report.html import write_report
from hardy.robustness.evaluate import Part, accuracies, averages, refuse_robustness
from hardy.robustness.threats import Threat
from hardy.server import Server
from hardy.state import Checkpoint, ServerState, disk, load_checkpoint, save_checkpoint, to, versions, write_atomic
from hardy.tensors import Tensors

Connect = Callable[[Plan, Federation], Engine]
"""makes an engine whose clients are elsewhere"""


@dataclass(kw_only=True)
class Figures:
    """A run's running totals; saved with every checkpoint."""

    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    macs: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    latest: dict[str, Any] | None = None
    """standard accuracy at the last evaluation"""
    best: dict[str, Any] | None = None
    """the round with the best validation accuracy, and the test accuracy it had"""

    def add(self, line: dict[str, Any]) -> None:
        for name in ("seconds", "bytes_up", "bytes_down", "macs"):
            setattr(self, name, getattr(self, name) + line[name])
        for reason in line["lost"].values():
            kind = reason.partition(":")[0]
            self.lost[kind] = self.lost.get(kind, 0) + 1


@dataclass(kw_only=True)
class Run:
    """A federation at some round: what `fit`, `resume` and `load` return."""

    experiment: Experiment
    server: Server
    engine: Engine
    state: ServerState
    figures: Figures
    folder: Path | None = None
    robust: dict[str, Any] = field(default_factory=dict)
    """accuracy by threat, where the experiment asks for it"""
    counted: dict[Objective, int] = field(default_factory=dict, repr=False)
    """multiply-accumulates of one image's way through the networks of an objective"""

    def newcomer(
        self, statistics: Estimate, *, domain: str | None = None, images: Tensor | NDArray[Any] | None = None
    ) -> Mixture:
        """A network for somebody who never took part: net(x, branch=...) gives the logits of images in [0, 1].

        Where clients keep their norms, it gets their average ("average"), over all of them or over one domain's; or
        ("images") that with clean statistics measured on images of its own, uint8 or in [0, 1], [N, C, H, W]. The
        adversarial branch is averaged over clients of kind AT, or is what the norm gives to a client of kind ST.
        """
        return afterwards.newcomer(self, statistics, domain=domain, images=images)

    def customise(self, *, width: float = 1.0, robustness: float | None = None, client: int | None = None) -> Predictor:
        """The trained network at a width and a robustness (λ); both can be changed again in place. Where clients have
        networks of their own, of one client."""
        return Predictor(self, width=width, robustness=robustness, client=client)

    def fine_tune(self, *, steps: int, freeze: int = 0, rate: float | None = None) -> "Run":
        """A run in which every client went on alone for so many steps of its own objective, with the first `freeze`
        layers held; the rate is training.rate unless given. This run stays as it is."""
        return afterwards.fine_tune(self, steps=steps, freeze=freeze, rate=rate)

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        figures, plan = self.figures, self.engine.plan
        return {
            "name": self.experiment.name,
            "method": plan.method.name,
            "rounds": self.state.round,
            "seconds": figures.seconds,
            "bytes_up": figures.bytes_up,
            "bytes_down": figures.bytes_down,
            "macs": figures.macs,
            "standard_accuracy": figures.latest,
            "robust_accuracy": self.robust,
            "best": figures.best,
            "parameters": parameters(plan.model),
            "engine": self.engine.name,
            "device": _device_name(self.engine.device),
            "seed": self.experiment.seed,
            "lost": figures.lost,
            "versions": versions(),
        }


def fit(
    experiment: Experiment,
    *,
    method: Method | None = None,
    model: Model | None = None,
    data: Federation | Dataset | None = None,
    out: Path | str | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    network: Connect | None = None,
) -> Run:
    """Runs an experiment. A method, a model or data given as objects take the place of the names in it.

    With `out`, the run is kept in that folder and can be resumed; without, it stays in memory. `network` makes the
    engine where the clients are elsewhere.
    """
    run = prepare(experiment, method=method, model=model, data=data, data_folder=data_folder, network=network)
    if out is None:
        return _rounds(run, quiet=quiet)
    run.folder = Path(out)
    if (run.folder / "config.toml").exists():
        raise HardyError(
            f"{run.folder} already holds a run. Go on with `hardy resume {run.folder}`, or choose another folder."
        )
    with disk(f"the run folder {run.folder}"):
        (run.folder / "pictures").mkdir(parents=True, exist_ok=True)
    with folders.locked(run.folder):
        folders.introduce(run)
        return _rounds(run, quiet=quiet)


def resume(
    folder: Path | str,
    *,
    method: Method | None = None,
    model: Model | None = None,
    data: Federation | Dataset | None = None,
    data_folder: Path | str | None = None,
    quiet: bool = False,
    remark: Any = None,
    network: Connect | None = None,
) -> Run:
    """Goes on with a run from its last good checkpoint; the end is the same, bit for bit, as if it had not stopped."""
    folder = Path(folder)
    with folders.locked(folder):
        run = _reopen(folder, method, model, data, data_folder, remark, network)
        if run.state.round == 0:
            folders.introduce(run)
        return _rounds(run, quiet=quiet)


def load(
    folder: Path | str,
    *,
    method: Method | None = None,
    model: Model | None = None,
    data: Federation | Dataset | None = None,
    data_folder: Path | str | None = None,
    best: bool = False,
) -> Run:
    """A run as its last good checkpoint left it, or as it was at its best validation accuracy."""
    run = _reopen(Path(folder), method, model, data, data_folder, None, None)
    if best:
        found, _ = load_checkpoint(Path(folder) / "best")
        run.state, run.figures = to(found.server, run.engine.device), Figures(**found.figures)
        run.engine.store = {**run.engine.store, **run.engine.cast(found.store)}
    return run


def evaluate(
    run: Run | Path | str,
    threats: str | Sequence[str | Threat] = (),
    *,
    data_folder: Path | str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measures a run, or the run in a folder, as `hardy.evaluation.evaluate` says."""
    run = run if isinstance(run, Run) else load(run, data_folder=data_folder)
    if not any(len(client.test) + len(client.validation) for client in run.engine.data.clients):
        raise HardyError(
            f"nobody in {run.folder or 'this run'} holds rows to measure on, here. Over a network let the nodes "
            "measure (evaluation.threats in the experiment), or pass data to hardy.load."
        )
    return evaluation.evaluate(run, threats, **options)


def prepare(
    experiment: Experiment,
    *,
    method: Method | None = None,
    model: Model | None = None,
    data: Federation | Dataset | None = None,
    data_folder: Path | str | None = None,
    network: Connect | None = None,
) -> Run:
    """Everything built and checked, nothing trained."""
    given = data is not None and network is None
    if not isinstance(data, Federation):
        data = federation(experiment, data, data_folder)
    elif given and experiment.data.shift is not None:
        raise HardyError("data.shift cannot shift a federation that is given; use hardy.data.shifts.shifted on it.")
    elif given and experiment.data.capacity is not None:
        raise HardyError("data.capacity cannot be dealt to a federation that is given; use with_capacity on it.")
    if network is None:  # nodes are infiltrated where they are
        data = experiment.faults.infiltrate(data, experiment.seed)
    plan = bind(experiment, data, method, model)
    server = Server(
        plan=plan,
        clients=data.clients,
        seed=experiment.seed,
        cohort=experiment.cohort,
        faults=experiment.faults,
        admission=experiment.admission,
        training=experiment.training,
        drift=experiment.evaluation.drift,
    )
    server.refuse_impossible(experiment.training)
    for branch in (experiment.evaluation.attack_branch, experiment.evaluation.predict_branch):
        if (known := plan.method.norm.branches) is not None and branch not in known:
            raise unknown("branch in evaluation", branch, known)
    for level in experiment.evaluation.robustness:
        refuse_robustness(level, plan.method.norm)
    if network is not None:
        engine = network(plan, data)
    else:
        resident = Resident(data, experiment.engine.find_device(), experiment.engine.precision)
        engine = experiment.engine.make(plan, resident, experiment.training, seed=experiment.seed)
    state = server.start()
    state = replace(
        state,
        shared=engine.cast(state.shared),
        reported=engine.cast(state.reported),
        memory=engine.cast(state.memory),
    )
    if method:
        experiment = replace(experiment, method=FROM_PYTHON)
    if model:
        experiment = replace(experiment, model=FROM_PYTHON)
    if given:
        experiment = replace(experiment, data=replace(experiment.data, source=FROM_PYTHON))
    # what `auto` chose is kept: a resumed run must not choose again
    experiment = replace(experiment, engine=replace(experiment.engine, name=engine.name))
    return Run(experiment=experiment, server=server, engine=engine, state=state, figures=Figures())


def bind(experiment: Experiment, data: Federation, method: Method | None = None, model: Model | None = None) -> Plan:
    """The experiment's method on its model, or on those given; the same first tensors wherever it is called."""
    chosen = method or config.method(experiment)
    build = model or _model(experiment, data, chosen.budget.base_width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        try:
            return chosen.bind(build, data.shape)
        except (RuntimeError, ValueError, OverflowError, ZeroDivisionError, MemoryError) as error:
            raise HardyError(f"model {experiment.model!r} cannot be built for images {data.shape}: {error}") from error


def federation(experiment: Experiment, dataset: Dataset | None = None, folder: Path | str | None = None) -> Federation:
    """Who holds which rows of the experiment's data, or of a data set given."""
    choice = experiment.data
    if dataset is None:
        name, options = named(choice.source, "data.source")
        if name == FROM_PYTHON:
            raise HardyError("this run was started from Python with data of its own; pass them to resume or load.")
        dataset = load_source(name, data_root(Path(folder) if folder else None), **options)
    name, options = named(choice.split, "data.split")
    rule = construct(find("split", name), options, "data.split")
    dealt = federate(
        dataset,
        rule,
        clients=choice.clients,
        pooled=choice.pooled,
        validation=choice.validation,
        test=choice.test,
        limit=choice.limit,
        seed=experiment.seed,
    )
    if choice.shift is not None:
        shift = convert(choice.shift, Shift, "data.shift")
        dealt = shifted(dealt, shift, seed=experiment.seed, test=choice.shift_test)
    if choice.capacity is not None:
        dealt = with_capacity(dealt, convert(choice.capacity, Capacity, "data.capacity"), experiment.seed)
    return with_kinds(dealt, choice.adversarial)


def _model(experiment: Experiment, data: Federation, width: float | None) -> Model:
    name, options = named(experiment.model, "model")
    if width is not None and options.get("width", 1.0) != width:
        raise HardyError(
            f"model.width is {options.get('width', 1.0)}, but the bases of this method are ×{width:g}; set model.width "
            f"= {width:g}, or the method's width."
        )
    factory = find("model", name)
    given = {"classes": len(data.classes), "shape": data.shape}
    return lambda norm: construct(factory, options, "model", norm=norm, **given)


def _reopen(
    folder: Path,
    method: Method | None,
    model: Model | None,
    data: Federation | Dataset | None,
    data_folder: Path | str | None,
    remark: Any,
    network: Connect | None,
) -> Run:
    if not (folder / "config.toml").is_file():
        raise HardyError(
            f"{folder} holds no run (no config.toml). Start one with `hardy run EXPERIMENT --out {folder}`."
        )
    text = (folder / "config.toml").read_text(encoding="utf-8")
    saved = config.parse(text, where=str(folder / "config.toml"), check=method is None)
    if far := network is None and saved.engine.name == "flower":  # to be looked at here, not to be trained
        saved = replace(saved, engine=replace(saved.engine, name="sequential"))
        if saved.network.clients is not None and data is None:
            from hardy.flower.roll import without_rows

            data = without_rows(folder)
    run = prepare(
        saved,
        method=method,
        model=model,
        data=data,
        data_folder=data_folder,
        network=network,
    )
    run.folder = folder
    if far and (kept := set(run.engine.store) & run.engine.plan.model_names):
        raise HardyError(
            f"the clients of {folder} kept their {min(kept)} and more at home, so their networks cannot be built "
            "here. Let the nodes measure them: evaluation.threats in the experiment."
        )
    if not any((folder / "checkpoint").glob("round-*")):
        return run  # stopped before the first checkpoint
    checkpoint, remarks = load_checkpoint(folder / "checkpoint")
    for line in remarks if remark else ():
        remark(line)
    run.state = to(checkpoint.server, run.engine.device)
    if not far:
        run.engine.store = run.engine.cast(checkpoint.store)
    run.figures = Figures(**checkpoint.figures)
    with suppress(OSError, ValueError, KeyError):
        run.robust = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["robust_accuracy"]
    return run


def _rounds(run: Run, *, quiet: bool) -> Run:
    experiment, folder, rounds = run.experiment, run.folder, run.experiment.rounds
    if folder is not None:
        folders.truncate(folder / "metrics.jsonl", run.state.round)
    progress = Progress(rounds, done=run.state.round, quiet=quiet)
    pace = folders.Pace(experiment.checkpoint.every)
    try:
        while run.state.round < rounds:
            began = time.perf_counter()
            rate = experiment.training.rate_at(run.state.round, rounds)
            run.state, line = run.server.round(run.state, run.engine, rate)
            line = {"round": run.state.round, "seconds": time.perf_counter() - began, **line}
            line["macs"] = sum(costs.macs_of_a_round(run, run.state.round - 1).values())
            _evaluate(run, line)
            line |= run.engine.account(line)
            run.figures.add(line)
            if folder is not None:
                with disk("metrics.jsonl"), (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                if pace.due(run.state.round) or run.state.round == rounds:
                    with pace.timed(run.state.round):
                        _save(run, folder / "checkpoint", run.engine.store)
            progress.update(run.state.round, _note(line, run.figures))
    finally:  # interrupted, nothing is saved: in the middle of a round some clients have trained and some have not
        progress.close()
    if folder is not None:
        write_atomic(folder / "summary.json", json.dumps(run.summary(), indent=2).encode())
        projections.write(folder, norms=projections.norms(run))
        levels, threats = experiment.evaluation.robustness, experiment.evaluation.threats
        if (len(run.engine.plan.method.budget.widths) > 1 or levels) and not run.engine.remote:
            evaluation.settings(run, robustness=levels, threats=threats if levels else (), quiet=quiet)
        with disk("report.html"):
            write_report(folder)
    if experiment.evaluation.threats and not run.robust and isinstance(run.engine, Flower):
        _ask_robustness(run, run.engine)
    elif experiment.evaluation.threats and not run.robust:
        run.robust = evaluation.evaluate(run, experiment.evaluation.threats, quiet=quiet)["robust_accuracy"]
    return run


def _ask_robustness(run: Run, engine: Flower) -> None:
    """Accuracy under the experiment's threats, measured by the nodes on their own rows."""
    choice = run.experiment.evaluation
    found = engine.accuracies(run.state, choice.predict_branch, choice.threats)[2:]
    run.robust = {t: averages(v, engine.data.clients) for t, v in zip(choice.threats, found, strict=True)}
    if run.folder is not None:
        write_atomic(run.folder / "summary.json", json.dumps(run.summary(), indent=2).encode())
        with disk("report.html"):
            write_report(run.folder)


def _evaluate(run: Run, line: dict[str, Any]) -> None:
    """Accuracy on the rounds that ask for it. Selection looks at validation rows only."""
    experiment, done = run.experiment, run.state.round
    if done % experiment.evaluation.every and done != experiment.rounds:
        return
    branch = experiment.evaluation.predict_branch
    if isinstance(run.engine, Flower):
        validation, test = (averages(v, run.engine.data.clients) for v in run.engine.accuracies(run.state, branch))
    else:
        validation, test = (accuracies(run.engine, run.state, part, branch) for part in get_args(Part))
    line["validation_accuracy"], line["standard_accuracy"] = validation, test
    run.figures.latest = test
    if experiment.evaluation.diagnose:
        line |= diagnose(run.engine, run.state, experiment.training.rate_at(done - 1, experiment.rounds))
    score, best = validation["mean"], run.figures.best
    if score is not None and (best is None or score > best["validation_accuracy"]):
        run.figures.best = {"round": done, "validation_accuracy": score, "standard_accuracy": test}
        if run.folder is not None:
            # to be served, not to be trained on: the networks without the objective's own tensors
            networks = {n: t for n, t in run.engine.store.items() if n in run.engine.plan.model_names}
            _save(run, run.folder / "best", networks, keep=1)


def _save(run: Run, folder: Path, store: Tensors, keep: int = 2) -> None:
    figures = {name: getattr(run.figures, name) for name in Figures.__dataclass_fields__}
    save_checkpoint(folder, Checkpoint(server=run.state, store=store, figures=figures), keep=keep)


def _note(line: dict[str, Any], figures: Figures) -> str:
    loss = f"loss {line['loss']:.3f}" if line["loss"] is not None else "no reply counted"
    if broken := line.get("broken_conditions"):
        loss += f"  {len(broken)} conditions on step sizes broken"
    return (
        f"{loss}  accuracy {figures.latest['mean']:.1%}"
        if figures.latest and figures.latest["mean"] is not None
        else loss
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
