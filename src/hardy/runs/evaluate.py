"""Evaluating a run: standard accuracy, accuracy under named threats, and whether the figures can be believed.

evaluation.json is written after every stage of every attack, so that an evaluation that was stopped goes on where it
was; figures found before are kept as long as the networks and the settings are the same.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hardy.runs import costs
from hardy.evaluation import projections
from hardy.core import random, tensors
from hardy.errors import HardyError
from hardy.runs.progress import Progress
from hardy.report.run_page import write_report
from hardy.report.pictures import image_grid_png
from hardy.attacks.base import Attack
from hardy.evaluation.checks import check
from hardy.evaluation.measure import Branches, Deployed, Mask, Part, accuracies, summarise, threat_key
from hardy.attacks.threats import Threat, parse_threat as parse, parse_threats as parse_all
from hardy.core.state import disk, versions, write_atomic

if TYPE_CHECKING:
    from hardy.runs.run import Run

_SHOWN = 12
"""images in a picture of an attack"""
_ASKED, _CLASSES = 400, 3
"""images of a client asked for representations, and the classes shown of them"""


def evaluate(
    run: "Run",
    threats: str | Sequence[str | Threat] = (),
    *,
    attack_branch: str | None = None,
    predict_branch: str | None = None,
    width: float = 1.0,
    robustness: float | None = None,
    part: Part = "test",
    limit: int | None = None,
    epsilons: Sequence[float] = (),
    checks: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measures the networks of a run as deployed; a run with a folder gets evaluation.json and a new report.

    Threats are texts such as "pgd-20,autoattack" or Threat objects. `limit` takes the first rows of each client.
    `epsilons` adds every threat at these radii too, for a curve. Branches not given are the experiment's. `width` and
    `robustness` (λ) customise the network, which is attacked as it then is.
    """
    choice = run.experiment.evaluation
    attack_branch, predict_branch = attack_branch or choice.attack_branch, predict_branch or choice.predict_branch
    if limit is not None and limit < 1:
        raise HardyError(f"limit is {limit}; it must be 1 or more rows a client.")
    chosen = _threats(threats, epsilons)
    branches = Branches(attack=attack_branch, predict=predict_branch, robustness=robustness)
    deployed = Deployed(run.engine, run.state, part, branches, limit, width=width, order=order(run))
    settings: dict[str, Any] = {"part": part, "limit": limit, "attack": attack_branch, "predict": predict_branch}
    customised = width != 1 or robustness is not None
    if customised:
        settings |= {"width": width, "robustness": robustness}
    record = _Record(run, deployed, settings)
    standing = deployed.standing()
    clients = run.engine.data.clients
    record.found["standard_accuracy"] = summarise(standing, clients)
    if checks and chosen and "flags" not in record.found:
        record.found["flags"] = _flags(run, deployed)
    stages = [(threat, name, attack) for threat in chosen for name, attack in threat.attack.stages()]
    progress = Progress(len(stages), quiet=quiet)
    for done, (threat, name, attack) in enumerate(stages, 1):
        before = record.stood(threat) or standing
        if record.needs(threat, name):
            after = deployed.attacked(attack, before, threat_key(run.experiment.seed, threat, name))
            record.put(threat, name, after, last=name == threat.attack.stages()[-1][0])
        progress.update(done, f"{threat.name} {name}")
    progress.close()
    result = record.result(chosen)
    if run.folder is not None:
        _illustrate(run, deployed, chosen)
        if chosen:
            projections.write(run.folder, threat=chosen[0].name, domains=_represent(run, deployed, chosen[0]))
        # figures that stand beside others must be of all test rows, and of the network as it is
        if part == "test" and limit is None and not customised:
            _publish(run.folder, result)
    return result


def order(run: "Run") -> list[int] | None:
    """The bases by their validation accuracy, the best first, where the budget asks for it (Algorithm 1, line 9)."""
    budget = run.engine.plan.method.budget
    if not budget.sorted:
        return None
    branch = run.experiment.evaluation.predict_branch
    alone = [
        accuracies(run.engine, run.state, "validation", branch, width=budget.widths[0], order=[base])["mean"] or 0.0
        for base in range(budget.bases)
    ]
    return sorted(range(budget.bases), key=lambda base: -alone[base])


def settings(
    run: "Run",
    *,
    widths: Sequence[float] = (),
    robustness: Sequence[float] = (),
    threats: str | Sequence[str | Threat] = (),
    quiet: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """What each width and robustness costs and scores; a run with a folder gets settings.json and a new report.

    Widths not given are 1, 2, 4, ... bases; robustness not given is the experiment's branch alone.
    """
    budget, rows = run.engine.plan.method.budget, []
    widest = budget.widths[-1]
    known = [width for count, width in enumerate(budget.widths, 1) if count.bit_count() == 1 or width == widest]
    bare = dataclasses.replace(run, folder=None)
    for width in widths or (known if budget.bases > 1 else budget.widths):
        for level in robustness or (None,):
            predictor = run.customise(width=width, robustness=level, client=0)
            found = evaluate(bare, threats, width=width, robustness=level, checks=False, quiet=quiet, **options)
            kept = ("mean", "worst_client", "by_domain")
            robust = {name: {key: value[key] for key in kept} for name, value in found["robust_accuracy"].items()}
            standard = {key: found["standard_accuracy"][key] for key in kept}
            rows.append({**predictor.costs(), "standard_accuracy": standard, "robust_accuracy": robust})
    if run.folder is not None:
        found = {"round": run.state.round, "settings": rows, **costs.training(run)}
        write_atomic(run.folder / "settings.json", json.dumps(found).encode())
        if (run.folder / "summary.json").exists():
            with disk("report.html"):
                write_report(run.folder)
    return rows


def _threats(threats: str | Sequence[str | Threat], epsilons: Sequence[float]) -> list[Threat]:
    """The threats named, and each of them at every further radius; each once."""
    if isinstance(threats, str):
        threats = parse_all(threats) if threats.strip() else ()
    given = [parse(threat) if isinstance(threat, str) else threat for threat in threats]
    for threat in list(given) if epsilons else ():
        if "@" in threat.name or not hasattr(threat.attack, "epsilon"):
            raise HardyError(
                f"no curve over radii for threat {threat.name!r}; name it without options, such as pgd-20."
            )
        given += [parse(f"{threat.name}@{epsilon:g}/255") for epsilon in epsilons]
    return list({threat.name: threat for threat in given}.values())


class _Record:
    """What is known so far of one set of networks under one set of settings, kept on disk if the run has a folder."""

    def __init__(self, run: "Run", deployed: Deployed, settings: dict[str, Any]) -> None:
        self.run = run
        self.path = run.folder / "evaluation.json" if run.folder else None
        provenance = {
            "round": run.state.round,
            "networks": _fingerprint(deployed) if self.path else None,
            "settings": settings,
            "images": [len(rows) for rows in deployed.rows],
            "seed": run.experiment.seed,
            "versions": versions(),
        }
        self.found: dict[str, Any] = {"provenance": provenance, "robust_accuracy": {}, "unfinished": {}}
        if self.path and self.path.exists():
            try:
                earlier = json.loads(self.path.read_text("utf-8"))
                if earlier.get("provenance") == provenance:
                    self.found = earlier
            except (OSError, ValueError, AttributeError):
                pass  # unreadable: measured anew

    def needs(self, threat: Threat, stage: str) -> bool:
        begun = self.found["unfinished"].get(threat.name, {"stages": {}})
        return not self._finished(threat) and stage not in begun["stages"]

    def _finished(self, threat: Threat) -> bool:
        known = self.found["robust_accuracy"].get(threat.name)
        return known is not None and known["attack"] == _describe(threat)

    def stood(self, threat: Threat) -> list[Mask] | None:
        """The points standing after the stages done."""
        held = self.found["unfinished"].get(threat.name)
        return [np.array(mask, dtype=bool) for mask in held["standing"]] if held else None

    def put(self, threat: Threat, stage: str, standing: list[Mask], *, last: bool) -> None:
        clients = self.run.engine.data.clients
        held = self.found["unfinished"].setdefault(threat.name, {"stages": {}})
        held["stages"][stage] = summarise(standing, clients)["mean"]
        held["standing"] = [mask.astype(int).tolist() for mask in standing]
        if last:
            del self.found["unfinished"][threat.name]
            figures = {**summarise(standing, clients), "attack": _describe(threat), "stages": held["stages"]}
            self.found["robust_accuracy"][threat.name] = figures
        if self.path:
            write_atomic(self.path, json.dumps(self.found).encode())

    def result(self, chosen: Sequence[Threat]) -> dict[str, Any]:
        if self.path:
            write_atomic(self.path, json.dumps(self.found, indent=1).encode())
        wanted = {threat.name: self.found["robust_accuracy"][threat.name] for threat in chosen}
        return {**self.found, "robust_accuracy": wanted}


def _describe(threat: Threat) -> dict[str, Any]:
    return {"name": type(threat.attack).__name__, **dataclasses.asdict(threat.attack)}


def _fingerprint(deployed: Deployed) -> str:
    """Of the numbers that are attacked."""
    digest = hashlib.sha256()
    for common, own in zip(deployed.common, deployed.own, strict=True):
        for name, tensor in sorted({**common, **own}.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def _flags(run: "Run", deployed: Deployed) -> list[dict[str, Any]]:
    """Red flags on the network of one client of each domain."""
    first: dict[str, int] = {}
    for number, profile in enumerate(run.engine.data.clients):
        if len(deployed.rows[number]):
            first.setdefault(profile.domain, number)
    raised = []
    for client in list(first.values())[:1] if deployed.alike else first.values():
        forward, x, y = _network(run, deployed, client, 128)
        key = random.fold(torch.tensor(run.experiment.seed, device=x.device), "checks")
        for flag in check(forward, x, y, key):
            raised.append({"client": client, **dataclasses.asdict(flag)})
    return raised


def _network(run: "Run", deployed: Deployed, client: int, points: int) -> tuple[Any, Tensor, Tensor]:
    """A client's forward as deployed, and its first images and labels."""
    engine = run.engine
    net = deployed.network(deployed.common, [tensors.gather(own, client) for own in deployed.own])
    rows = torch.from_numpy(deployed.rows[client][:points]).to(engine.device)
    x, y = engine.device_data.images(deployed.images, rows), engine.device_data.y[deployed.images][rows]
    return deployed.predicting(net), x, y


def _illustrate(run: "Run", deployed: Deployed, threats: Sequence[Threat]) -> None:
    """A picture a threat: images, the same attacked, and the change; predictions go into the labels."""
    folder = run.folder
    assert folder is not None
    client = max(range(len(deployed.rows)), key=lambda c: len(deployed.rows[c]))
    forward, x, y = _network(run, deployed, client, _SHOWN)
    classes = run.engine.data.classes
    for threat in threats:
        key = threat_key(run.experiment.seed, threat, "picture").to(x.device)
        changed = _first(threat).perturb(forward, x, y, key)
        change = changed - x
        magnified = 0.5 + 0.5 * change / change.abs().max().clamp_min(1e-12)
        rows = [_pixels(x), _pixels(changed), _pixels(magnified)]
        before, after = (", ".join(classes[i] for i in forward(z).argmax(-1).tolist()) for z in (x, changed))
        labels = [f"images, seen as {before}", f"attacked, seen as {after}", "the change, magnified"]
        name = "".join(c if c.isalnum() or c in "-." else "_" for c in threat.name)
        with disk("pictures"):
            (folder / "pictures").mkdir(exist_ok=True)
        write_atomic(folder / "pictures" / f"attack {name}.png", image_grid_png(rows, labels))


def _first(threat: Threat) -> Attack:
    """The attack, or the first of its stages."""
    name, attack = threat.attack.stages()[0]
    return attack if name else threat.attack


def _represent(run: "Run", deployed: Deployed, threat: Threat) -> list[dict[str, Any]]:
    """Images of some classes and the same attacked, as the last layer of a client of each domain sees them."""
    found = []
    last = {c.domain: number for number, c in enumerate(run.engine.data.clients) if len(deployed.rows[number])}
    for domain, client in last.items():  # the first ones are those that can afford adversarial training
        forward, x, y = _network(run, deployed, client, _ASKED)
        x, y = x[y < _CLASSES], y[y < _CLASSES]
        if len(x) < 2:
            continue
        key = threat_key(run.experiment.seed, threat, "representations").to(x.device)
        attacked = _first(threat).perturb(deployed.attacking(forward.func), x, y, key)
        seen = [projections.penultimate(forward.func, z, **forward.keywords) for z in (x, attacked)]
        names = [run.engine.data.classes[label] for label in y.tolist()]
        marks = [(name, state) for state in ("clean", "attacked") for name in names]
        found.append({"domain": domain, "client": client, **projections.placed(torch.cat(seen), marks)})
    return found


def _pixels(x: Tensor) -> Any:
    return (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def _publish(folder: Path, result: dict[str, Any]) -> None:
    """RunTotals into summary.json, so that reports and comparisons show them."""
    path = folder / "summary.json"
    if not path.exists():
        return
    summary = json.loads(path.read_text("utf-8"))
    kept = ("mean", "worst_client", "by_domain", "by_client")
    figures = {name: {key: value[key] for key in kept} for name, value in result["robust_accuracy"].items()}
    summary["robust_accuracy"] = {**summary.get("robust_accuracy", {}), **figures}
    write_atomic(path, json.dumps(summary, indent=2).encode())
    with disk("report.html"):
        write_report(folder)
