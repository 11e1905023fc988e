"""A model applied to one slot's tensors, or to those of several bases."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor, nn

from hardy.core.layers import Call, UseStatistics, passing
from hardy.core.manner import fused_products, manner, reading_rounded, round_once
from hardy.core.modes import call_model, classifier
from hardy.core.tensors import Tensors


class Net:
    """forward(x, branch, statistics) over the tensors of one slot. Passes in batch mode move `buffers`, the
    statistics, which the step reads off afterwards; the tensors given are never written to."""

    received: Tensors
    """the shared tensors that the client was sent, where somebody has said so"""
    offset: Tensor | None = None
    """what is added to the logits"""

    def __init__(self, model: nn.Module, trained: Tensors, buffers: Tensors, rounded: Tensors | None = None) -> None:
        """`rounded` are copies of weights as products read them, where somebody has them already."""
        self.model, self.buffers, self.received = model, buffers, {}
        self._set(trained, rounded)

    @property
    def trained(self) -> Tensors:
        return self._trained

    @trained.setter
    def trained(self, trained: Tensors) -> None:
        self._set(trained, None)

    def at(self, trained: Tensors) -> "Net":
        """The same network on tensors of the same values, to which gradients are taken."""
        made = copy(self)
        made._set(trained, self._rounded)
        return made

    def on(self, trained: Tensors, buffers: Tensors) -> "Net":
        """The same network on other tensors."""
        made = copy(self)
        made.buffers = buffers
        made._set(trained, None)
        return made

    def plus(self, offset: Tensor) -> "Net":
        """The same network with this added to its logits."""
        made = copy(self)
        made.offset = offset if self.offset is None else self.offset + offset
        return made

    def knowing(self, received: Tensors) -> "Net":
        """The same network that knows what the client was sent."""
        made = copy(self)
        made.received = received
        return made

    def sent(self) -> "Net":
        """The network as the client was sent it; what it was not sent is its own."""
        return self.on(*({n: self.received.get(n, t) for n, t in own.items()} for own in (self.trained, self.buffers)))

    def _set(self, trained: Tensors, rounded: Tensors | None) -> None:
        self._trained, self._read, self._rounded = trained, _prepared(self.model, trained), rounded or {}
        if manner() == "fused" and not rounded:
            self._rounded = {name: round_once(trained[name]) for name in fused_products(self.model) if name in trained}

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
        state = {**self._read, **self.buffers}
        with passing(*calls), reading_rounded(self._read, self._rounded):
            key = next((call.key for call in calls if call.key is not None), None)
            logits = call_model(self.model, state, images[0] if len(images) == 1 else torch.cat(images), key=key)
        if any(call.statistics == "batch" for call in calls):
            self.buffers = {name: state[name] for name in self.buffers}
        logits = logits.to(images[0].dtype)
        if self.offset is not None:
            logits = logits + self.offset
        return [logits] if len(calls) == 1 else list(logits.chunk(len(calls)))

    def features(self, x: Tensor, *, branch: str = "clean", key: Tensor | None = None) -> Tensor:
        """The representation before the classifier, [N, F], by running statistics: what the last linear layer or
        convolution is given."""
        given: list[Tensor] = []
        hook = classifier(self.model).register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
        try:
            self(x, branch=branch, key=key)
        finally:
            hook.remove()
        return given[-1].flatten(1)


def _prepared(model: nn.Module, trained: Tensors) -> Tensors:
    """Weights as autocast hands them to the products they are for: rounded once, and not in every pass of an attack.
    Those of layers that read rounded copies stay as they are."""
    device = next(iter(trained.values())).device.type if trained else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return trained
    products = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    if manner() == "fused":
        products -= fused_products(model).keys()
    half = torch.get_autocast_dtype(device)
    return {name: tensor.to(half) if name in products else tensor for name, tensor in trained.items()}


class Mixture:
    """Networks that answer together: the mean of their logits. It is called like one Net, in inference only.

    With statistics "images" the images of a call are normalised by each other. A call that names no branch takes the
    mixture's.
    """

    def __init__(self, nets: Sequence[Net], statistics: UseStatistics = "running", branch: str = "clean") -> None:
        self.nets, self.statistics, self.branch = list(nets), statistics, branch

    def __call__(self, x: Tensor, *, branch: str | None = None, robustness: float | Tensor | None = None) -> Tensor:
        branch = branch or self.branch
        answers = [net(x, branch=branch, statistics=self.statistics, robustness=robustness) for net in self.nets]
        return answers[0] if len(answers) == 1 else torch.stack(answers).mean(0)
