"""How long replies usually are, so that the gate can tell one that is unlike the others.

Of weights it is the change that counts, divided by the root of the local steps, since clients take unlike numbers of
them; of statistics and control variates the values themselves. What is usual is the running median: of each of the
last eight rounds the median over the admitted replies, and of these the median. One client of three or more cannot move
it far.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median_low

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.messages import Updates, Work
from hardy.core.partition import Role
from hardy.core.tensors import Tensors

_ROUNDS = 8
"""rounds that are remembered"""
_NEAR = 0.1
"""a change shorter than this share of what was sent is never too long: where most clients have learnt all there is for
them, one that has not may move a thousand times as far"""
GROUPS = {
    Role.WEIGHT: "weights",
    Role.NORM_AFFINE: "weights",
    Role.NORM_MEAN: "means",
    Role.NORM_VAR: "variances",
    Role.CONTROL: "control variates",
}


def lengths(updates: Updates, work: Work, roles: Mapping[str, Role]) -> dict[str, Tensor]:
    """Group of tensors -> length in each reply, [S]; and under "near" the length below which a change is fine."""
    parts: dict[str, list[Tensor]] = {}
    for name, value in (*updates.shared.items(), *updates.reported.items()):
        group = GROUPS.get(roles.get(name, Role.COUNTER)) if value.is_floating_point() else None
        if group and (group != "weights" or name in updates.reported):
            parts.setdefault(group, []).append(value.reshape(len(value), -1))
    found = {group: tensors.row_lengths(torch.cat(rows, 1)) for group, rows in parts.items()}
    if spans := _weights(updates.shared, roles):
        several, steps = len(work.matrix) > 1, updates.steps.to(updates.loss).clamp_min(1).sqrt()
        change = updates.matrix - (work.matrix[updates.bases] if several else work.matrix)
        sent, moved = work.sent_lengths(spans), tensors.span_lengths(change, spans) / steps
        found["weights"] = torch.hypot(moved, found["weights"]) if "weights" in found else moved
        found["near"] = _NEAR * (sent[updates.bases] if several else sent) / steps
    return found


def _weights(shared: Tensors, roles: Mapping[str, Role]) -> tuple[tuple[int, int], ...]:
    """The columns of a matrix of all shared tensors in which weights are; neighbours are one span."""
    spans: list[tuple[int, int]] = []
    end = 0
    for name, value in sorted(shared.items()):
        if not value.is_floating_point():
            continue
        start, end = end, end + value.numel() // len(value)
        if GROUPS.get(roles.get(name, Role.COUNTER)) == "weights":
            spans.append((spans.pop()[0] if spans and spans[-1][1] == start else start, end))
    return tuple(spans)


def usual_lengths(history: Tensors) -> dict[str, float]:
    """Group -> its running median, for those that have one."""
    return median_lengths({group: past.tolist() for group, past in history.items()})


def median_lengths(found: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Group -> the median of its lengths. What does not move at all, say a branch that a client does not train, says
    nothing of how far one moves."""
    known = {group: [v for v in values if v > 0 and isfinite(v)] for group, values in found.items()}
    return {group: median_low(values) for group, values in known.items() if values}


def remembered_lengths(history: Tensors, now: Mapping[str, float]) -> Tensors:
    """The history with a round's medians added, the oldest forgotten."""
    kept = dict(history)
    for group, length in now.items():
        past = history.get(group, torch.zeros(_ROUNDS, dtype=torch.float64))
        kept[group] = torch.cat([past[1:], past.new_tensor([length])])
    return kept


def too_long(found: Mapping[str, float], usual: Mapping[str, float], ratio: float, rate: float) -> str | None:
    """What of a reply is more than `ratio` times as long as usual, in words."""
    near = found.get("near", 0.0)
    fine = {"weights": near, "control variates": near / max(rate, 1e-30)}  # a variate is a change divided by the rate
    for group, typical in usual.items():
        if (length := found.get(group, 0.0)) > max(ratio * typical, fine.get(group, 0.0)):
            what = "a change of weights" if group == "weights" else group
            return f"{what} {length / typical:.3g} times as long as usual, limit {ratio:g}"
    return None
