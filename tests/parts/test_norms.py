"""Norms on images and on tokens."""

import torch
from torch import nn

from conftest import fit
from hardy import papers
from hardy.models import MODELS
from hardy.parts.norms import layer


def test_layer_norm_on_tokens_vectors_and_images():
    made, x = layer().layer(6), torch.randn(4, 5, 6)
    torch.testing.assert_close(made(x), nn.LayerNorm(6)(x))
    torch.testing.assert_close(made(x[:, 0]), nn.LayerNorm(6)(x[:, 0]))
    images = torch.randn(4, 6, 3, 3)
    torch.testing.assert_close(made(images), nn.GroupNorm(1, 6)(images))


def test_a_transformer_trains_with_it():
    def vit(norm):
        return MODELS["tiny_vit"](norm=norm, shape=(1, 8, 8), classes=3, width=0.25)

    before = fit(papers.fedavg(norm=layer()), model=vit, rounds=1).state.shared
    after = fit(papers.fedavg(norm=layer()), model=vit, rounds=2).state.shared
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())
