"""Evaluating a run: standard accuracy, accuracy under named threats, and whether the figures can be believed.

evaluation.json is written after every stage of every attack, so that an evaluation that was stopped goes on where it
was; figures found before are kept as long as the networks and the settings are the same.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hardy.attacks.base import Attack, Forward, refuse_inputs
from hardy.attacks.threats import Threat, parse_threat, parse_threats
from hardy.core import random
from hardy.core.engine import Branches, DataPart
from hardy.core.files import disk, file_lock, make_folder, refuse_links, write_atomic
from hardy.core.json_files import read_sealed, write_sealed
from hardy.errors import HardyError
from hardy.evaluation import projections
from hardy.evaluation.client_checks import ask_clients
from hardy.evaluation.measure import ServedClients, order_of_bases, threat_key
from hardy.evaluation.record import EVALUATION_LOCK, EvaluationRecord
from hardy.evaluation.smoothing import BLOCK, Smoothing, certified_figures, count_votes, parse_smoothing
from hardy.evaluation.spread import found_flags
from hardy.parts.metrics import to_metrics
from hardy.report.pictures import displayable, image_grid_png
from hardy.report.run_page import write_report
from hardy.runs import costs
from hardy.runs.progress import Progress
from hardy.runs.run import Run
from hardy.runs.unseen import held_out_accuracy

PUBLISHED = (
    *("mean", "worst_client", "by_domain", "by_client", "round", "images", "standard_error", "better", "missing"),
    *("held_out", "held_out_error"),
    *("measured", "clients", "quantiles"),
)
"""what summary.json holds of a figure"""
_SHOWN = 12
"""images in a picture of an attack"""
_OF_EACH, _ILLUSTRATED = 4, 30
"""images in the smaller pictures of every client, and the most clients that have one"""
_ASKED, _CLASSES = 400, 3
"""images of a client asked for representations, and the classes shown of them"""


def evaluate_run(
    run: Run,
    threats: str | Sequence[str | Threat] = (),
    *,
    metrics: str | Sequence[Any] | None = None,
    attack_branch: str | None = None,
    predict_branch: str | None = None,
    width: float = 1.0,
    robustness: float | None = None,
    part: DataPart = "test",
    limit: int | None = None,
    epsilons: Sequence[float] = (),
    certify: str | Smoothing | Sequence[str | Smoothing] = (),
    checks: bool = True,
    quiet: bool = False,
    report: bool = True,
) -> dict[str, Any]:
    """Measures the networks of a run as they are served; a run with a folder gets evaluation.json and a new report.

    Threats are texts such as "pgd-20,autoattack" or Threat objects. `metrics` are names ("auroc,ece"), metrics, or
    functions of logits and labels; not given: the experiment's. `limit` takes the first rows of each client.
    `epsilons` adds every threat at these radii too, for a curve. `certify` are certificates by randomised smoothing,
    such as "sigma=0.25,n=1000" or a hardy.evaluation.smoothing.Smoothing. Branches not given are the experiment's.
    `width` and `robustness` (λ) customise the network, which is attacked as it then is. `report=False` leaves
    report.html alone.
    """
    if limit is not None and limit < 1:
        raise HardyError(f"limit is {limit}; it must be 1 or more rows a client.")
    engine, seed, usual = run.needs_local("an evaluation"), run.experiment.seed, run.branches
    branches = Branches(
        attack=attack_branch or usual.attack, predict=predict_branch or usual.predict, robustness=robustness
    )
    chosen = _threats(threats, epsilons)
    for threat in chosen:
        refuse_inputs(threat.attack, engine.data.shape, bounded=engine.data.bounded)
    order = order_of_bases(engine, run.state, usual.predict, run.local_measures)
    served = run.local_measures.served(run.state, part, branches, limit, width=width, order=order)
    settings: dict[str, Any] = {"part": part, "limit": limit, "attack": served.attack, "predict": served.predict}
    customised = width != 1 or robustness is not None
    if customised:
        settings |= {"width": width, "robustness": robustness}
    path = run.folder / "evaluation.json" if run.folder else None
    if run.folder is not None:
        refuse_links(run.folder)
    record = EvaluationRecord(
        path,
        served,
        engine.data.profiles,
        round_number=run.state.round,
        seed=seed,
        settings=settings,
        metrics=run.experiment.evaluation.metrics if metrics is None else to_metrics(metrics),
    )
    answers = served.answers()
    record.put_clean(answers)
    if checks and chosen and "flags" not in record.found:
        record.found["flags"] = _flags(run, served)
    stages = [(threat, name, attack) for threat in chosen for name, attack in threat.attack.stages()]
    progress = Progress(len(stages), quiet=quiet)
    for done, (threat, name, attack) in enumerate(stages, 1):
        if not record.alias(threat) and record.needs(threat, name):
            before = record.answers_after(threat, answers)
            after = served.attacked(attack, before, threat_key(seed, threat, name), ensemble=bool(name))
            record.put(threat, name, after, last=name == threat.attack.stages()[-1][0])
        progress.update(done, f"{threat.name} {name}")
    progress.close()
    asked = [certify] if isinstance(certify, str | Smoothing) else certify
    smoothings = [parse_smoothing(one) if isinstance(one, str) else one for one in asked]
    for smoothing in smoothings:
        _certify(record, served, smoothing, seed, quiet=quiet)
    if engine.data.held_out and part == "test" and not customised:
        statistics = run.experiment.data.held_out_statistics
        record.found["standard_accuracy"] |= held_out_accuracy(engine, run.state, branches, statistics)
        for threat in chosen:
            if "held_out" not in record.found["robust_accuracy"][threat.name]:
                found = held_out_accuracy(engine, run.state, branches, statistics, threat)
                record.found["robust_accuracy"][threat.name] |= found
    result = record.result(chosen, [smoothing.name for smoothing in smoothings])
    if run.folder is not None:
        with engine.arithmetic(training=False):
            _illustrate(run, served, chosen)
            seen = _represent(run, served, chosen[0]) if chosen else []
        if chosen:
            with file_lock(run.folder / EVALUATION_LOCK, wait=True):
                projections.write_projections(run.folder, run.state.round, threat=chosen[0].name, domains=seen)
        # figures that stand beside others must be of all test rows, and of the network as it is
        if part == "test" and limit is None and not customised:
            _publish(run, result)
        if report:
            write_new_report(run)
    return result


def _certify(record: EvaluationRecord, served: ServedClients, smoothing: Smoothing, seed: int, *, quiet: bool) -> None:
    """The votes of noisy copies, noted block by block, and what they certify."""
    if record.certificate(smoothing.name, smoothing.radii):
        return
    key = random.fold(torch.tensor(seed), "certify", smoothing.name)
    done, sides = record.votes(smoothing.name)
    total = smoothing.n0 + smoothing.n
    progress = Progress(total, done=done, quiet=quiet)
    while done < total:
        side = 0 if done < smoothing.n0 else 1
        last = min(done + BLOCK, smoothing.n0 if side == 0 else total)
        votes = count_votes(served, smoothing, done, last, key)
        sides[side] = [one + two for one, two in zip(sides[side], votes, strict=True)] if sides[side] else votes
        done = last
        record.put_votes(smoothing.name, done, sides)
        progress.update(done, f"certificates, {smoothing.name}")
    progress.close()
    record.put_certificate(smoothing.name, certified_figures(served, smoothing, sides[0], sides[1], record.round))


def known_settings(run: Run) -> list[dict[str, Any]]:
    """What is known of the widths and robustness of a run, of its round; measured if nothing is."""
    path = run.folder / "settings.json" if run.folder else None
    if path is not None and path.exists():
        found = read_sealed(path, "Remove it: it is measured anew.")
        if found.get("round") == run.state.round:
            rows: list[dict[str, Any]] = found["settings"]
            return rows
    return evaluate_settings(run)


def evaluate_settings(
    run: Run,
    *,
    widths: Sequence[float] = (),
    robustness: Sequence[float] = (),
    threats: str | Sequence[str | Threat] = (),
    quiet: bool = True,
    report: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """What each width and robustness costs and scores; a run with a folder gets settings.json and a new report.

    Widths not given are 1, 2, 4, ... bases; robustness not given is the experiment's branch alone.
    """
    budget, rows = run.engine.plan.method.budget, []
    widest = budget.widths[-1]
    known = [width for count, width in enumerate(budget.widths, 1) if count.bit_count() == 1 or width == widest]
    bare, predictor = dataclasses.replace(run, folder=None), run.customise(client=0)
    for width in widths or (known if budget.bases > 1 else budget.widths):
        for level in robustness or (None,):
            costing = {**predictor.customise(width=width, robustness=level).costs(), "robustness": level}
            found = evaluate_run(
                bare, threats, metrics=(), width=width, robustness=level, checks=False, quiet=quiet, **options
            )
            standard = _published(found["standard_accuracy"])
            rows.append({**costing, "standard_accuracy": standard, "robust_accuracy": published(found)})
    if run.folder is not None:
        found = {"round": run.state.round, "settings": rows, **costs.training_costs(run)}
        write_sealed(run.folder / "settings.json", found)
        if report:
            write_new_report(run)
    return rows


def write_new_report(run: Run) -> None:
    """report.html, once there is a summary to report on."""
    if run.folder is not None and (run.folder / "summary.json").exists():
        with disk("report.html"):
            write_report(run.folder)


def _threats(threats: str | Sequence[str | Threat], epsilons: Sequence[float]) -> list[Threat]:
    """The threats named, and each of them at every further radius; each once."""
    if isinstance(threats, str):
        threats = parse_threats(threats) if threats.strip() else ()
    given = [parse_threat(threat) if isinstance(threat, str) else threat for threat in threats]
    for threat in list(given) if epsilons else ():
        if "@" in threat.name or not hasattr(threat.attack, "epsilon"):
            raise HardyError(
                f"no curve over radii for threat {threat.name!r}; name it without options, such as pgd-20."
            )
        given += [parse_threat(f"{threat.name}@{epsilon:g}/255") for epsilon in epsilons]
    return list({threat.name: threat for threat in given}.values())


def _flags(run: Run, served: ServedClients) -> list[dict[str, Any]]:
    """Red flags on the network of one client of each domain; those that there are, are of images."""
    if len(run.engine.data.shape) == 1:
        return []
    first: dict[str, int] = {}
    for number, profile in enumerate(run.engine.data.profiles):
        if len(served.rows[number]):
            first.setdefault(profile.domain, number)
    clients = list(first.values())[:1] if served.served.alike else list(first.values())
    key = random.fold(torch.tensor(run.experiment.seed), "checks")
    raised = found_flags(served, clients, key)
    return [{"client": client, **dataclasses.asdict(flag)} for client in clients for flag in raised[client]]


def _network(served: ServedClients, client: int, points: int) -> tuple[Any, Tensor, Tensor]:
    """A client's forward as it is served, and its first images and labels."""
    engine = served.engine
    net = served.served.network(client)
    rows = torch.from_numpy(served.rows[client][:points]).to(engine.device)
    x, y = engine.device_data.images(served.images, rows), engine.device_data.y[served.images][rows]
    return served.predicting(net), x, y


def _illustrate(run: Run, served: ServedClients, threats: Sequence[Threat]) -> None:
    """A picture a threat of the client with most rows, and smaller ones of every client, up to a number."""
    if run.folder is None or len(run.engine.data.shape) == 1:
        return
    held = [client for client, rows in enumerate(served.rows) if len(rows)]
    if not held:
        return
    with disk("pictures"):
        make_folder(run.folder / "pictures")
    largest = max(held, key=lambda client: len(served.rows[client]))
    shown = held[:: -(-len(held) // _ILLUSTRATED)]
    for threat in threats:
        name = "attack " + "".join(c if c.isalnum() or c in "-." else "_" for c in threat.name)
        ((_, large),) = _attacked(run, served, [largest], _SHOWN, threat)
        small = {f"{name}, client {client}": s for client, s in _attacked(run, served, shown, _OF_EACH, threat)}
        for stem, sheet in {name: large, **small}.items():
            write_atomic(run.folder / "pictures" / f"{stem}.png", sheet)


def _attacked(
    run: Run, served: ServedClients, clients: Sequence[int], most: int, threat: Threat
) -> Iterator[tuple[int, bytes]]:
    """Images of each client, the same attacked, and the change; predictions go into the labels."""
    classes, attack = run.engine.data.classes, _first(threat)
    key = threat_key(run.experiment.seed, threat, "picture")

    def look(forward: Forward, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        changed = attack.perturb(forward, x, y, key)
        return x, changed, *(forward(z).argmax(-1) for z in (x, changed))

    def images(client: int) -> int:
        return min(most, len(served.rows[client]))

    for count, alike in groupby(sorted(clients, key=images), key=images):
        members = list(alike)
        for client, (x, changed, *seen) in zip(members, ask_clients(served, members, count, look, key), strict=True):
            change = changed - x
            magnified = 0.5 + 0.5 * change / change.abs().max().clamp_min(1e-12)
            rows = [displayable(z.numpy()) for z in (x, changed, magnified)]
            before, after = (", ".join(classes[i] for i in some.tolist()) for some in seen)
            labels = [f"images, seen as {before}", f"attacked, seen as {after}", "the change, magnified"]
            yield client, image_grid_png(rows, labels)


def _first(threat: Threat) -> Attack:
    """The attack, or the first of its stages."""
    name, attack = threat.attack.stages()[0]
    return attack if name else threat.attack


def _represent(run: Run, served: ServedClients, threat: Threat) -> list[dict[str, Any]]:
    """Images of some classes and the same attacked, as the last layer of a client of each domain sees them."""
    found = []
    last = {c.domain: number for number, c in enumerate(run.engine.data.profiles) if len(served.rows[number])}
    for domain, client in last.items():  # the first ones are those that can afford adversarial training
        forward, x, y = _network(served, client, _ASKED)
        x, y = x[y < _CLASSES], y[y < _CLASSES]
        if len(x) < 2:
            continue
        key = threat_key(run.experiment.seed, threat, "representations").to(x.device)
        attacked = _first(threat).perturb(served.attacking(forward.func), x, y, key)
        seen = [projections.penultimate(forward.func, z, **forward.keywords) for z in (x, attacked)]
        names = [run.engine.data.classes[label] for label in y.tolist()]
        marks = [(name, state) for state in ("clean", "attacked") for name in names]
        found.append({"domain": domain, "client": client, **projections.placed(torch.cat(seen), marks)})
    return found


def published(result: dict[str, Any]) -> dict[str, Any]:
    """The robust accuracies of an evaluation as summary.json holds them."""
    return {name: _published(value) for name, value in result["robust_accuracy"].items()}


def published_metrics(result: dict[str, Any]) -> dict[str, Any]:
    """The metrics under attack, likewise."""
    return {
        threat: {name: _published(value) for name, value in found.items()}
        for threat, found in result["robust_metrics"].items()
    }


def _published(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: figures[key] for key in PUBLISHED if key in figures}


def _publish(run: Run, result: dict[str, Any]) -> None:
    """Robust accuracy into summary.json, so that reports and comparisons show it. A summary of another round stays as
    it is."""
    assert run.folder is not None
    path = run.folder / "summary.json"
    with file_lock(run.folder / EVALUATION_LOCK, wait=True):
        if not path.exists():
            return
        summary = read_sealed(path, f"`hardy resume {run.folder}` writes it anew.")
        if summary["rounds"] == run.state.round:
            write_sealed(path, {**summary, **_joined(summary, result, run.state.round)}, indent=2)


def _joined(summary: dict[str, Any], result: dict[str, Any], round_number: int) -> dict[str, Any]:
    """What a summary knows of a round, with what an evaluation has found."""
    attacked = metrics_of_round(summary.get("robust_metrics", {}), round_number)
    for threat, found in published_metrics(result).items():
        attacked[threat] = attacked.get(threat, {}) | found
    clean = {name: _published(value) for name, value in result["metrics"].items()}
    return {
        "robust_accuracy": of_round(summary["robust_accuracy"], round_number) | published(result),
        "metrics": of_round(summary.get("metrics", {}), round_number) | clean,
        "robust_metrics": attacked,
        "certified_accuracy": of_round(summary.get("certified_accuracy", {}), round_number)
        | published_certificates(result),
    }


def published_certificates(result: dict[str, Any]) -> dict[str, Any]:
    """The certificates of an evaluation as summary.json holds them: without their curve."""
    return {
        name: {key: value for key, value in found.items() if key not in ("curve", "radii")}
        | {"radii": {radius: _published(one) for radius, one in found["radii"].items()}}
        for name, found in result["certified_accuracy"].items()
    }


def of_round(figures: dict[str, Any], round_number: int) -> dict[str, Any]:
    """Those of a round; others are stale."""
    return {name: value for name, value in figures.items() if value.get("round") == round_number}


def metrics_of_round(figures: dict[str, dict[str, Any]], round_number: int) -> dict[str, dict[str, Any]]:
    """The same of metrics by threat."""
    found = {threat: of_round(metrics, round_number) for threat, metrics in figures.items()}
    return {threat: metrics for threat, metrics in found.items() if metrics}
