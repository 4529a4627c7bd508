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
from sansgpu.models.generation.call_reader import ToolCallReader
from sansgpu.models.generation.calls import ToolCall

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
        self._readers: Sequence[ToolCallReader] | None = None
        self._offsets = [0] * choices  # characters of the tokens whose scores were sent
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if self._is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def start(self, accepted: Accepted, readers: Sequence[ToolCallReader] | None = None) -> None:
        """Sets the size of the prompt and, if the answers can call functions, the reader of each answer."""
        self._prompt, self._readers = accepted.prompt_tokens, readers

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
        calls: list[list[Object]] = [[] for _ in texts]
        async for event in self._read(events):
            for part in self._parts(event):
                if isinstance(part, str):
                    texts[event.index] += part
                else:
                    calls[event.index].append(_call_object(part))
            if isinstance(event, TextPiece):
                scores[event.index] += event.scores
            else:
                reasons[event.index] = self._reason(event)
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            called = {"tool_calls": calls[index]} if calls[index] else {}
            message = {"role": "assistant", "content": text or (None if called else ""), "refusal": None, **called}
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
            calls = [0] * self._choices
            async for event in self._read(events):
                logprobs = self._logprobs(event.index, event.scores) if isinstance(event, TextPiece) else None
                parts = self._parts(event)
                for part in parts or ([""] if logprobs is not None else []):
                    if isinstance(part, str):
                        content: Object | str = {"content": part} if self._is_chat else part
                    else:
                        content = {"tool_calls": [{"index": calls[event.index], **_call_object(part)}]}
                        calls[event.index] += 1
                    yield self._chunk(event.index, content, logprobs=logprobs)
                    logprobs = None
                if isinstance(event, Finished):
                    yield self._chunk(event.index, {} if self._is_chat else "", self._reason(event))
            if self._body.includes_usage:
                yield server_sent({**self._common, "choices": [], "usage": self._usage()})
            yield server_sent(DONE)
        except ServiceError as error:
            yield server_sent(error_object(error))

    def _parts(self, event: TextPiece | Finished) -> list[str | ToolCall]:
        """Returns the text and the calls that an event adds."""
        if self._readers is not None:
            reader = self._readers[event.index]
            return list(reader.add(event.text) if isinstance(event, TextPiece) else reader.end())
        return [event.text] if isinstance(event, TextPiece) else []

    def _reason(self, event: Finished) -> str:
        has_calls = self._readers is not None and self._readers[event.index].has_calls
        return "tool_calls" if has_calls and event.reason == "stop" else event.reason

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


def _call_object(call: ToolCall) -> Object:
    # Mistral's templates require ids of nine letters and digits when they come back in a message.
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


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
