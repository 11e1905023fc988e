"""The scalars of a run for TensorBoard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardy.errors import HardyError
from hardy.report.stored_run import number, read_run


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested objects by its path, 'standard_accuracy/by_domain/pen'. Lists hold no series."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _scalars(part, f"{name}/{key}" if name else key)
    elif (scalar := number(value)) is not None:
        yield name, scalar


def require_tensorboard() -> Any:
    """The writer, or an error with the remedy."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HardyError("tensorboard is not installed. Remedy: pip install 'hardy-fl[tensorboard]'.") from None
    return SummaryWriter


def write_tensorboard(folder: Path) -> Path:
    """Write every scalar of metrics.jsonl to folder/tensorboard, in place of an earlier export."""
    writer_of = require_tensorboard()
    run, out = read_run(folder), folder / "tensorboard"
    for earlier in out.glob("events.out.tfevents.*"):
        earlier.unlink()
    with writer_of(str(out)) as writer:
        for row in run.rounds:
            for name, value in _scalars({key: part for key, part in row.items() if key != "round"}):
                writer.add_scalar(name, value, row["round"])
    return out
