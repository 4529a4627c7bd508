"""The kernels of recurrent layers, compared with float64, on every instruction set."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.recurrent.delta_rule import DeltaRuleOptions, delta_rule, reference_delta_rule
from sansgpu.kernels.recurrent.selective_scan import ScanInputs, reference_selective_scan, selective_scan
from sansgpu.kernels.recurrent.sequences import States
from sansgpu.kernels.recurrent.short_convolution import reference_short_convolution, short_convolution
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LENGTHS = st.lists(st.integers(0, 150), min_size=1, max_size=3).filter(any)
ERROR = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # relative to the largest value, or to 1 if that is larger
Values = list[torch.Tensor]


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def random_values(seed: int, *shapes: tuple[int, ...]) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def assert_near(found: torch.Tensor | None, exact: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert exact is not None
    assert found.shape == exact.shape
    exact = exact.detach()
    assert (found.double() - exact).abs().max() <= ERROR[dtype] * max(float(exact.abs().max()), 1.0)


def assert_same_as_exact(
    values: Values,
    narrow: int,
    dtype: torch.dtype,
    kernel: Callable[[Values], States],
    exact: Callable[[Values], States],
) -> None:
    """Compares outputs, states and gradients; the first `narrow` of the values have the dtype, the others are fp32."""
    ours = [value.to(dtype if place < narrow else torch.float32) for place, value in enumerate(values)]
    theirs = [value.double().requires_grad_() for value in ours]
    ours = [value.requires_grad_() for value in ours]
    found, expected = kernel(ours), exact(theirs)
    weights = torch.sin(torch.arange(expected.out.numel())).view(expected.out.shape).to(dtype).float()
    (found.out.float() * weights).sum().backward()
    (expected.out * weights).sum().backward()
    assert found.out.dtype == dtype
    assert_near(found.out, expected.out, dtype)
    if found.last is not None:
        assert_near(found.last, expected.last, dtype)
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one.grad, other.grad if other.grad is not None else torch.zeros_like(other), dtype)


def delta_values(tokens: int, heads: tuple[int, int], sizes: tuple[int, int], has_beta: bool, seed: int) -> Values:
    (key_heads, value_heads), (d, e) = heads, sizes
    shapes = [(1, tokens, key_heads, d)] * 2 + [(1, tokens, value_heads, e)] + [(1, tokens, value_heads)] * 2
    q, k, v, decay, beta = random_values(seed, *shapes)
    return [q, F.normalize(k, dim=-1), v, -F.softplus(2 * decay), *([beta.sigmoid()] if has_beta else [])]


@RANDOM
@given(
    LENGTHS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans(),
    DTYPES, st.integers(0, 99),
)  # fmt: skip
@example([64, 0, 129], 1, 20, 16, 8, False, False, torch.float32, 0)  # more value heads than a unit of work has
@example([130], 2, 1, 40, 24, True, True, torch.float32, 0)
def test_delta_rule(
    native_kernels: str, lengths: list[int], key_heads: int, group: int, d: int, e: int, has_beta: bool,
    normalized: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    starts = starts_of(lengths)
    options = DeltaRuleOptions(starts, 0.5, normalized, returns_states=True)
    values = delta_values(sum(lengths), (key_heads, key_heads * group), (d, e), has_beta, seed)

    def run(function: Callable[..., States], given: Values) -> States:
        return function(*given[:4], given[4] if has_beta else None, options)

    assert_same_as_exact(values, 3, dtype, lambda v: run(delta_rule, v), lambda v: run(reference_delta_rule, v))


@RANDOM
@given(LENGTHS, st.integers(1, 80), st.integers(1, 5), st.booleans(), st.booleans(), DTYPES, st.integers(0, 99))
def test_short_convolution(
    native_kernels: str, lengths: list[int], channels: int, taps: int, biased: bool, silu: bool, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    shapes = [(1, sum(lengths), channels), (channels, taps), *([(channels,)] if biased else [])]
    values, starts = random_values(seed, *shapes), starts_of(lengths)

    def run(function: Callable[..., torch.Tensor], given: Values) -> States:
        return States(function(given[0], given[1], given[2] if biased else None, starts, silu), None)

    def exact(given: Values) -> States:
        return run(reference_short_convolution, given)

    assert_same_as_exact(values, 1, dtype, lambda v: run(short_convolution, v), exact)


@RANDOM
@given(LENGTHS, st.integers(1, 70), st.integers(1, 17), DTYPES, st.integers(0, 99))
def test_selective_scan(
    native_kernels: str, lengths: list[int], channels: int, states: int, dtype: torch.dtype, seed: int
) -> None:
    tokens, starts = sum(lengths), starts_of(lengths)
    shapes = [(1, tokens, channels)] * 2 + [(channels, states)] + [(1, tokens, states)] * 2 + [(channels,)]
    x, steps, rates, into, out, skip = random_values(seed, *shapes)
    values = [x, F.softplus(steps), -2 * rates.abs(), into, out, skip]
    assert_same_as_exact(
        values,
        1,
        dtype,
        lambda v: selective_scan(ScanInputs(*v), starts, states=True),
        lambda v: reference_selective_scan(ScanInputs(*v), starts),
    )


@pytest.mark.parametrize("has_beta", [True, False])
def test_states_continue_sequences(native_kernels: str, has_beta: bool) -> None:
    """A text that is computed in parts, as in generation, gives the same as in one pass."""
    values = delta_values(100, (2, 4), (16, 8), has_beta, 0)
    options = DeltaRuleOptions(returns_states=True, normalized=True)

    def run(first: int, end: int, initial: torch.Tensor | None) -> States:
        part = [value[:, first:end] for value in values]
        return delta_rule(*part[:4], part[4] if has_beta else None, options, initial)

    whole, before = run(0, 100, None), run(0, 97, None)
    outs, state = [before.out], before.last
    for token in range(97, 100):
        following = run(token, token + 1, state)
        outs.append(following.out)
        state = following.last
    assert_near(torch.cat(outs, 1), whole.out.double(), torch.float32)
    assert whole.last is not None
    assert_near(state, whole.last.double(), torch.float32)


def test_scans_continue_sequences(native_kernels: str) -> None:
    x, steps, rates, into, out, skip = random_values(
        0, (1, 50, 40), (1, 50, 40), (40, 16), (1, 50, 16), (1, 50, 16), (40,)
    )

    def run(first: int, end: int, initial: torch.Tensor | None) -> States:
        part = [value[:, first:end] for value in (x, F.softplus(steps))], [value[:, first:end] for value in (into, out)]
        return selective_scan(ScanInputs(*part[0], -rates.abs(), *part[1], skip), None, initial, states=True)

    whole, before = run(0, 50, None), run(0, 33, None)
    after = run(33, 50, before.last)
    assert_near(torch.cat((before.out, after.out), 1), whole.out.double(), torch.float32)
    assert whole.last is not None
    assert_near(after.last, whole.last.double(), torch.float32)


def test_results_do_not_depend_on_threads(native_kernels: str) -> None:
    q, k, v, decay, beta = (value.requires_grad_() for value in delta_values(150, (1, 20), (16, 8), True, 0))
    x, weight, bias = (value.requires_grad_() for value in random_values(0, (1, 150, 130), (130, 4), (130,)))
    starts = starts_of([70, 80])

    def compute() -> Values:
        out = delta_rule(q, k, v, decay, beta, DeltaRuleOptions(starts)).out
        mixed = short_convolution(x, weight, bias, starts, silu=True)
        inputs = ScanInputs(mixed, F.softplus(x), -weight.abs(), x[..., :4].sin(), x[..., 4:8].cos(), bias)
        scanned = selective_scan(inputs, starts).out
        grads = torch.autograd.grad(
            (out * out).sum() + (scanned * scanned).sum(), (q, k, v, decay, beta, x, weight, bias)
        )
        return [out, mixed, scanned, *grads]

    assert_equal_on_all_threads(compute)


def test_gradients_with_initial_states_are_refused(native_kernels: str) -> None:
    q, k, v, decay = (value.requires_grad_() for value in delta_values(5, (1, 1), (4, 4), False, 0))
    with pytest.raises(RuntimeError, match="begin with a state of zeros"):
        delta_rule(q, k, v, decay, None, initial=torch.zeros(1, 1, 4, 4))
