"""Which clients can afford adversarial training (kind AT), and which cannot (ST)."""

from dataclasses import replace
from math import ceil
from typing import Literal

from hardy.core.federation import Federation
from hardy.errors import HardyError, unknown

Affording = float | Literal["rich"] | tuple[int | str, ...] | dict[str, float] | None
"""Who can afford adversarial training: a share of each domain's clients, those of the largest capacity, clients by
number or by domain, or a share for each of some domains."""


def with_kinds(federation: Federation, adversarial: Affording, *, pooled: bool = False) -> Federation:
    """Makes clients AT, and the others ST; None leaves them as they are. A share takes a domain's first clients,
    rounded down; where the rows of all domains were pooled, those of all clients."""
    if adversarial is None:
        return federation
    if pooled and isinstance(adversarial, int | float):
        share, count = adversarial, len(federation.clients)
        adversarial = tuple(range(_share_of(count, share, "the clients")))
        if share and not adversarial:
            raise _nobody(share, count, "the pool")
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
        else:
            chosen.update(domains[who][: _share_of(len(domains[who]), share, str(who))])
    if not chosen and any(shares.values()):
        raise _nobody(adversarial, max(map(len, domains.values())), "a domain")
    return chosen


def _share_of(count: int, share: float, whose: str) -> int:
    if not 0 <= share <= 1:
        raise HardyError(f"the share of {whose} in data.adversarial is {share}; it must be in [0, 1].")
    return int(share * count + 1e-9)


def _nobody(adversarial: object, count: int, where: str) -> HardyError:
    return HardyError(
        f"data.adversarial is {adversarial}, which is less than one of the {count} clients of {where}, and is rounded "
        f"down: nobody would train adversarially. Take {ceil(100 / count) / 100:g} or more, more clients, or names of "
        "domains."
    )


__all__ = ["Affording", "with_kinds"]
