"""Compares the distillation loss, in C++ and in plain torch, with float64 code, also for confident students."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.kernels import cross_entropy
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy
from sansgpu.kernels.mixed_loss import SoftTargets, linear_mixed_loss, reference_mixed_loss
from tests.kernels.test_kernels import DTYPES, RANDOM, assert_near, with_gradients


def softened(tokens: int, vocabulary: int, top: int, weight: float, temperature: float, seed: int = 0) -> SoftTargets:
    """Returns soft targets from a teacher with random logits."""
    logits = 2 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))
    known, ids = torch.log_softmax(logits, dim=1).topk(top)
    rest = torch.log1p(-known.exp().sum(dim=1, keepdim=True)) if tokens else known[:, :1]
    return SoftTargets(ids, torch.cat((known, rest), dim=1), weight, temperature)


def random_operands(tokens: int, vocabulary: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator), torch.randn(vocabulary, width, generator=generator)


@RANDOM
@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(3, 90) | st.just(128), st.integers(1, 20), st.floats(0, 1),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 2.0]),
    st.builds(LossOptions, z_loss=st.sampled_from([0.0, 0.01]), softcap=st.sampled_from([0.0, 5.0])), DTYPES,
    st.integers(0, 99),
)  # fmt: skip
def test_linear_mixed_loss(
    kernels: str, tokens: int, width: int, vocabulary: int, top: int, ignored: float, weight: float,
    temperature: float, options: LossOptions, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    hidden, head = (t.to(dtype) for t in random_operands(tokens, vocabulary, width, seed))
    generator = torch.Generator().manual_seed(seed)
    soft = softened(tokens, vocabulary, min(top, vocabulary - 1), weight, temperature, seed)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::2] = soft.ids[::2, 0]  # some targets are the teacher's most likely token
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    valid, scale = targets != -100, torch.tensor(0.37, dtype=torch.float64)

    def reference(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return reference_mixed_loss(hidden[valid], head, targets[valid], soft.rows(valid), options)[0]

    with pytest.MonkeyPatch.context() as patch:
        for rows in ("CHUNK_ROWS", "PLAIN_ROWS"):
            patch.setattr(cross_entropy, rows, 16)  # several chunks, the last one short
        loss, parts = linear_mixed_loss(hidden, head, targets, soft, options)
        ours = with_gradients([hidden, head], lambda h, w: linear_mixed_loss(h, w, targets, soft, options)[0], scale)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, ours[0])
    assert_near(ours, with_gradients([hidden.double(), head.double()], reference, scale), dtype)
    plain = linear_cross_entropy(hidden, head, targets, LossOptions(softcap=options.softcap))
    near = 1e-5 if kernels == "native" or dtype != torch.bfloat16 else 1e-2  # torch rounds logits to bf16
    torch.testing.assert_close(parts[0], plain.to(parts.dtype), rtol=near, atol=near)
    if weight == 0:
        torch.testing.assert_close(loss, linear_cross_entropy(hidden, head, targets, options), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_the_threads(native_kernels: str, dtype: torch.dtype) -> None:
    (hidden, head), soft = random_operands(300, 200, 70, 0), softened(300, 200, 8, 0.5, 2.0)
    targets, before, results = torch.arange(300) % 200, torch.get_num_threads(), []
    for threads in (1, 2, 5, 5):
        torch.set_num_threads(threads)
        both = [t.to(dtype).requires_grad_() for t in (hidden.clone(), head.clone())]
        loss, parts = linear_mixed_loss(*both, targets, soft, LossOptions(z_loss=0.01))
        loss.backward()
        results.append([loss.detach(), parts, *(t.grad for t in both)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_student_that_agrees_with_a_confident_teacher_keeps_its_small_gradient(
    native_kernels: str, weight: float
) -> None:
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16)
    head = torch.tensor([[1.0], [0.0], [0.0], [-0.5]], dtype=torch.bfloat16)
    teacher = torch.log_softmax(torch.tensor([[8.1, 0.0, 0.3, -4.0]]), dim=1)
    known = teacher[:, [0, 2]]
    soft = SoftTargets(
        torch.tensor([[0, 2]]), torch.cat((known, torch.log1p(-known.exp().sum(1, keepdim=True))), 1), weight
    )
    target = torch.tensor([0])
    ours = with_gradients([hidden, head], lambda h, w: linear_mixed_loss(h, w, target, soft)[0], torch.ones(()))
    exact = with_gradients(
        [hidden.double(), head.double()],
        lambda h, w: reference_mixed_loss(h, w, target, soft, LossOptions())[0],
        torch.ones(()),
    )
    assert float(exact[1].norm()) < 1e-2
    for mine, right in zip(ours[1:], exact[1:], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=2e-2, atol=1e-6)


def test_tokens_outside_of_the_vocabulary_are_refused(kernels: str) -> None:
    soft = SoftTargets(torch.tensor([[1, 5]]), torch.zeros(1, 3), 0.5)
    with pytest.raises(IndexError, match="out of bounds"):
        linear_mixed_loss(torch.ones(1, 4), torch.ones(5, 4), torch.tensor([0]), soft)
