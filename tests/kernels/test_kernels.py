"""Compares every kernel, in C++ and in plain torch, with float64 code at random shapes, forward and backward."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels import attention as attention_module
from sansgpu.kernels import cross_entropy, library
from sansgpu.kernels.attention import attention, bidirectional_ranges, causal_ranges, reference_attention
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy, reference_cross_entropy
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.newton_schulz import newton_schulz, reference_newton_schulz
from sansgpu.kernels.update import AdamWStep, WeightUpdate, adamw_in_torch, add_product, global_norm
from tests.kernels.updates import adamw

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
SOFTCAPS = st.sampled_from([None, 0.3, 5.0, 50.0])
RANDOM = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def with_gradients(tensors: list[torch.Tensor], function: object, weight: torch.Tensor) -> list[torch.Tensor]:
    """Returns the function's value and the gradient of its weighted sum for each tensor."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves)  # type: ignore[operator]
    (value * weight.to(value.dtype)).sum().backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_near(ours: list[torch.Tensor], reference: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert len(ours) == len(reference)
    for mine, exact in zip(ours, reference, strict=True):
        error = (mine.double() - exact).norm()
        assert error <= TOLERANCE[dtype] * (exact.norm() + 1)  # some gradients are zero


@RANDOM
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 300), st.sampled_from([2, 8, 16, 64]),
    st.booleans(), st.sampled_from([0.0, 0.02, 0.3]), SOFTCAPS, DTYPES, st.integers(0, 99),
)  # fmt: skip
@example(1, 2, 1, 290, 16, True, 0.0, 0.3, torch.float32, 0)  # several blocks of queries and of keys
@example(1, 1, 2, 290, 16, False, 0.02, 50.0, torch.bfloat16, 0)
def test_attention(
    kernels: str, batch: int, groups: int, kv_heads: int, time: int, dim: int, causal: bool, edges: float,
    softcap: float | None, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, groups * kv_heads, time, dim), (batch, kv_heads, time, dim), (batch, kv_heads, time, dim)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    documents = (torch.rand(batch, time, generator=generator) < edges).cumsum(1)
    ranges = (causal_ranges if causal else bidirectional_ranges)(documents)
    ours = with_gradients(inputs, lambda q, k, v: attention(q, k, v, ranges, softcap=softcap), weight)
    wide = [t.double() for t in inputs]
    exact = with_gradients(wide, lambda q, k, v: reference_attention(q, k, v, ranges, softcap=softcap), weight)
    assert_near(ours, exact, dtype)


@RANDOM
@given(st.integers(1, 70), st.integers(1, 150), SOFTCAPS, DTYPES, st.integers(0, 99))
def test_attention_of_few_queries_to_any_ranges_of_keys(
    kernels: str, queries: int, keys: int, softcap: float | None, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, 3, time, 16, generator=generator).to(dtype) for time in (queries, keys, keys)]
    weight = torch.randn(2, 3, queries, 16, generator=generator, dtype=torch.float64)
    ranges = torch.randint(0, keys + 1, (2, queries, 2), generator=generator).sort(dim=-1).values
    ranges[..., 1].clamp_(min=1)
    ranges[..., 0].clamp_(max=keys - 1)
    ranges[..., 1] = ranges[..., 1].maximum(ranges[..., 0] + 1)  # a softmax over no keys has no gradient
    ours = with_gradients(inputs, lambda q, k, v: attention(q, k, v, ranges.int(), softcap=softcap), weight)
    wide = [t.double() for t in inputs]
    exact = with_gradients(wide, lambda q, k, v: reference_attention(q, k, v, ranges, softcap=softcap), weight)
    assert_near(ours, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("groups", "kv_heads", "edges", "softcap"), [(1, 3, 0.0, None), (3, 2, 0.01, 2.0), (4, 1, 0.0, None)]
)
def test_attention_over_many_keys_does_not_depend_on_the_threads(
    native_kernels: str, groups: int, kv_heads: int, edges: float, softcap: float | None, dtype: torch.dtype
) -> None:
    generator, time = torch.Generator().manual_seed(groups), 840  # four blocks of keys
    shapes = [(1, groups * kv_heads, time, 32), (1, kv_heads, time, 32), (1, kv_heads, time, 32)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    ranges = causal_ranges((torch.rand(1, time, generator=generator) < edges).cumsum(1))
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5, 5):
        torch.set_num_threads(threads)
        results.append(with_gradients(inputs, lambda q, k, v: attention(q, k, v, ranges, softcap=softcap), weight))
    torch.set_num_threads(before)
    wide = [t.double() for t in inputs]
    exact = with_gradients(wide, lambda q, k, v: reference_attention(q, k, v, ranges, softcap=softcap), weight)
    assert_near(results[0], exact, dtype)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_a_query_that_sees_nothing_attends_to_nothing(kernels: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    ranges = causal_ranges(torch.zeros(1, 9, dtype=torch.int64))
    ranges[:, 4] = 0
    out = attention(q, k, v, ranges)
    out.sum().backward()
    assert torch.equal(out[:, :, 4], torch.zeros(1, 2, 8))
    assert q.grad is not None
    assert torch.equal(q.grad[:, :, 4], torch.zeros(1, 2, 8))
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v) if t.grad is not None)


def test_indices_out_of_bounds_are_refused_and_not_read(native_kernels: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    for wrong in (torch.tensor([0, 10]), torch.tensor([-1, 3])):
        with pytest.raises(IndexError, match="out of bounds"):
            attention(q, k, v, wrong.int().expand(1, 9, 2))
    with pytest.raises(RuntimeError, match="ranges"):
        attention(q, k, v, torch.zeros(1, 5, 2, dtype=torch.int32))
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_drops_the_same_weights_forward_and_backward(kernels: str, dtype: torch.dtype) -> None:
    time, rate = 128, 0.3
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(2, 3, time, time, generator=generator).to(dtype) for _ in range(4))
    ranges = causal_ranges((torch.rand(2, time, generator=generator) < 0.02).cumsum(1))

    def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attention(q, k, v, ranges, rate)

    identity = torch.eye(time, dtype=dtype).expand(2, 3, time, time)
    weights = reference_attention(q.double(), k.double(), identity.double(), ranges)
    kept = dropped(q, k, identity) != 0  # the output for one-hot values is the weights themselves
    visible = attention_module.visible_keys(ranges, time).expand_as(kept)
    share = kept[visible & (weights > 1e-6)].double().mean()
    assert share == pytest.approx(1 - rate, abs=0.02)
    factor = kept.double() / (1 - rate)
    ours = with_gradients([q, k, v], dropped, weight)
    exact = with_gradients(
        [t.double() for t in (q, k, v)], lambda q, k, v: reference_attention(q, k, v, ranges, factor), weight
    )
    assert_near(ours, exact, dtype)
    torch.manual_seed(6)
    assert not torch.equal(attention(q, k, identity, ranges, rate) != 0, kept)


SHAPES = st.builds(
    LossOptions,
    label_smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 0.01]),
    softcap=st.sampled_from([0.0, 5.0]),
)


@RANDOM
@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(2, 90) | st.sampled_from([128, 192]), st.floats(0, 1), SHAPES,
    DTYPES, st.integers(0, 99),
)  # fmt: skip
def test_linear_cross_entropy(
    kernels: str, tokens: int, width: int, vocabulary: int, ignored: float, shape: LossOptions, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    head = torch.randn(vocabulary, width, generator=generator).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    scale = torch.tensor(0.37, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for rows in ("CHUNK_ROWS", "PLAIN_ROWS"):
            patch.setattr(cross_entropy, rows, 16)  # several chunks, the last one short
        ours = with_gradients([hidden, head], lambda h, w: linear_cross_entropy(h, w, targets, shape), scale)
        assert not linear_cross_entropy(hidden, head, targets, shape).requires_grad
        torch.testing.assert_close(linear_cross_entropy(hidden, head, targets, shape), ours[0])
    exact = with_gradients(
        [hidden.double(), head.double()], lambda h, w: reference_cross_entropy(h, w, targets, shape), scale
    )
    assert_near(ours, exact, dtype)


def test_chunks_of_a_frozen_head_are_small_in_large_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(100, 8, generator=generator), torch.randn(30, 8, generator=generator)
    targets = torch.randint(0, 30, (100,), generator=generator)
    rows, call = list[int](), library.call

    def counted(name: str, *arguments: Any) -> None:
        if name == "cross_entropy_losses":
            rows.append(arguments[2])
        call(name, *arguments)

    def frozen() -> list[torch.Tensor]:
        return with_gradients([hidden], lambda h: linear_cross_entropy(h, head, targets), torch.ones(()))

    monkeypatch.setattr(library, "call", counted)
    whole = frozen()
    monkeypatch.setattr(cross_entropy, "FROZEN_HEAD_ROWS", 16)
    monkeypatch.setattr(cross_entropy, "FROZEN_HEAD_BYTES", 40 * 30 * 4)  # the logits of 40 tokens
    for found, expected in zip(frozen(), whole, strict=True):
        torch.testing.assert_close(found, expected)
    with_gradients([hidden, head], lambda h, w: linear_cross_entropy(h, w, targets), torch.ones(()))
    assert rows == ([100, 40, 40, 20, 100] if library.available() else [])


def test_linear_cross_entropy_survives_logits_of_any_size(kernels: str) -> None:
    hidden = torch.tensor([[300.0], [-300.0], [0.0]])
    head = torch.tensor([[1.0], [-1.0], [0.5]])
    targets = torch.tensor([0, 0, 1])
    exact = with_gradients(
        [hidden.double(), head.double()], lambda h, w: reference_cross_entropy(h, w, targets), torch.ones(())
    )
    ours = with_gradients([hidden, head], lambda h, w: linear_cross_entropy(h, w, targets), torch.ones(()))
    assert_near(ours, exact, torch.float32)
    nan = linear_cross_entropy(torch.tensor([[float("nan")]]), head, torch.tensor([0]))
    assert not bool(nan.isfinite())  # so that the training step notices it


@pytest.mark.parametrize("tokens", [40, 2 * cross_entropy.CHUNK_ROWS + 5])
def test_without_gradients_linear_cross_entropy_computes_only_logits(
    kernels: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, call = set(), library.call
    monkeypatch.setattr(library, "call", lambda name, *arguments: (called.add(name), call(name, *arguments))[1])
    hidden, head = torch.ones(tokens, 8, requires_grad=True), torch.ones(30, 8, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, head, targets)
    assert called <= {"cross_entropy_losses"}
    loss = linear_cross_entropy(hidden, head, targets)
    assert len(called) == (1 + 3 if library.available() else 0)  # and three kernels for the gradients
    assert torch.equal(evaluated, loss)


def test_linear_cross_entropy_multiplies_in_autocasts_dtype_and_sums_in_fp32(kernels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator) for n in (50, 40))
    targets = torch.randint(0, 40, (50,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, head, targets)
    assert loss.dtype == torch.float32
    exact = reference_cross_entropy(hidden.bfloat16().double(), head.bfloat16().double(), targets)
    assert float(loss) == pytest.approx(float(exact), rel=5e-3)


@RANDOM
@given(st.integers(1, 300), st.integers(1, 300), st.booleans(), st.integers(0, 99))
def test_adamw_and_the_norm(kernels: str, rows: int, columns: int, narrow: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    if narrow:
        gradient = gradient.bfloat16()
    reference = torch.nn.Parameter(weight.double())
    optimizer = torch.optim.AdamW([reference], lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    working = weight.bfloat16() if narrow else None
    for step in (1, 2, 3):
        reference.grad = gradient.double() * 0.5
        optimizer.step()
        adamw(
            weight, first, second, gradient, working,
            lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, step=step, scale=0.5,
        )  # fmt: skip
    torch.testing.assert_close(weight.double(), reference.detach(), rtol=1e-5, atol=1e-6)
    if working is not None:
        assert torch.equal(working, weight.bfloat16())
    both = [gradient, weight]
    assert global_norm(both) == pytest.approx(sum(float(t.double().square().sum()) for t in both) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_updates_rows_that_have_had_a_gradient(kernels: str, dtype: torch.dtype, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, seen = torch.randn(40, 100, generator=generator), torch.tensor([0, 7, 8, 39])
    start, expected = weight.clone(), weight.clone()
    first, second, expected_first, expected_second = (torch.zeros_like(weight) for _ in range(4))
    working = weight.to(torch.bfloat16)
    common: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    for step in range(1, 4):  # step 2 has no gradient
        gradient = torch.zeros_like(weight)
        if step != 2:
            gradient[seen] = torch.randn(4, 100, generator=generator)
        gradient = gradient.to(dtype)
        adamw(weight, first, second, gradient, working, step=step, weight_decay=weight_decay, **common)
        one = WeightUpdate(expected, (expected_first, expected_second), gradient, None, weight_decay)
        adamw_in_torch(one, AdamWStep(number=step, **common))
    for ours, theirs in ((weight, expected), (first, expected_first), (second, expected_second)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(working, weight.to(torch.bfloat16), rtol=0, atol=0)
    assert torch.equal(weight[1], start[1]) == (weight_decay == 0)


@RANDOM
@given(st.integers(1, 5000), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_products_are_added_up_in_fp32(kernels: str, size: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total, product = torch.randn(size, generator=generator), torch.randn(size, generator=generator).to(dtype)
    expected = total + product.float()
    assert torch.equal(add_product(total, product), expected)


@RANDOM
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 90), st.sampled_from([4, 130]), st.booleans(), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_embedding_adds_up_gradients_in_fp32(
    kernels: str, batch: int, time: int, rows: int, width: int, narrow: bool, sparse: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, width, generator=generator).to(torch.bfloat16 if narrow else torch.float32)
    indices = torch.randint(0, rows, (batch, time), generator=generator)
    weight = torch.randn(batch, time, width, generator=generator)
    leaf = table.clone().requires_grad_()
    leaf.grad_dtype = None
    out = embed(indices, leaf, sparse)
    (out * weight).sum().backward()
    assert torch.equal(out, table.float()[indices])
    expected = torch.zeros(rows, width, dtype=torch.float64).index_add_(
        0, indices.flatten(), weight.double().flatten(0, 1)
    )
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.is_sparse == (sparse and rows > 8 * indices.numel())
    torch.testing.assert_close(leaf.grad.to_dense().double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24), st.integers(0, 99))
def test_orthogonalize_brings_singular_values_near_one_and_keeps_directions(
    count: int, rows: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    together = newton_schulz(matrices, torch.float64)
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(newton_schulz(matrix[None], torch.float64)[0], result)
        u, before, vh = torch.linalg.svd(matrix, full_matrices=False)
        core = u.T @ result @ vh.T
        settled = before > 0.03 * before.norm()  # five iterations do not raise tiny values to one
        assert torch.all((core.diagonal()[settled] > 0.3) & (core.diagonal()[settled] < 1.3))
        assert (core - core.diagonal().diag()).abs().max() < 1e-6
    assert reference_newton_schulz(matrices[0]).shape == (rows, columns)
