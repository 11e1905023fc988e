"""The box that inputs stay in: [0, 1] for images; plain feature vectors have none unless their range is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_bounded: ContextVar[bool] = ContextVar("hardy_bounded", default=True)


@contextmanager
def inputs(*, bounded: bool) -> Iterator[None]:
    """Inputs inside are in [0, 1], or any numbers."""
    token = _bounded.set(bounded)
    try:
        yield
    finally:
        _bounded.reset(token)


def clip_to_box(x: Tensor) -> Tensor:
    """Into [0, 1] where inputs are bounded; elsewhere as they are."""
    return x.clamp(0.0, 1.0) if _bounded.get() else x
