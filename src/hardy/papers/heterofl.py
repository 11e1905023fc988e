"""HeteroFL: a client trains the corner of the network that it can afford; SHeteroFL: and every narrower one in it.

Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR 2021.
Hong et al., Split-Mix, ICLR 2022, §4.1 (SHeteroFL, after Yu et al., Slimmable Neural Networks, ICLR 2019).

W the ×1 network · R_k the width client k can train · W[r] the first ⌈r·C⌉ of the C outputs and inputs of every layer;
the image's channels and the classes are never cut
1. The server sends client k the corner W[R_k].
2. It trains that corner; SHeteroFL: on the sum of the losses of all widths r ≤ R_k, in one step.
   Scaler: while it learns, what every layer but the last gives is multiplied by 1/r.
   Masked loss: logits of classes that it has no rows of do not take part.
3. Every entry of W is averaged over the clients that hold it, each client counted once, weighted by its examples;
   an entry nobody holds keeps its value.
4. Width r is served by W[r]; static norms: with statistics measured at the end (inference_statistics = recomputed).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hardy.attacks.base import Attack
from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser, Setting, name_part, within
from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.parts.example_privacy import DpSgd
from hardy.parts.norms import batch
from hardy.parts.objectives import Calibrated, cross_entropy
from hardy.parts.optimisers import sgd
from hardy.parts.subnetworks import WIDTHS, ChannelSubmodels, SubnetworkBudget, held_mean
from hardy.registry import part


@dataclass(frozen=True, kw_only=True)
class ChannelBudget(SubnetworkBudget):
    """Sub-networks of fewer channels."""

    scaler: bool = False
    """multiply what every layer but the last gives by 1/r while a network of width r learns; not with statistics that
    are tracked meanwhile"""

    def check(self, method: Method, setting: Setting) -> None:
        super().check(method, setting)
        attacks = any(isinstance(found, Attack) for found in within(method.objective))
        tracked = method.norm.inference_statistics == "running" or attacks
        if self.scaler and method.norm.branches is not None and tracked:
            raise HardyError(
                f"scaler of budget {name_part(self)!r} with norm {name_part(method.norm)!r}: the statistics tracked in "
                "training are of values 1/r times as large as those that are served or attacked. Usual fix: norm group "
                "or absent; without attacks, batch with inference_statistics = recomputed (HeteroFL's static norm)."
            )


@part("budget", name="corners")
@dataclass(frozen=True, kw_only=True)
class CornerBudget(ChannelBudget):
    """Every client trains the widest corner of the one network that it can afford."""

    slimmable: bool = False
    """a client trains every width it can afford, the losses added up, and not the widest alone"""

    def check(self, method: Method, setting: Setting) -> None:
        super().check(method, setting)
        if self.slimmable and any(isinstance(part, DpSgd) for part in method.parts()):
            raise HardyError(
                "dp_sgd with budget corners, slimmable: its account counts one gradient a step, and a client makes one "
                "for each width. Usual fix: slimmable = false."
            )

    def submodels(self, model: nn.Module, shape: ImageShape) -> ChannelSubmodels:
        return ChannelSubmodels(model, shape, self.widths, slimmable=self.slimmable, scaler=self.scaler)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Masked(Calibrated):
    """The inner objective without the logits of classes that the client has no training rows of. As published they are
    0, and not left out: see `masked_cross_entropy`."""

    def offset(self, counts: Tensor) -> Tensor:
        return torch.where(counts > 0, 0.0, -1e9).to(counts)


corners, masked = CornerBudget, Masked


@part("method")
def heterofl(
    *,
    widths: tuple[float, ...] = WIDTHS,
    slimmable: bool = False,
    scaler: bool = False,
    missing_labels: bool = True,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Each client trains the widest corner of one network that it can afford; widths are those trained and served.

    missing_labels: false leaves the logits of classes that a client has no rows of out of its loss
    """
    return Method(
        name="sheterofl" if slimmable else "heterofl",
        norm=norm,
        objective=objective if missing_labels else masked(inner=objective),
        optimiser=optimiser,
        budget=corners(widths=widths, slimmable=slimmable, scaler=scaler),
        aggregator=held_mean(),
    )


@part("method")
def sheterofl(
    *,
    widths: tuple[float, ...] = WIDTHS,
    scaler: bool = False,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """HeteroFL whose clients train every width they can afford, as slimmable networks."""
    return heterofl(widths=widths, slimmable=True, scaler=scaler, norm=norm, objective=objective, optimiser=optimiser)


__all__ = ["corners", "heterofl", "masked", "sheterofl"]
