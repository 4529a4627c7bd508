"""Generates the texts of many requests in one batch, which they join and leave between tokens."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from sansgpu.config import derive_seed
from sansgpu.config.wording import counted
from sansgpu.events.progress import Warn
from sansgpu.jobs.serve.worker import Accepted, Endpoint, Finished, ServiceError, TextPiece, TokenScore, Work, Worker
from sansgpu.models.generation.batch import Continuation, RunningBatch, ScoredToken
from sansgpu.models.generation.call_form import CallForm
from sansgpu.models.generation.call_reader import ToolCallReader
from sansgpu.models.generation.generate import PROMPT_TOKENS, BatchModel, SlotReader
from sansgpu.models.generation.prefix_cache import PrefixCache
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.generation.text import StopStrings, TextPieces
from sansgpu.models.generation.tool_calls import schemas_of

PREFIX_SHARE = 4  # memory of the running sequences / memory of the finished ones that later prompts may begin with
WAITING_RATIO = 8  # maximum number of waiting sequences for each that can run


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation to answer, with the functions that the answer can call, and variables of the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    most_calls: int | None = None  # maximum number of calls in an answer; None: no limit

    @property
    def text(self) -> str:
        """The texts that a chat template writes, for a comparison of its size with the model's context."""
        others = [{k: v for k, v in message.items() if k not in ("role", "content")} for message in self.messages]
        known = [part for part in (*self.tools, *others) if part]
        contents = "".join(message["content"] for message in self.messages)
        return contents + (json.dumps(known, ensure_ascii=False) if known else "")


Prompt = str | ChatPrompt  # a text to continue, or a conversation to answer


@dataclass(eq=False)
class GenerationWork(Work):
    """Prompts to continue, each `copies` times, until a text of `stop` or `limit` tokens are generated.

    Without a `limit`, a text has at most `usual_limit` tokens, or fills the context. Without a `seed`, it is random.
    """

    prompts: Sequence[Prompt]
    copies: int
    limit: int | None
    usual_limit: int | None
    sampling: Sampling
    seed: int | None
    stop: Sequence[str]
    alternatives: int | None = None  # number of most likely tokens to score with each generated one; None: no scores
    unfinished: int = field(init=False)
    tokens: Sequence[list[int]] = field(init=False, default=())  # the ids of each prompt, set by the worker
    form: CallForm | None = field(init=False, default=None)  # of calls in an answer, set by the worker
    limits: Sequence[int] = field(init=False, default=())  # the maximum tokens of each answer, set by the worker

    def __post_init__(self) -> None:
        self.places = self.unfinished = len(self.prompts) * self.copies

    def readers(self) -> list[ToolCallReader] | None:
        """Returns readers of the calls in each answer, once the work is accepted; None if there can be none."""
        if self.form is None or isinstance(chat := self.prompts[0], str):
            return None
        return [ToolCallReader(self.form, schemas_of(chat.tools), chat.most_calls) for _ in range(self.places)]


class _Choice:
    """One of the texts of a request."""

    def __init__(self, work: GenerationWork, index: int, tokens: Continuation, model: BatchModel) -> None:
        decode = model.decode if work.form is None else partial(model.decode, marks=work.form.marks)
        stops = [*work.stop, *model.stops]
        self.work, self.index, self.tokens = work, index, tokens
        self._pieces, self._stops, self._read = TextPieces(decode), StopStrings(stops), 0
        self._decode, self._scored = decode, 0  # tokens whose scores were sent

    def events(self) -> Iterator[TextPiece | Finished]:
        """Yields what the last token adds: text, and the end if it is the last one."""
        tokens, text = self.tokens, ""
        if len(tokens.ids) > self._read:
            self._read = len(tokens.ids)
            text = self._stops.add(self._pieces.add(tokens.ids[-1]))
        if tokens.ended is not None and not self._stops.found:
            text += self._stops.add(self._pieces.end())
        if self._stops.found:
            tokens.ended = "stop"
        elif tokens.ended is not None:
            text += self._stops.end()
        unsent = [self._in_text(score) for score in tokens.scores[self._scored :]]
        if self._stops.found:  # without the tokens of the stop string
            starts = accumulate((len(score.text) for score in unsent), initial=0)
            unsent = [score for start, score in zip(starts, unsent, strict=False) if start < len(text)]
        if text or (unsent and tokens.ended is not None):
            self._scored = len(tokens.scores)
            yield TextPiece(self.index, text, unsent)
        if tokens.ended is not None:
            yield Finished(self.index, tokens.ended, len(tokens.ids))

    def _in_text(self, score: ScoredToken) -> TokenScore:
        top = [(self._decode([token]), logprob) for token, logprob in score.top]
        return TokenScore(self._decode([score.id]), score.logprob, top)


class GenerationWorker(Worker[GenerationWork]):
    """Generates texts with a model: at most `slots` at once, each of at most `context` tokens with its prompt."""

    def __init__(self, model: BatchModel, slots: int, context: int, token_bytes: int, warn: Warn) -> None:
        super().__init__(slots * (1 + WAITING_RATIO), token_bytes, warn)
        self.endpoints: tuple[Endpoint, ...] = ("completions",) if model.chat_ids is None else ("completions", "chat")
        self.slots, self.context, self._model = slots, context, model
        reader = model.open_reader(slots, context)
        reader.add([[0]] * slots)  # allocates the cache, which can take seconds
        self._batch = RunningBatch(reader, model.ends)
        self._batch.clear()
        if isinstance(reader, SlotReader):
            reader.prefixes = PrefixCache(slots * context // PREFIX_SHARE)
        self._waiting: deque[_Choice] = deque()
        self._active: list[_Choice] = []

    def prepare(self, work: GenerationWork) -> None:
        for prompt in work.prompts:
            self.require_fits("the prompt", prompt if isinstance(prompt, str) else prompt.text)
        work.form = next((self._form(prompt) for prompt in work.prompts if not isinstance(prompt, str)), None)
        work.tokens = [self._encode(prompt) for prompt in work.prompts]
        work.limits = [self._limit(len(ids), work) for ids in work.tokens]

    def accept(self, work: GenerationWork) -> None:
        seed = secrets.randbits(63) if work.seed is None else work.seed
        work.deliver(Accepted(sum(map(len, work.tokens))))
        for number, (ids, limit) in enumerate(zip(work.tokens, work.limits, strict=True)):
            for index in range(number * work.copies, (number + 1) * work.copies):
                draws = torch.Generator().manual_seed(derive_seed(seed, "row", index))
                tokens = Continuation(ids, limit, work.sampling, draws, work.alternatives)
                self._waiting.append(_Choice(work, index, tokens, self._model))

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._model.text_ids(prompt)
        if self._model.chat_ids is None:
            raise ServiceError("the model has no chat template; use /v1/completions.")
        return self._model.chat_ids(prompt.messages, prompt.tools, prompt.variables)

    def _form(self, prompt: ChatPrompt) -> CallForm | None:
        """Returns the form of calls in an answer; None if it cannot call a function.

        Raises ServiceError if the chat template leaves out the tools or calls of the conversation.
        """
        has_calls = any("tool_calls" in message for message in prompt.messages)
        if self._model.tool_use is None or not (prompt.tools or has_calls):
            return None
        use = self._model.tool_use()
        if prompt.tools and not use.shows_tools:
            raise ServiceError("the model's chat template does not support tools; remove tools.", param="tools")
        if has_calls and not use.shows_calls:
            raise ServiceError("the model's chat template does not support tool_calls; remove them.", param="messages")
        return use.form if prompt.tools else None

    def _limit(self, prompt: int, work: GenerationWork) -> int:
        """Returns the maximum number of tokens to generate. Raises ServiceError if they do not fit the context."""
        limit = work.limit
        more = " The server's --context can be raised." if self.context < self._model.context else ""
        asked = f" and {counted(limit, 'token')} to generate" if limit is not None else ""
        if prompt + (limit or 1) > self.context:
            raise ServiceError(
                f"the prompt has {counted(prompt, 'token')}{asked}, but prompt and answer together can have only "
                f"{self.context:,}; shorten the prompt{' or lower max_tokens' if asked else ''}.{more}",
                code="context_length_exceeded",
            )
        room = self.context - prompt
        return limit or min(room, work.usual_limit or room)

    def running(self) -> list[GenerationWork]:
        return list(dict.fromkeys(choice.work for choice in self._active))

    def advance(self) -> None:
        """Generates a token of each text, after waiting texts have replaced those whose clients have disconnected."""
        self._drop_closed()
        joining = list(self._joining())
        self._active = [choice for choice in self._active if choice.tokens.ended is None] + joining
        if not self._active:
            return
        try:
            self._batch.step([choice.tokens for choice in joining])
        except BaseException:
            self._batch.clear()  # its cache may be incomplete
            raise
        for choice in self._active:
            for event in choice.events():
                choice.work.deliver(event)
            if choice.tokens.ended is not None:
                choice.work.unfinished -= 1
                if not choice.work.unfinished:
                    self.close(choice.work)

    def _drop_closed(self) -> None:
        self._waiting = deque(choice for choice in self._waiting if not choice.work.is_over)
        for choice in self._active:
            if choice.work.is_over and choice.tokens.ended is None:
                choice.tokens.ended = "cancelled"

    def _joining(self) -> Iterator[_Choice]:
        """Yields waiting choices while there is room, up to PROMPT_TOKENS in total or one longer prompt."""
        free, tokens = self._batch.free, 0
        while self._waiting and free:
            tokens += len(self._waiting[0].tokens.prompt)
            if tokens > PROMPT_TOKENS and tokens > len(self._waiting[0].tokens.prompt):
                return
            free -= 1
            yield self._waiting.popleft()
