"""Initializes a decoder from counts of bigrams, i.e. pairs of adjacent tokens.

The initial model predicts the next token j after token i with about the probabilities of a bigram model with
Kneser-Ney smoothing (Ney et al. 1994), up to a constant per row of logits:

    log p(j | i) = log q(j) + S(i, j),    S(i, j) = log(1 + max(c(i, j) - d, 0) / (d t(i) q(j)))

c counts pairs, t(i) is the number of different tokens after i, and q(j) the share of all different pairs that end with
j. S is zero for pairs that do not occur, so its largest singular vectors are found by products with a sparse matrix
(Halko et al., arXiv 0909.4061). Training then starts near the loss of a bigram model, instead of spending its first
steps on learning what counting gives in a second.

V vocabulary, D width of the model, r rank of the approximation of S.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.kernels.pointwise import Activation
from sansgpu.machine.probe import one_thread
from sansgpu.models.decoder import DecoderBlock, FeedForward, TransformerLM

DISCOUNT = 0.75  # usual in Kneser-Ney smoothing
MAX_RANK = 512  # bounds the time for large models
OVERSAMPLING, POWER_ITERATIONS = 32, 2  # accuracy of the singular vectors
CLIPPED_NORMS = 0.05  # share of the vectors that are shortened, so that the others need not be padded to their norm
CONSTANT_RATIO = 0.5  # entry of the dimension that is equal for all tokens / norm of the others
# Root mean square of the entries of an untied embedding. It is small, so that the outputs of the blocks soon count as
# much in the residual stream.
EMBEDDING_RMS = 0.25
TIED_SCALE = 4.0  # scale of a tied embedding, whose inverse is in the last norm; otherwise its first updates erase it
UNIT_INPUT = 0.3  # standard deviation of the inputs of hidden units that compute a linear map
OPEN_GATE = 2.0  # input of SwiGLU's gates for such units
SQUARE_OFFSET = 1.5  # center of squared ReLU for such units, which are linear for inputs below it


class Factors(NamedTuple):
    """S(i, j) is approximately context[i] · output[j]."""

    context: torch.Tensor  # (V, r) fp32, all rows shorter than `radius`
    missing: torch.Tensor  # (V, 1): with it as one more entry, all rows of `context` have the norm `radius`
    radius: torch.Tensor  # ()
    output: torch.Tensor  # (V, r)
    bias: torch.Tensor  # (V, 1): log q, up to a constant


class _SparseMatrix:
    """A sparse matrix for products with dense ones, whose results do not depend on the number of threads."""

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, height: int) -> None:
        order = rows.argsort(stable=True)
        self._columns, self._values = columns[order], values[order]
        self._offsets = F.pad(torch.bincount(rows, minlength=height).cumsum(0)[:-1], (1, 0))

    def __matmul__(self, dense: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(self._columns, dense, self._offsets, mode="sum", per_sample_weights=self._values)


def bigram_factors(
    firsts: torch.Tensor, seconds: torch.Tensor, counts: torch.Tensor, vocabulary: int, rank: int, seed: int
) -> Factors:
    """Factorizes S of the distinct pairs (`firsts`, `seconds`), each (P,), that occur `counts` times."""
    counts = counts.double()
    totals = torch.zeros(vocabulary, dtype=torch.float64).index_add_(0, firsts, counts)
    ends = torch.zeros(vocabulary, dtype=torch.float64).index_add_(0, seconds, counts)
    continuation = _shares(torch.bincount(seconds, minlength=vocabulary).double())
    followers = torch.bincount(firsts, minlength=vocabulary)
    seen = torch.log1p((counts - DISCOUNT) / (DISCOUNT * followers[firsts] * continuation[seconds]))
    # Frequent tokens matter more: errors are weighted by the probabilities of both tokens.
    row_weights, column_weights = _shares(totals).sqrt(), _shares(ends).sqrt()
    weighted = (seen * row_weights[firsts] * column_weights[seconds]).float()
    kept = min(rank, vocabulary, MAX_RANK)
    left, sizes, right = _svd(firsts, seconds, weighted, vocabulary, kept, torch.Generator().manual_seed(seed))
    context = F.pad(left * sizes.sqrt() / row_weights[:, None].float(), (0, rank - kept))
    output = F.pad(right * sizes.sqrt() / column_weights[:, None].float(), (0, rank - kept))
    norms = context.norm(dim=1, keepdim=True)
    radius = norms[totals > 0].quantile(1 - CLIPPED_NORMS).clamp(min=1e-6)
    context = context * (radius / norms.clamp(min=1e-12)).clamp(max=1)
    bias = continuation.log().float()[:, None]
    return Factors(context, _missing(context, radius), radius, output, bias - bias.mean())


def _shares(counts: torch.Tensor) -> torch.Tensor:
    """Returns probabilities, none of which is zero."""
    return (counts + 0.1) / (counts + 0.1).sum()


def _missing(rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Returns the entry that each row lacks to have this norm, (V, 1); zero if it is longer."""
    return (norm.square() - rows.square().sum(1, keepdim=True)).clamp(min=0).sqrt()


def _svd(
    rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: int, rank: int, draws: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns approximate left singular vectors (size, rank), singular values, and right singular vectors."""
    matrix, transposed = _SparseMatrix(rows, columns, values, size), _SparseMatrix(columns, rows, values, size)
    basis = matrix @ torch.randn(size, min(size, rank + OVERSAMPLING), generator=draws)
    for _ in range(POWER_ITERATIONS):
        basis = matrix @ _orthonormal(transposed @ _orthonormal(basis))
    basis = _orthonormal(basis)
    right, sizes, inner = torch.linalg.svd(transposed @ basis, full_matrices=False)
    return (basis @ inner.T)[:, :rank], sizes[:rank], right[:, :rank]


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(matrix).Q
    return basis


def _rotation(width: int, draws: torch.Generator) -> torch.Tensor:
    """Returns a random rotation that maps vectors whose first entry is zero to vectors whose mean is zero.

    It spreads the entries over all coordinates, which the optimizer treats separately. LayerNorm subtracts the mean.
    """
    columns = torch.randn(width, width, generator=draws)
    columns[:, 0] = 1.0
    return _orthonormal(columns).T


@torch.no_grad()
def initialize_from_bigrams(
    model: TransformerLM, firsts: np.ndarray, seconds: np.ndarray, counts: np.ndarray, seed: int
) -> None:
    """Sets the initial embedding and output head or, if they are one matrix, also the last feed-forward layer."""
    first, second, count = (torch.from_numpy(values) for values in (firsts, seconds, counts))
    vocabulary, width = model.embedding.weight.shape
    rank = width - 3 if model.head is not None else (width - 6) // 2
    with one_thread():  # the last bits of a factorization depend on the number of threads
        factors = bigram_factors(first, second, count, vocabulary, rank, seed)
        rotation = _rotation(width, torch.Generator().manual_seed(seed))
    if model.head is None:
        _set_tied(model, factors, rotation)
    else:
        _set_untied(model, factors, rotation)


def _constant_beside(norm: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the constant entry of vectors whose other entries have this norm, and the RMS of all `width` entries."""
    constant = CONSTANT_RATIO * norm
    return constant, (norm.square() + constant.square()).sqrt() / width**0.5


def _set_untied(model: TransformerLM, factors: Factors, rotation: torch.Tensor) -> None:
    """Embeddings are (0, context, missing, constant), heads (0, output, 0, bias / constant).

    All embeddings have the same norm, by which the model divides them.
    """
    assert model.head is not None
    nothing = torch.zeros_like(factors.bias)
    constant, unit = _constant_beside(factors.radius, len(rotation))
    embedding = torch.cat([nothing, factors.context, factors.missing, constant.expand_as(nothing)], 1)
    head = torch.cat([nothing, factors.output, nothing, factors.bias / constant], 1)
    model.embedding.weight.copy_(embedding * EMBEDDING_RMS / unit @ rotation)
    model.head.weight.copy_(head * unit @ rotation)


def _set_tied(model: TransformerLM, factors: Factors, rotation: torch.Tensor) -> None:
    """Embeddings are (0, a context, output, bias / constant, a missing, other constant, missing to equal norms, 0).

    The last feed-forward layer replaces them by (0, 0, context, constant, 0, 0, 0, missing), times a scale, in the same
    coordinates, whose product with the embedding of j is S(i, j) + log q(j). a makes context and output equally large.
    """
    width, rank = len(rotation), factors.context.shape[1]
    constant, unit = _constant_beside(factors.radius, width)
    output, bias = factors.output * unit, factors.bias / constant * unit
    ratio = output.norm() / factors.context.norm().clamp(min=1e-6)
    parts = torch.cat([ratio * factors.context, output, bias, ratio * factors.missing], 1)
    norm = parts.norm(dim=1).quantile(1 - CLIPPED_NORMS)
    other, rms = _constant_beside(norm, width)
    zeros = torch.zeros_like(bias)
    embedding = torch.cat([zeros, parts, other.expand_as(zeros), _missing(parts, norm), zeros], 1)
    embedding = F.pad(embedding, (0, width - embedding.shape[1]))
    # Rows of the map, from normalized embeddings, and the embedding's entries: contexts are at 1, outputs at 1 + rank.
    mapped = torch.zeros(width, width)
    bias_at = 1 + 2 * rank
    mapped[1 + rank : bias_at, 1 : 1 + rank] = torch.eye(rank) / ratio
    mapped[bias_at, bias_at + 2] = constant / other
    mapped[bias_at + 4, bias_at + 1] = 1 / ratio
    change = TIED_SCALE * rms * (mapped * rms / unit - torch.eye(width))
    is_one = torch.zeros(width)
    is_one[bias_at + 2] = rms / other  # its product with a normalized embedding is 1
    model.embedding.weight.copy_(TIED_SCALE * embedding @ rotation)
    model.norm.fill_scale(1 / TIED_SCALE)
    _set_linear_map(
        cast(DecoderBlock, model.blocks[-1]).feed_forward, rotation.T @ change @ rotation, rotation.T @ is_one
    )


def _set_linear_map(layer: FeedForward, matrix: torch.Tensor, is_one: torch.Tensor) -> None:
    """Makes a feed-forward layer compute matrix @ x for inputs x with is_one · x = 1.

    Uses that f(x) - f(-x) = x for GELU and ReLU, and (a + x)^2 - (a - x)^2 = 4 a x. The other hidden units keep their
    inputs, but have no output.
    """
    width = len(matrix)
    inputs = UNIT_INPUT * torch.eye(width)
    layer.down.weight.zero_()
    if layer.gate is not None:
        layer.gate.weight[:width] = OPEN_GATE * is_one
        layer.up.weight[:width] = inputs
        layer.down.weight[:, :width] = matrix / (UNIT_INPUT * F.silu(torch.tensor(OPEN_GATE)))
        return
    squared = layer.activation is Activation.RELU_SQUARED
    offset, slope = (SQUARE_OFFSET, 4 * SQUARE_OFFSET) if squared else (0.0, 1.0)
    layer.up.weight[:width], layer.up.weight[width : 2 * width] = offset * is_one + inputs, offset * is_one - inputs
    outputs = matrix / (UNIT_INPUT * slope)
    layer.down.weight[:, :width], layer.down.weight[:, width : 2 * width] = outputs, -outputs
