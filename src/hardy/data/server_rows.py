"""Rows of the server's own, on which it trains as a client does, for rules that compare clients with it."""

from dataclasses import replace

import numpy as np

from hardy.core import random
from hardy.core.federation import Client, Federation, Rows
from hardy.errors import HardyError


def take_rows(federation: Federation, rows: int, seed: int) -> tuple[Federation, Federation]:
    """(the federation without some training rows, drawn over all clients; the server as one client who has them)."""
    held = np.unique(np.concatenate([client.train for client in federation.clients]))
    if rows >= len(held):
        raise HardyError(f"server.rows is {rows}, but the clients hold {len(held)} training rows. Ask for fewer.")
    chosen = random.stream(seed, "server rows").choice(held, rows, replace=False)
    left = [client.train[~np.isin(client.train, chosen)] for client in federation.clients]
    if emptied := [number for number, train in enumerate(left) if not len(train)]:
        raise HardyError(
            f"server.rows is {rows}, which would leave client {emptied[0]} without a training row. Ask for fewer, or "
            "name a server.source."
        )
    clients = tuple(replace(client, train=train) for client, train in zip(federation.clients, left, strict=True))
    return replace(federation, clients=clients), _alone(federation, np.sort(chosen))


def own_rows(source: Federation, rows: int, seed: int, like: Federation) -> Federation:
    """The server as the one client of some training rows of a source of its own."""
    if source.shape != like.shape or len(source.classes) != len(like.classes):
        raise HardyError(
            f"server.source has inputs {source.shape} of {len(source.classes)} classes, the clients {like.shape} of "
            f"{len(like.classes)}. Take a source like theirs."
        )
    held = source.clients[0].train
    if rows > len(held):
        raise HardyError(f"server.rows is {rows}, but server.source has {len(held)} training rows. Ask for fewer.")
    return _alone(source, np.sort(random.stream(seed, "server rows").choice(held, rows, replace=False)))


def _alone(federation: Federation, rows: Rows) -> Federation:
    none = np.zeros(0, np.int64)
    return replace(
        federation,
        x_train=federation.x_train[rows],
        y_train=federation.y_train[rows],
        x_test=federation.x_test[:0],
        y_test=federation.y_test[:0],
        clients=(Client(domain="server", train=np.arange(len(rows)), validation=none, test=none),),
    )


__all__ = ["own_rows", "take_rows"]
