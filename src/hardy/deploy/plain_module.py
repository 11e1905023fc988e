"""Back to PyTorch: a trained network without Hardy's layers."""

import torch
from torch import nn

from hardy.core import tensors
from hardy.core.layers import calling
from hardy.deploy.predictor import Predictor
from hardy.errors import HardyError
from hardy.models.convert import restore


@torch.no_grad()
def plain_module(predictor: Predictor) -> nn.Module:
    """The network of a predictor as a module in evaluation mode: the user's own class where it was adopted, torch's own
    layers otherwise. Its answers are compared with the predictor's."""
    plan, branch = predictor.plan, predictor.branch
    if len(predictor.bases) > 1:
        raise HardyError(
            f"width {predictor.width:g} is served by the mean of {len(predictor.bases)} networks, which is no module "
            f"of one class. Take run.customise(), or one of them: width = {plan.method.budget.widths[0]:g}."
        )
    if predictor.statistics == "images":
        raise HardyError(
            "norm inference_statistics is 'batch': such a network needs its neighbours. Take running or recomputed."
        )
    (base,) = predictor.bases
    own = dict(base.state_dict())
    narrower = [n for n, shape in tensors.shapes(plan.start).items() if n in own and own[n].shape != shape]
    if narrower:
        raise HardyError(
            f"width {predictor.width:g} is a part of the network ({narrower[0]} is smaller), which is no module of its "
            "class. Take width = 1, or run.customise()."
        )
    images = torch.rand(2, *predictor.shape, generator=torch.Generator().manual_seed(0)).to(predictor.dtype)

    def forward(net: nn.Module) -> torch.Tensor:
        with calling(branch=branch, statistics="running", key=None):
            answer: torch.Tensor = net(images)
        return answer

    made = restore(base, forward, branch=branch)
    wanted, found = predictor(images).cpu(), forward(made)
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())):
        raise HardyError("the plain module answers differently from the trained network. Take run.customise() instead.")
    dtype = next(value.dtype for value in plan.start.values() if value.is_floating_point())
    return made.to(dtype).requires_grad_(True)
