"""What a run has spent of its clients' privacy: the mechanisms of all its parts, added up by whom they protect."""

from math import inf, isfinite
from typing import Any

from hardy.core.account import Mechanism, epsilon_of
from hardy.core.protocols import Part
from hardy.core.server import Server
from hardy.errors import HardyError

ALL = "the networks of all rounds"
STATISTICS = "reported statistics alone, not the weights"
DELTA = 1e-5
"""where no part says it"""
_EMPTY = 1e-3
"""chance of an empty cohort, as a share of δ, that is let pass"""


def privacy_spent(server: Server, rounds: int) -> list[dict[str, Any]]:
    """ε of each unit that is protected, after so many rounds; None: no noise, no bound. [] if nothing is."""
    found: dict[str, list[Mechanism]] = {}
    for mechanism in _mechanisms(server, rounds):
        found.setdefault(mechanism.unit, []).append(mechanism)
    spent = []
    for unit, together in found.items():
        delta = min((m.delta for m in together if m.delta is not None), default=DELTA)
        epsilon = epsilon_of(together, delta)
        spent.append(
            {
                "unit": unit,
                "epsilon": epsilon if isfinite(epsilon) else None,
                "delta": delta,
                "adjacency": together[0].adjacency,
                "covers": ALL if any(m.on_updates for m in together) or unit == "example" else STATISTICS,
                "mechanisms": [
                    {"what": m.what, "noise": m.noise, "share": m.share, "sampling": m.sampling, "times": m.times}
                    for m in together
                ],
            }
        )
    return spent


def _mechanisms(server: Server, rounds: int) -> list[Mechanism]:
    parts = list(server.plan.method.parts())
    if all(type(part).mechanisms is Part.mechanisms for part in parts):
        return []
    asked = server.networks_asked(rounds)
    return [m for part in parts for m in part.mechanisms(server.plan, server.setting, rounds, asked)]


def refuse_leaks(server: Server, *, over_network: bool = False) -> None:
    """Refuses what would let data reach the networks past their noise."""
    every = _mechanisms(server, 1)
    if over_network and (known := [m.what for m in every if m.simulated and m.noise]):
        raise HardyError(
            f"noise on {known[0]} follows from the experiment's seed, which every node knows and can take off again. "
            'Usual fix: entropy = "system" where the part has it; statistics of norms can only be simulated.'
        )
    mechanisms = [m for m in every if m.on_updates]
    if not mechanisms:
        return
    if server.admission.largest_ratio < inf:
        raise HardyError(
            f"admission.largest_ratio is {server.admission.largest_ratio:g}: whether a reply counts would hang on how "
            "long the others' are, which no noise covers. Set it to inf: under client_level_dp no reply moves the "
            "model by more than clip."
        )
    delta, population = min(m.delta or DELTA for m in mechanisms), len(server.clients)
    share = server.cohort.size(population) / population
    if server.cohort.sampling == "poisson" and (empty := (1 - share) ** population) > _EMPTY * delta:
        raise HardyError(
            f"a Poisson cohort of {share:.3g} of {population} clients is empty with a chance of {empty:.2g}, and an "
            f"empty round adds no noise; it must be at most {_EMPTY * delta:.2g}, {_EMPTY:g} of δ. Ask more clients "
            "(cohort), or take cohort.sampling = fixed."
        )
