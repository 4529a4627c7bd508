"""Embeds the texts of many requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sansgpu.config.wording import truncate
from sansgpu.events.progress import Warn
from sansgpu.jobs.serve.bodies import MAX_ECHOED
from sansgpu.jobs.serve.worker import Accepted, ServiceError, Vectors, Work, Worker
from sansgpu.models.huggingface.sentence_embedding import QUERY_PROMPT, EmbeddingLayout
from sansgpu.tasks.embed.data import tokenize
from sansgpu.tasks.embed.objective import encode_tokens
from sansgpu.tasks.task import TrainedModel

MAX_WAITING = 4096  # texts of all requests, as one request to OpenAI may have 2,048
UNBOUNDED = 1 << 30  # tokens: no text is truncated


@dataclass(eq=False)
class EmbeddingWork(Work):
    """Texts to embed, after the model's prompt for an `input_type`, or its prompt `prompt_name`."""

    texts: Sequence[str]
    prompt_name: str | None = None
    input_type: str | None = None
    tokens: Sequence[np.ndarray] = field(init=False, default=())  # set by the worker

    def __post_init__(self) -> None:
        self.places = len(self.texts)


class EmbeddingWorker(Worker[EmbeddingWork]):
    """Embeds texts with a model that `jobs.embed.open_encoder` has loaded, after a prompt of the model."""

    endpoints = ("embeddings",)

    def __init__(self, loaded: TrainedModel, token_bytes: int, warn: Warn) -> None:
        super().__init__(MAX_WAITING, token_bytes, warn)
        self.width: int = loaded.objective.width
        self.context = loaded.config.window
        self._loaded, self._layout = loaded, loaded.objective.layout
        self._waiting: list[EmbeddingWork] = []

    def prepare(self, work: EmbeddingWork) -> None:
        for number, text in enumerate(work.texts, 1):
            self.require_fits(f"text {number}", text)
        work.tokens = tokenize(work.texts, self._loaded.tokenizer, UNBOUNDED, self._prompt(work))
        for number, length in enumerate(map(len, work.tokens), 1):
            if not length:
                raise ServiceError(f"text {number} has no tokens; remove it.")
            if length > self.context:
                raise ServiceError(
                    f"text {number} has {length:,} tokens, but the model reads at most {self.context:,}; shorten it.",
                    code="context_length_exceeded",
                )

    def _prompt(self, work: EmbeddingWork) -> str:
        layout: EmbeddingLayout = self._layout
        if work.prompt_name is not None:
            if work.prompt_name not in layout.prompts:
                names = " ".join(layout.prompts) or "none"
                raise ServiceError(
                    f"the model has no prompt {truncate(work.prompt_name, MAX_ECHOED)}; its prompts are {names}.",
                    param="prompt_name",
                )
            return layout.prompts[work.prompt_name]
        if work.input_type is None:
            return layout.prompt()
        return layout.query_prompt if work.input_type == QUERY_PROMPT else layout.passage_prompt

    def accept(self, work: EmbeddingWork) -> None:
        work.deliver(Accepted(sum(map(len, work.tokens))))
        self._waiting.append(work)

    def running(self) -> list[EmbeddingWork]:
        return self._waiting

    def advance(self) -> None:
        self._waiting = [work for work in self._waiting if not work.is_over]
        if not self._waiting:
            return
        vectors, first = encode_tokens(self._loaded, [ids for work in self._waiting for ids in work.tokens]), 0
        for work in self._waiting:
            self.close(work)
            work.deliver(Vectors(vectors[first : first + work.places]))
            first += work.places
