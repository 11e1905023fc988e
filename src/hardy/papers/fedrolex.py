"""FedRolex: the part of the network that a client trains rolls on with every round.

Alam et al., FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022.

W the ×1 network · R_k the width client k can train · C the channels of a layer · j the round, from 0
1. In round j client k gets the channels j, j + 1, ..., j + ⌈R_k·C⌉ − 1, modulo C, of every layer, and the weights
   between them. The image's channels and the classes are never cut.
2. It trains them as a network of its own.
3. Every entry of W is averaged over the clients that trained it, weighted by their examples; an entry nobody trained
   keeps its value.
4. In C rounds every channel of a layer is trained equally often, so W as a whole is the result.
   Width r is served by the window of the last round: the paper serves W alone.
"""

from dataclasses import dataclass

from torch import nn

from hardy.core.method import Method
from hardy.core.protocols import Norm, Objective, Optimiser
from hardy.core.tensors import ImageShape
from hardy.errors import HardyError
from hardy.papers.heterofl import ChannelBudget
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.parts.subnetworks import WIDTHS, ChannelSubmodels, held_mean
from hardy.registry import part


@part("budget", name="windows")
@dataclass(frozen=True, kw_only=True)
class WindowBudget(ChannelBudget):
    """Every client trains the widest window of channels that it can afford; the window rolls on with every round."""

    advance: int = 1
    """channels by which the windows of all layers move in a round"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advance < 1:
            raise HardyError(f"advance of windows is {self.advance}; it must be 1 or more. Corners stand still.")

    def submodels(self, model: nn.Module, shape: ImageShape) -> ChannelSubmodels:
        return ChannelSubmodels(model, shape, self.widths, advance=self.advance, scaler=self.scaler)


windows = WindowBudget


@part("method")
def fedrolex(
    *,
    widths: tuple[float, ...] = WIDTHS,
    advance: int = 1,
    scaler: bool = False,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """Each client trains the widest window of channels that it can afford, a channel further with every round."""
    return Method(
        name="fedrolex",
        norm=norm,
        objective=objective,
        optimiser=optimiser,
        budget=windows(widths=widths, advance=advance, scaler=scaler),
        aggregator=held_mean(),
    )


__all__ = ["fedrolex", "windows"]
