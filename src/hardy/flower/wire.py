"""Tensors, settings and figures as Flower's records, and back. Nothing is pickled, and nothing received is trusted."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor

from hardy.core.tensors import Tensors
from hardy.parts.compression import Compression

TENSORS = "tensors"
"""the one array of a record"""
UNREADABLE = "bytes that cannot be read"


def pack(tensors: Mapping[str, Tensor | NDArray[Any]]) -> Any:
    """An ArrayRecord of tensors, bit for bit, in one piece: Flower sends every array by two requests of its own, and a
    network has hundreds."""
    from flwr.app import Array, ArrayRecord

    content = save({name: np.asarray(_on_host(value), order="C") for name, value in tensors.items()})
    return ArrayRecord({TENSORS: Array(dtype="uint8", shape=(len(content),), stype="safetensors", data=content)})


def _on_host(value: Tensor | NDArray[Any]) -> NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def unpack_arrays(content: Any, record: str) -> dict[str, Any]:
    """The arrays of a record, {} if there is none; one that cannot be read is left as it came, for the gate."""
    found = content.array_records.get(record, {})
    if set(found) != {TENSORS}:
        return dict(found)
    try:
        # the lengths that its header tells must fit its bytes, so it unpacks to no more than came
        return dict(sorted(load(bytes(found[TENSORS].data)).items()))  # it gives them in any order
    except Exception:  # whatever bytes a hostile node puts there
        return {UNREADABLE: found[TENSORS]}


def compress(
    rule: Compression, new: Tensors, sent: Tensors, lost: Tensors, names: Iterable[str]
) -> tuple[Tensors, Tensors]:
    """The tensors with the named ones in pieces, and what is lost of these by it, on top of what was lost before."""
    packed, left = dict(new), {}
    for name in names:
        change = packed.pop(name) - sent[name]
        if name in lost:
            change = change + lost[name]
        pieces = rule.compress(change)
        left[name] = change - rule.expand(pieces, change)
        packed |= {f"{name}:{piece}": value for piece, value in pieces.items()}
    return packed, left


def expand(rule: Compression, came: dict[str, Any], sent: Tensors, names: Iterable[str]) -> dict[str, Any]:
    """The tensors put together from pieces; those that cannot be are left as they came, for the gate."""
    whole = dict(came)
    for name in names:
        pieces = {key.removeprefix(f"{name}:"): whole.pop(key) for key in came if key.startswith(f"{name}:")}
        try:
            like = sent[name]
            found = {piece: torch.as_tensor(value, device=like.device) for piece, value in pieces.items()}
            whole[name] = like + rule.expand(found, like)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            whole |= {f"{name}:{piece}": value for piece, value in pieces.items()}
    return whole


def message(records: dict[str, Any], **settings: Any) -> Any:
    """A RecordDict of records and plain settings."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({**records, "settings": ConfigRecord(settings)})


def settings(content: Any) -> dict[str, Any]:
    return dict(content.config_records.get("settings", {}))


def reply_figures(content: Any, record: str) -> dict[str, Any]:
    return dict(content.metric_records.get(record, {}))


def size(content: Any) -> int:
    """Bytes of a message's content as it is laid on the wire, before TLS and HTTP."""
    records = content.array_records.values()
    arrays = sum(len(array.data) + len(name) for record in records for name, array in record.items())
    small = (*content.metric_records.values(), *content.config_records.values())
    return int(arrays + sum(record.count_bytes() for record in small))


def contents(content: Any) -> dict[str, Any]:
    """What a message holds, for the record: how many bytes of each tensor and key, and every other value as it is."""
    found: dict[str, Any] = {}
    for name in content.array_records:
        found[name] = {tensor: array.nbytes for tensor, array in unpack_arrays(content, name).items()}
    for name, record in (*content.metric_records.items(), *content.config_records.items()):
        found[name] = {key: _for_the_record(value) for key, value in record.items()}
    return found


def _for_the_record(value: Any) -> Any:
    if isinstance(value, list):
        return [_for_the_record(one) for one in value]
    return len(value) if isinstance(value, bytes) else value
