"""Warm start: a run whose first networks are somebody's trained ones."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hardy.config import FROM_PYTHON, named
from hardy.core.method import Plan
from hardy.core.partition import Placement, Role
from hardy.core.spending import privacy_spent
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.runs.checkpoint import load_checkpoint
from hardy.runs.run import Run
from hardy.user_code import short

_LOG = logging.getLogger("hardy")
_STATISTICS = {Role.NORM_MEAN: "running_mean", Role.NORM_VAR: "running_var"}
"""as torch's batch norms call them"""
_COUNTS = (Role.COUNTER, Role.NORM_COUNT)


@dataclass(frozen=True, kw_only=True)
class TrainedTensors:
    """Trained tensors: those all clients have in common, [B, ...], and the clients' own, [C, B, ...]."""

    words: str
    common: Tensors
    own: Tensors
    complete: bool
    """whether a tensor that the model has no place for is an error"""

    def find(self, plan: Plan, name: str) -> tuple[str, bool] | None:
        """The name of what stands for a tensor of the model here, and whether each client has its own."""
        branch, role = plan.tags[name].branch, plan.roles[name]
        tried = [name]
        if branch:
            layer, _, last = name.rpartition(f".{branch}.")
            tried += [f"{layer}.clean.{last}", f"{layer}.{_STATISTICS.get(role, last)}"]
        for one in tried:
            if one in self.common or one in self.own:
                return one, one in self.own
        return None


def warm_start(run: Run, init: Any, *, head: bool = True) -> None:
    """Puts trained tensors in place of a run's first ones. Without `head` the last layer stays as it is."""
    source, plan = _source(init), run.engine.plan
    private = sorted(n for n in plan.names(Placement.PRIVATE) if n in plan.model_names)
    if run.local is None and private:
        raise HardyError(
            f"init cannot reach the clients over a network: with method {plan.method.name!r} they keep {private[0]} "
            "and more at home. Take a method that shares all tensors, or leave init out."
        )
    left = set() if head else _head(plan)
    state = run.state
    places = {
        Placement.SHARED: dict(state.shared),
        Placement.REPORTED: state.reported.first_rows(),
        Placement.PRIVATE: run.engine.store.first_rows(),
    }
    used, misfits = set(), []
    for name in (n for n in plan.tags if n in plan.model_names):
        found = source.find(plan, name)
        used.add(found[0] if found else name)
        if name in left or (found is None and plan.roles[name] in _COUNTS):
            continue
        target = places[plan.placement[name]]
        if found is None:
            misfits.append(f"{name} is not there")
            continue
        value = _fitted(source, found, target[name], per_client=plan.placement[name] is not Placement.SHARED)
        if value.shape != target[name].shape:
            misfits.append(f"{name} is {_words(value, plan, name)}, here {_words(target[name], plan, name)}")
        else:
            target[name] = value.to(target[name])
    if source.complete:
        extra = {n for n in source.common if not n.endswith("num_batches_tracked")} - used - _constants(source, plan)
        misfits += [f"{name} has no place in the model" for name in sorted(extra)]
    if misfits:
        model = short(named(run.experiment.model, "model")[0])
        raise HardyError(
            f"init ({source.words}) does not fit model {model!r}: {'; '.join(misfits[:3])}"
            f"{f'; and {len(misfits) - 3} more' if len(misfits) > 3 else ''}. Take the model it was trained with; with "
            "another number of classes, init_head=False leaves the last layer fresh."
        )
    reported = state.reported.begun(places[Placement.REPORTED])
    run.state = replace(state, shared=places[Placement.SHARED], reported=reported)
    run.engine.store = run.engine.store.begun(places[Placement.PRIVATE])
    words = str(init) if isinstance(init, str | Path) else FROM_PYTHON
    run.experiment = replace(run.experiment, init=words, init_head=head)
    if privacy_spent(run.server, 1):
        _LOG.warning(
            "init: the privacy account is of this run alone. If its first networks were trained on rows of these "
            "clients, add the ε of that training; without one there is no bound."
        )


def _constants(source: TrainedTensors, plan: Plan) -> set[str]:
    """Tensors that are constants of the model too, with the same values, such as those of InputScale."""
    held = plan.model.state_dict()
    pairs = {name: (source.common[name][0].to(held[name]), held[name]) for name in source.common.keys() & held.keys()}
    return {name for name, (one, other) in pairs.items() if one.shape == other.shape and torch.allclose(one, other)}


def _fitted(source: TrainedTensors, found: tuple[str, bool], like: Tensor, *, per_client: bool) -> Tensor:
    """What was found on the axes of a tensor here, [B, ...] or [C, B, ...]. Clients that are others get the mean."""
    name, own = found
    value = source.own[name] if own else source.common[name]
    if own and not (per_client and len(value) == len(like)):
        value, own = value.mean(0) if value.is_floating_point() else value[0], False
    bases = like.shape[1 if per_client else 0]
    axis = 1 if own else 0
    if value.shape[axis] == 1:  # one network, for all bases
        value = value.expand(*value.shape[:axis], bases, *value.shape[axis + 1 :])
    return value.expand(len(like), *value.shape).clone() if per_client and not own else value.clone()


def _words(value: Tensor, plan: Plan, name: str) -> str:
    """A tensor's shape without its axes of clients and bases; the number of bases where there are several."""
    first = 1 if plan.placement[name] is Placement.SHARED else 2
    bases = value.shape[first - 1]
    return f"{tuple(value.shape[first:])}{f' in {bases} bases' if bases > 1 else ''}"


def _head(plan: Plan) -> set[str]:
    """The tensors of the last layer that is no norm."""
    last = [n for n, tag in plan.tags.items() if tag.trained and tag.role is Role.WEIGHT][-1]
    layer = last.rpartition(".")[0]
    return {name for name in plan.tags if name.rpartition(".")[0] == layer}


def _source(init: Any) -> TrainedTensors:
    if isinstance(init, Run):
        words, state, store = f"the run {init.experiment.name}", init.state, init.engine.store
        return TrainedTensors(words=words, common=dict(state.shared), own={**state.reported, **store}, complete=False)
    if isinstance(init, nn.Module):
        return _from_state_dict(init.state_dict(), f"a {type(init).__name__}")
    if isinstance(init, Mapping):
        return _from_state_dict(init, "a state_dict")
    if not isinstance(init, str | Path):
        raise HardyError(
            f"init is a {type(init).__name__}; give a run, its folder, a state_dict, a .safetensors or .pt file, or a "
            "module."
        )
    if str(init) == FROM_PYTHON:
        raise HardyError("this run was warm-started from Python and stopped before its first checkpoint; start again.")
    path = Path(init)
    if path.is_dir():
        found, _ = load_checkpoint(path / "checkpoint" if (path / "checkpoint").is_dir() else path)
        own = {**found.server.reported, **found.store}
        return TrainedTensors(words=str(init), common=dict(found.server.shared), own=own, complete=False)
    return _from_state_dict(_read(path), str(init))


def _read(path: Path) -> Any:
    if not path.is_file():
        raise HardyError(f"init is {str(path)!r}; there is no such run folder or file.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        raise HardyError(f"init {path} cannot be read as tensors: {str(error)[:200]}") from error
    except Exception as error:  # whatever pickle says of a file that holds more than tensors
        raise HardyError(
            f"init {path} holds more than tensors ({type(error).__name__}). Save model.state_dict() instead."
        ) from error


def _from_state_dict(given: Any, words: str) -> TrainedTensors:
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise HardyError(f"init ({words}) is no state_dict: it must map names to tensors. Save model.state_dict().")
    return TrainedTensors(words=words, common={n: t.detach()[None] for n, t in given.items()}, own={}, complete=True)
