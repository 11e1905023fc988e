"""evaluation.json: what is known of a set of networks under a set of settings, written after every stage."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hardy.attacks.threats import Threat
from hardy.core.federation import Client
from hardy.core.files import versions, write_atomic
from hardy.evaluation.measure import Mask, ServedClients, summarise
from hardy.evaluation.serving import Served


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
    ) -> None:
        self.path, self.clients, self.round = path, clients, round_number
        self.images = [len(rows) for rows in served.rows]
        provenance = {
            "round": round_number,
            "networks": fingerprint(served.served) if path else None,
            "settings": settings,
            "images": self.images,
            "seed": seed,
            "versions": versions(),
        }
        self.found: dict[str, Any] = {"provenance": provenance, "robust_accuracy": {}, "unfinished": {}}
        if path and path.exists():
            try:
                earlier = json.loads(path.read_text("utf-8"))
                if earlier.get("provenance") == provenance:
                    self.found = earlier
            except (OSError, ValueError, AttributeError):
                pass  # unreadable: measured anew

    def figures(self, standing: Sequence[Mask]) -> dict[str, Any]:
        """Accuracies with the round and the number of images they are of."""
        return {**summarise(standing, self.clients), "round": self.round, "images": sum(self.images)}

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
        """Notes what a stage of an attack left standing."""
        held = self.found["unfinished"].setdefault(threat.name, {"stages": {}})
        held["stages"][stage] = summarise(standing, self.clients)["mean"]
        held["standing"] = [mask.astype(int).tolist() for mask in standing]
        if last:
            del self.found["unfinished"][threat.name]
            figures = {**self.figures(standing), "attack": _describe(threat), "stages": held["stages"]}
            self.found["robust_accuracy"][threat.name] = figures
        if self.path:
            write_atomic(self.path, json.dumps(self.found).encode())

    def result(self, chosen: Sequence[Threat]) -> dict[str, Any]:
        """All that is known, of these threats."""
        if self.path:
            write_atomic(self.path, json.dumps(self.found, indent=1).encode())
        wanted = {threat.name: self.found["robust_accuracy"][threat.name] for threat in chosen}
        return {**self.found, "robust_accuracy": wanted}


def _describe(threat: Threat) -> dict[str, Any]:
    return {"name": type(threat.attack).__name__, **dataclasses.asdict(threat.attack)}


def fingerprint(served: Served) -> str:
    """Of the numbers that are attacked."""
    digest = hashlib.sha256()
    for common, own in zip(served.common, served.own, strict=True):
        for name, tensor in sorted({**common, **own}.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
