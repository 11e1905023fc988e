"""evaluation.json: what is known of a set of networks under a set of settings, written after every stage."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardy.attacks.threats import Threat
from hardy.core.federation import Client
from hardy.core.files import file_lock, versions
from hardy.core.json_files import read_sealed, write_sealed
from hardy.core.metric import Metric
from hardy.errors import HardyError
from hardy.evaluation.measure import ServedClients, figures
from hardy.evaluation.serving import Served

EVALUATION_LOCK = ".evaluation.lock"
"""held while figures are read, added to and written back, so that evaluations at the same time lose nothing"""
_LOG = logging.getLogger("hardy")


class EvaluationRecord:
    """Figures found so far, kept on disk where there is a path. Those found before are used again as long as the
    networks and the settings are the same."""

    def __init__(
        self,
        path: Path | None,
        served: ServedClients,
        clients: Sequence[Client],
        *,
        round_number: int,
        seed: int,
        settings: dict[str, Any],
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.path, self.clients, self.round = path, clients, round_number
        self.served, self.metrics = served, metrics
        self.images = [len(rows) for rows in served.rows]
        provenance = {
            "round": round_number,
            "networks": fingerprint(served.served) if path else None,
            "settings": settings,
            "images": self.images,
            "seed": seed,
            "versions": versions(),
        }
        self.found: dict[str, Any] = {"provenance": provenance, "unfinished": {}}
        self.found |= {"metrics": {}, "robust_accuracy": {}, "robust_metrics": {}, "certified_accuracy": {}}
        self.found |= self._known()

    def _known(self) -> dict[str, Any]:
        """What the file holds of the same networks and settings; {} if it cannot be read: measured anew."""
        if not self.path or not self.path.exists():
            return {}
        try:
            earlier = read_sealed(self.path, "It is measured anew.")
        except HardyError as error:
            _LOG.warning("%s", error)
            return {}
        earlier.setdefault("certified_accuracy", {})  # of a file from before there were certificates
        same = earlier.get("provenance") == self.found["provenance"]
        return earlier if same and all(isinstance(earlier.get(key), dict) for key in self.found) else {}

    def put_clean(self, answers: Sequence[Tensor]) -> None:
        """Notes what the networks answer when nobody attacks."""
        self.found["standard_accuracy"] = self._figures(answers)
        self.found["metrics"] |= self._metrics(answers)

    def _figures(self, answers: Sequence[Tensor], metric: Metric | None = None) -> dict[str, Any]:
        """Accuracies, or a metric, with the round and the number of images they are of."""
        values = self.served.figure_of(metric, answers)
        return figures(values, self.clients, self.images, self.round, metric, data=self.served.engine.data)

    def _metrics(self, answers: Sequence[Tensor]) -> dict[str, Any]:
        return {one.name: {**self._figures(answers, one), "metric": _describe_metric(one)} for one in self.metrics}

    def alias(self, threat: Threat) -> bool:
        """Whether the same attack is known under another name; its figures then stand under this one too."""
        for name, known in list(self.found["robust_accuracy"].items()):
            if known["attack"] == _describe(threat):
                for group in ("robust_accuracy", "robust_metrics"):
                    if name in self.found[group]:
                        self.found[group].setdefault(threat.name, self.found[group][name])
        return self._finished(threat)

    def needs(self, threat: Threat, stage: str) -> bool:
        begun = self.found["unfinished"].get(threat.name, {"stages": {}})
        return not self._finished(threat) and stage not in begun["stages"]

    def _finished(self, threat: Threat) -> bool:
        known = self.found["robust_accuracy"].get(threat.name)
        metrics = self.found["robust_metrics"].get(threat.name, {})
        measured = all(metrics.get(one.name, {}).get("metric") == _describe_metric(one) for one in self.metrics)
        return known is not None and known["attack"] == _describe(threat) and measured

    def answers_after(self, threat: Threat, clean: Sequence[Tensor]) -> list[Tensor]:
        """The logits after the stages done."""
        held = self.found["unfinished"].get(threat.name)
        if not held:
            return list(clean)
        return [
            torch.tensor(rows, dtype=like.dtype).view(like.shape)
            for rows, like in zip(held["logits"], clean, strict=True)
        ]

    def put(self, threat: Threat, stage: str, answers: list[Tensor], *, last: bool) -> None:
        """Notes what a stage of an attack left: of each row the logits."""
        held = self.found["unfinished"].setdefault(threat.name, {"stages": {}})
        held["stages"][stage] = self._figures(answers)["mean"]
        held["logits"] = [logits.tolist() for logits in answers]
        if last:
            del self.found["unfinished"][threat.name]
            found = {**self._figures(answers), "attack": _describe(threat), "stages": held["stages"]}
            self.found["robust_accuracy"][threat.name] = found
            self.found["robust_metrics"].setdefault(threat.name, {}).update(self._metrics(answers))
        self._write()

    def certificate(self, name: str, radii: Sequence[float]) -> dict[str, Any] | None:
        """What is known under a name, if it has figures at these radii."""
        known: dict[str, Any] | None = self.found["certified_accuracy"].get(name)
        return known if known and known["radii"].keys() == {f"{r:g}" for r in radii} else None

    def votes(self, name: str) -> tuple[int, list[list[Tensor]]]:
        """How many copies were counted before, and the votes of those that choose and of those that bound."""
        held = self.found["unfinished"].get(f"certificate {name}")
        if not held:
            return 0, [[], []]
        return held["copies"], [[torch.tensor(own, dtype=torch.int64) for own in side] for side in held["votes"]]

    def put_votes(self, name: str, copies: int, votes: Sequence[Sequence[Tensor]]) -> None:
        """Notes the votes of so many copies."""
        told = {"copies": copies, "votes": [[own.tolist() for own in side] for side in votes]}
        self.found["unfinished"][f"certificate {name}"] = told
        self._write()

    def put_certificate(self, name: str, found: dict[str, Any]) -> None:
        self.found["unfinished"].pop(f"certificate {name}", None)
        self.found["certified_accuracy"][name] = found
        self._write()

    def result(self, chosen: Sequence[Threat], certificates: Sequence[str] = ()) -> dict[str, Any]:
        """All that is known, of these threats and certificates."""
        self._write(indent=1)
        names = [metric.name for metric in self.metrics]
        robust, attacked = self.found["robust_accuracy"], self.found["robust_metrics"]
        return {
            **self.found,
            "metrics": {name: self.found["metrics"][name] for name in names},
            "robust_accuracy": {threat.name: robust[threat.name] for threat in chosen},
            "robust_metrics": {t.name: {name: attacked[t.name][name] for name in names} for t in chosen if names},
            "certified_accuracy": {name: self.found["certified_accuracy"][name] for name in certificates},
        }

    def _write(self, indent: int | None = None) -> None:
        """Writes what is known, with what others have found since; where both have a figure, ours counts."""
        if not self.path:
            return
        with file_lock(self.path.with_name(EVALUATION_LOCK), wait=True):
            theirs = self._known()
            done = {**theirs.get("robust_accuracy", {}), **self.found["robust_accuracy"]}
            sure = {**theirs.get("certified_accuracy", {}), **self.found["certified_accuracy"]}
            ended = {*done, *(f"certificate {name}" for name in sure)}
            begun = {name: value for name, value in theirs.get("unfinished", {}).items() if name not in ended}
            attacked = dict(theirs.get("robust_metrics", {}))
            for threat, metrics in self.found["robust_metrics"].items():
                attacked[threat] = {**attacked.get(threat, {}), **metrics}
            self.found = {
                **theirs,
                **self.found,
                "metrics": {**theirs.get("metrics", {}), **self.found["metrics"]},
                "robust_accuracy": done,
                "certified_accuracy": sure,
                "robust_metrics": attacked,
                "unfinished": {**begun, **self.found["unfinished"]},
            }
            write_sealed(self.path, self.found, indent)


def _describe(threat: Threat) -> dict[str, Any]:
    return {"name": type(threat.attack).__name__, **dataclasses.asdict(threat.attack)}


def _describe_metric(metric: Metric) -> dict[str, Any]:
    return {"name": metric.name, **dataclasses.asdict(metric)}


def fingerprint(served: Served) -> str:
    """Of the numbers that are attacked."""
    digest = hashlib.sha256()
    for common, own in zip(served.common, served.own, strict=True):
        for name, tensor in sorted({**common, **own}.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
