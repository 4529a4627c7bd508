"""Generates text: for one prompt, in a conversation, and for many prompts in batches."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.data import DataConfig
from sansgpu.config.paths import contains_run, local_path
from sansgpu.data.forms.chats import PROMPTS, ConversationOptions, Prompt
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.shards import rows_with_progress
from sansgpu.data.sources import open_single
from sansgpu.events.progress import ReportProgress, Warn, ignore_progress
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import require_file
from sansgpu.files.partial_file import PartialFile
from sansgpu.machine.distributed.world import require_one_process
from sansgpu.machine.probe import available_memory, has_bf16_tensors
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.models.generation.call_reader import ToolCallReader
from sansgpu.models.generation.calls import ToolCall
from sansgpu.models.generation.generate import BatchModel, Completion, complete, stops_of, stream
from sansgpu.models.generation.omitted import omitted_parts
from sansgpu.models.generation.prompts import RejectedConversationError
from sansgpu.models.generation.sampling import Sampling, reading, require_valid_sampling
from sansgpu.models.generation.template_variables import NO_VARIABLES, Variables
from sansgpu.models.generation.text import without_stop
from sansgpu.models.generation.tool_calls import schemas_of
from sansgpu.models.modules import set_matmul_precision
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model

AUTO_SLOTS = 128  # maximum batch size; larger batches make matmuls hardly more efficient
PROBE_TOKENS = 256  # a multiple of the cache's blocks, so that a part of a block is not counted as a token
CACHE_RATIO = 0.5  # maximum share of the available memory for the KV cache


@dataclass(frozen=True)
class GenerateRequest:
    """The options of `sansgpu generate --data`. Without a `batch_size`, the largest that fits and helps is chosen."""

    model: ModelRequest
    data: str
    output: Path
    max_new_tokens: int
    sampling: Sampling
    batch_size: int | None = None
    variables: Variables = field(default_factory=dict)  # of the chat template


def generate_text(
    model: ModelRequest,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    warn: Warn,
    progress: ReportProgress = ignore_progress,
) -> Iterator[str]:
    """Streams the continuation of `prompt` by a run, a Hugging Face model or a GGUF file."""
    require_valid_sampling(sampling)
    loaded = open_model(model, "generate", warn, progress)
    opened = _open_single(loaded)
    return stream(opened, opened.text_ids(prompt), max_new_tokens, sampling)


def _open_single(loaded: TrainedModel) -> BatchModel:
    """Returns a model for single texts, whose prompts are not read in 8-bit integers, because that is hardly faster."""
    opened: BatchModel = loaded.task_class.batch_model(loaded)
    if loaded.precision == "int8":
        set_matmul_precision(loaded.objective.model, "bf16" if has_bf16_tensors("int8") else "int16")
    return opened


class ChatSession:
    """A chat model with the messages so far."""

    def __init__(
        self,
        model: ModelRequest,
        system: str | None,
        warn: Warn,
        progress: ReportProgress = ignore_progress,
        variables: Variables = NO_VARIABLES,
    ) -> None:
        """`variables` are those of the chat template. Raises ConfigError if there is no model or no such template."""
        loaded = open_model(model, "chat", warn, progress)
        self._model = _open_single(loaded)
        if self._model.chat_ids is None:
            raise ConfigError(
                f"{model.target} has no chat template; use `sansgpu generate`, or set data.chat_template."
            )
        self._form = None if self._model.tool_use is None else self._model.tool_use().form
        if self._form is not None:
            self._model = replace(self._model, decode=partial(self._model.decode, marks=self._form.marks))
        self._variables = variables
        self._system_messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._system_messages)

    def say(self, text: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Streams the model's answer, which is added to the conversation once the caller has read all of it."""
        require_valid_sampling(sampling)
        assert self._model.chat_ids is not None
        self.messages.append({"role": "user", "content": text})
        ids = self._model.chat_ids(self.messages, variables=self._variables)
        texts, calls = list[str](), list[ToolCall]()
        for part in self._parts(stream(self._model, ids, max_new_tokens, sampling)):
            if isinstance(part, str):
                texts.append(part)
                yield part
            else:
                line_break = "\n" if texts or calls else ""
                yield f"{line_break}[call: {part}]"
                calls.append(part)
        called: dict[str, Any] = {"tool_calls": [call.as_message() for call in calls]} if calls else {}
        self.messages.append({"role": "assistant", "content": "".join(texts), **called})

    def _parts(self, pieces: Iterator[str]) -> Iterator[str | ToolCall]:
        """Divides an answer into texts and the calls of functions that it contains."""
        if self._form is None:
            yield from pieces
            return
        reader = ToolCallReader(self._form, {})
        for piece in pieces:
            yield from reader.add(piece)
        yield from reader.end()


def generate_rows(request: GenerateRequest, warn: Warn, progress: ReportProgress) -> dict[str, Any]:
    """Writes the rows of a dataset with their completions, and returns a summary.

    A command that was killed continues when it is repeated. Raises ConfigError if no row can be completed, or if the
    output file belongs to a different request.
    """
    require_one_process("generate --data")
    require_valid_sampling(request.sampling)
    require_file(request.output)
    target = request.model.target
    loaded = open_generator(request.model, warn, progress)
    model = loaded.task_class.batch_model(loaded)
    if not model.together:
        warn(
            f"{target}: prompts are completed one at a time, because the model's layers do not support batched "
            "generation."
        )
    if request.variables and model.chat_ids is None:
        raise ConfigError(f"{target} has no chat template; remove --template-variable.")
    bad_rows = RowReport("skip")
    options = ConversationOptions.of(loaded.config.data)
    source = open_single(request.data, DataConfig(dataset_name=request.data), text_rows=True, progress=progress)
    for note in source.notes:
        warn(f"{request.data}: {note}")
    prompts = list(_encoded(rows_with_progress(source, progress), request.variables, model, options, bad_rows))
    bad_rows.report(lambda note: warn(f"{request.data}: {note}"))
    if not prompts:
        raise ConfigError(f"{request.data} has no rows to complete; add rows, which need a prompt, messages or a text.")
    file = PartialFile(
        request.output, target, _fingerprint(request, loaded, prompts), weights_sha256(loaded.objective.model)
    )
    with write_failures_as(SansGPUError, request.output), reading(loaded.objective.model):
        summary = _complete_rest(request, model, prompts, file, progress)
    return {**summary, "skipped": bad_rows.skipped, "output": str(request.output)}


def open_generator(model: ModelRequest, warn: Warn, progress: ReportProgress = ignore_progress) -> TrainedModel:
    """Loads a run, a Hugging Face model or a GGUF file that generates text, with its chat template if it has one."""
    is_run = contains_run(local_path(model.target))
    return open_model(model, "complete" if is_run else "chat", warn, progress)


def _complete_rest(
    request: GenerateRequest,
    model: BatchModel,
    prompts: list[tuple[Prompt, list[int]]],
    file: PartialFile,
    progress: ReportProgress,
) -> dict[str, Any]:
    done = file.open()
    rest, tokens, start = prompts[done:], 0, time.monotonic()
    longest = max((len(ids) for _, ids in rest), default=0)
    length = min(model.context, longest + request.max_new_tokens)
    slots = slots_for(model, request.batch_size, len(rest), length) if rest else 0

    def counted(completions: Iterator[Completion]) -> Iterator[Completion]:
        nonlocal tokens
        for number, completion in enumerate(completions, done + 1):
            tokens += len(completion.ids)
            progress("generating", number, len(prompts), "row")
            yield completion

    progress("generating", done, len(prompts), "row")
    if rest:
        limits = [min(request.max_new_tokens, model.context - len(ids)) for _, ids in rest]
        reader, ids = model.open_reader(slots, length), [ids for _, ids in rest]
        completions = complete(reader, ids, model.ends, limits, request.sampling, done, stops_of(model))
        for completion in _in_order(counted(completions), done):
            prompt = prompts[completion.row][0]
            row = prompt.completed(*_answer(model, completion, prompt))
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.finish()
    seconds = time.monotonic() - start
    return {
        "rows": len(prompts),
        "resumed": done,
        "batch_size": slots,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _answer(model: BatchModel, completion: Completion, prompt: Prompt) -> tuple[str, str, list[dict[str, Any]]]:
    """Returns the text of a completion, why it ended, and its calls if it continues a conversation with tools."""
    use = model.tool_use() if prompt.tools and prompt.has_turns and model.tool_use is not None else None
    if use is None or use.form is None:
        return without_stop(model.decode(completion.ids), model.stops), completion.reason, []
    reader = ToolCallReader(use.form, schemas_of(prompt.tools))
    whole = without_stop(model.decode(completion.ids, marks=use.form.marks), model.stops)
    parts = [*reader.add(whole), *reader.end()]
    text = "".join(part for part in parts if isinstance(part, str))
    return text, completion.reason, [part.as_message() for part in parts if isinstance(part, ToolCall)]


def _encoded(
    rows: Iterable[SourceRow],
    variables: Variables,
    model: BatchModel,
    options: ConversationOptions,
    bad_rows: RowReport,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Yields each usable row with its token ids."""

    def encode(row: SourceRow) -> tuple[Prompt, list[int]]:
        prompt = options.applied_to_prompt(PROMPTS.read(row, options.columns))
        if prompt.turns and not prompt.text and model.chat_ids is None:
            raise row.error("it has messages, but the model has no chat template")
        with tokenizer_errors(row.where):
            if prompt.turns and model.chat_ids is not None:
                render = partial(model.chat_ids, variables=variables)
                try:
                    ids = render(prompt.turns, prompt.tools)
                except RejectedConversationError as error:
                    raise row.error(str(error).rstrip(".")) from None
                bad_rows.not_used(omitted_parts(prompt.turns, prompt.tools, render))
            else:
                ids = model.text_ids(prompt.text)
                bad_rows.not_used(["tools"] if prompt.tools else [])
        if len(ids) >= model.context:
            raise row.error(f"it has {len(ids):,} tokens, too many for the model's context of {model.context:,}")
        return prompt, ids

    yield from bad_rows.parsed(rows, encode)


def slots_for(model: BatchModel, requested: int | None, rows: int, length: int) -> int:
    """Returns the batch size: the requested one, or the largest useful one whose KV cache fits into memory."""
    most = min(requested or AUTO_SLOTS, rows)
    if requested is not None or not model.together:
        return most
    return max(1, min(most, cached_sequences(model, length)))


def cached_sequences(model: BatchModel, length: int) -> int:
    """Returns the number of sequences of `length` tokens that fit into the memory for the cache."""
    probe = model.open_reader(1, PROBE_TOKENS)
    probe.add([[0]])
    size = probe.token_bytes * length + probe.sequence_bytes
    return int(CACHE_RATIO * available_memory(torch.device("cpu"))) // size


def _in_order(completions: Iterable[Completion], first: int) -> Iterator[Completion]:
    """Yields completions by row number, starting at `first`."""
    early: dict[int, Completion] = {}
    for completion in completions:
        early[completion.row] = completion
        while first in early:
            yield early.pop(first)
            first += 1


def _fingerprint(request: GenerateRequest, loaded: TrainedModel, prompts: list[tuple[Prompt, list[int]]]) -> str:
    """Returns a hash of everything that determines the output, except the weights."""
    model = request.model.target, loaded.source.step, loaded.precision
    digest = hashlib.sha256(repr((*model, request.max_new_tokens, request.sampling)).encode())
    for prompt, ids in prompts:
        digest.update(json.dumps([prompt.row, ids]).encode())
    return digest.hexdigest()
