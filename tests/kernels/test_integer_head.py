"""The output head in block floating point against float64, at random shapes, and its dithering."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, quantize_rows
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy_and_hits, reference_cross_entropy
from sansgpu.kernels.mixed_loss import SoftTargets, linear_mixed_loss, reference_mixed_loss
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
ERROR = 6e-3  # maximum error of a loss per token, and of a gradient relative to its largest element


def operands(
    tokens: int, width: int, vocabulary: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden states, a head whose logits are as large as a trained model's, and targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator) / width**0.5
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), targets


def exact(*leaves: torch.Tensor) -> list[torch.Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def assert_close(leaves: tuple[torch.Tensor, ...], expected: list[torch.Tensor]) -> None:
    for leaf, other in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        assert float((leaf.grad - other.grad).abs().max()) <= ERROR * float(other.grad.abs().max()) + 1e-12


@RANDOM
@given(
    st.integers(1, 90), st.integers(1, 70), st.integers(1, 1300), st.integers(0, 99),
    st.sampled_from([LossOptions(), LossOptions(0.1, 0.01), LossOptions(z_loss=0.01, softcap=5.0)]),
)  # fmt: skip
@example(1500, 40, 700, 0, LossOptions())  # two chunks of tokens
@example(20, 8, 9001, 0, LossOptions())  # more terms than one pass sums
@example(9, 5, 1, 0, LossOptions())  # the kernel needs two tokens in the vocabulary
def test_loss_and_gradients_are_close_to_float64(
    native_kernels: str, tokens: int, width: int, vocabulary: int, seed: int, options: LossOptions
) -> None:
    hidden, head, targets = operands(tokens, width, vocabulary, seed)
    wide = exact(hidden, head)
    in_integers = LossOptions(options.label_smoothing, options.z_loss, options.softcap, integer=True)
    loss, _ = linear_cross_entropy_and_hits(hidden, head, targets, in_integers)
    expected = reference_cross_entropy(*wide, targets, options)
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERROR * tokens
    assert_close((hidden, head), wide)


def test_a_quantized_head_is_multiplied_in_integers(native_kernels: str) -> None:
    hidden, head, targets = operands(80, 64, 300)
    weight = QuantizedWeight(quantize_rows(head.detach(), FORMATS["q8_0"]), FORMATS["q8_0"])
    (wide,) = exact(hidden)
    loss, _ = linear_cross_entropy_and_hits(hidden, weight, targets, LossOptions(integer=True))
    expected = reference_cross_entropy(wide, weight.dequantized(torch.float32).double(), targets)
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERROR * 80
    assert_close((hidden,), [wide])


def test_distillation_is_close_to_float64(native_kernels: str) -> None:
    hidden, head, targets = operands(90, 32, 400)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(400, generator=generator)[:5] for _ in range(90)])
    probabilities = torch.log_softmax(torch.randn(90, 6, generator=generator), dim=1)
    soft, wide = SoftTargets(ids, probabilities, weight=0.7, temperature=2.0), exact(hidden, head)
    loss, _ = linear_mixed_loss(hidden, head, targets, soft, LossOptions(integer=True))
    expected, _ = reference_mixed_loss(*wide, targets, soft, LossOptions())
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERROR * 90
    assert_close((hidden, head), wide)


def test_probabilities_below_a_unit_are_kept_on_average(native_kernels: str) -> None:
    """One wrong token has half of the probability; 6,000 others share the rest, each a fifth of a unit."""
    vocabulary, targets = 6000, torch.zeros(1024, dtype=torch.int64)
    head = torch.zeros(vocabulary, 16)
    head[1, 0] = 8.7
    hidden = torch.ones(1024, 16) + 0.001 * torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    leaf = head.requires_grad_()
    (wide,) = exact(head)
    loss, _ = linear_cross_entropy_and_hits(hidden, leaf, targets, LossOptions(integer=True))
    loss.backward()
    reference_cross_entropy(hidden.double(), wide, targets).backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    rare, expected = leaf.grad[2:, 0].double(), wide.grad[2:, 0]
    assert float(rare.sum() / expected.sum()) == pytest.approx(1.0, abs=2e-3)
    assert float((rare / expected).std()) < 0.1  # each is a sum over 1,024 tokens


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_hidden_state_makes_the_loss_nan(native_kernels: str, bad: float) -> None:
    hidden, head, targets = (tensor.detach() for tensor in operands(20, 16, 100))
    hidden[3, 5] = bad
    loss, _ = linear_cross_entropy_and_hits(hidden, head, targets, LossOptions(integer=True))
    assert not bool(loss.isfinite())


def test_results_do_not_depend_on_the_threads(native_kernels: str) -> None:

    def results() -> list[torch.Tensor | None]:
        hidden, head, targets = operands(1100, 70, 900)
        loss, hits = linear_cross_entropy_and_hits(hidden, head, targets, LossOptions(0.1, integer=True))
        loss.backward()
        return [loss, hits, hidden.grad, head.grad]

    assert_equal_on_all_threads(results)
