"""A node's part in secure aggregation: four answers a round, after which the server knows a sum.

keys     new keys for this round: one to share secrets with, one to mask with
shares   its masking key and the secret of its own mask, in shares, each encrypted for one other client
masked   it trains, and sends its weighted change with all masks on
unmask   the shares it holds: of the own masks of those that stayed, of the masking keys of those that were lost

The node keeps its keys only until it has answered the last one, and answers it once.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from hardy.core import tensors
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.masking import KeyPair, encode, enough, mask, seal, split, unseal
from hardy.flower.memory import Memory
from hardy.flower.node import Node
from hardy.parts.aggregators.client_privacy import move_limit

_KEPT = "secure"


def train_or_mask(me: Node, content: Any, memory: Memory) -> Any:
    """A round in the open, or a stage of one under masks: what the experiment says, not what the message would like."""
    stage = wire.settings(content).get("stage")
    if me.chosen.network.secure != (stage is not None):
        raise HardyError("the server asks for training in another way than network.secure of the experiment says.")
    if stage is None:
        return me.train(content, memory)
    if stage not in _STAGES:
        raise HardyError(f"{stage!r} is no stage of secure aggregation.")
    return _STAGES[str(stage)](me, content, memory)


def _keys(me: Node, content: Any, memory: Memory) -> Any:
    share, masking = KeyPair.new(), KeyPair.new()
    asked = wire.settings(content)
    _keep(memory, attempt=str(asked["attempt"]), share=share.private, mask=masking.private, own=secrets.token_bytes(32))
    return wire.message({}, share=share.public, mask=masking.public)


def _shares(me: Node, content: Any, memory: Memory) -> Any:
    asked, kept = wire.settings(content), _kept(memory, content)
    clients = [int(client) for client in asked["clients"]]
    share, masking = KeyPair.of(kept["share"]), KeyPair.of(kept["mask"])
    if "clients" in kept or len(set(clients)) != len(clients) or me.number not in clients or len(clients) < 3:
        raise HardyError(f"the server wants shares for clients {clients}; nothing is shared.")
    at = clients.index(me.number)
    if (asked["share"][at], asked["mask"][at]) != (share.public, masking.public):
        raise HardyError("the server names other keys of this client than it has; nothing is shared.")
    halves = [split(secret, len(clients), enough(len(clients))) for secret in (kept["own"], kept["mask"])]
    sealed = [
        seal(share.agree(public, "share", kept["attempt"], me.number, client), own + key)
        for client, public, own, key in zip(clients, asked["share"], *halves, strict=True)
    ]
    _keep(memory, **kept, clients=clients, publics=list(asked["mask"]), share_publics=list(asked["share"]))
    return wire.message({}, sealed=sealed)


def _masked(me: Node, content: Any, memory: Memory) -> Any:
    asked, kept = wire.settings(content), _kept(memory, content)
    clients = [int(client) for client in asked["clients"]]
    known = dict(zip(kept.get("clients", ()), kept.get("publics", ()), strict=True))
    if "stayed" in kept or not known.keys() >= set(clients) or len(clients) < enough(len(known)):
        raise HardyError(f"the server wants a vector masked for clients {clients}; nothing is sent.")
    round_number = int(asked["round"])
    held = me.engine.cast(memory.before(round_number))
    ((_, updates, received),) = me.local_round(content, held)
    change = vector(tensors.gather(updates.shared, 0), received, move_limit(me.engine.plan.method))
    weight = float(asked["weight"])
    if not 0 < weight <= 1:
        raise HardyError(f"the server gives this client the weight {weight}, must be in (0, 1]; nothing is sent.")
    values = encode(weight * np.append(change, float(updates.loss[0])))
    others = {client: known[client] for client in clients}
    sent = mask(values, me.number, KeyPair.of(kept["mask"]), kept["own"], others, kept["attempt"])
    memory.keep(round_number, dict(me.engine.store))
    _keep(memory, **kept, stayed=clients, sealed=list(asked["sealed"]))
    return wire.message({"masked": wire.pack({"vector": sent})})


def _unmask(me: Node, content: Any, memory: Memory) -> Any:
    asked, kept = wire.settings(content), _kept(memory, content)
    clients, before = {int(client) for client in asked["clients"]}, list(kept.get("stayed", ()))
    everyone = list(kept.get("clients", ()))
    if not clients <= set(before) or me.number not in clients or len(clients) < enough(len(everyone)):
        raise HardyError(f"the server says that clients {sorted(clients)} have stayed; no share is told.")
    del memory.scratch[_KEPT]  # never an answer to two stories of who was lost
    share = KeyPair.of(kept["share"])
    told: list[bytes] = []
    for other, sealed in zip(before, kept["sealed"], strict=True):
        public = kept["share_publics"][everyone.index(other)]
        both = unseal(share.agree(public, "share", kept["attempt"], other, me.number), sealed)
        told.append(both[: len(both) // 2] if other in clients else both[len(both) // 2 :])
    return wire.message({}, shares=told)


_STAGES = {"keys": _keys, "shares": _shares, "masked": _masked, "unmask": _unmask}


def vector(new: Tensors, old: Tensors, limit: float) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The change of the shared tensors in one row, in the order of their names, cut to a length."""
    rows = [(new[name].double() - old[name].double()).flatten().cpu().numpy() for name in sorted(new)]
    change = np.concatenate(rows)
    length = float(np.linalg.norm(change))
    return change * min(1.0, limit / length) if length else change


def _keep(memory: Memory, **values: str | bytes | Sequence[int] | Sequence[bytes]) -> None:
    from flwr.app import ConfigRecord

    memory.scratch[_KEPT] = ConfigRecord(values)


def _kept(memory: Memory, content: Any) -> dict[str, Any]:
    """What this node has kept of the attempt that the server asks about."""
    found = dict(memory.scratch.config_records.get(_KEPT, {}))
    if found.get("attempt") != wire.settings(content).get("attempt") or not found:
        raise HardyError("the server asks about keys that this node has not, or no longer.")
    return found
