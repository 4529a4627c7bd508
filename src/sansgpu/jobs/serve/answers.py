"""The objects that OpenAI's interface returns, built from the events of a worker."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from sansgpu.jobs.serve.bodies import ChatBody, EmbeddingBody, GenerationBody
from sansgpu.jobs.serve.worker import Accepted, Finished, Progress, ServiceError, TextPiece, TokenScore, Vectors

Object = dict[str, Any]
DONE = "[DONE]"


def error_object(error: ServiceError) -> Object:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class TextAnswer:
    """The answer to one request for completions or a chat, complete or as a stream of events."""

    def __init__(self, body: GenerationBody, model: str, choices: int) -> None:
        self._is_chat = isinstance(body, ChatBody)
        self._body, self._choices, self._generated = body, choices, 0
        self._prompt = 0  # tokens of the prompts
        self._offsets = [0] * choices  # characters of the tokens whose scores were sent
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self._is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def start(self, accepted: Accepted) -> None:
        self._prompt = accepted.prompt_tokens

    def _usage(self) -> Object:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt + self._generated,
        }

    async def whole(self, events: AsyncIterator[Progress]) -> Object:
        """Returns the complete answer. Raises ServiceError if one of the events is an error."""
        texts, reasons = [""] * self._choices, [""] * self._choices
        scores: list[list[TokenScore]] = [[] for _ in texts]
        async for event in self._read(events):
            if isinstance(event, TextPiece):
                texts[event.index] += event.text
                scores[event.index] += event.scores
            else:
                reasons[event.index] = event.reason
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._is_chat else {"text": text}
            logprobs = self._logprobs(index, scores[index])
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
        return {**self._common, "choices": choices, "usage": self._usage()}

    async def chunks(self, events: AsyncIterator[Progress]) -> AsyncIterator[str]:
        """Yields the answer as server-sent events. An error is the last one."""
        try:
            if self._is_chat:
                for index in range(self._choices):
                    yield self._chunk(index, {"role": "assistant", "content": ""})
            async for event in self._read(events):
                if isinstance(event, TextPiece):
                    content = {"content": event.text} if self._is_chat else event.text
                    yield self._chunk(event.index, content, logprobs=self._logprobs(event.index, event.scores))
                else:
                    yield self._chunk(event.index, {} if self._is_chat else "", event.reason)
            if self._body.includes_usage:
                yield server_sent({**self._common, "choices": [], "usage": self._usage()})
            yield server_sent(DONE)
        except ServiceError as error:
            yield server_sent(error_object(error))

    async def _read(self, events: AsyncIterator[Progress]) -> AsyncIterator[TextPiece | Finished]:
        """Yields the events until every choice has ended, and counts tokens. Raises ServiceError."""
        unfinished = self._choices
        while unfinished:
            event = await anext(events)
            if isinstance(event, ServiceError):
                raise event
            if isinstance(event, Finished):
                unfinished -= 1
                self._generated += event.tokens
            if isinstance(event, (TextPiece, Finished)):
                yield event

    def _logprobs(self, index: int, scores: Sequence[TokenScore]) -> Object | None:
        """Returns the scores of a choice's next tokens in the form of OpenAI's interface; None if not wanted."""
        if self._body.alternatives is None:
            return None
        if self._is_chat:
            content = [{**_scored(s.text, s.logprob), "top_logprobs": [_scored(*one) for one in s.top]} for s in scores]
            return {"content": content, "refusal": None}
        ends = list(accumulate((len(score.text) for score in scores), initial=self._offsets[index]))
        self._offsets[index] = ends.pop()
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [dict(score.top) for score in scores] if self._body.alternatives else None,
            "text_offset": ends,
        }

    def _chunk(
        self, index: int, content: Object | str, reason: str | None = None, logprobs: Object | None = None
    ) -> str:
        choice = {"index": index, "delta" if self._is_chat else "text": content, "logprobs": logprobs}
        usage = {"usage": None} if self._body.includes_usage else {}
        return server_sent({**self._common, "choices": [{**choice, "finish_reason": reason}], **usage})


def _scored(text: str, logprob: float) -> Object:
    """Returns a token; a part of a character has no bytes, because its text is a replacement character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def server_sent(content: Object | str) -> str:
    return f"data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n"


def embedding_list(body: EmbeddingBody, model: str, accepted: Accepted, vectors: Vectors) -> Object:
    """Returns the answer to a request for embeddings."""
    data = []
    for index, row in enumerate(vectors.rows.astype("<f4")):
        coded = base64.b64encode(row.tobytes()).decode() if body.encoding_format == "base64" else row.tolist()
        data.append({"object": "embedding", "index": index, "embedding": coded})
    usage = {"prompt_tokens": accepted.prompt_tokens, "total_tokens": accepted.prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
