"""Kernels return zeros for inputs without rows, forward and backward; conftest fills new memory with large values.

A rank has such inputs if its share of a batch has no targets.
"""

import pytest
import torch

from sansgpu.kernels import linear, pointwise
from sansgpu.kernels.attention import Decay, attention
from sansgpu.kernels.cross_entropy import linear_cross_entropy
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.kernels.norm import LayerNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import dropout
from sansgpu.kernels.rotary import rotate_heads
from sansgpu.kernels.update import add_product, global_norm, quantized_zeros
from tests.kernels.updates import adamw, adamw8

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ADAMW = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.1, "step": 1, "scale": 1.0}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def assert_zero_gradients(*leaves: torch.Tensor) -> None:
    for tensor in leaves:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any(), tensor.grad


def test_new_memory_is_poisoned() -> None:
    """If new memory were zero, the tests below could pass by luck."""
    if torch.ones(1).new_empty(3, 5).eq(0).all():
        pytest.skip("this C library cannot fill new memory")
    assert (torch.empty(200, 70) > 1e38).all()


@pytest.mark.parametrize("bias", [False, True])
def test_linear(kernels: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS", 0)
    layer, x = linear.Linear(70, 200, bias=bias).bfloat16(), leaf(2, 0, 70, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert_zero_gradients(x, *layer.parameters())


@DTYPES
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_attention(kernels: str, dtype: torch.dtype, batch: int, queries: int, keys: int) -> None:
    q = leaf(batch, 4, queries, 16, dtype=dtype)
    k, v = (leaf(batch, 2, keys, 16, dtype=dtype) for _ in range(2))
    y = attention(q, k, v, torch.zeros(batch, queries, 2, dtype=torch.int32))
    y.sum().backward()
    assert not y.any()
    assert_zero_gradients(q, k, v)


@DTYPES
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("batch", "time"), [(0, 3), (2, 0)])
def test_attention_between_nodes(kernels: str, dtype: torch.dtype, added: bool, batch: int, time: int) -> None:
    q, k, v = (leaf(batch, 2, time, 16, dtype=dtype) for _ in range(3))
    table, ranges = leaf(2, 7), torch.zeros(batch, time, 2, dtype=torch.int32)
    decay = Decay(torch.zeros(batch, time, 2, dtype=torch.int32), table, added)
    attention(q, k, v, ranges, decay=decay).sum().backward()
    assert_zero_gradients(q, k, v, table)


def test_attention_without_heads_is_refused(native_kernels: str) -> None:
    ranges = torch.zeros(1, 3, 2, dtype=torch.int32)
    for heads, kv_heads, dim in ((0, 0, 8), (0, 2, 8), (2, 0, 8), (2, 2, 0)):
        q, k = torch.empty(1, heads, 3, dim), torch.empty(1, kv_heads, 3, dim)
        with pytest.raises(RuntimeError, match="at least one query head"):
            attention(q, k, k, ranges)


@DTYPES
def test_cross_entropy(kernels: str, dtype: torch.dtype) -> None:
    for rows, targets in ((0, []), (3, [-100, -100, -100])):
        hidden, head = leaf(rows, 8, dtype=dtype), leaf(40, 8, dtype=dtype)
        loss = linear_cross_entropy(hidden, head, torch.tensor(targets, dtype=torch.int64))
        loss.backward()
        assert loss == 0
        assert_zero_gradients(hidden, head)


@DTYPES
def test_dropout_and_embedding(kernels: str, dtype: torch.dtype) -> None:
    x, table, no_columns = leaf(0, 9, dtype=dtype), leaf(11, 5, dtype=dtype), leaf(11, 0, dtype=dtype)
    looked_up = embed(torch.zeros(1, 0, dtype=torch.int64), table).sum()
    looked_up = looked_up + embed(torch.zeros(2, 3, dtype=torch.int64), no_columns).sum()
    (dropout(x, 0.5, True).sum() + looked_up).backward()
    assert_zero_gradients(x, table, no_columns)


@DTYPES
@pytest.mark.parametrize("norm", [LayerNorm(12), RMSNorm(12, 1e-6)], ids=["layer", "rms"])
def test_norms_and_residuals(kernels: str, dtype: torch.dtype, norm: LayerNorm | RMSNorm) -> None:
    norm.zero_grad()
    x, y = leaf(2, 0, 12), leaf(2, 0, 12, dtype=dtype)
    total = norm.branch(x, y, 0.5)
    (norm(x).sum() + residual(x, y, 0.5, True).sum() + sum(part.sum() for part in total if part is not None)).backward()
    assert_zero_gradients(x, y, *norm.parameters())


@DTYPES
@pytest.mark.parametrize(("time", "heads", "dim"), [(0, 2, 8), (3, 2, 0), (3, 0, 8)])
def test_rotary(kernels: str, dtype: torch.dtype, time: int, heads: int, dim: int) -> None:
    q, k = leaf(2, time, heads, dim, dtype=dtype), leaf(2, time, heads, dim, dtype=dtype)
    angles = torch.ones(1, 1, time, dim)
    (sum(part.sum() for part in rotate_heads(q, k, angles, angles))).backward()
    assert_zero_gradients(q, k)


@DTYPES
def test_activations_and_orthogonal_matrices(kernels: str, dtype: torch.dtype) -> None:
    x, y = leaf(0, 6, dtype=dtype), leaf(0, 6, dtype=dtype)
    functions = (pointwise.gelu, pointwise.gelu_tanh, pointwise.relu, pointwise.relu_squared)
    (pointwise.swiglu(x, y).sum() + sum(function(x).sum() for function in functions)).backward()
    assert_zero_gradients(x, y)
    assert newton_schulz(torch.empty(0, 4, 3), dtype).shape == (0, 4, 3)


@DTYPES
def test_updates(kernels: str, dtype: torch.dtype) -> None:
    none = torch.empty(0, 5, dtype=dtype)
    assert global_norm([none, none]) == 0
    assert add_product(torch.empty(0, 5), none).shape == (0, 5)
    adamw(torch.empty(0, 5), torch.empty(0, 5), torch.empty(0, 5), none, torch.empty(0, 5).bfloat16(), **ADAMW)
    adamw8(torch.empty(0, 5), *quantized_zeros(none), *quantized_zeros(none), none, None, **ADAMW)
