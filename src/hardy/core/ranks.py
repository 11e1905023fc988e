"""The processes that run one server round together; here one that is alone."""

from typing import TypeVar

T = TypeVar("T")


class Ranks:
    """Processes that each train a share of a round's slots and then do the same server round on the same state. This
    one is alone: it has everything already."""

    number: int = 0
    """this one's"""
    count: int = 1

    def gather(self, value: T) -> list[T]:
        """What each rank has, in the order of ranks; the same list on all of them."""
        return [value]

    def total(self, value: T | None) -> T | None:
        """What the ranks have, added up in their order, on all of them: tensors of floating numbers are summed, of
        whole numbers the largest counts. None is nothing."""
        return value


ALONE = Ranks()
