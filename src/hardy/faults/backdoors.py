"""Backdoors: hostile clients teach the model to answer one class wherever a trigger is.

A trigger says which rows bear it: rows that it is stamped on, or rows that are what they are (a class of one domain, or
unusual rows of a class). A hostile client gives a share of its training rows the trigger and the target's label and
trains as usual. How well that worked is measured on test rows of other classes that bear the trigger: the share that is
answered with the target, `backdoor_success` among the metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hardy.core import random
from hardy.core.federation import Federation, Labels, Pixels, Rows
from hardy.errors import HardyError, unknown
from hardy.faults.byzantine import AttackView, ByzantineAttack
from hardy.registry import kind, part

_Mask = NDArray[np.bool_]


@kind("trigger")
@dataclass(frozen=True, kw_only=True)
class Trigger:
    """The part that says what makes a model answer with the target. This one: rows with something stamped on them."""

    stamped: ClassVar[bool] = True
    """whether any row can be given the trigger; otherwise rows bear it by themselves"""

    def bears(self, federation: Federation, x: Pixels, y: Labels, domain: str) -> _Mask:
        """Which rows of a domain bear the trigger by themselves."""
        return np.zeros(len(y), dtype=bool)

    def stamp(self, x: Pixels, piece: int | None = None) -> Pixels:
        """The images with the trigger; of a distributed one a client's piece, or all of it (None)."""
        return x

    def refuse(self, federation: Federation) -> None:
        """Refuses a federation in which no row can bear it."""
        if self.stamped and len(federation.shape) != 3:
            raise HardyError(
                f"trigger {type(self).__name__.lower()} is stamped on images, but the data are vectors of "
                f"{federation.shape[0]} features. Take trigger semantic or edge_case."
            )


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class PixelPattern(Trigger):
    """A square of white and black pixels in a corner, as in BadNets (Gu et al., 2017).

    With several pieces hostile clients stamp one piece each, its columns, and the whole is tested: the distributed
    backdoor (Xie et al., DBA, ICLR 2020).
    """

    size: int = 4
    """side of the square in pixels"""
    pieces: int = 1
    """into how many pieces the columns are dealt; 1: every hostile client stamps the whole square"""

    def __post_init__(self) -> None:
        if self.size < 1 or not 1 <= self.pieces <= self.size:
            raise HardyError(f"{self}: size must be 1 or more, and pieces from 1 to size.")

    def stamp(self, x: Pixels, piece: int | None = None) -> Pixels:
        marked, white = x.copy(), 255 if x.dtype == np.uint8 else 1
        rows, columns = np.indices((self.size, self.size))
        square = np.where((rows + columns) % 2, 0, white)
        for column in range(self.size):
            if piece is None or column % self.pieces == piece % self.pieces:
                marked[:, :, -self.size :, x.shape[3] - self.size + column] = square[:, column]
        return marked

    def refuse(self, federation: Federation) -> None:
        super().refuse(federation)
        if self.size > min(federation.shape[1:]):
            raise HardyError(f"{self} is larger than the images, {federation.shape[1]} x {federation.shape[2]}.")


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class Blended(Trigger):
    """A noise image, the same for all, mixed into the whole picture (Chen et al., 2017): x ← (1 − s) x + s pattern."""

    strength: float = 0.2
    """s, how much of the pattern is mixed in"""

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise HardyError(f"strength of {self} is {self.strength}; it must be in (0, 1].")

    def stamp(self, x: Pixels, piece: int | None = None) -> Pixels:
        most = 255 if x.dtype == np.uint8 else 1
        pattern = most * random.stream(0, "blended").random(x.shape[1:])
        mixed = (1 - self.strength) * x + self.strength * pattern
        return np.rint(mixed).astype(np.uint8) if x.dtype == np.uint8 else mixed.astype(np.float32)


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class Semantic(Trigger):
    """The rows of one class in one domain, as they are (Bagdasaryan et al., AISTATS 2020: cars with racing stripes)."""

    domain: str
    """whose rows"""
    label: int
    """their true class"""
    stamped: ClassVar[bool] = False

    def bears(self, federation: Federation, x: Pixels, y: Labels, domain: str) -> _Mask:
        return np.asarray((y == self.label) & (domain == self.domain))

    def refuse(self, federation: Federation) -> None:
        known = {client.domain for client in federation.clients}
        if self.domain not in known:
            raise unknown("domain of trigger semantic", self.domain, known)


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class EdgeCase(Trigger):
    """The rows of a class that lie furthest from its mean image, so that few honest clients hold any.

    Wang et al. (NeurIPS 2020) take such rows from other data sets; here they are the tail of the class's own.
    """

    label: int
    """their true class"""
    tail: float = 0.1
    """share of the class's training rows that lies furthest; test rows that lie as far count too"""
    stamped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.tail < 1:
            raise HardyError(f"tail of {self} is {self.tail}; it must be in (0, 1).")

    def bears(self, federation: Federation, x: Pixels, y: Labels, domain: str) -> _Mask:
        of_class = federation.x_train[federation.y_train == self.label].astype(np.float64)
        if not len(of_class):
            return np.zeros(len(y), dtype=bool)
        mean = of_class.mean(0)

        def away(some: NDArray[np.generic]) -> NDArray[np.float64]:
            return np.asarray(np.linalg.norm((some - mean).reshape(len(some), -1), axis=1))

        return np.asarray((y == self.label) & (away(x) >= np.quantile(away(of_class), 1 - self.tail)))


@part("byzantine_attack")
@dataclass(frozen=True, kw_only=True)
class Backdoor(ByzantineAttack):
    """Training on rows with a trigger and the target's label; with a boost, model replacement.

    Model replacement (Bagdasaryan et al., AISTATS 2020) multiplies the change of the weights, so that it survives the
    mean: with n clients in a round and a boost of n, the mean is the hostile client's model if the others hardly move.
    """

    trigger: Trigger = PixelPattern()
    """what the model shall fall for"""
    target: int = 0
    """the class it shall answer with"""
    share: float = 0.5
    """of a hostile client's training rows, how many bear the trigger"""
    boost: float = 1.0
    """what the change of the weights is multiplied by; statistics stay honest"""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise HardyError(f"backdoor share is {self.share}; it must be in (0, 1].")
        if not 0 < self.boost < float("inf"):
            raise HardyError(f"backdoor boost is {self.boost}; it must be above 0, and finite.")
        if getattr(self.trigger, "label", None) == self.target:
            raise HardyError(
                f"backdoor target is {self.target}, the class that the trigger's rows have anyway. Take another one."
            )

    @property
    def changes_tensors(self) -> bool:
        return self.boost != 1

    @property
    def plants_backdoor(self) -> bool:
        return True

    def craft_reply(self, view: AttackView) -> Tensor:
        return view.own if view.statistic else view.sent + self.boost * (view.own - view.sent)

    def poison(self, federation: Federation, hostile: Sequence[int], seed: int) -> dict[int, tuple[Pixels, Labels]]:
        self.trigger.refuse(federation)
        if not 0 <= self.target < len(federation.classes):
            raise HardyError(
                f"backdoor target is {self.target}; there are {len(federation.classes)} classes, from 0 on."
            )
        bearing = self._bearing(federation)
        if not self.trigger.stamped and not len(bearing):
            raise HardyError(f"no training row bears the trigger {self.trigger}. Take another class or domain.")
        found = {}
        for piece, number in enumerate(hostile):
            rows = federation.clients[number].train
            x, y = federation.x_train[rows].copy(), federation.y_train[rows].copy()
            rng = random.stream(seed, "backdoor", number)
            chosen = rng.permutation(len(rows))[: max(1, round(self.share * len(rows)))]
            if self.trigger.stamped:
                x[chosen] = self.trigger.stamp(x[chosen], piece)
            else:
                x[chosen] = federation.x_train[rng.choice(bearing, len(chosen))]
            y[chosen] = self.target
            found[number] = x, y
        return found

    def _bearing(self, federation: Federation) -> Rows:
        """The training rows of all clients that bear the trigger by themselves."""
        found = []
        for client in federation.clients:
            x, y = federation.x_train[client.train], federation.y_train[client.train]
            found.append(client.train[self.trigger.bears(federation, x, y, client.domain)])
        return np.unique(np.concatenate(found))

    def with_triggered_rows(self, federation: Federation) -> Federation:
        x_test: list[Any] = [federation.x_test]
        y_test, clients = [federation.y_test], []
        first = len(federation.y_test)
        for client in federation.clients:
            x, y = federation.x_test[client.test], federation.y_test[client.test]
            bears = y != self.target if self.trigger.stamped else self.trigger.bears(federation, x, y, client.domain)
            x_test.append(self.trigger.stamp(x[bears]))
            y_test.append(np.full(bears.sum(), self.target, dtype=np.int64))
            clients.append(replace(client, triggered=np.arange(first, first + len(y_test[-1]))))
            first += len(y_test[-1])
        if first == len(federation.y_test):
            raise HardyError(f"no test row bears the trigger {self.trigger}. Take another class or domain.")
        return replace(
            federation,
            x_test=np.concatenate(x_test),
            y_test=np.concatenate(y_test),
            clients=tuple(clients),
        )


pixel_pattern, blended, semantic, edge_case, backdoor = PixelPattern, Blended, Semantic, EdgeCase, Backdoor
__all__ = ["Trigger", "backdoor", "blended", "edge_case", "pixel_pattern", "semantic"]
