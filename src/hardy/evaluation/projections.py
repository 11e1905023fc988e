"""Norms and representations seen from afar: points in the plane of their two widest directions (FedRBN, Fig. 2, 7, 12).

projections.json in a run folder holds the points; report.html draws them.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardy.core.json_files import read_sealed, write_sealed
from hardy.core.layers import BatchNorm, Statistics
from hardy.core.method import Plan
from hardy.core.net import Mixture
from hardy.core.partition import Placement
from hardy.core.tensors import Tensors
from hardy.errors import HardyError


def plane(points: Tensor) -> Tensor:
    """Coordinates of points, [N, D], along their two principal axes."""
    points = points.double().cpu()  # float32 cannot hold the sum of what nearly diverged
    centred = points - points.mean(0)
    u, s, _ = torch.linalg.svd(nn.functional.pad(centred, (0, 2, 0, 2)), full_matrices=False)
    coordinates: Tensor = (u * s)[: len(points), :2]
    return coordinates


def placed(points: Tensor, marks: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The points in their plane, each with its mark, and the marks of those that have no place in one: a client that
    diverged answers with what is not finite."""
    fine = points.double().square().sum(1).isfinite()
    kept, left_out = ([mark for mark, ok in zip(marks, fine.tolist(), strict=True) if ok is it] for it in (True, False))
    places = plane(points[fine]).tolist()
    return {"points": [[*at, *mark] for at, mark in zip(places, kept, strict=True)], "left_out": left_out}


def norms(plan: Plan, own: Tensors, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Mean and variance of every client and branch, in the first and the last norm layer that clients keep; `own` are
    the tensors, [C, B, ...], of the clients with these numbers."""
    found = []
    layers = [
        path
        for path, module in plan.model.named_modules()
        if isinstance(module, BatchNorm) and plan.placement[f"{path}.clean.mean"] is not Placement.SHARED
    ]
    for path in dict.fromkeys(layers[:1] + layers[-1:]):
        rows, marks = [], []
        layer = plan.model.get_submodule(path)
        for branch in (name for name, kept in layer.named_children() if isinstance(kept, Statistics)):
            mean, var = (own.get(f"{path}.{branch}.{word}") for word in ("mean", "var"))
            if mean is None or var is None:
                continue  # one branch may be the server's
            for at, client in enumerate(numbers):
                if mean[at, 0].any():  # still at its start: nobody has trained it
                    rows.append(torch.cat([mean[at, 0], var[at, 0]]))
                    marks.append((client, branch))
        if len(rows) > 1:
            found.append({"layer": path, **placed(torch.stack(rows), marks)})
    return found


def penultimate(net: Mixture, x: Tensor, branch: str, robustness: float | None = None) -> Tensor:
    """What the last linear layer that runs in each base is given, [N, D]; without such a layer, the logits."""
    seen: list[Tensor] = []
    linear = [module for module in net.nets[0].model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        return net(x, branch=branch, robustness=robustness)
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1))) for layer in linear]
    try:
        net(x, branch=branch, robustness=robustness)
    finally:
        for hook in hooks:
            hook.remove()
    each = len(seen) // len(net.nets)
    return torch.cat(seen[each - 1 :: each], 1)


def write_projections(folder: Path, round_number: int, **found: Any) -> None:
    """Adds to what the folder's projections.json holds of this round; what it holds of another one goes."""
    path = folder / "projections.json"
    earlier: dict[str, Any] = {}
    if path.exists():
        with suppress(HardyError):  # what cannot be read is replaced
            earlier = read_sealed(path, "")
    known = earlier if earlier.get("round") == round_number else {"round": round_number}
    write_sealed(path, {**known, **found})
