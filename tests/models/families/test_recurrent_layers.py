"""Models with recurrent layers give the same with our kernels as with transformers' loops, packed or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sansgpu.models.huggingface.generation import PretrainedSlots, slots_work
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.recurrent_layers import KernelRecurrence
from tests.models.families.packed import assert_packed_equals_separate

VOCABULARY = 128
GQA = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {**GQA, "head_dim": 16}
DELTA = {
    **HEADS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "rope_parameters": ROPE},
    "qwen3_next": {**DELTA, **EXPERTS},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "jamba": {
        **GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "granitemoehybrid": {
        **GQA, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "num_local_experts": 0,
    },
    "bamba": {**GQA, **MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**HEADS, **MAMBA2, "mamba_d_ssm": 64, "mamba_d_head": 8},
    "nemotron_h": {
        **HEADS, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
    },
    "zamba2": {
        **GQA, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "mamba_ngroups": 1,
        "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}  # fmt: skip
OFTEN = ("qwen3_5_text", "mamba", "granitemoehybrid")  # the others have the same layers, and their tests are long
FAMILIES = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.long) for name in MODELS]
)


def models(family: str) -> tuple[Any, Any]:
    """Returns a random model and a patched copy."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](vocab_size=VOCABULARY, **MODELS[family])
    plain = AutoModelForCausalLM.from_config(config).eval()
    patched = copy.deepcopy(plain)
    patch_model(patched)
    return plain, patched


@FAMILIES
def test_packed_examples_have_the_loss_and_gradients_of_separate_ones(family: str) -> None:
    plain, patched = models(family)
    assert any(isinstance(module, KernelRecurrence) for module in patched.modules())
    assert_packed_equals_separate(plain, patched, VOCABULARY)


@FAMILIES
def test_generated_text_is_that_of_transformers(family: str) -> None:
    plain, patched = models(family)
    prompt = torch.arange(3, 14)[None]
    found, expected = (one.generate(prompt, max_new_tokens=8, do_sample=False) for one in (patched, plain))
    assert torch.equal(found, expected)


@FAMILIES
@torch.no_grad()
def test_prompts_of_a_batch_continue_as_if_they_were_alone(family: str) -> None:
    plain, patched = models(family)
    unpadded = UnpaddedModel(patched, pack=True)
    assert slots_work(unpadded)
    reader = PretrainedSlots(unpadded, 3, 64)
    # The first prompt is shorter than the convolutions, and two are the same.
    sequences = [[5], [*range(3, 23)], [*range(3, 23)]]
    found = reader.add(sequences)
    for step in range(4):
        for logits, ids in zip(found, sequences, strict=True):
            torch.testing.assert_close(logits, plain(torch.tensor([ids])).logits[0, -1], rtol=1e-4, atol=1e-4)
        if step == 1:  # the first sequence ends, the others move to its slot, and another one joins
            reader.keep([1, 2])
            sequences = [*sequences[1:], [9, 8, 7]]
            found = torch.cat((found[1:], reader.add(sequences[-1:])))
        next_tokens = [(number + int(row.argmax())) % VOCABULARY for number, row in enumerate(found)]
        sequences = [[*ids, token] for ids, token in zip(sequences, next_tokens, strict=True)]
        found = reader.step(next_tokens)
