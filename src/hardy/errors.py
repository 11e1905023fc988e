"""What users see when something they gave cannot work."""

from collections.abc import Iterable
from difflib import get_close_matches

_SYNONYMS = {
    "aggregation": "aggregator",
    "algorithm": "method",
    "batch_size": "batch",
    "batchsize": "batch",
    "centralized": "centralised",
    "client_fraction": "fraction",
    "compress": "compression",
    "dataset": "source",
    "eps": "epsilon",
    "fraction_fit": "fraction",
    "global_rounds": "rounds",
    "learning_rate": "rate",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "loss": "objective",
    "lr": "rate",
    "n_clients": "clients",
    "normalization": "norm",
    "num_clients": "clients",
    "num_epochs": "epochs",
    "num_rounds": "rounds",
    "optimizer": "optimiser",
    "partition": "split",
    "partitioner": "split",
    "rng": "seed",
    "server_rounds": "rounds",
    "strategy": "method",
    "vectorized": "vectorised",
}
"""words of other libraries -> Hardy's"""


class HardyError(Exception):
    """A mistake the user can mend: one message with the value, the limit and the remedy. The CLI exits with 2."""


class AllRefused(HardyError):
    """Training that cannot go on, since the server refused every reply of many rounds: most often it diverged."""


def unknown(
    kind: str, value: object, allowed: Iterable[str], *, elsewhere: Iterable[str] = (), listed_by: str = ""
) -> HardyError:
    """An unknown name, with the nearest known one; `elsewhere` are keys of other tables, such as training.rate. Names
    too many for a message are listed by a command."""
    names, word = sorted(allowed), str(value)
    meant = {word, _SYNONYMS.get(word, word)}
    same = [*sorted(meant & set(names)), *(key for key in elsewhere if key.rpartition(".")[2] in meant)]
    near = same or get_close_matches(word, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = f"`{listed_by}` lists them all" if listed_by else f"Known: {', '.join(names) or 'none'}"
    return HardyError(f"unknown {kind} {value!r}.{hint} {known}.")


def printable(text: object, most: int = 100) -> str:
    """Words from outside as a piece of one line: no control characters, which could steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])
