"""Linear layers with block-quantized weights, compared with float64 of the values that gguf-py reads."""

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, dequantize_rows, format_for, quantize_rows
from sansgpu.kernels.quantized_linear import quantized_linear, quantized_lora_linear

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
ERROR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # relative, with two roundings in bf16
SCALE = 1.7


def new_weight(name: str, outputs: int, blocks: int, seed: int = 0) -> QuantizedWeight:
    """Returns normal values in a format, in memory that cannot be written."""
    format = FORMATS[name]
    values = torch.randn(outputs, blocks * format.block, generator=torch.Generator().manual_seed(seed))
    data = quantize_rows(values, format).numpy()
    data.flags.writeable = False
    return QuantizedWeight(torch.from_numpy(data), format)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_gguf_py(name: str) -> None:
    weight = new_weight(name, 7, 3)
    expected = torch.from_numpy(gguf.quants.dequantize(weight.data.numpy(), weight.format.encoding))
    assert torch.equal(dequantize_rows(weight.data, weight.format), expected)
    assert expected.shape == (weight.outputs, weight.inputs)
