"""Both generations of EmbeddingGemma give the vectors of other libraries, before and after training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tools.family_trials import TRAINING, rows_of, sansgpu, write_rows
from tools.tiny_model import make_tokenizer

from sansgpu.models.family import TINY_HEAD_DIM
from tests.processes import options

WINDOW = 8
SIZES = {
    **TINY_HEAD_DIM,
    "vocab_size": 1024,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
TEXTS = ["a fox", "def add(a, b):\n    return a + b", "the fox runs home and " * 12]


def first(folder: Path) -> Path:
    """Makes an EmbeddingGemma: a Gemma 3 whose tokens attend to later ones, and two Dense modules."""
    config = transformers.Gemma3TextConfig(
        **SIZES, query_pre_attn_scalar=16, sliding_window=2 * WINDOW, use_bidirectional_attention=True
    )
    transformers.Gemma3TextModel(config).save_pretrained(folder / "transformer")
    make_tokenizer(encoder=True).save_pretrained(folder / "transformer")
    dense = [Dense(*sizes, bias=False, activation_function=torch.nn.Identity()) for sizes in ((64, 96), (96, 64))]
    modules = [Transformer(str(folder / "transformer")), Pooling(64), *dense]
    SentenceTransformer(modules=[*modules, Normalize()], prompts=PROMPTS, device="cpu").save(str(folder / "model"))
    return folder / "model"


def second(folder: Path) -> Path:
    """Makes an EmbeddingGemma 2, which can read images, and projects its vectors to another size itself."""
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16,
    }  # fmt: skip
    text = {
        **SIZES,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 16,
        "embedding_dim": 96,
    }
    config = transformers.EmbeddingGemma2Config(text_config=text, vision_config=vision)
    model = folder / "model"
    transformers.EmbeddingGemma2Model(config).save_pretrained(model)
    make_tokenizer(encoder=True).save_pretrained(model)
    classes = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    (model / "modules.json").write_text(
        json.dumps(
            [
                {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
                for place, (path, name) in enumerate(classes.items())
            ]
        )
    )
    (model / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": 96, "pooling_mode": "mean", "include_prompt": True}
    (model / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return model


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5


def with_sentence_transformers(model: Path, prompt: str) -> np.ndarray:
    vectors: np.ndarray = SentenceTransformer(str(model), device="cpu").encode(TEXTS, prompt=prompt or None)
    return vectors


@torch.no_grad()
def with_transformers(model: Path, prompt: str) -> np.ndarray:
    """Computes the vectors without Sentence Transformers, which needs torchvision for a model that can read images."""
    tokenizer, loaded = transformers.AutoTokenizer.from_pretrained(model), transformers.AutoModel.from_pretrained(model)
    ids = [tokenizer(prompt + text, return_tensors="pt").input_ids for text in TEXTS]
    means = torch.cat([loaded.eval()(input_ids=one).last_hidden_state.mean(1) for one in ids])
    return torch.nn.functional.normalize(means).numpy()


def vectors_of(model: Path, prompt: str | None = None) -> np.ndarray:
    """Returns the vectors of TEXTS, which `embed` writes."""
    folder = model.parent
    output = folder / f"{model.name}-{prompt}.npy"
    write_rows(folder / "texts.jsonl", ({"text": text} for text in TEXTS))
    prompted = ("--prompt", prompt) if prompt else ()
    files = ("--data", folder / "texts.jsonl", "--output", output)
    outcome = sansgpu("embed", model, *files, "--precision", "fp32", *prompted)
    assert outcome.refusal is None
    assert "padded" not in outcome.err
    vectors: np.ndarray = np.load(output)
    return vectors


@pytest.mark.parametrize(
    ("make", "expected"),
    [(first, with_sentence_transformers), pytest.param(second, with_transformers, marks=pytest.mark.long)],
)
def test_vectors_are_those_of_other_libraries(
    make: Callable[[Path], Path], expected: Callable[[Path, str], np.ndarray], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows_of("embed", 8))
    for name in (None, *PROMPTS):
        assert_close(vectors_of(model, name), expected(model, PROMPTS[name] if name else ""))
    chosen = {
        **TRAINING, "task": "embed", "model.name_or_path": model, "data.dataset_name": tmp_path / "rows.jsonl",
        "data.max_length": 160, "training.max_steps": 1, "training.matryoshka_dims": [32, 64],
        "training.learning_rate": 0.01,
    }  # fmt: skip
    assert sansgpu("train", *options(chosen), "--output-dir", tmp_path / "run").refusal is None
    trained, query = vectors_of(tmp_path / "run", "query"), PROMPTS["query"]
    assert_close(trained, expected(tmp_path / "run/final", query))
    assert np.abs(trained - expected(model, query)).max() > 1e-3
