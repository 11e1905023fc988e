"""The gradient of a network to its images as ONNX, for places without autograd: a browser, or another runtime.

(images, cotangent, robustness) -> (logits, gradient): gradient is that of Σ cotangent · logits to the images. For the
cross-entropy of labels the cotangent is softmax(logits) − one_hot(labels); any other loss works the same way.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hardy.core.files import disk
from hardy.core.layers import calling
from hardy.errors import HardyError

_OPSET = 18


def write_gradient(
    base: nn.Module, path: Path, *, shape: Sequence[int], classes: int, branch: str, mixes: bool
) -> None:
    """Traces a base and its backward pass to the images, and writes both as one ONNX file for any number of images."""
    state = {name: tensor.detach().cpu().float() for name, tensor in _tensors(base).items()}
    images, cotangent = torch.rand(2, *shape), torch.randn(2, classes)
    given = (images, cotangent, torch.tensor(0.5)) if mixes else (images, cotangent)

    def both(state: dict[str, Tensor], images: Tensor, cotangent: Tensor, robustness: Tensor | None) -> Any:
        def logits(x: Tensor) -> Any:
            with calling(branch=branch, statistics="running", key=None, robustness=robustness):
                return functional_call(base, state, (x,))

        pulled: Any = vjp(logits, images)  # its stub has three values, which only has_aux gives
        answer, pull_back = pulled
        return answer, pull_back(cotangent)[0]

    several = {0: torch.export.Dim("images", min=1, max=65536)}
    with warnings.catch_warnings(), disk(str(path)):
        warnings.simplefilter("ignore")  # the exporter's own, about itself
        try:
            function = both if mixes else lambda state, images, cotangent: both(state, images, cotangent, None)
            traced = make_fx(function, decomposition_table=_BACKWARD, tracing_mode="symbolic")(state, *given)
            torch.onnx.export(
                _Traced(traced, state).eval(),
                given,
                str(path),
                input_names=["images", "cotangent", "robustness"][: len(given)],
                output_names=["logits", "gradient"],
                dynamic_shapes=({**several}, {**several}, {})[: len(given)],
                opset_version=_OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise HardyError(f"the gradient of this network cannot be written as ONNX: {first}.") from error


def _tensors(base: nn.Module) -> dict[str, Tensor]:
    return {**dict(base.named_parameters()), **dict(base.named_buffers())}


class _Traced(nn.Module):
    """A traced function of tensors and images with its tensors inside."""

    def __init__(self, traced: GraphModule, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.traced, self.names = traced, list(state)
        for number, tensor in enumerate(state.values()):
            self.register_buffer(f"tensor{number}", tensor)

    def forward(self, images: Tensor, cotangent: Tensor, robustness: Tensor | None = None) -> Any:
        state = {name: self.get_buffer(f"tensor{number}") for number, name in enumerate(self.names)}
        return self.traced(state, images, cotangent, *([] if robustness is None else [robustness]))


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor, None, None]:
    """ONNX has no backward of a convolution; to the input it is a transposed one. Weights need none here."""
    if transposed or x.dim() != 4:
        raise NotImplementedError("the backward of this kind of convolution")
    left = [
        x.shape[2 + i]
        - ((gradient.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1)
        for i in range(2)
    ]
    return torch.conv_transpose2d(gradient, weight, None, stride, padding, left, groups, dilation), None, None


def _max_pool_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each gradient goes to the place its maximum came from."""
    count, channels, height, width = x.shape
    flat = torch.zeros_like(x).reshape(count, channels, height * width)
    spread = flat.scatter_add(2, indices.reshape(count, channels, -1), gradient.reshape(count, channels, -1))
    return spread.reshape(count, channels, height, width)


_BACKWARD: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
