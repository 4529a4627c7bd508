"""Compares AdamW with bf16 weights and with 8-bit moments, in C++ and in plain torch, with float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels import update as update_module
from sansgpu.kernels.update import BLOCK, MAPS, AdamWStep, WeightUpdate, dequantize, quantize, quantized_zeros
from tests.kernels.updates import adamw, adamw8

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = st.one_of(
    st.tuples(st.integers(1, 1000)), st.tuples(st.integers(1, 60), st.integers(1, 60)), st.just((2, BLOCK))
)
WIDTHS = st.sampled_from([torch.float32, torch.bfloat16])
LR, DECAY, EPS, SCALE, BETA1, BETA2 = 1e-3, 0.1, 1e-8, 0.5, 0.9, 0.98
SETTINGS = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY, "scale": SCALE}
LARGE = 70_001  # more than one thread's share, and not a multiple of any block size


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Draws values of many magnitudes, some of them zero."""
    return normal(shape, seed) * torch.exp(3 * normal(shape, seed + 1)) * (normal(shape, seed + 2) < 1.5)


def exact_step(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns weight and moments after a step, in float64."""
    gradient = gradient.double() * SCALE
    first = BETA1 * first.double() + (1 - BETA1) * gradient
    second = BETA2 * second.double() + (1 - BETA2) * gradient**2
    update = first / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + EPS)
    return weight.double() * (1 - LR * DECAY) - LR * update, first, second


def unit(exact: torch.Tensor) -> torch.Tensor:
    """Returns the distance between the two bf16 values around each value."""
    return torch.exp2(exact.abs().log2().floor() - 7)


@settings(RANDOM, max_examples=10)
@given(SHAPES, WIDTHS, st.integers(1, 5), st.integers(0, 99))
def test_bf16_weights_are_right_on_average(
    kernels: str, shape: tuple[int, ...], width: torch.dtype, step: int, seed: int
) -> None:
    weight, gradient = normal(shape, seed, torch.bfloat16), normal(shape, seed + 1, width)
    first, second = normal(shape, seed + 2) / 3, normal(shape, seed + 3).square()
    exact, exact_first, exact_second = exact_step(weight, first, second, gradient, step)
    torch.set_num_threads(1)  # faster for many small steps
    draws = 100
    total = torch.zeros(shape, dtype=torch.float64)
    for draw in range(draws):
        drawn, m, v = weight.clone(), first.clone(), second.clone()
        adamw(drawn, m, v, gradient, None, step=step, seed=draw * 1_000_003 + seed, **SETTINGS)
        off = (drawn.double() - exact) / unit(exact)
        assert off.abs().max() < 1.001  # one of the two nearest bf16 values
        total += off
    torch.testing.assert_close(m.double(), exact_first, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.double(), exact_second, rtol=1e-5, atol=1e-6)
    assert (total / draws).abs().max() < 6 * 0.5 / draws**0.5
    assert (total / draws).mean().abs() < 6 * 0.5 / (draws * exact.numel()) ** 0.5


def test_what_is_representable_stays_and_what_is_not_finite_too(kernels: str) -> None:
    weight = normal((5000,), 0, torch.bfloat16)
    for seed in range(20):
        same = weight.clone()
        adamw(
            same, torch.zeros(5000), torch.zeros(5000), torch.zeros(5000), None,
            lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, step=1, scale=1.0, seed=seed,
        )  # fmt: skip
        assert torch.equal(same, weight)
    for bad in (math.inf, -math.inf, math.nan):
        weight = torch.full((500,), bad, dtype=torch.bfloat16)
        adamw(weight, torch.zeros(500), torch.zeros(500), torch.zeros(500), None, step=1, **SETTINGS)
        assert not weight.isfinite().any()
        weight, codes = normal((500,), 0, torch.bfloat16), quantized_zeros(torch.zeros(500))
        gradient = torch.zeros(500)
        gradient[3] = bad
        again = quantized_zeros(weight)
        adamw8(weight, *codes, *again, gradient, None, step=1, **SETTINGS)
        assert weight.isfinite().sum() == 499
        for signed, moment in ((True, codes), (False, again)):
            values = dequantize(*moment, signed)
            assert not values[:BLOCK].isfinite().any()  # so that the next step notices it
            assert torch.equal(values[BLOCK:], torch.zeros(500 - BLOCK))


def of_a_narrow_step(width: torch.dtype, seed: int) -> list[torch.Tensor]:
    weight, gradient = normal((LARGE,), 0, torch.bfloat16), normal((LARGE,), 1, width)
    first, second = normal((LARGE,), 2), normal((LARGE,), 3).square()
    adamw(weight, first, second, gradient, None, step=2, seed=seed, **SETTINGS)
    return [weight, first, second]


def of_a_step_in_fp32(width: torch.dtype, seed: int) -> list[torch.Tensor]:
    weight, gradient = normal((LARGE,), 0), normal((LARGE,), 1, width)
    first, second, working = normal((LARGE,), 2), normal((LARGE,), 3).square(), normal((LARGE,), 4, torch.bfloat16)
    adamw(weight, first, second, gradient, working, step=2, seed=seed, **SETTINGS)
    return [weight, first, second, working]


def of_a_quantised_step(width: torch.dtype, seed: int) -> list[torch.Tensor]:
    weight, gradient = normal((LARGE,), 0, torch.bfloat16), normal((LARGE,), 1, width)
    moments = [*quantize(normal((LARGE,), 2), True), *quantize(normal((LARGE,), 3).square(), False)]
    adamw8(weight, *moments, gradient, None, step=2, seed=seed, **SETTINGS)
    return [weight, *moments]


@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [of_a_narrow_step, of_a_step_in_fp32, of_a_quantised_step])
def test_equal_seeds_give_equal_bits(
    kernels: str, run: Callable[[torch.dtype, int], list[torch.Tensor]], width: torch.dtype
) -> None:
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    once = run(width, 2**63 - 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(once, run(width, 2**63 - 1), strict=True))
    for other in (2**63 - 2, 2**31 - 1):  # a different low word, a different high word
        differs = [not torch.equal(a, b) for a, b in zip(once, run(width, other), strict=True)]
        # Only bf16 weights are rounded at random.
        assert differs == [run is not of_a_step_in_fp32] + [False] * (len(once) - 1)


def weights_of_many_sizes() -> list[WeightUpdate]:
    """Returns updates of small and large weights in fp32 and bf16, each with its own weight decay and seed."""
    updates = []
    for number, size in enumerate((5, LARGE, 1, 300, 40_000)):
        width = torch.bfloat16 if number % 2 else torch.float32
        moments = (normal((size,), number), normal((size,), number + 1).square())
        weight, gradient = normal((size,), number + 2, width), normal((size,), number + 3, torch.bfloat16)
        working = weight.bfloat16() if width == torch.float32 else None
        updates.append(WeightUpdate(weight, moments, gradient, working, DECAY * number, seed=number))
    return updates


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_updated_together_change_as_alone(kernels: str, quantized: bool) -> None:
    together, alone, step = weights_of_many_sizes(), weights_of_many_sizes(), AdamWStep(LR, (BETA1, BETA2), EPS, 3)
    if quantized:
        together, alone = ([quantize_moments(update) for update in updates] for updates in (together, alone))
    apply = update_module.adamw8 if quantized else update_module.adamw
    apply(together, step)
    for one, other in zip(alone, together, strict=True):
        before = one.weight.clone()
        apply([one], step)
        assert not torch.equal(one.weight, before)
        for mine, expected in zip((other.weight, *other.moments), (one.weight, *one.moments), strict=True):
            assert torch.equal(mine, expected)
        assert one.working is None or torch.equal(one.working, one.weight.bfloat16())


def quantize_moments(update: WeightUpdate) -> WeightUpdate:
    first, second = update.moments
    return replace(update, moments=(*quantize(first, True), *quantize(second, False)))


def test_tensors_of_another_size_are_refused(native_kernels: str) -> None:
    step = AdamWStep(LR, (BETA1, BETA2), EPS, 1)
    for sizes in ((8, 8, 8), (9, 7, 9), (9, 9, 10)):
        first, second, gradient = (torch.zeros(size) for size in sizes)
        with pytest.raises(RuntimeError, match="the same number of elements"):
            update_module.adamw([WeightUpdate(torch.zeros(9), (first, second), gradient)], step)
    with pytest.raises(RuntimeError, match="the same number of elements"):
        update_module.add_product(torch.zeros(9), torch.zeros(8, dtype=torch.bfloat16))
    codes, scales = quantized_zeros(torch.zeros(300))
    with pytest.raises(RuntimeError, match="the same number of elements"):
        update_module.adamw8(
            [WeightUpdate(torch.zeros(300), (codes, scales, codes, scales[:1]), torch.zeros(300))], step
        )


@pytest.mark.parametrize("signed", [False, True])
def test_the_map_is_the_papers(signed: bool) -> None:
    values = MAPS[signed]
    assert values.shape == (256,)
    assert torch.equal(values, values.unique(sorted=True))
    assert {0.0, 1.0} <= set(values.tolist())
    for decade in range(7):
        cells = (64 if signed else 128) >> decade  # each smaller decade has half as many values, evenly spaced
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float64) * 10.0**-decade
        inside = values[(values > edges[0]) & (values < edges[-1])].double()
        torch.testing.assert_close(inside, (edges[1:] + edges[:-1]) / 2, rtol=1e-6, atol=0)
    assert not (values < 0).any() or signed
    assert torch.equal(values[values < 0].flip(0), -values[(values > 0) & (values < 1)]) or not signed


@RANDOM
@given(SHAPES, st.booleans(), st.integers(0, 99))
def test_quantised_values_are_the_nearest(shape: tuple[int, ...], signed: bool, seed: int) -> None:
    values = spread(shape, seed) if signed else spread(shape, seed).square()
    codes, scales = quantize(values, signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, shape, (math.ceil(values.numel() / BLOCK),))
    again = dequantize(codes, scales, signed)
    each = scales.repeat_interleave(BLOCK)[: values.numel()].view(shape)
    error = (again - values).abs()
    assert torch.all(error <= (0.9 / 64 if signed else 0.9 / 128) / 2 * 1.001 * each)
    nearest = (values[..., None] - each[..., None] * MAPS[signed]).abs().amin(-1)
    kept = torch.ones(shape, dtype=torch.bool) if signed else values > 0.2e-6 * each
    assert torch.all((error - nearest)[kept] <= 1e-6 * values.abs()[kept])
    assert torch.equal(again == 0, values == 0) or signed
    for block, scale in zip(values.flatten().split(BLOCK), scales, strict=True):
        assert scale == block.abs().max()
    assert torch.equal(dequantize(*quantize(again, signed), signed).sign(), again.sign())


@pytest.mark.parametrize("signed", [False, True])
def test_blocks_of_zeros_are_exact(signed: bool) -> None:
    values = torch.zeros(3, BLOCK)
    values[1] = normal((BLOCK,), 0).abs()
    values[2] = 1e-42  # the inverse of this scale is infinite
    codes, scales = quantize(values, signed)
    assert scales[[0, 2]].tolist() == [0, 0]
    assert torch.equal(dequantize(codes, scales, signed)[[0, 2]], torch.zeros(2, BLOCK))
    zeros = quantized_zeros(values)
    assert all(torch.equal(a, b) for a, b in zip(zeros, quantize(torch.zeros(3, BLOCK), signed), strict=True))
    assert not dequantize(*zeros, signed).signbit().any()


def assert_quantised(ours: tuple[torch.Tensor, torch.Tensor], exact: torch.Tensor, signed: bool) -> None:
    """Checks codes against those of `exact`; neighbors are allowed if `exact` is between the two."""
    codes, scales = quantize(exact, signed)
    torch.testing.assert_close(ours[1], scales, rtol=1e-5, atol=0)
    apart = (ours[0].int() - codes.int() + 128 & 255) - 128
    assert apart.abs().max() <= 1
    assert int(apart.count_nonzero()) <= 2 + exact.numel() // 200
    each = scales.repeat_interleave(BLOCK)[: exact.numel()].view(exact.shape)
    error, least = ((dequantize(c, s, signed) - exact).abs() for c, s in (ours, (codes, scales)))
    assert torch.all(error <= least * 1.001 + 1e-5 * exact.abs() + 2e-7 * each)


@RANDOM
@given(SHAPES, WIDTHS, WIDTHS, st.booleans(), st.integers(1, 5), st.integers(0, 99))
@example((LARGE,), torch.float32, torch.bfloat16, False, 3, 0)
@example((40, 7), torch.bfloat16, torch.float32, True, 3, 0)
def test_adamw8_is_adamw_of_what_its_codes_say(
    kernels: str, shape: tuple[int, ...], wide: torch.dtype, narrow: torch.dtype, across: bool, step: int, seed: int
) -> None:
    weight, gradient = normal(shape, seed, wide), spread(shape, seed + 1).to(narrow)
    if across and len(shape) == 2:
        gradient = gradient.t().contiguous().t()  # matmuls may leave such strides
    first = quantize(spread(shape, seed + 2), True)
    second = quantize(spread(shape, seed + 3).square(), False)
    exact, exact_first, exact_second = exact_step(
        weight, dequantize(*first, True), dequantize(*second, False), gradient, step
    )
    working = torch.zeros(shape, dtype=torch.bfloat16) if wide == torch.float32 else None
    before = weight.clone()
    adamw8(weight, *first, *second, gradient, working, step=step, seed=seed, **SETTINGS)
    assert_quantised(first, exact_first, True)
    assert_quantised(second, exact_second, False)
    if working is not None:
        torch.testing.assert_close(weight.double() - before, exact - before, rtol=1e-4, atol=2e-6)
        assert torch.equal(working, weight.bfloat16())
    else:
        assert ((weight.double() - exact).abs() <= 1.01 * unit(exact) + 1e-6).all()


@pytest.mark.parametrize("signed", [False, True])
def test_compiled_code_finds_the_same_codes(kernels: str, signed: bool) -> None:
    """Runs a step whose moments become values at and around every boundary between two codes."""
    middles = ((MAPS[signed][1:] + MAPS[signed][:-1]) / 2).double()
    values = torch.cat([torch.ones(1).double(), MAPS[signed].double(), *(middles * (1 + e) for e in (-1e-4, 1e-4))])
    values = torch.cat([torch.cat([values[:1], part]) for part in values.split(BLOCK - 1)])  # each block has a 1
    first, second = quantized_zeros(values), quantized_zeros(values)
    gradient = (values if signed else values.sqrt()).float()
    adamw8(
        torch.zeros(values.shape), *first, *second, gradient, None,
        lr=0.0, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0, step=1, scale=1.0,
    )  # fmt: skip
    ours, (codes, _) = (first if signed else second)[0], quantize(values.float(), signed)
    assert torch.equal(ours, codes)


@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.9, 0.999), (0.95, 0.95)])
def test_steps_stay_bounded_whatever_shares_a_block(kernels: str, betas: tuple[float, float]) -> None:
    """|m| / sqrt(v) is bounded by the Cauchy-Schwarz inequality; rounding may exceed the bound only a few times."""
    torch.set_num_threads(1)  # faster for many small steps
    beta1, beta2 = betas
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf
    assert bound < 10
    size = 3 * BLOCK + 5
    magnitudes = torch.exp(5 * normal((size,), 0))
    weight, first, second = torch.zeros(size), quantized_zeros(torch.zeros(size)), quantized_zeros(torch.zeros(size))
    worst = 0.0
    for step in range(1, 201):
        gradient = normal((size,), 3 * step) * magnitudes * (normal((size,), 3 * step + 1) > 1.5)  # most are zero
        before = weight.clone()
        adamw8(
            weight, *first, *second, gradient, None,
            lr=1.0, betas=betas, eps=1e-12, weight_decay=0.0, step=step, scale=1.0,
        )  # fmt: skip
        worst = max(worst, float((weight - before).abs().max()))
    assert 0.5 < worst < 3 * max(bound, 1)


def regression_loss(update: Callable[[torch.Tensor, torch.Tensor, int], None], dtype: torch.dtype) -> float:
    """Returns the loss after 200 steps on noisy linear data, starting from zero."""
    inputs, truth = normal((400, 60), 0), normal((60, 9), 1) / 8
    targets = inputs @ truth + 0.1 * normal((400, 9), 2)
    weight = torch.zeros(60, 9, dtype=dtype)
    for step in range(1, 201):
        rows = slice((step % 4) * 100, (step % 4) * 100 + 100)
        error = inputs[rows] @ weight.float() - targets[rows]
        update(weight, inputs[rows].t() @ error / 50, step)
    return float((inputs @ weight.float() - targets).square().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_and_moments_learn_as_well_as_fp32(kernels: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # faster for many small steps
    common = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.01, "scale": 2.0}
    moments = [torch.zeros(60, 9), torch.zeros(60, 9)]
    small = [*quantized_zeros(moments[0]), *quantized_zeros(moments[0])]
    wide = regression_loss(lambda w, g, n: adamw(w, *moments, g, None, step=n, **common), torch.float32)
    quantised = regression_loss(lambda w, g, n: adamw8(w, *small, g, None, step=n, seed=n, **common), dtype)
    moments = [torch.zeros(60, 9), torch.zeros(60, 9)]
    narrow = regression_loss(lambda w, g, n: adamw(w, *moments, g, None, step=n, seed=n, **common), dtype)
    assert wide < 0.02
    assert quantised == pytest.approx(wide, rel=0.05)
    assert narrow == pytest.approx(wide, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_may_lie_in_memory_in_any_order(kernels: str, dtype: torch.dtype) -> None:
    gradient = normal((30, 20), 0)
    results = []
    for given_so in (gradient, gradient.t().contiguous().t()):
        weight, first, second = normal((30, 20), 1, dtype), torch.zeros(30, 20), torch.zeros(30, 20)
        adamw(weight, first, second, given_so, None, step=1, **SETTINGS)
        results.append((weight, first, second))
        torch.testing.assert_close(first, gradient * (SCALE * (1 - BETA1)))
    assert ((results[0][0] - results[1][0]).double().abs() <= 1.01 * unit(results[0][0].double())).all()
