"""A thread that owns a model, so that whoever submits work to it never waits for a computation."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

import numpy as np
import torch

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import first_line
from sansgpu.events.progress import Warn

Endpoint = Literal["completions", "chat", "embeddings"]
MIN_TOKEN_BYTES = 64  # limit of a token's size if all in the vocabulary are smaller: normalizers drop e.g. spaces
STOPPED = "the server was stopped before the answer was complete."


class ServiceError(Exception):
    """An error that a client gets: a sentence with the status and the code of OpenAI's interface."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


@dataclass(frozen=True)
class Accepted:
    """The first event of valid work: the number of tokens of its prompts or texts."""

    prompt_tokens: int


@dataclass(frozen=True)
class TokenScore:
    """The text of a token and its log-probability, with those of the most likely tokens in its place."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class TextPiece:
    """Generated text of one choice and, if the client wants them, the scores of its tokens."""

    index: int
    text: str
    scores: Sequence[TokenScore] = ()


@dataclass(frozen=True)
class Finished:
    """The end of one choice. `reason` is stop or length, and `tokens` the number of generated tokens."""

    index: int
    reason: str
    tokens: int


@dataclass(frozen=True)
class Vectors:
    """The embeddings of all texts, (S, D) float32."""

    rows: np.ndarray


Progress = Accepted | TextPiece | Finished | Vectors | ServiceError


@dataclass(eq=False)
class Work:
    """A request of a client, which occupies `places` sequences.

    The worker calls `deliver` in its own thread. After a ServiceError there are no more events.
    """

    deliver: Callable[[Progress], None]
    places: int = field(init=False, default=1)
    is_prepared: bool = field(init=False, default=False)
    is_cancelled: bool = field(init=False, default=False)  # set by `Worker.cancel`
    is_over: bool = field(init=False, default=False)


def _is_ready(work: Work) -> bool:
    """Returns whether the model's thread can compute or cancel the work."""
    return work.is_prepared or work.is_cancelled


Kind = TypeVar("Kind", bound=Work)


class Worker(ABC, Generic[Kind]):
    """A thread that starts work in the order of its arrival, as soon as there is room for it.

    Another thread prepares the work, so that tokenizing a long text delays no running computation.
    """

    endpoints: tuple[Endpoint, ...]
    context: int  # maximum tokens of a text, with its prompt

    def __init__(self, capacity: int, token_bytes: int, warn: Warn) -> None:
        """`capacity` is the maximum number of sequences, running and waiting; `token_bytes` a token's maximum size."""
        self._capacity, self._token_bytes, self._warn = capacity, max(token_bytes, MIN_TOKEN_BYTES), warn
        self._changed = threading.Condition()
        self._arrived: deque[Kind] = deque()
        self._prepared: list[Kind] = []
        self._open: dict[Kind, None] = {}  # work that is not over, in the order of its arrival
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), name="model", daemon=True)
        self._preparation = threading.Thread(target=self._prepare_all, name="preparation", daemon=True)

    def start(self) -> None:
        self._preparation.start()
        self._thread.start()

    def submit(self, work: Kind) -> None:
        """Queues work. Raises ServiceError if it is too much, too much is waiting, or the worker is stopping."""
        if work.places > self._capacity:
            raise ServiceError(
                f"the request asks for {work.places:,} texts, but this server accepts at most {self._capacity:,}; "
                "divide it into several requests."
            )
        with self._changed:
            if self._stopping:
                raise ServiceError(STOPPED, 503, "stopped")
            if sum(one.places for one in self._open) + work.places > self._capacity:
                raise ServiceError("too many requests are waiting; try again later.", 429, "queue_full")
            self._open[work] = None
            self._arrived.append(work)
            self._changed.notify_all()

    def cancel(self, work: Kind) -> None:
        """Ends work whose client has disconnected, at the latest after the next token."""
        with self._changed:
            work.is_cancelled = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends all work with an error after the current computation. A second call does nothing."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended after `stop`, at most this long."""
        self._thread.join(seconds)

    def _prepare_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._arrived)
                if self._stopping:
                    return
                work = self._arrived.popleft()
            if work.is_over or work.is_cancelled:
                continue
            self._guarded(lambda: [work], partial(self.prepare, work))  # noqa: B023  called at once
            with self._changed:
                self._prepared.append(work)
                self._changed.notify_all()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # each thread has a setting of its own
        with torch.inference_mode():
            while self._wait():
                for work in self._take():
                    self._guarded(lambda: [work], partial(self.accept, work))  # noqa: B023  called at once
                self._guarded(self.running, self.advance)
        for work in list(self._open):
            self.fail(work, ServiceError(STOPPED, 503, "stopped"))

    def _wait(self) -> bool:
        """Waits for something to do; returns False if the worker is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or any(map(_is_ready, self._open)) or self._prepared)
            return not self._stopping

    def _take(self) -> list[Kind]:
        """Returns newly prepared work, and drops cancelled work."""
        with self._changed:
            prepared, self._prepared = self._prepared, []
            for work in [work for work in self._open if work.is_cancelled]:
                self.close(work)
        for work in prepared:
            work.is_prepared = True
        return [work for work in prepared if not work.is_over]

    def _guarded(self, affected: Callable[[], Sequence[Kind]], compute: Callable[[], None]) -> None:
        """Calls `compute`. An error ends the affected work, but not the server."""
        try:
            compute()
        except ConfigError as error:
            failure = ServiceError(" ".join(str(error).split()))
        except SansGPUError as error:
            failure = ServiceError(" ".join(str(error).split()), 500, "model_failed")
        except ServiceError as error:
            failure = error
        except Exception as error:
            failure = ServiceError(f"the model failed ({type(error).__name__}: {first_line(error)}).", 500, "failed")
        else:
            return
        if failure.status >= 500:
            self._warn(f"a request failed: {failure.message}")
        for work in affected():
            self.fail(work, failure)

    def fail(self, work: Kind, error: ServiceError) -> None:
        if not work.is_over:
            self.close(work)
            work.deliver(error)

    def require_fits(self, name: str, text: str) -> None:
        """Raises ServiceError, without tokenizing, if a text has more bytes than the context's tokens can have."""
        size, limit = len(text.encode()), self.context * self._token_bytes
        if size > limit:
            raise ServiceError(
                f"{name} has {size:,} bytes, but the {self.context:,} tokens of the context have {limit:,} at most; "
                "shorten it.",
                code="context_length_exceeded",
            )

    def close(self, work: Kind) -> None:
        """Frees the places of work that is over."""
        with self._changed:
            work.is_over = True
            self._open.pop(work, None)

    @abstractmethod
    def prepare(self, work: Kind) -> None:
        """Tokenizes new work in the thread for preparation. Raises ServiceError or ConfigError if it is invalid."""

    @abstractmethod
    def accept(self, work: Kind) -> None:
        """Queues work that is prepared."""

    @abstractmethod
    def running(self) -> Sequence[Kind]:
        """Returns the work that ends if `advance` fails."""

    @abstractmethod
    def advance(self) -> None:
        """Computes one step of all work, e.g. one token of each sequence."""
