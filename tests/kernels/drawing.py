"""Random tensors where the kernels run: a GPU, or the CPU with Triton's interpreter (tests/conftest.py)."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda" if torch.cuda.is_available() else "cpu")
