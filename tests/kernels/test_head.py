"""Tests of the output head and the embedding: threads, options, ties, large logits, and shapes that do not match."""

import pytest
import torch

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, quantize_rows
from sansgpu.kernels.cross_entropy import (
    LossOptions,
    linear_cross_entropy,
    linear_cross_entropy_and_hits,
    reference_cross_entropy,
    reference_logits,
)
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.log_probabilities import log_probabilities_and_hits, target_log_probabilities
from sansgpu.kernels.mixed_loss import SoftTargets, linear_mixed_loss
from tests.kernels.threads import assert_equal_on_all_threads


def leaves(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns hidden states and a head, whose logits are as large as a trained model's."""
    generator = torch.Generator().manual_seed(0)
    hidden = 3 * torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator) / width**0.5
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def random_targets(tokens: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [LossOptions(), LossOptions(0.1, 0.01), LossOptions(z_loss=0.01, softcap=5.0)])
def test_gradients_do_not_depend_on_the_threads(native_kernels: str, options: LossOptions, dtype: torch.dtype) -> None:
    indices, targets = random_targets(300, 150), random_targets(300, 200)

    def results() -> list[torch.Tensor | None]:
        hidden, head = leaves(300, 70, 200, dtype)
        table = torch.ones(150, 70, requires_grad=True)
        linear_cross_entropy(hidden + embed(indices, table).to(dtype), head, targets, options).backward()
        return [hidden.grad, head.grad, table.grad]

    assert_equal_on_all_threads(results)


def test_losses_of_bf16_are_not_rounded_to_bf16(native_kernels: str) -> None:
    hidden, head = leaves(200, 64, 500, torch.bfloat16)
    exact_hidden, exact_head = (t.detach().double().requires_grad_() for t in (hidden, head))
    targets = random_targets(200, 500)
    loss, exact = (
        linear_cross_entropy(hidden, head, targets),
        reference_cross_entropy(exact_hidden, exact_head, targets),
    )
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


def test_a_confident_target_keeps_its_small_gradient(native_kernels: str) -> None:
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    head = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, head, torch.tensor([0]))
    loss.backward()
    others = 2 * torch.exp(torch.tensor(-8.0, dtype=torch.float64))
    assert loss.item() == pytest.approx(torch.log1p(others).item(), rel=1e-5)
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(-(others / (1 + others)).item(), rel=1e-2)


@pytest.mark.parametrize("scale", [1.0, 200.0])  # 200: the running maximum of the softmax must be updated
def test_hits_are_the_targets_with_the_first_largest_logit(kernels: str, scale: float) -> None:
    hidden, head = (t.detach() for t in leaves(100, 16, 130, torch.float32))
    targets = (hidden @ head.T).argmax(1)
    targets[::3] = 129
    expected = int(((scale * hidden @ head.T).argmax(1) == targets).sum())
    assert linear_cross_entropy_and_hits(scale * hidden, head, targets)[1] == expected
    equal = torch.zeros_like(hidden)
    assert linear_cross_entropy_and_hits(equal, head, torch.tensor([0, 1] * 50))[1] == 50


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("tokens", [0, 1, 1500])
def test_log_probabilities_and_hits_are_those_of_each_target(kernels: str, tokens: int, softcap: float) -> None:
    hidden, head = (t.detach() for t in leaves(tokens, 24, 130, torch.float32))
    logits = reference_logits(hidden.double(), head.double(), softcap)
    targets = torch.where(torch.arange(tokens) % 2 == 0, logits.argmax(dim=1), random_targets(tokens, 130))
    found, hits = log_probabilities_and_hits(hidden, head, targets, LossOptions(softcap=softcap))
    assert torch.allclose(found.double(), logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.equal(hits, logits.argmax(dim=1) == targets)


@pytest.mark.parametrize(("width", "count"), [(5, 3), (4, 2)])
def test_operands_that_do_not_match_are_refused(native_kernels: str, width: int, count: int) -> None:
    with pytest.raises(RuntimeError, match="do not match"):
        linear_cross_entropy(torch.ones(3, 4), torch.ones(6, width), torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient(kernels: str, frozen: int) -> None:
    both, one = leaves(40, 8, 100, torch.float32), leaves(40, 8, 100, torch.float32)
    one[frozen].requires_grad_(False)
    for hidden, head in (both, one):
        linear_cross_entropy(hidden, head, random_targets(40, 100)).backward()
    assert one[frozen].grad is None
    grad, expected = one[1 - frozen].grad, both[1 - frozen].grad
    assert grad is not None
    assert expected is not None
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(0, 8, 20), (7, 33, 51), (1500, 24, 130)])
def test_log_probabilities_of_targets_have_the_gradients_of_any_function_of_them(
    kernels: str, tokens: int, width: int, vocabulary: int, softcap: float
) -> None:
    targets = random_targets(tokens, vocabulary)
    coefficients = torch.randn(tokens, generator=torch.Generator().manual_seed(2))

    def function(log_probabilities: torch.Tensor) -> torch.Tensor:
        return (log_probabilities * coefficients.to(log_probabilities) + log_probabilities.square()).sum()

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves(tokens, width, vocabulary, torch.float32)]
    logits = exact[0] @ exact[1].T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]
    function(expected).backward()
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        hidden, head = leaves(tokens, width, vocabulary, torch.float32)
        found = target_log_probabilities(hidden, head, targets, softcap)
        function(found).backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        for leaf, other in zip((hidden, head), exact, strict=True):
            assert leaf.grad is not None
            assert other.grad is not None
            scale = other.grad.abs().max() if tokens else 1.0
            torch.testing.assert_close(leaf.grad.double() / scale, other.grad / scale, rtol=1e-4, atol=1e-5)
        results.append((found, hidden.grad, head.grad))
    torch.set_num_threads(before)
    with torch.no_grad():
        without = target_log_probabilities(hidden, head, targets, softcap)
    torch.testing.assert_close(without, found)
    if kernels == "native":
        assert torch.equal(without, found)
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [LossOptions(), pytest.param(LossOptions(0.1, 0.01), marks=pytest.mark.long), LossOptions(0.1, 0.01, 5.0)],
)
@pytest.mark.parametrize("name", ["q4_1", pytest.param("q8_0", marks=pytest.mark.long), "q6_k"])
def test_a_quantized_head_computes_what_its_values_do(
    kernels: str, name: str, options: LossOptions, dtype: torch.dtype
) -> None:
    rows = 1100 if kernels != "torch" else 300  # more than a chunk
    hidden, head = leaves(rows, 256, 300, dtype)
    weight = QuantizedWeight(quantize_rows(head.detach(), FORMATS[name]), FORMATS[name])
    targets, soft = random_targets(rows, 300), soft_targets(rows, 300)
    results = []
    for matrix in (weight, weight.dequantized(dtype)):
        hidden.grad = None
        loss, hits = linear_cross_entropy_and_hits(hidden, matrix, targets, options)
        of_targets = target_log_probabilities(hidden, matrix, targets, options.softcap)
        mixed, parts = linear_mixed_loss(
            hidden, matrix, targets, soft, LossOptions(0.0, options.z_loss, options.softcap)
        )
        (loss + of_targets.square().sum() + mixed).backward()
        results.append([loss, hits, of_targets, mixed, parts, hidden.grad])
    for of_blocks, of_values in zip(*results, strict=True):
        assert of_blocks is not None
        assert of_values is not None
        if options.softcap:  # the compiler orders the operations of its tanh differently in the two kernels
            near = 1e-5 if dtype == torch.float32 else 2e-2  # roundings to bf16
            largest = float(of_values.detach().abs().max())
            torch.testing.assert_close(of_blocks, of_values, rtol=near, atol=1e-6 + 0.01 * near * largest)
        else:
            torch.testing.assert_close(of_blocks, of_values, rtol=1e-6, atol=0.0)


def soft_targets(tokens: int, vocabulary: int) -> SoftTargets:
    """Returns a random teacher's five most likely tokens at each of `tokens` positions."""
    logits = torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(3))
    known, ids = torch.log_softmax(logits, dim=1).topk(5)
    rest = (1 - known.exp().sum(dim=1, keepdim=True)).log()
    return SoftTargets(ids, torch.cat((known, rest), dim=1), weight=0.5)
