"""The one way to a client's network: from a plan and tensors.

A client is served by the shared tensors with its own in their place, of as many bases as the width asks for, the best
first where the budget sorts them. A norm may ask for statistics recomputed on the client's training images. Evaluation,
the predictor, the export, a network for a new client and the diagnosis all start here.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hardy.core import tensors
from hardy.core.engine import Branches
from hardy.core.layers import BatchNorm, Statistics, UseStatistics, calling
from hardy.core.method import Plan
from hardy.core.modes import call_model
from hardy.core.net import Mixture, Net
from hardy.core.partition import Placement, Role
from hardy.core.protocols import Norm
from hardy.core.tensors import Tensors
from hardy.errors import HardyError, unknown


def chosen_branch(norm: Norm, asked: str | None, what: str = "branch") -> str:
    """The branch asked for, which the norm must have; not asked: the one it serves with."""
    if asked is not None and norm.branches is not None and asked not in norm.branches:
        raise unknown(what, asked, norm.branches)
    return norm.serving_branch if asked is None else asked


def chosen_branches(norm: Norm, asked: Branches) -> tuple[str, str]:
    """The branches that attacks climb on and that predict; a robustness that the norm cannot mix is refused."""
    refuse_robustness(asked.robustness, norm)
    return chosen_branch(norm, asked.attack), chosen_branch(norm, asked.predict)


def refuse_robustness(robustness: float | None, norm: Norm) -> None:
    if robustness is None:
        return
    if "adversarial" not in (norm.branches or ()):
        raise HardyError(
            f"robustness {robustness} cannot be chosen: norm {type(norm).__name__!r} keeps no adversarial branch. "
            "Train with norm dual, as split_mix_dat does."
        )
    if not 0 <= robustness <= 1:
        raise HardyError(f"robustness is {robustness}; it must be in [0, 1], from the clean to the adversarial branch.")


def refuse_common(plan: Plan) -> None:
    """A shift for the images of all clients needs a network for all of them."""
    own = [name for name in plan.model_names if plan.placement[name] is not Placement.SHARED]
    if own or plan.method.norm.inference_statistics != "running":
        raise HardyError(
            f"a threat with common=true needs one network for all clients; with method {plan.method.name!r} each has "
            "its own norms or weights. Leave common out: then every client meets its own shift."
        )


@dataclass(frozen=True, kw_only=True)
class Served:
    """The networks of one width, all clients' side by side."""

    plan: Plan
    common: list[Tensors]
    """the tensors that all clients have in common, one entry per base"""
    own: list[Tensors]
    """those of each client, [C, ...]"""

    @property
    def alike(self) -> bool:
        """Whether all clients have the same network."""
        return not any(self.own)

    def bases(self, client: int) -> list[Tensors]:
        """The tensors of a client's network, one entry per base."""
        return [{**base, **tensors.gather(own, client)} for base, own in zip(self.common, self.own, strict=True)]

    def network(self, client: int) -> Mixture:
        """A client's network; called without a branch, it answers with the norm's own."""
        return mixture(self.plan, self.bases(client))


def serve(
    plan: Plan,
    shared: Tensors,
    own: Tensors,
    *,
    rounds: int,
    width: float = 1.0,
    order: Sequence[int] | None = None,
    images: Callable[[], Iterable[Tensor]] | None = None,
) -> Served:
    """The networks at a width out of the shared tensors, [B, ...], and the clients' own, [C, B, ...], as so many
    rounds have left them, with the bases in this order.
    `images` gives each client's training images in turn, for a norm that recomputes statistics."""
    budget, names = plan.method.budget, model_names(plan)
    bases = slice(None) if order is None else list(order)
    shared = {name: shared[name][bases] for name in names if name in shared}
    own = {name: own[name][:, bases] for name in names if name in own}
    at_width = partial(budget.serve, width=width, submodels=plan.submodels, rounds=rounds)
    chosen = at_width({**shared, **tensors.gather(own, 0)})
    served = Served(plan=plan, common=[tensors.select(b, shared) for b in chosen], own=[{} for _ in chosen])
    if own:
        cut = torch.vmap(lambda own: [tensors.select(b, own) for b in at_width({**shared, **own})])(own)
        served.own[:] = cut
    if plan.method.norm.inference_statistics == "recomputed":
        _recompute_all(served, images)
    return served


def model_names(plan: Plan) -> list[str]:
    """The model's tensors in the order of its layers: a checkpoint gives them back in another."""
    return [name for name in plan.tags if name in plan.model_names]


def _recompute_all(served: Served, images: Callable[[], Iterable[Tensor]] | None) -> None:
    plan = served.plan
    if images is None:
        raise HardyError(
            f"norm {type(plan.method.norm).__name__!r} recomputes a client's statistics on its training images, and "
            "none are on this machine. Load the run with its data, or let the nodes measure."
        )
    statistics = [n for n in plan.buffers if plan.roles[n] in (Role.NORM_MEAN, Role.NORM_VAR)]
    for common, own in zip(served.common, served.own, strict=True):
        found = [
            tensors.select(recompute_statistics(plan.model, {**common, **tensors.gather(own, client)}, x), statistics)
            for client, x in enumerate(images())
        ]
        own |= tensors.stack(found)


@torch.no_grad()
def recompute_statistics(model: nn.Module, held: Tensors, images: Tensor) -> Tensors:
    """The tensors of a network with the clean statistics that these images have, layer by layer."""

    def measure(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        kept, over = layer.get_submodule("clean"), [axis for axis in range(inputs[0].dim()) if axis != 1]
        assert isinstance(kept, Statistics)
        kept.var, kept.mean = torch.var_mean(inputs[0], over)

    measured = tensors.apply(lambda t: t.to(images.device), held)
    hooks = [m.register_forward_pre_hook(measure) for m in model.modules() if isinstance(m, BatchNorm)]
    try:
        with calling(branch="clean", statistics="running", key=None):
            call_model(model, measured, images, key=None)
    finally:
        for hook in hooks:
            hook.remove()
    return measured


def base_net(plan: Plan, held: Tensors) -> Net:
    """The model as a function of these tensors."""
    return Net(plan.model, tensors.select(held, plan.trained), tensors.select(held, plan.buffers))


def mixture(plan: Plan, bases: Sequence[Tensors], branch: str | None = None) -> Mixture:
    """The network whose answer is the mean over these bases, by default with this branch or the norm's own."""
    norm, nets = plan.method.norm, [base_net(plan, held) for held in bases]
    return Mixture(nets, statistics=call_statistics(norm), branch=chosen_branch(norm, branch))


def call_statistics(norm: Norm) -> UseStatistics:
    """What a served network normalises a call's images by."""
    return "images" if norm.inference_statistics == "batch" else "running"


def base_module(plan: Plan, held: Tensors) -> nn.Module:
    """A copy of the model, on the CPU, that owns these values: what is trained as parameters, the rest as buffers."""
    model = deepcopy(plan.model)
    for name, value in held.items():
        path, _, own = name.rpartition(".")
        owner, value = model.get_submodule(path), value.detach().clone()
        setattr(owner, own, nn.Parameter(value) if isinstance(getattr(owner, own), nn.Parameter) else value)
    return model.cpu()
