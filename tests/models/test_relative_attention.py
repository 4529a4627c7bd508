"""MPNet and DeBERTa compute the same in packed rows as transformers does with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model

SIZES = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 258, "initializer_range": 0.2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VERSION_3 = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "mpnet": lambda: transformers.MPNetConfig(**SIZES, pad_token_id=1),
    "deberta-v3": lambda: transformers.DebertaV2Config(**SIZES, **VERSION_3),
    "absolute positions": lambda: transformers.DebertaV2Config(**SIZES, **VERSION_3 | {"position_biased_input": True}),
    "own projections": lambda: transformers.DebertaV2Config(**SIZES, **VERSION_3 | {"share_att_key": False}),
    "no buckets": lambda: transformers.DebertaV2Config(
        **SIZES, **VERSION_3 | {"position_buckets": -1, "max_relative_positions": 40, "pos_att_type": ["c2p"]}
    ),
    "only absolute positions": lambda: transformers.DebertaV2Config(**SIZES, relative_attention=False),
    "convolution": lambda: transformers.DebertaV2Config(**SIZES, **VERSION_3, conv_kernel_size=3),
}
OFTEN = ("mpnet", "deberta-v3", "convolution")  # the others are packed before a release
PADDED = ("only absolute positions", "convolution")


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(CONFIGS[name]())


def outputs(model: transformers.PreTrainedModel, pack: bool, lengths: list[int]) -> list[torch.Tensor]:
    """Returns the final hidden states of all tokens, and the gradients of all parameters."""
    count = sum(lengths)
    tokens = torch.randint(2, 500, (count,), generator=torch.Generator().manual_seed(count))
    states = UnpaddedModel(model, pack).hidden_states(tokens, torch.tensor(lengths))
    model.zero_grad()
    (states * torch.sin(torch.arange(states.numel()).view(states.shape))).sum().backward()
    return [states.detach(), *(p.grad.to_dense() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.long) for n in CONFIGS])
@settings(max_examples=3, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 70), st.integers(71, 250)), min_size=1, max_size=6))
def test_packed_rows_have_the_hidden_states_and_gradients_of_padded_rows(name: str, lengths: list[int]) -> None:
    ours = model_of(name)
    patch_model(ours)
    found, expected = outputs(ours, True, lengths), outputs(model_of(name), False, lengths)
    assert len(found) == len(expected) > 20
    scale = max(float(gradient.abs().max()) for gradient in expected[1:])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=2e-5)
    for mine, exact in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", CONFIGS)
def test_encoders_with_relative_positions_and_without_convolutions_are_packed(name: str) -> None:
    model = model_of(name)
    unpatched = patch_model(model)
    assert unpatched == (["attention"] if name in PADDED else [])
    assert UnpaddedModel(model, pack=True).packs == (name not in PADDED)
