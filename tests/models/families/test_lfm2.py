"""LFM2's short convolutions stay inside their examples, in packed rows and in batches of prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from sansgpu.models.families.lfm2 import PackedConvolution
from sansgpu.models.huggingface.generation import PretrainedSlots, slots_work
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "conv_L_cache": 3,
    "use_cache": False,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip


def models(**changes: object) -> tuple[Any, Any]:
    """Returns a random model and a patched copy."""
    torch.manual_seed(0)
    plain = Lfm2ForCausalLM(Lfm2Config(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    patched = copy.deepcopy(plain)
    patch_model(patched)
    return plain, patched


def test_rows_may_be_shorter_than_the_convolution() -> None:
    plain, patched = models(conv_L_cache=5)
    tokens = torch.tensor([7, 8])
    found = UnpaddedModel(patched, pack=True).hidden_states(tokens, torch.tensor([2]))
    torch.testing.assert_close(found, plain.model(tokens[None]).last_hidden_state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_packed_examples_have_the_loss_and_gradients_of_separate_ones(taps: int) -> None:
    plain, patched = models(conv_L_cache=taps)
    unpadded = UnpaddedModel(patched, pack=True)
    assert unpadded.packs
    lengths = torch.tensor([1, 2, 9, 4, 30])
    tokens = torch.randint(0, 100, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1)
    unpadded.summed_loss(tokens, lengths, targets).backward()
    for ids, wanted in zip(tokens.split(lengths.tolist()), targets.split(lengths.tolist()), strict=True):
        torch.nn.functional.cross_entropy(plain(ids[None]).logits[0], wanted, reduction="sum").backward()
    for (name, expected), ours in zip(plain.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, expected.grad, rtol=1e-5, atol=1e-5 * float(expected.grad.norm()), msg=name
        )


@torch.no_grad()
def test_prompts_of_a_batch_continue_as_if_they_were_alone() -> None:
    plain, patched = models()
    unpadded = UnpaddedModel(patched, pack=True)
    assert slots_work(unpadded)
    reader = PretrainedSlots(unpadded, 3, 64)
    sequences = [[5], list(range(20)), [7, 8, 9]]
    found = reader.add(sequences)
    for step in range(6):
        for logits, ids in zip(found, sequences, strict=True):
            torch.testing.assert_close(logits, plain(torch.tensor([ids])).logits[0, -1], rtol=1e-4, atol=1e-4)
        if step == 3:  # the first sequence ends, and the others move to its slot
            reader.keep([1, 2])
            found, sequences = found[1:], sequences[1:]
        next_tokens = found.argmax(-1).tolist()
        sequences = [[*ids, token] for ids, token in zip(sequences, next_tokens, strict=True)]
        found = reader.step(next_tokens)


@torch.no_grad()
def test_prompts_that_share_a_long_beginning_continue_as_if_they_were_alone() -> None:
    plain, patched = models(max_position_embeddings=256)
    beginning = [number * 7 % 60 for number in range(90)]
    prompts = [[*beginning, *range(start, start + own)] for start, own in ((1, 20), (5, 28), (40, 19))]
    reader = PretrainedSlots(UnpaddedModel(patched, pack=True), 3, 200)
    expected = torch.stack([plain(torch.tensor([ids])).logits[0, -1] for ids in prompts])
    torch.testing.assert_close(reader.add(prompts), expected, rtol=1e-4, atol=1e-4)
    expected = torch.stack([plain(torch.tensor([[*ids, 3]])).logits[0, -1] for ids in prompts])
    torch.testing.assert_close(reader.step([3, 3, 3]), expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_with_bias_is_left_alone() -> None:
    plain, patched = models(conv_bias=True)
    assert not any(isinstance(module, PackedConvolution) for module in patched.modules())
    assert not UnpaddedModel(patched, pack=True).packs
    ids = torch.arange(9)[None]
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
