"""Generates continuations of prompts: many at once, or one as a stream.

A finished sequence makes room for the next prompt, so that the batch stays full. The random draws of a row depend on
the seed and the row's number only, and no row's arithmetic depends on the others, so neither the batch size nor an
interruption changes a text.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from sansgpu.config import derive_seed
from sansgpu.kernels.decoder_step import DecoderStep, StepWeight, step_layer, step_of
from sansgpu.kernels.linear import MIN_ROWS
from sansgpu.kernels.pointwise import Activation
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.formats.tokenizers import TextCodec
from sansgpu.models.generation.kv_cache import LayerSlots, SlotCache
from sansgpu.models.generation.sampling import Sampling, reading, sample_tokens
from sansgpu.models.quantized_layers import matrix_of

PROMPT_TOKENS = 2048  # tokens of prompts in a forward pass: enough for full speed, with bounded memory
REPLACEMENT = "\ufffd"  # an incomplete UTF-8 sequence decodes to this
REFILL_RATIO = 8  # prompts are read when this fraction of the slots is free: short passes are slow


class Completion(NamedTuple):
    """The tokens generated for a prompt."""

    row: int
    ids: list[int]
    reason: str  # stop: the model ended the text; length: the limit of tokens or the context was reached


class BatchReader(Protocol):
    """A language model that reads several sequences at once, in the order in which they were added."""

    @property
    def slots(self) -> int:
        """Maximum number of sequences."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, known after the first pass."""

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Adds sequences; returns the logits (B, V) of their next tokens."""

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each sequence; returns the logits (B, V) of their next tokens."""

    def keep(self, kept: Sequence[int]) -> None:
        """Removes all sequences but those with these indices, in ascending order."""


@dataclass(frozen=True)
class BatchModel:
    """A language model and its tokenizer, to complete prompts."""

    open_reader: Callable[[int, int], BatchReader]  # of a number of slots and the tokens that each holds
    open_single: Callable[[int], BatchReader]  # the fastest reader of one sequence of this many tokens
    context: int
    together: bool  # False: the model reads one sequence at a time
    text_ids: Callable[[str], list[int]]
    chat_ids: Callable[[list[dict[str, Any]]], list[int]] | None  # None: it has no chat template
    decode: Callable[[list[int]], str]
    ends: frozenset[int]


@dataclass
class _Row:
    number: int
    limit: int  # tokens to generate
    draws: torch.Generator
    ids: list[int] = field(default_factory=list)

    def ended(self, ends: Container[int]) -> str | None:
        """Returns the reason why no more tokens follow, or None."""
        if self.ids and self.ids[-1] in ends:
            self.ids.pop()
            return "stop"
        return "length" if len(self.ids) == self.limit else None


def complete(
    reader: BatchReader,
    prompts: Sequence[Sequence[int]],
    ends: Container[int],
    limits: Sequence[int],
    sampling: Sampling,
    first: int = 0,
) -> Iterator[Completion]:
    """Yields the completion of each prompt, as they end. A completion has up to its `limits` tokens, at least 1.

    The first prompt is that of row number `first`.
    """
    waiting, active = list(range(len(prompts)))[::-1], list[_Row]()
    while waiting or active:
        free, logits = reader.slots - len(active), []
        if active:
            logits.append(reader.step([row.ids[-1] for row in active]))
        if waiting and (not active or free >= max(1, reader.slots // REFILL_RATIO)):
            added = [waiting.pop() for _ in range(min(free, len(waiting)))]
            logits.append(reader.add([list(prompts[number]) for number in added]))
            for number in added:
                draws = torch.Generator().manual_seed(derive_seed(sampling.seed, "row", first + number))
                active.append(_Row(first + number, limits[number], draws))
        tokens = sample_tokens(torch.cat(logits), sampling, [row.draws for row in active])
        kept = []
        for index, (row, token) in enumerate(zip(active, tokens, strict=True)):
            row.ids.append(token)
            if reason := row.ended(ends):
                yield Completion(row.number, row.ids, reason)
            else:
                kept.append(index)
        if len(kept) < len(active):
            reader.keep(kept)
            active = [active[index] for index in kept]


def stream(model: BatchModel, ids: list[int], max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yields pieces of text that continue `ids`, until the model ends the text or `max_new_tokens`.

    When the context is full, generation goes on from the newer half of it, so a text may be longer than the context.
    """
    yielded, new_ids = "", list[int]()
    for token in _tokens(model, ids[-model.context :], max_new_tokens, sampling):
        if token in model.ends:
            break
        new_ids.append(token)
        text = model.decode(new_ids)
        if not text.endswith(REPLACEMENT):  # otherwise the last character is incomplete
            yield text[len(yielded) :]
            yielded = text
    rest = model.decode(new_ids)[len(yielded) :]
    if rest:
        yield rest


def _tokens(model: BatchModel, held: list[int], count: int, sampling: Sampling) -> Iterator[int]:
    reader = model.open_single(min(model.context, len(held) + count))
    draws, is_read = torch.Generator().manual_seed(sampling.seed), False
    for _ in range(count):
        if len(held) > model.context:
            reader.keep([])
            held, is_read = held[-(model.context // 2) :], False
        logits = reader.step(held[-1:]) if is_read else reader.add([held])
        (token,) = sample_tokens(logits, sampling, [draws])
        held, is_read = [*held, token], True
        yield token


class SlotReader:
    """The part of a BatchReader that its model does not change. A pass has at least MIN_ROWS tokens.

    Those of fewer are filled up, because torch multiplies fewer rows with sums in another order than our kernel.
    """

    def __init__(self, slots: int, length: int, fused: DecoderStep | None = None) -> None:
        self.slots, self._count, self._fused = slots, 0, fused
        rows = slots if fused is not None else max(slots, MIN_ROWS)
        last = 1  # for what fills up a pass
        self.cache = SlotCache(rows + last, max(length, MIN_ROWS), packed=fused is not None)

    @property
    def token_bytes(self) -> int:
        return self.cache.token_bytes

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Runs the model on ids (B, T); returns logits (n, V) after the `chosen` ones of all tokens."""
        raise NotImplementedError

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the embeddings (B, D) of ids (B,), and cos and sin (B, d) of the rotary angles of their positions."""
        raise NotImplementedError

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        parts, together, tokens = [], list[list[int]](), 0
        for prompt in prompts:
            if together and tokens + len(prompt) > PROMPT_TOKENS:
                parts.append(self._read(together))
                together, tokens = [], 0
            together.append(prompt)
            tokens += len(prompt)
        return torch.cat([*parts, self._read(together)])

    def _read(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Reads prompts in one pass, or one longer than PROMPT_TOKENS in pieces."""
        first, self._count = self._count, self._count + len(prompts)
        *pieces, last = [prompts[0][n : n + PROMPT_TOKENS] for n in range(0, len(prompts[0]), PROMPT_TOKENS)]
        if not pieces:
            return self._read_whole(first, prompts)
        for number, piece in enumerate([*pieces, last]):
            padded = [*piece, *[0] * (MIN_ROWS - len(piece))]
            self.cache.start_piece(first, number * PROMPT_TOKENS, len(padded))
            logits = self._run(torch.tensor([padded]), [len(piece) - 1])
        self.cache.lengths[first] = len(prompts[0])
        return logits

    def _read_whole(self, first: int, prompts: Sequence[list[int]]) -> torch.Tensor:
        lengths = [len(prompt) for prompt in prompts]
        fill = max(0, MIN_ROWS - sum(lengths))
        self.cache.start_prompts(first, lengths + [fill] * (fill > 0))
        ids = torch.tensor([[*(token for prompt in prompts for token in prompt), *[0] * fill]])
        return self._run(ids, (torch.tensor(lengths).cumsum(0) - 1).tolist())

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        if self._fused is not None:
            self.cache.start_step(len(tokens))
            positions = self.cache.positions
            with torch.inference_mode():
                x, cos, sin = self.embedded(torch.tensor(tokens), positions)
                return self._fused(x, cos, sin, positions, self.cache.packed_layers())
        count = max(MIN_ROWS, len(tokens))
        self.cache.lengths[len(tokens) : count] = 0
        self.cache.start_step(count)
        ids = torch.tensor([*tokens, *[0] * (count - len(tokens))])
        return self._run(ids[:, None], list(range(len(tokens))))

    def _run(self, ids: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        filled = [*chosen, *chosen[:1] * (MIN_ROWS - len(chosen))]
        positions = self.cache.positions.view_as(ids)
        with torch.inference_mode():
            return self.logits(ids, positions, torch.tensor(filled))[: len(chosen)]

    def keep(self, kept: Sequence[int]) -> None:
        with torch.inference_mode():
            self.cache.keep(kept)
        self._count = len(kept)


class DecoderSlots(SlotReader):
    """A BatchReader for a `TransformerLM`, for sequences of up to `length` tokens."""

    def __init__(self, model: TransformerLM, slots: int, length: int, fused: DecoderStep | None) -> None:
        super().__init__(slots, length, fused)
        self._model = model
        self._caches = [LayerSlots(self.cache, layer) for layer in range(len(model.blocks))]

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._model.dtype == torch.bfloat16):
            hidden = self._model.hidden(ids, positions, caches=self._caches).flatten(0, 1)[chosen]
        return self._model.logits(hidden)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rotation = self._model.rotary(positions[:, None])
        assert rotation is not None
        return self._model.embedding(ids), *rotation


class SingleReader:
    """A BatchReader of one sequence at a time, for models that cannot read several with one cache."""

    slots, token_bytes = 1, 0

    def reset(self) -> None:
        """Empties the cache."""
        raise NotImplementedError

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        """Appends `ids` to the cached tokens; returns the logits (V,) of the next token."""
        raise NotImplementedError

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        self.reset()
        return self.step(prompts[0])

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.forward_new(list(tokens))[None]

    def keep(self, kept: Sequence[int]) -> None:
        """Does nothing: the next prompt empties the cache."""


class DecoderReader(SingleReader):
    """A SingleReader for a `TransformerLM`."""

    def __init__(self, model: TransformerLM) -> None:
        self._model = model

    def reset(self) -> None:
        self._caches = self._model.new_caches(1)

    def forward_new(self, ids: list[int]) -> torch.Tensor:
        inputs = torch.tensor([ids], device=self._model.norm.weight.device)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self._model.dtype == torch.bfloat16):
            hidden = self._model.hidden(inputs, caches=self._caches)[0, -1:]
        return self._model.logits(hidden)[0]


def decoder_step(model: TransformerLM) -> DecoderStep | None:
    """Returns the steps of our decoder with RMSNorm, rotary embedding and SwiGLU; None for other architectures."""
    blocks: list[Any] = list(model.blocks)
    if model.config.decoder.positions != "rope" or blocks[0].feed_forward.activation is not Activation.SWIGLU:
        return None
    layers = []
    for block in blocks:
        attention, mlp = block.attention, block.feed_forward
        linears = attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down
        weights = [StepWeight(matrix_of(linear), linear.bias) for linear in linears]
        head_norms = [attention.q_norm, attention.k_norm]
        layers.append(step_layer(block.attention_norm, block.feed_forward_norm, head_norms, weights))
    head = StepWeight(model.head_matrix)
    return step_of(layers, model.norm, head, model.config.head_dim, model.dtype)


def decoder_readers(model: TransformerLM, packs: bool = True) -> dict[str, Any]:
    """Returns the fields of a BatchModel that do not depend on its tokenizer.

    `packs` allows copies of the weights, which make steps several times as fast.
    """
    on_cpu = model.norm.weight.is_cpu
    fused = decoder_step(model) if packs and on_cpu else None

    def open_reader(slots: int, length: int) -> BatchReader:
        return DecoderSlots(model, slots, length, fused) if on_cpu else DecoderReader(model)

    return {
        "open_reader": open_reader,
        "open_single": lambda length: DecoderReader(model) if fused is None else open_reader(1, length),
        "context": model.config.max_seq_len,
        "together": on_cpu,
    }


def decoder_batch(model: TransformerLM, tokenizer: TextCodec, packs: bool = True) -> BatchModel:
    """Returns a `TransformerLM` and its tokenizer as a BatchModel. A text starts a document, as in training."""
    return BatchModel(
        **decoder_readers(model, packs),
        text_ids=lambda text: [*tokenizer.prefix_ids, *tokenizer.encode(text)] or [tokenizer.end_id],
        chat_ids=None,
        decode=tokenizer.decode,
        ends=frozenset({tokenizer.end_id}),
    )


def generate(
    model: TransformerLM, tokenizer: TextCodec, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Streams a continuation of `prompt`, as `stream` does, from a model that may be in training."""
    batch = decoder_batch(model, tokenizer, packs=False)
    with reading(model):
        yield from stream(batch, batch.text_ids(prompt), max_new_tokens, sampling)
