"""The web application: OpenAI's interface over a worker, and a page to chat."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sansgpu.config.wording import truncate
from sansgpu.events.progress import Warn
from sansgpu.jobs.serve.answers import TextAnswer, embedding_list, error_object
from sansgpu.jobs.serve.bodies import (
    MAX_ECHOED,
    BodyKind,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    parse,
)
from sansgpu.jobs.serve.embeddings import EmbeddingWork
from sansgpu.jobs.serve.generation import GenerationWork, Prompt
from sansgpu.jobs.serve.worker import Accepted, Endpoint, Progress, ServiceError, Vectors, Work, Worker
from sansgpu.machine.http.hosts import address_of, is_same_origin, is_this_machine, name_in
from sansgpu.machine.http.server import DRAIN_SECONDS, ConnectionLimits, run_app
from sansgpu.views.chat_page import ChatPage

MAX_BODY_BYTES = 16 << 20
LARGE_BODY_BYTES, MAX_LARGE_BODIES = 1 << 20, 8
CLIENT_CLOSED = 499  # nginx's status if the client has disconnected; nobody receives it
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Service:
    """A served model with its name and API key. Without a key, only programs on this machine may use it."""

    worker: Worker[Any]
    name: str
    created: int  # seconds since 1970
    key: str | None = None

    def object(self) -> dict[str, Any]:
        """Returns the model as OpenAI's interface describes it. `endpoints` and `context` are additions."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "sansgpu",
            "endpoints": list(self.worker.endpoints),
            "context": self.worker.context,
        }

    def require_access(self, request: Request) -> None:
        """Raises ServiceError unless the request may use the model.

        Without a key, it refuses requests that pages of other sites make in a browser on this machine: cross-origin
        requests (by the header Origin) and DNS rebinding (by the header Host).
        """
        if self.key is not None:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                raise ServiceError(
                    "the API key is missing or wrong; send Authorization: Bearer KEY.", 401, "invalid_api_key"
                )
            return
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_this_machine(name_in(host)):
            raise ServiceError(
                f"the host {truncate(host, MAX_ECHOED)} is not this machine; start the server with --api-key.", 403
            )
        if origin is not None and not is_same_origin(origin, host):
            raise ServiceError(
                f"pages of {truncate(origin, MAX_ECHOED)} may not use this server; start it with --api-key.", 403
            )

    def require_model(self, name: str | None, endpoint: Endpoint) -> None:
        """Raises ServiceError if a different model is asked for, or this one has no such endpoint."""
        if name not in (None, self.name):
            raise ServiceError(
                f"there is no model {truncate(str(name), MAX_ECHOED)}; this server has {self.name}.",
                404,
                "model_not_found",
                "model",
            )
        if endpoint not in self.worker.endpoints:
            lacking = {
                "chat": "has no chat template; use /v1/completions",
                "completions": "computes embeddings; serve a model that generates text",
                "embeddings": "generates text; serve an embedding model",
            }
            kind = "completions" if "embeddings" in self.worker.endpoints else endpoint
            raise ServiceError(f"{self.name} {lacking[kind]}.", param="model")


class OpenAIEndpoints:
    """The functions behind the paths of OpenAI's interface."""

    def __init__(self, service: Service) -> None:
        self._service, self._large = service, asyncio.Semaphore(MAX_LARGE_BODIES)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._service.object()]})

    async def model(self, request: Request) -> Response:
        self._service.require_model(request.path_params["name"], self._service.worker.endpoints[0])
        return JSONResponse(self._service.object())

    async def completions(self, request: Request) -> Response:
        body = await read_body(CompletionBody, request, self._large)
        self._service.require_model(body.model, "completions")
        return await answer_text(self._service, request, body, body.prompt)

    async def chat(self, request: Request) -> Response:
        body = await read_body(ChatBody, request, self._large)
        self._service.require_model(body.model, "chat")
        return await answer_text(self._service, request, body, [await asyncio.to_thread(body.conversation)])

    async def embeddings(self, request: Request) -> Response:
        body = await read_body(EmbeddingBody, request, self._large)
        self._service.require_model(body.model, "embeddings")
        return await answer_vectors(self._service, request, body)

    async def nothing(self, request: Request) -> Response:
        raise ServiceError(f"there is no {truncate(request.url.path, MAX_ECHOED)}.", 404)


def build_app(service: Service) -> Starlette:
    """Returns the application, which uses the service's worker."""
    page, endpoints = ChatPage.load(), OpenAIEndpoints(service)

    async def home(request: Request) -> Response:
        return HTMLResponse(page.html, headers=page.headers)

    def route(path: str, endpoint: Callable[[Request], Awaitable[Response]], *allowed: str) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                service.require_access(request)
                if request.method not in allowed:
                    raise ServiceError(f"{truncate(request.url.path, MAX_ECHOED)} accepts only {allowed[0]}.", 405)
                return await endpoint(request)
            except ServiceError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)

        return Route(path, guarded, methods=METHODS)

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(ServiceError(f"the server failed ({type(error).__name__}).", 500))

    routes = [
        Route("/", home),
        route("/v1/models", endpoints.models, "GET", "HEAD"),
        route("/v1/models/{name:path}", endpoints.model, "GET", "HEAD"),
        route("/v1/completions", endpoints.completions, "POST"),
        route("/v1/chat/completions", endpoints.chat, "POST"),
        route("/v1/embeddings", endpoints.embeddings, "POST"),
        route("/{path:path}", endpoints.nothing, *METHODS),
    ]
    return Starlette(routes=routes, exception_handlers={Exception: failed})


def run(
    service: Service,
    listener: socket.socket,
    limits: ConnectionLimits,
    description: str,
    warn: Warn,
    say: Callable[[str], None],
) -> None:
    """Serves a model until SIGINT, SIGTERM or SIGHUP. Open answers then end with an error."""

    def start() -> None:
        say(f"serving {service.name} at {address_of(listener)} ({description})")
        service.worker.start()

    run_app(build_app(service), listener, limits, warn, start, service.worker.stop)
    service.worker.stop()
    service.worker.join(DRAIN_SECONDS)


def busy() -> JSONResponse:
    """Returns the answer to clients beyond the limit of connections."""
    error = ServiceError("too many requests are being answered; try again later.", 503, "queue_full")
    return JSONResponse(error_object(error), 503, {"Connection": "close", "Retry-After": "1"})


def error_response(error: ServiceError) -> Response:
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error_object(error), error.status, headers)


async def read_body(kind: type[BodyKind], request: Request, large: asyncio.Semaphore) -> BodyKind:
    """Reads the body of a request, and parses it in another thread. Raises ServiceError.

    `large` limits how many large bodies are read at a time, because each takes tens of megabytes.
    """
    read = bytearray()
    is_too_large = int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES  # the server has validated the number
    async with contextlib.AsyncExitStack() as place:
        async for part in request.stream():  # to its end: many clients read the answer only after sending the body
            is_too_large = is_too_large or len(read) + len(part) > MAX_BODY_BYTES
            if is_too_large:
                read.clear()
                continue
            if len(read) <= LARGE_BODY_BYTES < len(read) + len(part):
                if large.locked():
                    raise ServiceError("too many large requests are arriving; try again later.", 429, "queue_full")
                await place.enter_async_context(large)
            read += part
        if is_too_large:
            raise ServiceError(f"the body is larger than {MAX_BODY_BYTES >> 20} MB; shorten it.", 413)
        return await asyncio.to_thread(parse, kind, bytes(read))


@contextlib.contextmanager
def submitted(worker: Worker[Any], work: Work) -> Iterator[None]:
    """Submits work, and cancels it if the code that waits for it ends with an exception. Raises ServiceError."""
    worker.submit(work)
    try:
        yield
    except BaseException:
        worker.cancel(work)
        raise


async def answer_text(service: Service, request: Request, body: GenerationBody, prompts: list[Any]) -> Response:
    """Generates text for prompts, and answers once it is complete or, if asked, with a stream."""
    events = Events()
    work = generation_work(body, prompts, events)
    with submitted(service.worker, work):
        answer = TextAnswer(body, service.name, work.places)
        answer.start(await while_connected(request, events.accepted()), work.readers())
        if not body.stream:
            return JSONResponse(await while_connected(request, answer.whole(events)))
    return EventStream(answer.chunks(events), lambda: service.worker.cancel(work))


class EventStream(StreamingResponse):
    """Server-sent events. Calls `end` once all are sent or the client has disconnected."""

    def __init__(self, chunks: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def generation_work(body: GenerationBody, prompts: list[Prompt], events: Events) -> GenerationWork:
    return GenerationWork(
        events.deliver,
        prompts,
        body.n or 1,
        body.limit,
        body.usual_limit,
        body.sampling,
        body.seed,
        body.stop or (),
        body.alternatives,
    )


async def answer_vectors(service: Service, request: Request, body: EmbeddingBody) -> Response:
    width = getattr(service.worker, "width", None)
    if body.dimensions not in (None, width):
        raise ServiceError(f"the model's vectors have {width} dimensions; remove dimensions.", param="dimensions")
    events = Events()
    work = EmbeddingWork(events.deliver, body.input, body.prompt_name, body.input_type)
    with submitted(service.worker, work):
        accepted = await while_connected(request, events.accepted())
        vectors = await while_connected(request, events.next())
    assert isinstance(vectors, Vectors)
    return JSONResponse(embedding_list(body, service.name, accepted, vectors))


class Events:
    """The events of one request's work, which the worker's thread adds and the event loop reads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Progress] = asyncio.Queue()

    def deliver(self, event: Progress) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed once the server has stopped
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> Progress:
        return await self._queue.get()

    async def next(self) -> Progress:
        """Returns the next event. Raises it if it is an error."""
        event = await self._queue.get()
        if isinstance(event, ServiceError):
            raise event
        return event

    async def accepted(self) -> Accepted:
        event = await self.next()
        assert isinstance(event, Accepted)
        return event


async def while_connected(request: Request, result: Awaitable[Result]) -> Result:
    """Waits for a result. Raises ClientDisconnect if the client disconnects first."""
    computing = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            raise ClientDisconnect
        return computing.result()
    finally:
        for task in (computing, leaving):
            task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
