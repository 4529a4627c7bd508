"""Sequences that share beginnings: the row that stands for them, their attention, and whole models."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.kernels.attention import attention, causal_ranges, in_window, reference_attention
from sansgpu.models import shared_prefixes
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.shared_prefixes import SharedPrefixes

# Few different tokens, so that random sequences have beginnings in common.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=12)


def row_of(sequences: list[list[int]], shares: bool = True) -> tuple[torch.Tensor, SharedPrefixes]:
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return tokens, SharedPrefixes.of(tokens, torch.tensor([len(sequence) for sequence in sequences]), shares)


def test_a_common_beginning_occurs_once() -> None:
    sequences = [[1, 2, 3, 6], [7], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    tokens, row = row_of(sequences)
    assert sorted(tokens[row.originals].tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert row.saved == 8
    assert tokens[row.originals][row.copies].tolist() == tokens.tolist()
    assert row.positions[row.copies].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


@settings(max_examples=60)
@given(SEQUENCES)
def test_each_place_stands_for_one_beginning(sequences: list[list[int]]) -> None:
    _, row = row_of(sequences)
    beginnings = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    by_place = dict(zip(row.copies.tolist(), beginnings, strict=True))
    assert [by_place[place] for place in row.copies.tolist()] == beginnings
    assert len(by_place) == len(set(beginnings)) == len(row)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("max_keys", [8, 10_000])  # several calls of the kernel, or one
def test_attention_and_gradients_are_those_of_separate_sequences(
    window: int | None, max_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "MAX_KEYS", max_keys)

    @settings(max_examples=25, deadline=None)
    @given(SEQUENCES, st.integers(0, 2**31))
    def check(sequences: list[list[int]], seed: int) -> None:
        _, row = row_of(sequences)
        random = torch.Generator().manual_seed(seed)
        states = [torch.randn(1, heads, len(row), 8, generator=random).requires_grad_() for heads in (4, 2, 2)]
        reference = [x.detach().double().requires_grad_() for x in states]
        documents = torch.repeat_interleave(torch.arange(len(sequences)), row.lengths)[None]
        ranges = causal_ranges(documents) if window is None else in_window(causal_ranges(documents), window)
        q, k, v = (x[:, :, row.copies] for x in reference)
        expected = reference_attention(q, k, v, ranges)
        mask = row if window is None else row.windowed(window)
        out = mask.attend(states[0], states[1], states[2], attention)
        found = row.expand(out[0].transpose(0, 1)).transpose(0, 1)[None]
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
        factors = torch.randn(found.shape, generator=random)
        (found * factors).sum().backward()
        (expected * factors.double()).sum().backward()
        for x, other in zip(states, reference, strict=True):
            assert x.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(x.grad, other.grad.float(), rtol=1e-4, atol=1e-4)

    check()


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    "gpt2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def unpadded_model(family: str) -> UnpaddedModel:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=60, max_position_embeddings=128, initializer_range=0.2, **shape, **FAMILIES[family]
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    patch_model(model)
    return UnpaddedModel(model, pack=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_of_models_are_those_of_separate_sequences(family: str) -> None:
    unpadded = unpadded_model(family)
    assert unpadded.shares
    random = torch.Generator().manual_seed(1)

    def drawn(count: int) -> torch.Tensor:
        return torch.randint(0, 60, (count,), generator=random)

    beginning, longer = drawn(17), drawn(9)
    examples = [torch.cat(parts) for parts in ((beginning, drawn(5)), (beginning, longer), (drawn(11),))]
    examples += [torch.cat((beginning, longer, drawn(7))), examples[0], torch.cat((beginning[:4], drawn(6)))]
    tokens, lengths = torch.cat(examples), torch.tensor([len(one) for one in examples])
    targets = drawn(len(tokens)).masked_fill(torch.rand(len(tokens), generator=random) < 0.3, -100)
    results = []
    for shares in (True, False):
        unpadded.shares = shares
        unpadded.model.zero_grad()
        loss = unpadded.summed_loss(tokens, lengths, targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in unpadded.model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients))
    (shared, found), (separate, expected) = results
    torch.testing.assert_close(shared, separate, rtol=1e-5, atol=0.0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        other = found[name].to_dense() if found[name].is_sparse else found[name]
        assert float((dense - other).abs().max()) <= 1e-5 * max(1.0, float(dense.abs().max())), name
