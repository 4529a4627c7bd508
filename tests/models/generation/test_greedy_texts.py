"""`generate` writes what transformers' greedy decoding writes, with the caches of all families."""

from __future__ import annotations

import pytest
from benchmarks.generation_trials import greedy_equal
from benchmarks.supported_models import FAMILIES
from benchmarks.tiny_model import has_chat_template

from tests.tasks.folders import model_folder

# Recurrent states under different names, a cache of the model's own class, and recurrent layers next to attention.
# Mistral has a window that is shorter than one of the prompts.
OFTEN = ("mamba", "falcon_mamba", "mamba2", "rwkv", "minimax", "falcon_h1", "bamba", "mistral")
ON_THE_PAGE = [family.model_type for family in FAMILIES if has_chat_template(family.model_type)]
# The next token depends on earlier ones only with larger weights, and with a head other than the embedding.
SHARP = {"initializer_range": 0.1, "tie_word_embeddings": False}
PROMPTS = ("the red fox", "for name in names:\n    print(name, end=' ')\n" * 3)


@pytest.mark.parametrize(
    "architecture",
    [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in ON_THE_PAGE if name not in OFTEN)],
)
def test_greedy_texts_are_those_of_transformers(architecture: str) -> None:
    assert greedy_equal(model_folder(architecture, **SHARP), PROMPTS) is None
