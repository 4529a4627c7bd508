"""Products with the packed codes of quantized weights are near float64 ones, and the same for any rows and threads."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight
from sansgpu.kernels.c_functions import constants
from sansgpu.kernels.frozen_linear import code_linear
from tests.kernels.test_quantized_linear import FACTORS, new_weight, values_of
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
GROUP = 32  # values of a row that share a scale
UNIT = 9 / 8 / 127  # largest unit of 8-bit integers, relative to the largest value of a group
ROUNDING = 1e-5  # largest rounding error of a sum in fp32, relative to the sum of magnitudes
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def packed(weight: QuantizedWeight) -> torch.Tensor:
    tiles = -(-weight.outputs // constants()["STEP_TILE"])
    size = tiles * library.call("code_bytes_per_tile", weight.format.number, weight.inputs)
    to = torch.empty(size, dtype=torch.uint8)
    library.call("pack_codes", weight.format.number, weight.data, weight.outputs, weight.inputs, to)
    return to


def product(weight: QuantizedWeight, x: torch.Tensor, parts: int) -> torch.Tensor:
    y = torch.empty(len(x), weight.outputs)
    sizes = len(x), weight.outputs, weight.inputs
    library.call("code_product", False, weight.format.number, parts, *sizes, x, packed(weight), None, y)
    return y


@pytest.mark.parametrize("name", ["q4_1", "q6_k", "q8_0"])
def test_a_layer_adds_its_bias_and_takes_bf16(native_kernels: str, name: str) -> None:
    weight = new_weight(name, 90, 2, 0)
    x, bias = torch.randn(140, weight.inputs), torch.randn(90)
    expected = x.double() @ values_of(weight).double().T + bias.double()
    for dtype, error in ((torch.float32, 1e-3), (torch.bfloat16, 2e-2)):
        found = code_linear(x.to(dtype), weight, packed(weight), bias, None)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=error * float(expected.abs().max()))
        for rows in (1, 3, 129):
            assert torch.equal(code_linear(x[:rows].to(dtype), weight, packed(weight), bias, None), found[:rows])


def inputs(rows: int, weight: QuantizedWeight, seed: int) -> torch.Tensor:
    """Returns random rows whose groups have very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 12, (rows, weight.inputs // GROUP, 1), generator=generator)
    return (torch.randn(rows, weight.inputs // GROUP, GROUP, generator=generator) * 2.0**powers).view(rows, -1)


@RANDOM
@given(
    st.sampled_from(list(FORMATS)), st.integers(1, 150), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2]),
    st.integers(0, 99),
)  # fmt: skip
@example("q4_1", 70, 33, 7, 2, 0)
@example("q6_k", 64, 4, 4, 1, 0)
def test_errors_are_those_of_rounding_the_inputs(
    native_kernels: str, name: str, outputs: int, blocks: int, rows: int, parts: int, seed: int
) -> None:
    weight = new_weight(name, outputs, blocks, seed)
    x, values = inputs(rows, weight, seed), values_of(weight).double()
    found = product(weight, x, parts)
    x_groups, w_groups = x.double().view(rows, -1, GROUP), values.view(outputs, -1, GROUP)
    unit = UNIT if parts == 1 else 2 * UNIT / 256  # the second byte may be limited, too
    error = unit / 2 * x_groups.abs().amax(2) @ w_groups.abs().sum(2).T
    error += ROUNDING * x_groups.abs().sum(2) @ w_groups.abs().amax(2).T
    assert bool(((found - x.double() @ values.T).abs() <= error).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_alone_gives_the_same_as_with_others(native_kernels: str, name: str) -> None:
    weight = new_weight(name, 130, 5)
    x = inputs(7, weight, 0)
    for parts in (1, 2):
        together = product(weight, x, parts)
        for row in range(len(x)):
            assert torch.equal(product(weight, x[row : row + 1], parts)[0], together[row])


def test_results_do_not_depend_on_the_threads(native_kernels: str) -> None:
    weight = new_weight("q4_k", 300, 3)
    assert_equal_on_all_threads(lambda: [product(weight, inputs(3, weight, 0), 2)])


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_not_finite_reach_the_results(native_kernels: str, name: str) -> None:
    weight = new_weight(name, 20, 3)
    x = inputs(3, weight, 0)
    for value in (torch.inf, -torch.inf, torch.nan):
        spoiled = x.clone()
        spoiled[1, 40] = value
        assert product(weight, spoiled, 2).isfinite().all(dim=1).tolist() == [True, False, True]
    for bits in (0x7C00, 0xFC00, 0x7C01, 0xFFFF):
        block = weight.data.view(20, 3, -1).numpy().copy()
        place = FACTORS.get(name, (0,))[0]
        block[5, 1, place : place + 2] = bits & 0xFF, bits >> 8
        changed = QuantizedWeight(torch.from_numpy(block.reshape(20, -1)), weight.format)
        found = product(changed, x, 2).isfinite().all(dim=0).tolist()
        assert found == [output != 5 for output in range(20)], hex(bits)


def test_integers_are_multiplied_exactly(native_kernels: str) -> None:
    weight = new_weight("q8_0", 70, 4)
    blocks = weight.data.view(70, 4, -1).numpy().copy()
    blocks[..., :2] = 0x00, 0x3C  # fp16 1.0
    weight = QuantizedWeight(torch.from_numpy(blocks.reshape(70, -1)), weight.format)
    x = torch.randint(-127, 128, (5, 128), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::GROUP] = 127
    assert torch.equal(product(weight, x, 1).double(), x.double() @ values_of(weight).double().T)
