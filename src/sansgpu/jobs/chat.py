"""Conversation with a chat model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.jobs.fine_tuned import load_fine_tuned, narrow_where_faster
from sansgpu.jobs.loading import is_fine_tuning
from sansgpu.models.chat import answer
from sansgpu.models.generate import Sampling, require_valid_sampling


class ChatSession:
    """A chat model with the messages so far."""

    def __init__(
        self,
        target: str,
        system: str | None,
        snapshot: str,
        warn: Callable[[str], None],
        remote_code: bool = False,
    ) -> None:
        """Raises ConfigError if there is no model, or if it has no chat template."""
        if (Path(target).expanduser() / "config.yaml").is_file() and not is_fine_tuning(target):
            raise ConfigError(f"{target} was not trained on conversations; use `sansgpu generate` to continue a text.")
        loaded = load_fine_tuned(target, "causal", snapshot, warn, remote_code)
        self._model, self._tokenizer = loaded.objective.model, loaded.tokenizer
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{target} has no chat template; use `sansgpu generate`, or give data.chat_template.")
        narrow_where_faster(self._model)
        self._system_messages = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.said = list(self._system_messages)

    def say(self, text: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Streams the model's answer. It joins the conversation once it is read to the end."""
        require_valid_sampling(sampling)
        self.said.append({"role": "user", "content": text})
        pieces: list[str] = []
        for piece in answer(self._model, self._tokenizer, self.said, max_new_tokens, sampling):
            pieces.append(piece)
            yield piece
        self.said.append({"role": "assistant", "content": "".join(pieces)})
