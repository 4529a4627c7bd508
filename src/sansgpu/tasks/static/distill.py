"""Distills an encoder to static embeddings, as model2vec does (github.com/MinishLab/model2vec).

Each token of the vocabulary is encoded as a text. Its vector is reduced by principal component analysis and weighted by
the smooth inverse frequency of the token. Unlike model2vec, an encoder with mean pooling gives the vector of the token
alone, without those of the special tokens around it, and rare characters are not taken for frequent tokens. Both
correlate better with human similarity scores.

V tokens of the vocabulary, D dimensions of an embedding, E dimensions of the encoder's vectors.
"""

from __future__ import annotations

import re

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

from sansgpu.config import ConfigError
from sansgpu.data.tokenizer import rows_needed, special_tokens_around
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.probe import mixed_precision
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout, pool
from sansgpu.tasks.fine_tuning import PASS_TOKENS
from sansgpu.tasks.static.model import StaticFolder
from sansgpu.tasks.static.settings import StaticModelConfig
from sansgpu.tasks.task import TrainedModel

DEFAULT_DIM = 256
SIF_COEFFICIENT: float = StaticModelConfig.model_fields["sif_coefficient"].default
_SPACES = "▁Ġ"  # how tokenizers write a space
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def distilled(encoder: TrainedModel, dim: int | None, sif: float, progress: ReportProgress) -> torch.Tensor:
    """Returns static embeddings, (V, D) fp32, of the tokens of an embedding model.

    `dim` defaults to 256, or to the dimensions of the encoder's vectors if they are fewer. The embeddings of special
    and unused tokens are 0. Raises ConfigError if `dim` exceeds the encoder's.
    """
    dim = reduced_dim(dim, int(encoder.objective.width), encoder.source.target)
    backend = encoder.tokenizer.backend_tokenizer
    numbers = _ordinary_tokens(backend)
    reduced = principal_components(_token_vectors(encoder, numbers, progress), dim)
    table = np.zeros((rows_needed(backend), dim), np.float32)
    table[numbers] = reduced * sif_weights(frequency_ranks(backend, numbers), sif)[:, None]
    scale = np.sqrt(np.square(table[numbers], dtype=np.float64).mean())  # learning rates then fit any encoder
    return torch.from_numpy(table / np.float32(scale))


def reduced_dim(dim: int | None, width: int, name: str) -> int:
    """Returns the dimensions of embeddings from an encoder called `name` whose vectors have `width`.

    `dim` are the configured ones. Raises ConfigError if they are more than `width`.
    """
    if dim is not None and dim > width:
        raise ConfigError(
            f"the vectors of {name} have only {width} dimensions, so they cannot be reduced to {dim}; ask for fewer."
        )
    return min(DEFAULT_DIM, width) if dim is None else dim


def static_folder(encoder: TrainedModel, dim: int | None, progress: ReportProgress) -> StaticFolder:
    """Distills an embedding model to a static one with normalized embeddings; see `distilled`.

    Raises ConfigError if the model is static already.
    """
    if "embed" in encoder.task_class.verbs_without_kernels:
        raise ConfigError(f"{encoder.source.target} already has static embeddings; choose an encoder.")
    table = distilled(encoder, dim, SIF_COEFFICIENT, progress)
    return StaticFolder(table, encoder.tokenizer.backend_tokenizer, EmbeddingLayout("mean", normalize=True))


def _ordinary_tokens(backend: Backend) -> np.ndarray:
    """Returns the ids of all tokens that are neither special nor unused, in ascending order."""
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = backend.get_vocab(with_added_tokens=True).items()
    return np.array(sorted(n for token, n in vocabulary if n not in special and not _UNUSED.fullmatch(token)), np.int64)


@torch.inference_mode()
def _token_vectors(encoder: TrainedModel, numbers: np.ndarray, progress: ReportProgress) -> np.ndarray:
    """Returns the vectors of tokens, (V, E) fp32, each encoded between the encoder's special tokens."""
    before, after = special_tokens_around(encoder.tokenizer.backend_tokenizer)
    length, objective = len(before) + 1 + len(after), encoder.objective
    found, per_pass = [], max(1, PASS_TOKENS // length)
    with mixed_precision(encoder.device, encoder.precision):
        for start in range(0, len(numbers), per_pass):
            progress("encoding the vocabulary", start, len(numbers), "token")
            part = numbers[start : start + per_pass]
            rows = np.array([[*before, number, *after] for number in part], np.int64)
            lengths = torch.full((len(part),), length, device=encoder.device)
            hidden = objective.unpadded.hidden_states(torch.from_numpy(rows.reshape(-1)).to(encoder.device), lengths)
            is_mean = objective.layout.pooling == "mean"
            dense = objective.dense
            pooled = dense(hidden[len(before) :: length]) if is_mean else pool(hidden, lengths, objective.layout, dense)
            found.append(pooled.float().cpu().numpy())
    return np.concatenate(found)


def principal_components(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Projects vectors (V, E) to their first `dim` principal components, (V, D) float64.

    Each component's value of largest magnitude is positive, so that the result does not depend on the solver's signs.
    """
    centered = vectors.astype(np.float64)
    centered -= centered.mean(0)
    _, axes = np.linalg.eigh(centered.T @ centered)  # in ascending order of variance
    scores = centered @ axes[:, ::-1][:, :dim]
    largest = scores[np.abs(scores).argmax(0), np.arange(dim)]
    return np.where(largest < 0, -scores, scores)  # type: ignore[no-any-return]


def frequency_ranks(backend: Backend, numbers: np.ndarray) -> np.ndarray:
    """Estimates the ranks by frequency, from 0, of tokens with ascending ids (V,).

    Vocabularies list frequent tokens first, but those of WordPiece and BPE start with all characters of the text that
    they were trained on. Most characters beyond ASCII are rare, so they are ranked last.
    """
    is_affected = isinstance(backend.model, (BPE, WordPiece))
    tokens = [str(backend.id_to_token(number)) for number in numbers.tolist()] if is_affected else []
    rare = [len(token) == 1 and not token.isascii() and token not in _SPACES for token in tokens]
    ranks = np.arange(len(numbers))
    ranks[np.argsort(rare, kind="stable")] = np.arange(len(rare))
    return ranks


def sif_weights(ranks: np.ndarray, sif: float) -> np.ndarray:
    """Returns the weights of tokens (V,) with different ranks by frequency, or ones if `sif` is 0.

    The probability of a token is estimated by Zipf's law: it is proportional to 1 / (rank + 2).
    """
    if not sif:
        return np.ones(len(ranks))
    probabilities = 1 / (ranks + 2)
    probabilities /= probabilities.sum()
    return sif / (sif + probabilities)
