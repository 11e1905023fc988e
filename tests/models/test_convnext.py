"""A ConvNeXt among the models: its block by hand, many slots at once, under attack, narrower, exported."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import SHAPE, assert_close, everything, fit, shortened
from hardy import papers
from hardy.core.layers import BatchNorm
from hardy.engines import EngineChoice
from hardy.errors import HardyError
from hardy.models import mini_convnext
from hardy.models.zoo.convnext import ConvNextBlock

VECTORISED = EngineChoice(name="vectorised", device="cpu", precision="float64")


def small(norm, width=0.25):
    return mini_convnext(norm=norm, shape=SHAPE, classes=3, width=width, blocks=1, kernel=3)


def test_a_block_by_hand():
    block = ConvNextBlock(4, nn.Identity, 5)
    x = torch.randn(2, 4, 6, 6)
    each = [F.conv2d(x[:, c : c + 1], block.spread.weight[c : c + 1], padding=2) for c in range(4)]
    spread = torch.cat(each, 1) + block.spread.bias[:, None, None]
    tokens = spread.permute(0, 2, 3, 1)
    wide = F.gelu(tokens @ block.widen.weight.flatten(1).T + block.widen.bias)
    out = (wide @ block.narrow.weight.flatten(1).T + block.narrow.bias).permute(0, 3, 1, 2)
    torch.testing.assert_close(block(x), x + 0.1 * out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        papers.fedavg(),
        papers.fatavg(),
        papers.fedrbn(),
        papers.fedwon(),
        papers.heterofl(),
        papers.fedavg(norm=papers.hbn().norm),
    ],
    ids=["clean", "attacked", "dual", "fedwon", "narrower", "hbn"],
)
def test_engines_agree_also_under_attack(method):
    method = shortened(method)
    options = {"model": small, "rounds": 2}
    assert_close(everything(fit(method, **options)), everything(fit(method, engine=VECTORISED, **options)), 1e-9)


def test_it_is_exported(tmp_path):
    pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    from hardy.deploy.onnx_file import open_onnx

    run = fit(papers.fedavg(), model=small, rounds=1)
    manifest = run.export(tmp_path / "net.onnx", client=0)
    x = torch.rand(3, *SHAPE)
    wanted = run.customise(client=0)(x).float()
    found = torch.from_numpy(open_onnx(manifest)(x.numpy()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_its_norms_and_sizes_are_checked():
    assert sum(isinstance(m, BatchNorm) for m in mini_convnext(norm=BatchNorm).modules()) == 7
    with pytest.raises(HardyError, match="kernel odd"):
        mini_convnext(kernel=4)
