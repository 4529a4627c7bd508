"""The bodies of requests to OpenAI's interface: which fields have an effect here, and which are refused."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from sansgpu.config.wording import shown, truncate
from sansgpu.data.forms.turns import ANSWERED_ROLES, Role
from sansgpu.jobs.serve.generation import ChatPrompt
from sansgpu.jobs.serve.worker import ServiceError
from sansgpu.models.generation.sampling import Sampling

MAX_ECHOED = 100  # characters of a request that an error message repeats
MAX_ITEMS = 2048  # prompts, messages, parts of a message or texts to embed in one request, as in OpenAI's interface
MAX_VALUES = 100_000  # in the JSON of a body; parsing millions of them would take gigabytes, and delay other requests
MAX_COUNT = 2**31 - 1  # largest number of tokens or answers; larger ones would overflow
MAX_TOOLS = 128  # as in OpenAI's interface
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 1000
MAX_COMPLETION_LOGPROBS, MAX_CHAT_LOGPROBS = 5, 20
# Fields that do not change an answer.
IGNORED = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
)  # fmt: skip
# Fields that are not supported, with the values that have no effect.
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "annotations": ([],), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "functions": ([],),
    "logit_bias": ({},), "min_p": (0,), "modalities": (["text"],), "presence_penalty": (0,),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],),
}  # fmt: skip


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _short(value: object) -> object:
    """Refuses a long list before its items are validated, each of which takes memory and time."""
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise PydanticCustomError("too_long", f"can have at most {MAX_ITEMS:,} items")
    return value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], BeforeValidator(_listed), BeforeValidator(_short)]  # a text, or a list of texts
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class OpenAIObject(BaseModel):
    """An object in a request. A field that would have an effect and is not supported is an error."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    place: ClassVar[str] = ""  # path of this part of the request body, for messages

    def model_post_init(self, context: Any) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED or value in WITHOUT_EFFECT.get(name, ()):
                continue
            name = truncate(name, MAX_ECHOED)
            near = get_close_matches(name, type(self).model_fields, n=1)
            meant = f" (did you mean {near[0]}?)" if near and name not in WITHOUT_EFFECT else ""
            raise ServiceError(f"{self.place}{name} is not supported{meant}; remove it.", param=name)


class TextPart(OpenAIObject):
    """A part of a message. Images and audio are not supported."""

    place = "a part's "
    type: Literal["text"]
    text: str


class FunctionSchema(OpenAIObject):
    """A function that the model may call. A `strict` schema is shown to the model, but not enforced."""

    place = "a function's "
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSchema(OpenAIObject):
    """A tool that the model may use."""

    place = "a tool's "
    type: Literal["function"]
    function: FunctionSchema

    def for_template(self) -> dict[str, Any]:
        own = self.function
        fields = {"name": own.name, "description": own.description, "parameters": own.parameters}
        return {"type": self.type, "function": {name: value for name, value in fields.items() if value is not None}}


class CalledFunction(OpenAIObject):
    """A function that an earlier answer called. The arguments are an object, or JSON text as in OpenAI's interface."""

    place = "a called function's "
    name: Text
    arguments: str | dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Returns the function with its arguments as an object. Raises ServiceError if they are none."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments or "{}", allow_inf_nan=False)
            except ValueError as error:
                raise ServiceError(f"the arguments of {self._shown} are not valid JSON ({error}).") from None
        if not isinstance(arguments, dict):
            raise ServiceError(f"the arguments of {self._shown} are no JSON object; send one, e.g. {{}}.")
        return {"name": self.name, "arguments": arguments}

    @property
    def _shown(self) -> str:
        return truncate(self.name, MAX_ECHOED)


class MessageCall(OpenAIObject):
    """A call in an earlier answer."""

    place = "a call's "
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": self.type, "function": self.function.for_template()}


class ChatMessage(OpenAIObject):
    """A message of a conversation."""

    place = "a message's "
    role: Role
    content: Annotated[str | list[TextPart], BeforeValidator(_short)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageCall], BeforeValidator(_short)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form of chat templates. Raises ServiceError if it has fields of other roles."""
        calls = [call.for_template() for call in self.tool_calls or ()]
        answer = {"reasoning_content": self.reasoning_content, "tool_calls": calls or None}
        result = {"tool_call_id": self.tool_call_id, "name": self.name}
        for role, fields in (("assistant", answer), ("tool", result)):
            wrong = next((name for name, value in fields.items() if value is not None and self.role != role), None)
            if wrong is not None:
                raise ServiceError(f"a message's {wrong} is only supported with the role {role}; remove it.")
        if self.content is None and not calls:
            raise ServiceError("a message's content is missing.", param="messages")
        others = {name: value for name, value in {**answer, **result}.items() if value is not None}
        return {"role": self.role, "content": self.text, **others}


class StreamOptions(OpenAIObject):
    """The options of a streamed answer. Obfuscation pads events, so it has no effect on the answer."""

    place = "stream_options."
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(OpenAIObject):
    """The fields that completions and chats share. Defaults are OpenAI's; `top_k` is an addition."""

    usual_limit: ClassVar[int | None] = None  # tokens of an answer without max_tokens; None: as many as fit
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[list[StopText], Field(max_length=MAX_STOPS), BeforeValidator(_listed), BeforeValidator(_short)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None

    @property
    def sampling(self) -> Sampling:
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(temperature, self.top_k or 0, 1.0 if self.top_p is None else self.top_p)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to score with each generated token; None: no scores are wanted."""
        return None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """A request to /v1/completions."""

    usual_limit = 16
    prompt: Texts = Field(min_length=1)
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], BeforeValidator(_short)] = Field(min_length=1)
    tools: Annotated[list[ToolSchema], Field(max_length=MAX_TOOLS), BeforeValidator(_short)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ServiceError("top_logprobs requires logprobs; set it to true.", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> ChatPrompt:
        """Returns the input of the chat template. Raises ServiceError if there is nothing to answer."""
        if self.messages[-1].role not in ANSWERED_ROLES:
            raise ServiceError("the last message is not the user's; add one to answer.", param="messages")
        calls = [call.function.arguments for message in self.messages for call in message.tool_calls or ()]
        if sum(_values_in(text.encode()) for text in calls if isinstance(text, str)) > MAX_VALUES:
            raise ServiceError(f"the calls have more than {MAX_VALUES:,} values; shorten the conversation.")
        tools = [tool.for_template() for tool in self.tools or ()] if self.tool_choice != "none" else []
        messages = [message.for_template() for message in self.messages]
        at_most = 1 if self.parallel_tool_calls is False else None
        return ChatPrompt(messages, tools, self.chat_template_kwargs or {}, at_most)


class EmbeddingBody(OpenAIObject):
    """A request to /v1/embeddings."""

    model: str | None = None
    input: Texts = Field(min_length=1)
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None  # as in Text Embeddings Inference: a prompt of the model
    input_type: Literal["query", "document", "passage"] | None = None  # as in the services of NVIDIA and Voyage
    dimensions: Count | None = None


BodyKind = TypeVar("BodyKind", bound=OpenAIObject)


def parse(kind: type[BodyKind], body: bytes) -> BodyKind:
    """Parses the body of a request. Raises ServiceError with the first problem."""
    if _values_in(body) > MAX_VALUES:
        raise ServiceError(f"the body has more than {MAX_VALUES:,} values; divide it into several requests.")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise ServiceError(f"the body is not valid JSON ({first['ctx']['error']}).")
    where = truncate(".".join(map(str, first["loc"])), MAX_ECHOED) or "the body"
    if first["type"] == "missing":
        problem = "is missing"
    elif first["type"] == "too_long":
        problem = _lower(first["msg"])
    else:
        problem = f"is {truncate(shown(first['input']), MAX_ECHOED)}, but {_lower(first['msg'])}"
    raise ServiceError(f"{where} {problem}.", param=str(first["loc"][0]) if first["loc"] else None)


def _lower(message: str) -> str:
    return message[0].lower() + message[1:]


def _values_in(text: bytes) -> int:
    """Returns about the number of values in a JSON text, without parsing it, or more than MAX_VALUES if it has more.

    Counts the commas and brackets outside strings, which takes a small part of the time of parsing.
    """
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (quotes := unescaped.count(b'"')) > 4 * MAX_VALUES:  # two for each key and each value
        return quotes
    return sum(part.count(sign) for part in unescaped.split(b'"')[::2] for sign in (b",", b"[", b"{"))
