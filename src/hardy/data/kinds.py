"""Which clients can afford adversarial training (kind AT), and which cannot (ST)."""

from dataclasses import replace
from typing import Literal

from hardy.core.federation import Federation
from hardy.errors import HardyError, unknown

Affording = float | Literal["rich"] | tuple[int | str, ...] | dict[str, float] | None
"""Who can afford adversarial training: a share of each domain's clients, those of the largest capacity, clients by
number or by domain, or a share for each of some domains."""


def with_kinds(federation: Federation, adversarial: Affording) -> Federation:
    """Makes clients AT, and the others ST; None leaves them as they are. A share takes a domain's first clients,
    rounded down."""
    if adversarial is None:
        return federation
    chosen = _chosen(federation, adversarial)
    clients = (replace(c, kind="AT" if n in chosen else "ST") for n, c in enumerate(federation.clients))
    return replace(federation, clients=tuple(clients))


def _chosen(federation: Federation, adversarial: float | str | tuple[int | str, ...] | dict[str, float]) -> set[int]:
    """The numbers of the clients that are AT."""
    if adversarial == "rich":
        most = max(client.capacity for client in federation.clients)
        return {number for number, client in enumerate(federation.clients) if client.capacity == most}
    domains: dict[str, list[int]] = {}
    for number, client in enumerate(federation.clients):
        domains.setdefault(client.domain, []).append(number)
    shares: dict[int | str, float]
    if isinstance(adversarial, int | float):
        shares = dict.fromkeys(domains, adversarial)
    else:
        shares = dict(adversarial.items()) if isinstance(adversarial, dict) else dict.fromkeys(adversarial, 1.0)
    chosen: set[int] = set()
    last = len(federation.clients) - 1
    for who, share in shares.items():
        if isinstance(who, int):
            if not 0 <= who <= last:
                raise HardyError(f"a client's number in data.adversarial is {who}; it must be 0 to {last}.")
            chosen.add(who)
        elif who not in domains:
            raise unknown("domain in data.adversarial", who, domains)
        elif not 0 <= share <= 1:
            raise HardyError(f"the share of {who} in data.adversarial is {share}; it must be in [0, 1].")
        else:
            chosen.update(domains[who][: int(share * len(domains[who]) + 1e-9)])
    return chosen


__all__ = ["Affording", "with_kinds"]
