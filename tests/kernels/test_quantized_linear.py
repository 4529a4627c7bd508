"""Block-quantized linear layers equal float64 layers with the values that gguf-py dequantizes."""

import gguf
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, dequantize_rows, format_for, quantize_rows
from sansgpu.kernels.frozen_linear import Adapter, quantized_linear, quantized_lora_linear
from tests.kernels.test_lora import DTYPES, RANDOM, SCALE, assert_near
from tests.kernels.threads import assert_equal_on_all_threads

NAMES = st.sampled_from(list(FORMATS))
RANK = 5
# Where the fp16 factors of a block are.
TWO = (0, 2)
FACTORS = {"q4_1": TWO, "q5_1": TWO, "q4_k": TWO, "q5_k": TWO, "q6_k": (208,), "q3_k": (108,), "q2_k": (80, 82)}


def new_weight(name: str, outputs: int, blocks: int, seed: int = 0) -> QuantizedWeight:
    """Returns random blocks with scales of at most 2, in read-only memory."""
    format, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (outputs, blocks, format.bytes), dtype=torch.uint8, generator=generator)
    for factor in FACTORS.get(name, (0,)):
        data[..., factor + 1] &= 0xBF  # the upper byte
    array = data.view(outputs, -1).numpy()
    array.flags.writeable = False
    return QuantizedWeight(torch.from_numpy(array), format)


def values_of(weight: QuantizedWeight) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(weight.data.numpy(), weight.format.encoding))


def leaves(rows: int, weight: QuantizedWeight, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns x, x after dropout, A and B."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, weight.inputs), (rows, weight.inputs), (RANK, weight.inputs), (weight.outputs, RANK)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@RANDOM
@given(NAMES, st.integers(1, 70), st.integers(1, 40), DTYPES, st.booleans(), st.integers(0, 99))
def test_values_are_those_of_gguf_py(
    kernels: str, name: str, outputs: int, blocks: int, dtype: torch.dtype, flush: bool, seed: int
) -> None:
    weight = new_weight(name, outputs, blocks, seed)
    expected = values_of(weight)
    torch.set_flush_denormal(flush)  # as in training: subnormal fp16 scales must not be flushed
    assert torch.equal(dequantize_rows(weight.data, weight.format, dtype), expected.to(dtype))
    torch.set_flush_denormal(False)
    assert expected.shape == (weight.outputs, weight.inputs)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_infinity_or_nan_reaches_the_results(kernels: str, name: str, dtype: torch.dtype) -> None:
    for bits in (0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x7FFF, 0xFFFF):
        weight = new_weight(name, outputs=9, blocks=3)
        block = weight.data.view(9, 3, -1).numpy().copy()
        place = FACTORS.get(name, (0,))[0]
        block[5, 1, place : place + 2] = bits & 0xFF, bits >> 8
        weight = QuantizedWeight(torch.from_numpy(block.reshape(9, -1)), weight.format)
        for rows in (1, 20):
            x = leaves(rows, weight, dtype)[0]
            y = quantized_linear(x, weight)
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert y.isfinite().all(dim=0).tolist() == [output != 5 for output in range(9)], hex(bits)
            assert not gradient.view(rows, 3, -1)[:, 1].isfinite().any(), hex(bits)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
def test_simple_formats_are_rounded_as_by_gguf_py(name: str) -> None:
    values, format = torch.randn(5, 320), FORMATS[name]
    values[1, :32] = 0
    values[2, :32] = torch.tensor([127.0, 0.5, -0.5, 1.5, -2.5, 0.49999997, *range(-13, 13)])  # q8_0 rounds halves
    expected = torch.from_numpy(gguf.quants.quantize(values.numpy(), format.encoding))
    assert torch.equal(quantize_rows(values.double(), format), expected)


# Relative squared errors of llama.cpp (ggml_quantize_chunk in llama-cpp-python 0.3.36) on these values.
@pytest.mark.parametrize(
    ("name", "tails", "expected"),
    [("q4_k", False, 5.10e-3), ("q4_k", True, 8.58e-3), ("q6_k", False, 3.14e-4), ("q6_k", True, 6.48e-4)],
)
def test_errors_are_below_those_of_llama_cpp(kernels: str, name: str, tails: bool, expected: float) -> None:
    torch.manual_seed(0)
    values = torch.distributions.StudentT(3.0).sample((256, 2048)) if tails else torch.randn(256, 2048)
    values, results = values * 0.02, []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(quantize_rows(values, FORMATS[name]))
    assert all(torch.equal(results[0], other) for other in results)
    error = (values_of(QuantizedWeight(results[0], FORMATS[name])) - values).double().square().mean()
    assert error / values.double().square().mean() < expected * (1.25 if kernels == "torch" else 0.97)


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_extreme_values_are_rounded_without_loss_of_the_others(kernels: str, name: str) -> None:
    format = FORMATS[name]
    for values in (torch.zeros(1, 256), torch.full((1, 256), 0.3), torch.full((1, 256), -0.3), torch.eye(256) * 1e4):
        found = dequantize_rows(quantize_rows(values, format), format)
        assert (found - values).abs().max() <= 1e-3 * values.abs().max()
    if kernels != "torch":
        tiny = torch.randn(4, 256) * 1e-6  # the fp16 factor of the scales is subnormal
        assert (dequantize_rows(quantize_rows(tiny, format), format) - tiny).norm() < 0.3 * tiny.norm()
    with pytest.raises(RuntimeError, match=f"NaN and infinite values cannot be quantized to {name}"):
        quantize_rows(torch.full((1, 256), torch.nan), format)


def test_formats_of_precisions() -> None:
    assert [format_for("int8", 960), format_for("int4", 1024)] == [FORMATS["q8_0"], FORMATS["q4_k"]]
    assert [format_for("int4", 960), format_for("int4", 100)] == [FORMATS["q4_1"], None]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@RANDOM
@given(NAMES, st.integers(1, 200), st.integers(1, 200), st.integers(1, 9), st.booleans(), st.booleans(), DTYPES)
@example("q4_k", 20, 65, 33, True, False, torch.float32)  # longer sums than one pass computes
@example("q6_k", 20, 8200, 1, True, False, torch.bfloat16)  # the same in the backward pass
@example("q4_1", 15, 70, 40, True, True, torch.bfloat16)  # few rows
def test_products_and_gradients(
    kernels: str, name: str, rows: int, outputs: int, blocks: int, biased: bool, adapted: bool, dtype: torch.dtype
) -> None:
    weight = new_weight(name, outputs, blocks)
    bias = torch.arange(outputs) / 10.0 if biased else None
    ours = leaves(rows, weight, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    sizes = [tensor.detach().abs().requires_grad_() for tensor in exact]
    wide = values_of(weight).to(dtype).double()
    found = []
    for x, dropped, first, second in (ours, exact, sizes):
        if x is ours[0]:
            y = (
                quantized_lora_linear(x, dropped, weight, bias, Adapter(first, second, SCALE))
                if adapted
                else quantized_linear(x, weight, bias)
            )
        else:
            y = x @ (wide if x is exact[0] else wide.abs()).T + (0 if bias is None else bias)
            y = y + SCALE * (dropped @ first.T) @ second.T if adapted else y
        grad = torch.linspace(-1, 1, y.numel()).view_as(y)
        y.backward((grad.abs() if x is sizes[0] else grad).to(y.dtype))
        found.append([y.detach(), *(t.grad for t in ((x, dropped, first, second) if adapted else (x,)))])
    assert_near(*found, dtype)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 150])
def test_results_do_not_depend_on_the_threads(native_kernels: str, rows: int, dtype: torch.dtype) -> None:
    weight = new_weight("q4_k", 300, 3)
    x, _, first, second = leaves(rows, weight, dtype)

    def results() -> list[torch.Tensor | None]:
        y = quantized_lora_linear(x, x, weight, None, Adapter(first, second, SCALE))
        plain = quantized_linear(x, weight)
        return [y, plain, *torch.autograd.grad((y + plain).sum(), (x, first, second))]

    assert_equal_on_all_threads(results)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_does_not_fit_is_refused(kernels: str) -> None:
    weight = new_weight("q4_k", 5, 2)
    x, dropped, first, second = leaves(3, weight, torch.float32)
    for refused in (
        (x[:, :256], dropped, weight, None, first, second),
        (x, dropped, weight, torch.ones(4), first, second),
    ):
        with pytest.raises(RuntimeError, match="does not match a quantized weight"):
            quantized_lora_linear(*refused[:4], Adapter(*refused[4:], SCALE))
        with pytest.raises(RuntimeError, match="does not match a quantized weight"):
            quantized_linear(refused[0], weight, refused[3])
    with pytest.raises(RuntimeError, match=r"q4_k requires rows whose length is a multiple of 256, got 300"):
        quantize_rows(torch.ones(2, 300), FORMATS["q4_k"])
    for data in (torch.zeros(2, 145, dtype=torch.uint8), torch.zeros(144, dtype=torch.uint8), torch.zeros(2, 144)):
        with pytest.raises(RuntimeError, match="a q4_k weight cannot have shape"):
            QuantizedWeight(data, FORMATS["q4_k"])
