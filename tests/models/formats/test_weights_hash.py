"""The hash of a model's weights notices a single changed byte, also of a quantized weight."""

from __future__ import annotations

import torch
from torch import nn

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.models.quantized_layers import QuantizableMatrix


def model_of(stored: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 2), nn.Embedding(0, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    matrix = QuantizableMatrix((model[0],), is_table=False)
    matrix.quantize(QuantizedWeight(stored, FORMATS["q8_0"]))
    return model


def test_every_byte_counts() -> None:
    stored = torch.zeros(3, 68, dtype=torch.uint8)
    expected = weights_sha256(model_of(stored))
    assert weights_sha256(model_of(stored.clone())) == expected
    stored[2, 40] = 1
    assert weights_sha256(model_of(stored)) != expected
    other = model_of(torch.zeros_like(stored))
    with torch.no_grad():
        other.get_parameter("1.bias")[1] += 1e-3
    assert weights_sha256(other) != expected
