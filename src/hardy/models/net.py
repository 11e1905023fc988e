"""A model applied to one slot's tensors."""

from torch import Tensor, nn
from torch.func import functional_call

from hardy.models.layers import UseStatistics, calling
from hardy.tensors import Tensors


class Net:
    """forward(x, branch, statistics) over the tensors of one slot. Passes in batch mode move `kept` (the statistics),
    which the step reads off afterwards; the tensors given are never written to."""

    def __init__(self, model: nn.Module, trained: Tensors, kept: Tensors) -> None:
        self.model, self.trained, self.kept = model, trained, kept

    def __call__(
        self, x: Tensor, *, branch: str = "clean", statistics: UseStatistics = "running", key: Tensor | None = None
    ) -> Tensor:
        state = {**self.trained, **self.kept}
        with calling(branch=branch, statistics=statistics, key=key):
            logits: Tensor = functional_call(self.model, state, (x,))
        if statistics == "batch":
            self.kept = {name: state[name] for name in self.kept}
        return logits
