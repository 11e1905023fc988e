"""Models of timm: adopted with equal outputs, or refused by name; none silently changed.

On the CPU, on images of 32x32, with random weights. What is written beside each name is the norm layers it has; `draws`
says that it drops by itself in training (F.dropout), so that its clients train one after another.
"""

import warnings

import pytest
import torch

from fake_torchvision import import_timm
from hardy.core.layers import calling
from hardy.core.modes import drawing_layer, examine
from hardy.errors import HardyError
from hardy.models.convert import adopt, restore

timm = import_timm()

MODELS = {
    "dla46_c": "BatchNorm2d",
    "fastvit_t8": "BatchNorm2d, BatchNormAct2d",
    "ghostnet_050": "BatchNorm2d, BatchNormAct2d, draws",
    "lcnet_035": "BatchNormAct2d",
    "mnasnet_small": "BatchNormAct2d",
    "mobilenetv3_small_050": "BatchNormAct2d",
    "regnety_002": "BatchNormAct2d",
    "repghostnet_050": "BatchNorm2d, BatchNormAct2d, draws",
    "resnet10t": "BatchNorm2d",
    "rexnetr_200": "BatchNorm2d, BatchNormAct2d",
    "semnasnet_050": "BatchNormAct2d",
    "test_byobnet": "BatchNormAct2d",
    "test_convnext": "",
    "test_convnext2": "",
    "test_convnext3": "",
    "test_efficientnet": "BatchNormAct2d",
    "test_efficientnet_evos": "",
    "test_efficientnet_gn": "",
    "test_efficientnet_ln": "",
    "test_mambaout": "",
    "test_nfnet": "",
    "test_resnet": "BatchNorm2d",
    "test_vit": "",
    "test_vit2": "",
    "test_vit4": "",
    "tinynet_e": "BatchNormAct2d",
}
SLOW = {
    "densenet121": "BatchNormAct2d",
    "efficientnet_b0": "BatchNormAct2d",
    "resnet18": "BatchNorm2d",
    "vgg11_bn": "BatchNorm2d",
}
SHAPE = (3, 32, 32)


def made(name):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's own
        model = timm.create_model(name, num_classes=10)
    for layer in model.modules():  # as after some training: an error would be lost in means of 0 and variances of 1
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model


def check(name, expected):
    model, x = made(name), torch.rand(2, *SHAPE)
    adopted = adopt(model, shape=SHAPE)
    norms = {type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)}
    examine(adopted, SHAPE)
    found = [*sorted(norms), *["draws"] * (drawing_layer(adopted) is not None)]
    assert ", ".join(found) == expected
    with torch.no_grad(), calling(branch="clean", statistics="running", key=None):
        before, after = model.eval()(x), adopted.eval()(x)
        back = restore(adopted, lambda net: net(x))
        assert (after - before).abs().max() <= 1e-4 * before.abs().max()
        assert back.state_dict().keys() == model.state_dict().keys() and type(back) is type(model)
        assert torch.equal(back(x), before)


@pytest.mark.parametrize(("name", "expected"), MODELS.items())
def test_a_model_of_timm_is_adopted_and_restored_unchanged(name, expected):
    check(name, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), SLOW.items())
def test_a_large_model_of_timm_is_adopted_and_restored_unchanged(name, expected):
    check(name, expected)


def test_a_model_of_timm_with_another_norm_is_refused_by_name():
    model = made("test_efficientnet")

    class Clipped(type(model.bn1)):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    model.bn1.__class__ = Clipped
    with pytest.raises(HardyError, match=r"Clipped at 'bn1' cannot be adopted: .* nn\.BatchNorm2d"):
        adopt(model, shape=SHAPE)
