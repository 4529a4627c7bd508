"""Embeds the texts of many requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sansgpu.events.progress import Warn
from sansgpu.jobs.serve.worker import Accepted, ServiceError, Vectors, Work, Worker
from sansgpu.tasks.embed.data import tokenize
from sansgpu.tasks.embed.objective import encode_tokens
from sansgpu.tasks.task import TrainedModel

MAX_WAITING = 4096  # texts of all requests, as one request to OpenAI may have 2,048
UNBOUNDED = 1 << 30  # tokens: no text is truncated


@dataclass(eq=False)
class EmbeddingWork(Work):
    """Texts to embed."""

    texts: Sequence[str]
    tokens: Sequence[np.ndarray] = field(init=False, default=())  # set by the worker

    def __post_init__(self) -> None:
        self.places = len(self.texts)


class EmbeddingWorker(Worker[EmbeddingWork]):
    """Embeds texts with a model that `jobs.embed.open_encoder` has loaded, after the model's default prompt."""

    endpoints = ("embeddings",)

    def __init__(self, loaded: TrainedModel, token_bytes: int, warn: Warn) -> None:
        super().__init__(MAX_WAITING, token_bytes, warn)
        self.width: int = loaded.objective.width
        self.context = loaded.config.window
        self._loaded, self._prompt = loaded, loaded.objective.layout.prompt()
        self._waiting: list[EmbeddingWork] = []

    def prepare(self, work: EmbeddingWork) -> None:
        for number, text in enumerate(work.texts, 1):
            self.require_fits(f"text {number}", text)
        work.tokens = tokenize(work.texts, self._loaded.tokenizer, UNBOUNDED, self._prompt)
        for number, length in enumerate(map(len, work.tokens), 1):
            if not length:
                raise ServiceError(f"text {number} has no tokens; remove it.")
            if length > self.context:
                raise ServiceError(
                    f"text {number} has {length:,} tokens, but the model reads at most {self.context:,}; shorten it.",
                    code="context_length_exceeded",
                )

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
