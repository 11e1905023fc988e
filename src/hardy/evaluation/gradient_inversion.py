"""What an image looked like, from the update that was made of it.

Geiping et al., Inverting Gradients, NeurIPS 2020: an image is searched whose gradient points where the update points
(cosine), and that is smooth (total variation). The attacker knows the network, the label, and that it was one step on
one image: the best an attacker can hope for.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from hardy.core import random
from hardy.core.net import Net
from hardy.core.tensors import ImageShape, Tensors


def invert(
    net: Net, change: Mapping[str, Tensor], shape: ImageShape, label: Tensor, *, iterations: int, key: Tensor
) -> Tensor:
    """The image in [0, 1] found for the change of the trained tensors that a step made."""
    wanted = {name: -value for name, value in change.items()}
    length = _norm(wanted.values())
    image = random.uniform(key, shape, next(iter(wanted.values())).dtype)[None].requires_grad_()
    optimiser = torch.optim.Adam([image], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(
        optimiser, [iterations * part // 8 for part in (3, 5, 7)], gamma=0.1
    )
    for _ in range(iterations):
        optimiser.zero_grad()
        found = _gradient(net, wanted, image, label)
        product = torch.stack([(found[name] * wanted[name]).sum() for name in wanted]).sum()
        cosine = product / (_norm(found.values()) * length).clamp_min(1e-30)
        roughness = sum((image.diff(dim=axis).abs().mean() for axis in (-1, -2)), image.new_zeros(()))
        (1 - cosine + 1e-2 * roughness).backward()  # type: ignore[no-untyped-call]
        assert image.grad is not None
        image.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            image.clamp_(0.0, 1.0)
    return image.detach()[0]


def _gradient(net: Net, names: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensors:
    trained = {name: value.detach().requires_grad_(name in names) for name, value in net.trained.items()}
    logits = Net(net.model, trained, net.buffers)(image, statistics="batch")
    loss = F.cross_entropy(logits, label[None])
    found = torch.autograd.grad(loss, [trained[name] for name in names], create_graph=True)
    return dict(zip(names, found, strict=True))


def _norm(values: Iterable[Tensor]) -> Tensor:
    return torch.stack([value.square().sum() for value in values]).sum().sqrt()


def error_of(found: Tensor, truth: Tensor, usual: Tensor) -> float:
    """Mean squared error, as a multiple of that of an attacker who always names the usual image: 1 is nothing learnt, 0
    is the image itself."""
    return float((found - truth).square().mean() / (usual - truth).square().mean().clamp_min(1e-12))
