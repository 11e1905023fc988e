"""The server's part in secure aggregation: it hands messages on, and learns the sum of what the nodes send.

A round has four stages (see `secure_node`). Whoever is lost before it has sent its masked vector is not in the sum;
whoever is lost after it is. With fewer than two thirds left the round counts for nothing.

The server goes on with replies that are all the same: the mean. So the rule, the noise of differential privacy and the
gate work as ever, but what they see of one client is the mean of all.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hardy.config import Experiment
from hardy.core import tensors
from hardy.core.messages import Answer, Updates, Work
from hardy.core.method import Plan
from hardy.core.partition import Placement
from hardy.core.protocols import Aggregator
from hardy.errors import HardyError
from hardy.flower import wire
from hardy.flower.masking import decode, enough, join, unmask
from hardy.flower.network_engine import Flower
from hardy.parts.aggregators.base import Mean, Pipeline
from hardy.parts.aggregators.client_privacy import ClientLevelDp
from hardy.parts.budgets import Full

_LOG = logging.getLogger("flwr")
_KEY = 32
_LEAST = 3


class SecureFlower(Flower):
    """Flower's nodes, asked under masks."""

    def train(self, work: Work) -> Iterator[Updates | Sequence[Answer] | dict[int, str]]:
        self._wire = {}
        asked = [slot.client for slot in work.slots]
        lost: dict[int, str] = {}
        try:
            mean, loss, stayed = self._sum(work, asked, lost)
        except HardyError as error:
            yield {client: lost.get(client, f"failed: {error}") for client in asked}
            return
        slots = [slot for slot in work.slots if slot.client in stayed]
        like = next(iter(mean.values()))
        yield Updates(
            slots=slots,
            shared=tensors.apply(lambda t: t.expand(len(slots), *t.shape), mean),
            reported={},
            weights=like.new_tensor([float(work.examples[slot.client]) for slot in slots]),
            steps=torch.tensor(
                [self.training.local_steps(work.examples[slot.client], work.round) for slot in slots],
                device=like.device,
            ),
            loss=like.new_full((len(slots),), loss),
        )
        if lost:
            yield lost

    def _sum(self, work: Work, asked: list[int], lost: dict[int, str]) -> tuple[tensors.Tensors, float, set[int]]:
        """The mean of the shared tensors and of the losses over the clients that stayed, and who they are."""
        attempt = secrets.token_hex(16)

        def stage(name: str, clients: Sequence[int], content: Callable[[int], dict[str, Any]]) -> dict[int, Any]:
            def whole(client: int) -> Any:
                own = content(client)
                return self._message(
                    own.pop("records", {}), client, stage=name, attempt=attempt, round=work.round, **own
                )

            found: dict[int, Any] = {}
            gone: dict[int, str] = {}
            least = self.network.replies if name == "keys" else 0
            for client, came in self._ask("train", work.round, clients, whole, least=least):
                (gone if isinstance(came, str) else found)[client] = came
            lost.update(gone)
            _LOG.info("round %d, secure, %s: %d of %d clients", work.round + 1, name, len(found), len(clients))
            return found

        said = stage("keys", asked, lambda client: {})
        keys = {c: pair for c, came in said.items() if (pair := _public(came))}
        first, needed = sorted(keys), enough(max(len(keys), _LEAST))
        _require(first, needed)
        named = {"clients": first, "share": [keys[c][0] for c in first], "mask": [keys[c][1] for c in first]}
        said = stage("shares", first, lambda client: dict(named))
        sealed = {c: made for c, came in said.items() if (made := _list(came, "sealed", len(first)))}
        second = sorted(sealed)
        _require(second, needed)
        weights = self._weights(work, asked)
        model = wire.pack(tensors.gather(work.shared, 0))

        def training(client: int) -> dict[str, Any]:
            own = {"sealed": [sealed[other][first.index(client)] for other in second], "clients": second}
            return {**own, "records": {"shared/0": model}, "bases": [0], "rate": work.rate, "weight": weights[client]}

        size = 1 + sum(t[0].numel() for t in work.shared.values())
        said = stage("masked", second, training)
        masked = {c: row for c, came in said.items() if (row := _vector(came, size)) is not None}
        third = sorted(masked)
        _require(third, needed)
        said = stage("unmask", third, lambda client: {"clients": third})
        shares = {c: told for c, came in said.items() if (told := _list(came, "shares", len(second)))}
        _require(sorted(shares), needed)
        secret = {
            other: join({first.index(c) + 1: told[at] for c, told in list(shares.items())[:needed]})
            for at, other in enumerate(second)
        }
        total = unmask(
            masked.values(),
            size,
            own=[secret[c] for c in third],
            lost={c: secret[c] for c in second if c not in masked},
            stayed={c: keys[c][1] for c in third},
            attempt=attempt,
        )
        for client in set(asked) - set(third):
            lost.setdefault(client, "failed: it left the round before its sum")
        for client in third:
            lost.pop(client, None)  # who was lost after it had sent its vector is in the sum
        figures = decode(total) / sum(weights[c] for c in third)
        return self._mean(work, figures[:-1]), float(figures[-1]), set(third)

    def _weights(self, work: Work, asked: Sequence[int]) -> dict[int, float]:
        """What each client multiplies its change by: its share of all that were asked."""
        if by_examples(self.plan.aggregator):
            held = {c: min(float(work.examples[c]), work.largest_weight) for c in asked}
        else:
            held = dict.fromkeys(asked, 1.0)
        total = sum(held.values())
        return {client: weight / total for client, weight in held.items()}

    def _mean(self, work: Work, change: "np.ndarray[Any, np.dtype[np.float64]]") -> tensors.Tensors:
        mean, at = {}, 0
        for name in sorted(work.shared):
            sent = work.shared[name][0]
            part = torch.from_numpy(change[at : at + sent.numel()]).view(sent.shape).to(sent.device)
            mean[name], at = (sent.double() + part).to(sent.dtype), at + sent.numel()
        return mean


def _require(left: Sequence[int], needed: int) -> None:
    if len(left) < max(needed, _LEAST):
        raise HardyError(f"{len(left)} clients are left, secure aggregation needs {max(needed, _LEAST)}")


def _public(came: Any) -> tuple[bytes, bytes] | None:
    said = wire.settings(came)
    found = said.get("share"), said.get("mask")
    return found if all(isinstance(key, bytes) and len(key) == _KEY for key in found) else None  # type: ignore[return-value]


def _list(came: Any, name: str, count: int) -> list[bytes] | None:
    found = wire.settings(came).get(name)
    right = isinstance(found, list) and len(found) == count and all(isinstance(one, bytes) for one in found)
    return found if right else None


def _vector(came: Any, size: int) -> "np.ndarray[Any, np.dtype[np.uint64]] | None":
    found = wire.unpack_arrays(came, "masked").get("vector")
    right = isinstance(found, np.ndarray) and found.dtype == np.uint64 and found.shape == (size,)
    return found if right else None


def by_examples(rule: Aggregator) -> bool:
    """Whether the mean goes by the numbers of examples."""
    if isinstance(rule, Pipeline):
        return not rule.pre and by_examples(rule.rule)
    return isinstance(rule, Mean) and rule.weigh == "samples"


def refuse_without_sums(asked: Experiment, plan: Plan, clients: int) -> None:
    """Refuses what needs more than a sum."""
    rule = plan.aggregator
    plain = rule.rule if isinstance(rule, Pipeline) else rule
    stages = rule.pre if isinstance(rule, Pipeline) else ()
    private = [stage for stage in stages if isinstance(stage, ClientLevelDp)]
    if not isinstance(plain, Mean) or len(private) < len(stages):
        other = plain if not isinstance(plain, Mean) else next(s for s in stages if s not in private)
        raise HardyError(
            f"network.secure: {other} looks at single updates, and the server sees their sum alone. Usual fix: rule "
            "mean, or leave network.secure out."
        )
    if any(stage.on == "updates" or stage.quantile is not None for stage in private):
        raise HardyError(
            'network.secure: client_level_dp with on = "updates" or a quantile looks at single updates. Usual fix: '
            'on = "sum" and a clip that stays; nodes clip, and the server adds the noise.'
        )
    if reported := plan.names(Placement.REPORTED):
        raise HardyError(
            f"network.secure: clients of {plan.method.name!r} report {reported[0]!r}, which the server reads one by "
            "one. Usual fix: a norm that keeps its statistics private (local)."
        )
    counted = [name for name in plan.names(Placement.SHARED) if not plan.start[name].is_floating_point()]
    if counted or not isinstance(plan.method.budget, Full) or plan.names(Placement.SHARED) == []:
        what = f"{counted[0]!r} is no number that can be summed" if counted else f"budget {plan.method.budget}"
        raise HardyError(f"network.secure: {what}. Usual fix: fedavg or fedbn, where all send the same real numbers.")
    if asked.evaluation.drift or asked.faults.hostile_clients(asked.seed, clients):
        raise HardyError(
            "network.secure: evaluation.drift and hostile clients of [faults] need single updates. Leave them out."
        )
    if (cohort := asked.cohort.size(clients)) < _LEAST:
        raise HardyError(
            f"network.secure: a round asks {cohort} clients, and in a sum of fewer than {_LEAST} each knows the "
            "other's part. Ask more clients (cohort)."
        )
