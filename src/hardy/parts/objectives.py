"""Objectives of standard training. Adversarial ones are in `adversarial`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective
from hardy.core.tensors import Tensors
from hardy.registry import part


@part("objective")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Standard training: the cross-entropy of the clean batch."""

    label_smoothing: float = 0.0
    """share of the label spread over all classes"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        logits = net(batch.x, statistics="batch", key=key)
        return F.cross_entropy(logits, batch.y, label_smoothing=self.label_smoothing)


@part("objective")
@dataclass(frozen=True, kw_only=True)
class MaskedCrossEntropy(Objective):
    """Cross-entropy for clients that lack classes: logits of classes absent from the batch do not take part, so that
    what the client never sees is not pushed down."""

    as_published: bool = False
    """HeteroFL and Split-Mix set those logits to 0, which leaves them e⁰ in the sum, instead of leaving them out"""

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        logits = net(batch.x, statistics="batch", key=key)
        present = (batch.y[:, None] == torch.arange(logits.shape[-1], device=logits.device)).any(0)
        return F.cross_entropy(torch.where(present, logits, 0.0 if self.as_published else -1e9), batch.y)


cross_entropy, masked_cross_entropy = CrossEntropy, MaskedCrossEntropy
__all__ = ["cross_entropy", "masked_cross_entropy"]
