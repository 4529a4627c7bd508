"""The output head in block floating point against float64, at random shapes, and its small probabilities."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, quantize_rows
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy_and_hits, reference_cross_entropy
from sansgpu.kernels.matmul import INTEGERS, Integer
from sansgpu.kernels.mixed_loss import SoftTargets, linear_mixed_loss, reference_mixed_loss
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Maximum error of a loss per token, and of a gradient relative to its largest element.
ERRORS: dict[Integer, float] = {"int16": 6e-3, "int8": 8e-2}


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


def assert_close(leaves: tuple[torch.Tensor, ...], expected: list[torch.Tensor], integer: Integer) -> None:
    for leaf, other in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        assert float((leaf.grad - other.grad).abs().max()) <= ERRORS[integer] * float(other.grad.abs().max()) + 1e-12


@pytest.mark.parametrize("integer", INTEGERS)
@RANDOM
@given(
    st.integers(1, 90), st.integers(1, 70), st.integers(1, 1300), st.integers(0, 99),
    st.sampled_from([LossOptions(), LossOptions(0.1, 0.01), LossOptions(z_loss=0.01, softcap=5.0)]),
)  # fmt: skip
@example(1500, 40, 700, 0, LossOptions())  # two chunks of tokens
@example(20, 8, 9001, 0, LossOptions())  # more terms than one pass sums
@example(9, 5, 1, 0, LossOptions())  # the kernel needs two tokens in the vocabulary
def test_loss_and_gradients_are_close_to_float64(
    native_kernels: str, integer: Integer, tokens: int, width: int, vocabulary: int, seed: int, options: LossOptions
) -> None:
    hidden, head, targets = operands(tokens, width, vocabulary, seed)
    wide = exact(hidden, head)
    in_integers = LossOptions(options.label_smoothing, options.z_loss, options.softcap, integer=integer)
    loss, _ = linear_cross_entropy_and_hits(hidden, head, targets, in_integers)
    expected = reference_cross_entropy(*wide, targets, options)
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERRORS[integer] * tokens
    assert_close((hidden, head), wide, integer)


@pytest.mark.parametrize("integer", INTEGERS)
def test_a_quantized_head_is_multiplied_in_integers(native_kernels: str, integer: Integer) -> None:
    hidden, head, targets = operands(80, 64, 300)
    weight = QuantizedWeight(quantize_rows(head.detach(), FORMATS["q8_0"]), FORMATS["q8_0"])
    (wide,) = exact(hidden)
    loss, _ = linear_cross_entropy_and_hits(hidden, weight, targets, LossOptions(integer=integer))
    expected = reference_cross_entropy(wide, weight.dequantized(torch.float32).double(), targets)
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERRORS[integer] * 80
    assert_close((hidden,), [wide], integer)


@pytest.mark.parametrize("integer", INTEGERS)
def test_distillation_is_close_to_float64(native_kernels: str, integer: Integer) -> None:
    hidden, head, targets = operands(90, 32, 400)
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(400, generator=generator)[:5] for _ in range(90)])
    probabilities = torch.log_softmax(torch.randn(90, 6, generator=generator), dim=1)
    soft, wide = SoftTargets(ids, probabilities, weight=0.7, temperature=2.0), exact(hidden, head)
    loss, _ = linear_mixed_loss(hidden, head, targets, soft, LossOptions(integer=integer))
    expected, _ = reference_mixed_loss(*wide, targets, soft, LossOptions())
    loss.backward()
    expected.backward()
    assert abs(float((loss - expected).detach())) <= ERRORS[integer] * 90
    assert_close((hidden, head), wide, integer)


@pytest.mark.parametrize("integer", INTEGERS)
def test_probabilities_below_a_unit_are_kept_on_average(native_kernels: str, integer: Integer) -> None:
    """One wrong token has half of the probability; 6,000 others share the rest, each a fifth of a unit of int16."""
    vocabulary, targets = 6000, torch.zeros(1024, dtype=torch.int64)
    head = torch.zeros(vocabulary, 16)
    head[1, 0] = 8.7
    hidden = torch.ones(1024, 16) + 0.001 * torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    leaf = head.requires_grad_()
    (wide,) = exact(head)
    loss, _ = linear_cross_entropy_and_hits(hidden, leaf, targets, LossOptions(integer=integer))
    loss.backward()
    reference_cross_entropy(hidden.double(), wide, targets).backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    rare, expected = leaf.grad[2:, 0].double(), wide.grad[2:, 0]
    tolerance = 2e-3 if integer == "int16" else 3e-2  # the large logit is rounded
    assert float(rare.sum() / expected.sum()) == pytest.approx(1.0, abs=tolerance)
    assert float((rare / expected).std()) < 0.1  # each is a sum over 1,024 tokens


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("integer", INTEGERS)
def test_a_bad_hidden_state_makes_the_loss_nan(native_kernels: str, integer: Integer, bad: float) -> None:
    hidden, head, targets = (tensor.detach() for tensor in operands(20, 16, 100))
    hidden[3, 5] = bad
    loss, _ = linear_cross_entropy_and_hits(hidden, head, targets, LossOptions(integer=integer))
    assert not bool(loss.isfinite())


@pytest.mark.parametrize("integer", INTEGERS)
def test_results_do_not_depend_on_the_threads(native_kernels: str, integer: Integer) -> None:

    def results() -> list[torch.Tensor | None]:
        hidden, head, targets = operands(1100, 70, 900)
        loss, hits = linear_cross_entropy_and_hits(hidden, head, targets, LossOptions(0.1, integer=integer))
        loss.backward()
        return [loss, hits, hidden.grad, head.grad]

    assert_equal_on_all_threads(results)


@pytest.mark.parametrize("integer", INTEGERS)
def test_the_small_gradient_of_a_confident_token_is_kept(native_kernels: str, integer: Integer) -> None:
    """The target has a probability of almost 1, and 1,000 others share the rest."""
    hidden = torch.full((40, 16), 1.0)
    head = 0.01 * torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    head[7] = 1.5  # a logit of 24
    leaf, (wide,) = hidden.requires_grad_(), exact(hidden)
    targets = torch.full((40,), 7)
    loss, _ = linear_cross_entropy_and_hits(leaf, head, targets, LossOptions(integer=integer))
    loss.backward()
    reference_cross_entropy(wide, head.double(), targets).backward()
    assert_close((leaf,), [wide], integer)


def test_a_bf16_head_is_multiplied_in_8_bits(native_kernels: str) -> None:
    hidden, head, targets = operands(300, 64, 500)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, head)]
    wide = exact(*narrow)
    losses = [
        linear_cross_entropy_and_hits(*narrow, targets, LossOptions(integer=integer))[0] for integer in (None, "int8")
    ]
    expected = reference_cross_entropy(*wide, targets)
    losses[1].backward()
    expected.backward()
    assert losses[0] != losses[1]
    assert abs(float((losses[1] - expected).detach())) <= ERRORS["int8"] * 300
    assert_close((narrow[0], narrow[1]), wide, "int8")
