"""Compares Nesterov momentum and steps along a direction, in C++ and in plain torch, with float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.update import WeightUpdate, descend, nesterov

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(st.one_of(st.integers(0, 300), st.just(70_001)), min_size=1, max_size=3)  # 70,001: several blocks
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
BETA, SCALE, LR, DECAY = 0.9, 0.5, 0.1, 0.3


def normal(size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@RANDOM
@given(SIZES, DTYPES, st.integers(0, 99))
def test_nesterov_looks_one_step_ahead(kernels: str, sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    updates = [
        WeightUpdate(normal(n, seed), (normal(n, n, wide), torch.empty(n, dtype=wide)), normal(n, seed + 1, dtype))
        for n in sizes
    ]
    momenta = [update.moments[0].to(torch.float64, copy=True) for update in updates]
    nesterov(updates, BETA, SCALE)
    for update, before in zip(updates, momenta, strict=True):
        gradient = update.gradient.double() * SCALE
        momentum = BETA * before + (1 - BETA) * gradient
        torch.testing.assert_close(update.moments[0].double(), momentum, rtol=1e-5, atol=1e-6)
        ahead = BETA * momentum + (1 - BETA) * gradient
        torch.testing.assert_close(update.moments[1].double(), ahead, rtol=1e-5, atol=1e-6)


@RANDOM
@given(SIZES, DTYPES, st.booleans(), st.integers(0, 99))
def test_descent_moves_weights_and_their_copies(
    kernels: str, sizes: list[int], dtype: torch.dtype, copied: bool, seed: int
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    updates = [
        WeightUpdate(
            normal(n, seed, wide),
            (),
            normal(n, n, dtype),
            normal(n, seed).bfloat16() if copied else None,
            DECAY / (1 + n),
        )
        for n in sizes
    ]
    weights = [update.weight.to(torch.float64, copy=True) for update in updates]
    descend(updates, LR, SCALE)
    for update, before in zip(updates, weights, strict=True):
        expected = before - LR * (update.weight_decay * before + SCALE * update.gradient.double())
        torch.testing.assert_close(update.weight.double(), expected, rtol=1e-5, atol=1e-5)
        assert update.working is None or torch.equal(update.working, update.weight.bfloat16())


def test_tensors_of_another_size_are_refused(native_kernels: str) -> None:
    with pytest.raises(RuntimeError, match="the same number of elements"):
        nesterov([WeightUpdate(torch.ones(4), (torch.ones(4), torch.ones(3)), torch.ones(4))], BETA, SCALE)
    with pytest.raises(RuntimeError, match="the same number of elements"):
        descend([WeightUpdate(torch.ones(4), (), torch.ones(5))], LR, SCALE)
