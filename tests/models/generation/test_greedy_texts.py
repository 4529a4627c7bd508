"""`generate` writes what transformers' greedy decoding writes, with the caches of all families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tools.generation_trials import greedy_equal
from tools.supported_models import FAMILIES

from sansgpu.models.huggingface.cached_reader import CacheUse, PretrainedReader, cache_use
from tests.tasks.folders import model_folder

# Recurrent layers alone, and a window that is shorter than one of the prompts.
OFTEN = ("mamba", "mistral")
ON_THE_PAGE = [family.model_type for family in FAMILIES if not family.is_encoder]
SELDOM = [name for name in (*ON_THE_PAGE, "recurrent_gemma") if name not in OFTEN]
# The next token depends on earlier ones only with larger weights, and with a head other than the embedding.
SHARP = {"initializer_range": 0.1, "tie_word_embeddings": False}
PROMPTS = ("the red fox", "for name in names:\n    print(name, end=' ')\n" * 3)


@pytest.mark.parametrize("architecture", [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in SELDOM)])
def test_greedy_texts_are_those_of_transformers(architecture: str) -> None:
    assert greedy_equal(model_folder(architecture, **SHARP), PROMPTS) is None


def test_a_cache_that_changes_the_logits_is_not_used() -> None:
    class Forgetful(transformers.MambaForCausalLM):
        def forward(self, *args: Any, cache_params: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    folder = model_folder("mamba", **SHARP)
    model, forgetful = (kind.from_pretrained(folder).eval() for kind in (transformers.MambaForCausalLM, Forgetful))
    for dtype in (torch.float32, torch.bfloat16):
        # A second pass over several tokens would lose Mamba's state.
        assert cache_use(model.to(dtype)) == CacheUse(given=False, positions=False, pieces=False)
        assert cache_use(forgetful.to(dtype)) is None
    tokens = [5, 9, 7, 2]
    reader = PretrainedReader(forgetful, None)
    logits = [reader.add([tokens[:3]]), reader.step(tokens[3:])]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, 2:]
    assert torch.equal(torch.cat(logits), expected)
