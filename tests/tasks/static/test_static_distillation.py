"""Distillation and tokenization for static embeddings equal plain references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoTokenizer

from sansgpu.config import ConfigError
from sansgpu.data.tokenizer import special_tokens_around
from sansgpu.jobs.embed import open_encoder
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout
from sansgpu.tasks.static.distill import distilled, frequency_ranks, principal_components, sif_weights, static_folder
from sansgpu.tasks.static.model import StaticModel, plain_tokenizer
from sansgpu.tasks.static.words import TextTokenizer, has_independent_words
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest
from tests.tasks.folders import WORDS, model_folder
from tests.tasks.tokenizer_kinds import tokenizer_of


@pytest.fixture(scope="module")
def encoder() -> TrainedModel:
    request = ModelRequest(str(model_folder("bert")), precision="fp32")
    return open_encoder(request, pytest.fail, lambda *_: None)


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 1000))
def test_principal_components_are_those_of_scikit_learn(rows: int, width: int, seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(rows + width, width)).astype(np.float32)
    dim = 1 + seed % width
    expected = PCA(dim, svd_solver="full").fit_transform(vectors.astype(np.float64))
    found = principal_components(vectors, dim)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-6)
    assert (found.max(0) >= -found.min(0)).all()  # the value of largest magnitude is positive


def test_the_weights_of_tokens_are_smooth_inverse_frequencies() -> None:
    shares = [1 / 2, 1 / 4, 1 / 3]
    expected = [0.01 / (0.01 + share / sum(shares)) for share in shares]
    np.testing.assert_allclose(sif_weights(np.array([0, 2, 1]), 0.01), expected)
    assert sif_weights(np.array([1, 0]), 0.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("model", [models.WordPiece, models.BPE, models.Unigram])
def test_rare_characters_are_ranked_last_where_a_vocabulary_starts_with_all(model: type) -> None:
    tokens = ["a", "é", "▁", "世", "the", "##é"]
    vocabulary: Any = {token: number for number, token in enumerate(tokens)}
    made = {
        models.WordPiece: lambda: models.WordPiece(vocabulary, unk_token="a"),
        models.BPE: lambda: models.BPE(vocabulary, []),
        models.Unigram: lambda: models.Unigram([(token, -number) for token, number in vocabulary.items()]),
    }[model]()
    ranks = frequency_ranks(Tokenizer(made), np.array([0, 1, 2, 3, 4, 5]))
    ordered = [tokens[place] for place in np.argsort(ranks)]
    assert ordered == (tokens if model is models.Unigram else ["a", "▁", "the", "##é", "é", "世"])


def test_distilled_vectors_are_those_of_the_tokens_alone(encoder: TrainedModel) -> None:
    """With all dimensions and no weights, distances between tokens are those of the encoder's hidden states."""
    folder = model_folder("bert")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    table = distilled(encoder, encoder.objective.width, 0.0, lambda *_: None).double()
    special = tokenizer.all_special_ids
    assert not table[special].any()
    tokens = tokenizer(" ".join(WORDS[:9]), add_special_tokens=False).input_ids[:9]
    before, after = special_tokens_around(tokenizer.backend_tokenizer)
    with torch.no_grad():
        inputs = [torch.tensor([[*before, token, *after]]) for token in tokens]
        hidden = torch.stack([model(ids).last_hidden_state[0, len(before)] for ids in inputs]).double()
    distances, expected = torch.cdist(table[tokens], table[tokens]), torch.cdist(hidden, hidden)
    torch.testing.assert_close(distances / distances[0, 1], expected / expected[0, 1], rtol=1e-4, atol=1e-4)


def test_an_encoder_cannot_be_distilled_to_more_dimensions_than_it_has(encoder: TrainedModel) -> None:
    with pytest.raises(ConfigError, match="have only 64 dimensions, so they cannot be reduced to 65; ask for fewer"):
        static_folder(encoder, 65, lambda *_: None)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=6), st.sampled_from(["wordpiece", "qwen"]))
def test_cached_words_give_the_tokens_of_the_text(texts: list[str], kind: str) -> None:
    texts = [*texts, "", "a  naïve <s> café", " The\tdog's\u0301 \u0301世界 \x00 end.\n"]
    backend = plain_tokenizer(tokenizer_of(kind))
    assert has_independent_words(backend) == (kind == "wordpiece")
    reader = TextTokenizer(backend, None)
    for _ in range(2):  # the second time from the cache
        tokens, lengths = reader.encode(texts)
        assert [part.tolist() for part in np.split(tokens, lengths.cumsum()[:-1])] == [
            backend.encode(text, add_special_tokens=False).ids for text in texts
        ]


def test_the_cache_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.tasks.static.words.MAX_CACHED_CHARACTERS", 10)
    backend = plain_tokenizer(tokenizer_of("wordpiece"))
    reader = TextTokenizer(backend, None)
    for text in ("the naïve café", "sells crêpes", "the café"):
        assert reader.encode([text])[0].tolist() == backend.encode(text, add_special_tokens=False).ids
    assert "naïve" not in reader._known


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.booleans(), st.integers(0, 99))
def test_a_vector_is_the_mean_of_its_tokens_vectors(sizes: list[int], normalize: bool, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    table, layout = torch.randn(20, 5, generator=draws), EmbeddingLayout("mean", normalize)
    tokens = torch.randint(0, 20, (sum(sizes),), generator=draws)
    model = StaticModel(table)
    means = [table.double()[part].mean(0) if len(part) else torch.zeros(5).double() for part in tokens.split(sizes)]
    expected = torch.stack([torch.nn.functional.normalize(mean, dim=0) if normalize else mean for mean in means])
    with torch.no_grad():
        torch.testing.assert_close(
            model.encode(tokens, torch.tensor(sizes), layout).double(), expected, rtol=0, atol=1e-6
        )
        if all(sizes):
            found = model(tokens, torch.tensor(sizes), layout)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
