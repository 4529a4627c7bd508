"""Generates continuations of prompts: many at once, or one as a stream.

When a sequence ends, the next prompt takes its slot, so that the batch stays full (continuous batching). The random
draws of a row depend only on the seed and the row's number, and its arithmetic does not depend on other rows. So
neither the batch size nor an interruption changes the generated text.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from sansgpu.config import derive_seed
from sansgpu.kernels.decoder_step import DecoderStep, StepWeight, step_layer, step_of
from sansgpu.kernels.linear import MIN_ROWS
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.formats.tokenizers import TextCodec
from sansgpu.models.generation.batch import BatchReader, Continuation, RunningBatch
from sansgpu.models.generation.kv_cache import LayerSlots, SlotCache
from sansgpu.models.generation.prefix_cache import MIN_SHARED, PrefixCache
from sansgpu.models.generation.sampling import Sampling, reading, sample_tokens
from sansgpu.models.generation.text import StopDetector, StopStrings, TextPieces
from sansgpu.models.generation.tool_calls import ToolUse
from sansgpu.models.modules import integer_of_model
from sansgpu.models.quantized_layers import matrix_of
from sansgpu.models.shared_prefixes import common_length

PROMPT_TOKENS = 2048  # maximum prompt tokens per forward pass: enough for full speed, with bounded memory
REFILL_RATIO = 8  # prompts are added once 1/8 of the slots are free, because passes over few tokens are slow


class Completion(NamedTuple):
    """The tokens generated for a prompt."""

    row: int
    ids: list[int]
    reason: str  # "stop": the model ended the text; "length": its limit of tokens was reached
    stop: int | None = None  # the token with which the model ended the text, which is not in `ids`


@dataclass(frozen=True)
class BatchModel:
    """A language model with its tokenizer, for generating text."""

    open_reader: Callable[[int, int], BatchReader]  # from the number of slots and the tokens per slot
    open_single: Callable[[int], BatchReader]  # the fastest reader for one sequence, from its maximum tokens
    context: int
    together: bool  # whether the model can process several sequences at once
    text_ids: Callable[[str], list[int]]
    chat_ids: Callable[..., list[int]] | None  # of messages, tools and variables; None: it has no chat template
    decode: Callable[..., str]  # of tokens, and the special tokens to keep in the text
    ends: frozenset[int]
    tool_use: Callable[[], ToolUse] | None = None  # None: it has no chat template
    stops: tuple[str, ...] = ()  # texts that end an answer if the chat template ends it without a token


def complete(
    reader: BatchReader,
    prompts: Sequence[Sequence[int]],
    ends: Container[int],
    limits: Sequence[int],
    sampling: Sampling,
    first: int = 0,
    stops: Callable[[int, list[int]], bool] | None = None,
) -> Iterator[Completion]:
    """Yields the completion of each prompt, in the order in which they end.

    `limits` are the maximum numbers of tokens to generate for each prompt, at least 1. Rows are numbered from `first`.
    `stops` is called with a row and its tokens after each new one, and returns whether to end the row; see `stops_of`.
    """
    waiting, batch = list(range(len(prompts)))[::-1], RunningBatch(reader, ends)
    numbers: dict[Continuation, int] = {}
    while waiting or numbers:
        added = []
        if waiting and (not numbers or batch.free >= max(1, reader.slots // REFILL_RATIO)):
            for number in [waiting.pop() for _ in range(min(batch.free, len(waiting)))]:
                draws = torch.Generator().manual_seed(derive_seed(sampling.seed, "row", first + number))
                added.append(Continuation(list(prompts[number]), limits[number], sampling, draws))
                numbers[added[-1]] = first + number
        batch.step(added)
        for one in batch.active:
            if stops is not None and one.stop is None and stops(numbers[one], one.ids):
                one.ended = "stop"
            if one.ended is not None:
                yield Completion(numbers.pop(one), one.ids, one.ended, one.stop)


def stops_of(model: BatchModel) -> Callable[[int, list[int]], bool] | None:
    """Returns a function for `complete` that ends a row at a stop string of the model; None if it has none."""
    if not model.stops:
        return None
    detectors: dict[int, StopDetector] = {}

    def ends(row: int, ids: list[int]) -> bool:
        found = detectors.setdefault(row, StopDetector(model.decode, model.stops)).ends(ids)
        if found:
            del detectors[row]
        return found

    return ends


def stream(model: BatchModel, ids: list[int], max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Yields pieces of a text that continues `ids`, until the model ends it or `max_new_tokens` are generated.

    When the context is full, its older half is dropped, so the text can be longer than the context.
    """
    pieces, stops = TextPieces(model.decode), StopStrings(model.stops)
    for token in _tokens(model, ids[-model.context :], max_new_tokens, sampling):
        if token in model.ends:
            break
        if piece := stops.add(pieces.add(token)):
            yield piece
        if stops.found:
            return
    rest = stops.add(pieces.end())
    if rest := rest if stops.found else rest + stops.end():
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
    """Base of the BatchReaders that use a SlotCache.

    The longest prefix that a prompt shares with a cached sequence is copied instead of computed. A DecoderStep, if
    there is one, also reads prompts, so that their keys and values do not depend on what was cached.

    Without it, passes get filler tokens, so that each has at least `least_rows`: MIN_ROWS, unless all linear layers
    multiply codes. With fewer, torch's matmul, which sums in a different order, would replace sansgpu's kernel, and
    results would depend on the batch size.

    The states of a `recurrent` model are those after a whole sequence. Its prompts take one pass each, and share
    nothing with sequences that continue in another way.
    """

    recurrent = False

    def __init__(self, slots: int, length: int, fused: DecoderStep | None = None, least_rows: int = MIN_ROWS) -> None:
        self.slots, self._fused, self._least = slots, fused, 1 if fused is not None else least_rows
        self._sequences: list[list[int]] = []  # the tokens of each sequence
        self.prefixes: PrefixCache | None = None  # stores finished sequences for later prompts
        rows, length = max(slots, self._least) + 1, max(length, self._least)  # with a slot for the filler tokens
        self.cache = SlotCache(rows, length, () if fused is None else fused.new_caches(rows, length))

    @property
    def token_bytes(self) -> int:
        return self.cache.token_bytes

    @property
    def sequence_bytes(self) -> int:
        return self.cache.state_bytes

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Runs the model on ids (B, T). Returns the logits (n, V) at `chosen` (n,), indices into all B * T tokens."""
        raise NotImplementedError

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the embeddings (B, D) of ids (B,), and the cos and sin (B, d) of the RoPE angles at `positions`."""
        raise NotImplementedError

    def add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Adds sequences. A prompt that several of them share is processed once, because results would be equal."""
        first, distinct = len(self._sequences), dict.fromkeys(map(tuple, prompts))
        logits = self._add([list(prompt) for prompt in distinct])
        places = dict(zip(distinct, range(len(distinct)), strict=True))
        sources = [places[tuple(prompt)] for prompt in prompts]
        for number, source in reversed(list(enumerate(sources))):  # a source is never after its copies
            if number != source:
                with torch.inference_mode():
                    self.cache.copy(first + number, first + source, len(prompts[number]))
        self._sequences[first:] = map(list, prompts)
        return logits if len(distinct) == len(prompts) else logits[sources]

    def _add(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        parts, waiting, starts = [], list[list[int]](), list[int]()
        for prompt in prompts:
            slot = len(self._sequences) + len(waiting)
            start = self._copy_prefix(slot, prompt)
            ahead = max((common_length(other, prompt) for other in waiting), default=0)
            tokens = sum(map(len, waiting)) - sum(starts) + len(prompt) - start
            if waiting and (tokens > PROMPT_TOKENS or ahead >= start + MIN_SHARED):
                parts.append(self._read(waiting, starts))
                waiting, starts = [], []
                start = self._copy_prefix(slot, prompt)  # it may share more with the prompts that were just processed
            waiting.append(prompt)
            starts.append(start)
        return torch.cat([*parts, self._read(waiting, starts)])

    def _copy_prefix(self, slot: int, prompt: list[int]) -> int:
        """Copies the longest cached beginning of a prompt to a slot; returns its length, or 0 if it is too short.

        The last token of the prompt is always left to be processed, because its logits are needed.
        """
        if self.recurrent:
            return 0
        known = prompt[:-1]
        shared = [common_length(sequence, known) for sequence in self._sequences]
        longest = max(shared, default=0)
        count, layers = (0, []) if self.prefixes is None else self.prefixes.find(known)
        if max(longest, count) < MIN_SHARED:
            return 0
        with torch.inference_mode():
            if longest >= count:
                self.cache.copy(slot, shared.index(longest), longest)
            else:
                self.cache.restore(slot, layers, count)
        return max(longest, count)

    def _read(self, prompts: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        """Processes prompts from `starts` on; returns the logits of their next tokens.

        A single prompt may have more than PROMPT_TOKENS tokens, which take several passes.
        """
        first = len(self._sequences)
        self._sequences += map(list, prompts)
        size = len(prompts[0]) if self.recurrent else PROMPT_TOKENS
        *before, last = range(starts[0], len(prompts[0]), size)
        for start in before:
            self._pass(first, [prompts[0][: start + size]], [start])
        return self._pass(first, prompts, [last, *starts[1:]])

    def _pass(self, first: int, prompts: Sequence[list[int]], starts: Sequence[int]) -> torch.Tensor:
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        ids, ends = [token for rest in rests for token in rest], list(accumulate(map(len, rests)))
        fill = max(0, self._least - len(ids))
        filler = [fill] * (fill > 0)  # a sequence of its own
        self.cache.start_prompts(first, [*starts, *[0] * len(filler)], [*map(len, rests), *filler])
        return self._run(torch.tensor([[*ids, *[0] * fill]]), [end - 1 for end in ends])

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.append(token)
        count = max(self._least, len(tokens))
        self.cache.lengths[len(tokens) : count] = 0
        self.cache.start_step(count)
        ids = torch.tensor([*tokens, *[0] * (count - len(tokens))])
        return self._run(ids[:, None], list(range(len(tokens))))

    def _run(self, ids: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        positions = self.cache.positions
        with torch.inference_mode():
            if self._fused is not None:
                slots, packed = self.cache.document_ids, self.cache.packed
                x, cos, sin = self.embedded(ids.flatten(), positions)
                return self._fused(x, cos, sin, slots, positions, packed, torch.tensor(chosen))
            filled = [*chosen, *chosen[:1] * (self._least - len(chosen))]
            return self.logits(ids, positions.view_as(ids), torch.tensor(filled))[: len(chosen)]

    def keep(self, kept: Sequence[int]) -> None:
        with torch.inference_mode():
            if self.prefixes is not None and not self.recurrent:
                for slot in (slot for slot in range(len(self._sequences)) if slot not in kept):
                    self.prefixes.store(self._sequences[slot], self.cache, slot)
            self._keep(kept)

    def reset(self) -> None:
        with torch.inference_mode():
            self._keep([])

    def _keep(self, kept: Sequence[int]) -> None:
        self.cache.keep(kept)
        self._sequences = [self._sequences[slot] for slot in kept]


class DecoderSlots(SlotReader):
    """A BatchReader for a `TransformerLM` and sequences of up to `length` tokens."""

    def __init__(self, model: TransformerLM, slots: int, length: int, fused: DecoderStep | None) -> None:
        super().__init__(slots, length, fused)
        self._model, self.recurrent = model, model.config.has_states
        self._caches = [LayerSlots(self.cache, layer) for layer in range(len(model.blocks))]

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._model.dtype == torch.bfloat16):
            hidden = self._model.hidden(ids, positions, self.cache.document_ids.view_as(ids), self._caches)
        return self._model.logits(hidden.flatten(0, 1)[chosen])

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rotation = self._model.rotary(positions[:, None])
        assert rotation is not None
        return self._model.embedding(ids), *rotation


class SingleReader:
    """Base of BatchReaders with one sequence, for models that cannot keep several sequences in one cache."""

    slots, token_bytes, sequence_bytes = 1, 0, 0

    def reset(self) -> None:
        """Clears the cache."""
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
        """Does nothing, because the next prompt clears the cache."""


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
    """Returns the fused decoding step for a decoder like Qwen3 or Llama; None for other architectures."""
    blocks, decoder = list[Any](model.blocks), model.config.decoder
    if decoder.positions != "rope" or decoder.gated_attention or blocks[0].feed_forward.gate is None:
        return None
    layers = []
    for block in blocks:
        attention, mlp = block.attention, block.feed_forward
        linears = attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down
        weights = [StepWeight(matrix_of(linear), linear.bias) for linear in linears]
        head_norms = [attention.q_norm, attention.k_norm]
        layers.append(step_layer(block.attention_norm, block.feed_forward_norm, head_norms, weights))
    head = StepWeight(model.head_matrix)
    return step_of(layers, model.norm, head, model.config.head_dim, model.dtype, integer_of_model(model))


def decoder_readers(model: TransformerLM, packs: bool = True) -> dict[str, Any]:
    """Returns the fields of a BatchModel that do not depend on the tokenizer.

    `packs` allows keeping a packed copy of the weights, which makes decoding steps several times as fast.
    """
    on_cpu = model.norm.weight.is_cpu
    fused = decoder_step(model) if packs and on_cpu else None

    def open_reader(slots: int, length: int) -> BatchReader:
        return DecoderSlots(model, slots, length, fused) if on_cpu else DecoderReader(model)

    return {
        "open_reader": open_reader,
        "open_single": lambda length: (
            DecoderReader(model) if fused is None else DecoderSlots(model, 1, length, fused.exact())
        ),
        "context": model.config.max_seq_len,
        "together": on_cpu,
    }


def decoder_batch(model: TransformerLM, tokenizer: TextCodec, packs: bool = True) -> BatchModel:
    """Returns a `TransformerLM` and its tokenizer as a BatchModel. Prompts start like documents in training."""
    return BatchModel(
        **decoder_readers(model, packs),
        text_ids=lambda text: [*tokenizer.prefix_ids, *tokenizer.encode(text)] or [tokenizer.end_id],
        chat_ids=None,
        decode=tokenizer.decode,
        ends=frozenset({tokenizer.end_id, *tokenizer.other_end_ids}),
        stops=tokenizer.stops,
    )


def generate(
    model: TransformerLM, tokenizer: TextCodec, prompt: str, max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Generates text after `prompt` like `stream`. The model may be in training mode, and is put back into it."""
    batch = decoder_batch(model, tokenizer, packs=False)
    with reading(model):
        yield from stream(batch, batch.text_ids(prompt), max_new_tokens, sampling)
