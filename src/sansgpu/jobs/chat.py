"""Conversation with a chat model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sansgpu.config import ConfigError
from sansgpu.data.shards import ReportProgress, ignore_progress
from sansgpu.models.generation.generate import stream
from sansgpu.models.generation.sampling import Sampling, require_valid_sampling
from sansgpu.train.loading import open_model


class ChatSession:
    """A chat model with the messages so far."""

    def __init__(
        self,
        target: str,
        system: str | None,
        snapshot: str,
        warn: Callable[[str], None],
        remote_code: bool = False,
        objective: str | None = None,
        progress: ReportProgress = ignore_progress,
    ) -> None:
        """Raises ConfigError if there is no model, or if it has no chat template."""
        loaded = open_model(target, "chat", snapshot, warn, remote_code, objective, progress)
        self._model = loaded.kind.batch_model(loaded)
        if self._model.chat_ids is None:
            raise ConfigError(f"{target} has no chat template; use `sansgpu generate`, or give data.chat_template.")
        self._system_messages = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._system_messages)

    def say(self, text: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Streams the model's answer, which is added to the conversation once the caller has read all of it."""
        require_valid_sampling(sampling)
        assert self._model.chat_ids is not None
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        for piece in stream(self._model, self._model.chat_ids(self.messages), max_new_tokens, sampling):
            pieces.append(piece)
            yield piece
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
