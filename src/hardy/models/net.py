"""A model applied to one slot's tensors, or to those of several bases."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hardy.models.layers import Call, UseStatistics, forcing, passing
from hardy.tensors import Tensors


class Net:
    """forward(x, branch, statistics) over the tensors of one slot. Passes in batch mode move `kept` (the statistics),
    which the step reads off afterwards; the tensors given are never written to."""

    def __init__(self, model: nn.Module, trained: Tensors, kept: Tensors) -> None:
        self.model, self.trained, self.kept = model, trained, kept

    def __call__(
        self,
        x: Tensor,
        *,
        branch: str = "clean",
        statistics: UseStatistics = "running",
        key: Tensor | None = None,
        robustness: float | Tensor | None = None,
    ) -> Tensor:
        return self.together((x, Call(branch, statistics, key, robustness)))[0]

    def together(self, *passes: tuple[Tensor, Call]) -> list[Tensor]:
        """The logits of several passes of as many images each, one after the other for the norms, but with every layer
        run once for all: weights are read, and their gradients written, once."""
        images, calls = zip(*passes, strict=True)
        state = {**self.trained, **self.kept}
        with passing(*calls):
            logits: Tensor = functional_call(self.model, state, (images[0] if len(images) == 1 else torch.cat(images),))
        if any(call.statistics == "batch" for call in calls):
            self.kept = {name: state[name] for name in self.kept}
        logits = logits.to(images[0].dtype)
        return [logits] if len(calls) == 1 else list(logits.chunk(len(calls)))


class Mixture:
    """Networks that answer together: the mean of their logits. It is called like one Net, in inference only.

    With statistics "batch" the images of a call are normalised by each other.
    """

    def __init__(self, nets: Sequence[Net], statistics: UseStatistics = "running") -> None:
        self.nets, self.statistics = list(nets), statistics

    def __call__(self, x: Tensor, *, branch: str = "clean", robustness: float | Tensor | None = None) -> Tensor:
        with forcing(self.statistics):  # and not as an argument: what the batch moves is not kept
            answers = [net(x, branch=branch, robustness=robustness) for net in self.nets]
        return answers[0] if len(answers) == 1 else torch.stack(answers).mean(0)
