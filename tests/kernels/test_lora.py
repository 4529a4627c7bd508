"""Linear layers with a LoRA adapter, compared with float64, on every instruction set and in plain torch."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.frozen_linear import Adapter, lora_linear
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ERROR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # relative error; bf16 rounds twice
SCALE = 1.7


def assert_near(
    found: list[torch.Tensor | None], exact: list[torch.Tensor | None], sizes: list[torch.Tensor | None],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Compares results with float64, relative to `sizes`: the sums of absolute terms, because terms may cancel."""
    for value, expected, size in zip(found, exact, sizes, strict=True):
        assert value is not None
        assert expected is not None
        assert size is not None
        assert value.dtype == dtype
        assert (value.double() - expected).norm() <= ERROR[dtype] * size.norm()


def leaves(rows: int, inputs: int, outputs: int, rank: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns x, x after dropout, W, A and B; all but W require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, inputs), (rows, inputs), (outputs, inputs), (rank, inputs), (outputs, rank)]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [value.requires_grad_(place != 2) for place, value in enumerate(values)]


def exact(
    x: torch.Tensor, dropped: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adapter: Adapter
) -> torch.Tensor:
    y = x @ weight.T + adapter.scale * (dropped @ adapter.first.T) @ adapter.second.T
    return y if bias is None else y + bias


@RANDOM
@given(
    st.integers(1, 200), st.integers(1, 150), st.integers(1, 150), st.integers(1, 20), st.booleans(), st.booleans(),
    DTYPES, st.integers(0, 99),
)  # fmt: skip
@example(130, 66, 200, 16, True, False, torch.bfloat16, 0)
@example(20, 8200, 70, 5, True, False, torch.float32, 0)  # longer sums than one pass of the kernel computes
def test_lora_linear(
    kernels: str, rows: int, inputs: int, outputs: int, rank: int, biased: bool, separate: bool, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    ours = leaves(rows, inputs, outputs, rank, dtype, seed)
    theirs = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in ours]
    sizes = [tensor.detach().abs().requires_grad_(tensor.requires_grad) for tensor in theirs]
    bias = torch.arange(outputs) / 10.0 if biased else None
    found = []
    for (x, dropped, weight, first, second), compute in ((ours, lora_linear), (theirs, exact), (sizes, exact)):
        y = compute(x, dropped if separate else x, weight, bias, Adapter(first, second, SCALE))
        grad = torch.linspace(-1, 1, y.numel()).view_as(y)
        y.backward((grad.abs() if x is sizes[0] else grad).to(y.dtype))
        found.append([y.detach(), *(t.grad for t in (x, *([dropped] if separate else []), first, second))])
        assert weight.grad is None
    assert_near(*found, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 70), (600, 130, 300)])
def test_results_do_not_depend_on_the_threads(
    native_kernels: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, _, weight, first, second = leaves(rows, inputs, outputs, 16, dtype, 0)

    def results() -> list[torch.Tensor | None]:
        y = lora_linear(x, x, weight, None, Adapter(first, second, SCALE))
        return [y, *torch.autograd.grad(y.sum(), (x, first, second))]

    assert_equal_on_all_threads(results)


def test_an_adapter_that_does_not_fit_is_refused(native_kernels: str) -> None:
    x, _, weight, first, second = leaves(3, 4, 5, 2, torch.float32, 0)
    for refused in (
        (x, x, weight, None, first, second[:4]),
        (x, x, weight, torch.ones(4), first, second),
        (x, x, weight[:, :3], None, first, second),
        (x, x[:2], weight, None, first, second),
    ):
        with pytest.raises(RuntimeError, match="match a layer"):
            lora_linear(*refused[:4], Adapter(*refused[4:], SCALE))
