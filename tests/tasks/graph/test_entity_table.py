"""Entity vectors, compared with plain loops in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.tasks.graph.entities import NameBags


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 99))
def test_mean_name_embeddings_and_their_gradient_are_those_of_plain_loops(names: list[list[int]], seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    embedding = torch.randn(9, 5, generator=draws).requires_grad_()
    weights = torch.randn(len(names), 5, generator=draws)
    means = NameBags(names, 9).means(embedding)
    (means * weights).sum().backward()
    exact = embedding.detach().double().requires_grad_()
    expected = torch.stack([exact[tokens].mean(0) for tokens in names])
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)
    assert embedding.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(embedding.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
