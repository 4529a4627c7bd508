"""Models with attention of their own pack examples, with the losses and gradients of separate ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tools.tiny_model import TINY
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sansgpu.models.huggingface.patches import ATTENTION, patch_model
from tests.models.families.packed import assert_packed_equals_separate

VOCABULARY = 128
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {  # name: (model_type, changes, attention uses our kernel)
    "falcon": ("falcon", {}, True),
    "falcon with a key for each query": ("falcon", {"multi_query": False}, True),
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, True),
    "gpt_neo": ("gpt_neo", {}, True),
    "gpt_oss": ("gpt_oss", {}, False),
    "granite_swa": ("granite_swa", {}, False),
}
OFTEN = ("falcon", "gpt_neo")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.long) for n in MODELS])
def test_packed_examples_have_the_loss_and_gradients_of_separate_ones(name: str) -> None:
    model_type, changes, uses_kernel = MODELS[name]
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[model_type](vocab_size=VOCABULARY, **{**TINY[model_type].tiny, **ends, **changes})
    plain: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    patched = copy.deepcopy(plain)
    assert (ATTENTION not in patch_model(patched)) == uses_kernel
    assert_packed_equals_separate(plain, patched, VOCABULARY)


def test_falcon_with_alibi_is_left_alone() -> None:
    config = CONFIG_MAPPING["falcon"](vocab_size=VOCABULARY, **{**TINY["falcon"].tiny, "alibi": True})
    plain: Any = AutoModelForCausalLM.from_config(config).eval()
    patched, ids = copy.deepcopy(plain), torch.arange(9)[None]
    assert ATTENTION in patch_model(patched)
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
