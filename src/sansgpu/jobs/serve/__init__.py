"""Serves a model over HTTP with OpenAI's interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.paths import local_path
from sansgpu.config.wording import counted
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.jobs.embed import open_encoder
from sansgpu.jobs.generate import cached_sequences, open_generator
from sansgpu.jobs.serve.worker import Worker
from sansgpu.machine.distributed.world import require_one_process
from sansgpu.train.loading import ModelRequest, only_embeds

AUTO_SLOTS = 16  # texts at once: with more, each client waits longer for its tokens
AUTO_CONTEXT = 4096  # tokens of a text with its prompt: memory for them is reserved for every slot


@dataclass(frozen=True)
class ServeRequest:
    """The options of `sansgpu serve`. Without a `max_batch`, the memory limits it."""

    model: ModelRequest
    host: str
    port: int
    api_key: str | None
    max_batch: int | None = None
    context: int | None = None


def serve(request: ServeRequest, warn: Warn, progress: ReportProgress) -> Callable[[Callable[[str], None]], None]:
    """Loads the model and reserves the port. Returns a function that serves until it is interrupted.

    That function takes one that prints a line. Raises ConfigError if the model, the address or an option cannot be
    used.
    """
    require("sansgpu serve", "starlette", "uvicorn")
    require_one_process("serve")
    from sansgpu.jobs.serve.app import Service, busy, run
    from sansgpu.machine.http.hosts import bind, is_this_machine
    from sansgpu.machine.http.server import connection_limits

    if request.api_key is not None and not request.api_key.strip():
        raise ConfigError("--api-key is empty; pass a secret of your choice.")
    if request.api_key is None and not is_this_machine(request.host):
        raise ConfigError(
            f"--host {request.host} lets other machines use the model; set --api-key or SANSGPU_API_KEY to a secret."
        )
    listener, limits = bind(request.host, request.port), connection_limits(busy())
    worker, description = _open_worker(request, warn, progress)
    service = Service(worker, _name_of(request.model.target), int(time.time()), request.api_key)
    return lambda say: run(service, listener, limits, description, warn, say)


def _open_worker(request: ServeRequest, warn: Warn, progress: ReportProgress) -> tuple[Worker[Any], str]:
    """Loads the model; returns its worker and a line that says what it can do."""
    from sansgpu.jobs.serve.embeddings import EmbeddingWorker
    from sansgpu.jobs.serve.generation import GenerationWorker

    if only_embeds(request.model):
        if request.max_batch is not None or request.context is not None:
            raise ConfigError(f"{request.model.target} computes embeddings; remove --max-batch and --context.")
        loaded = open_encoder(request.model, warn, progress)
        return EmbeddingWorker(
            loaded, longest_token(loaded.tokenizer), warn
        ), f"vectors of {counted(loaded.objective.width, 'dimension')}"
    loaded = open_generator(request.model, warn, progress)
    model = loaded.task_class.batch_model(loaded)
    if request.context is not None and request.context > model.context:
        raise ConfigError(
            f"--context {request.context} is longer than the model's context of {counted(model.context, 'token')}; "
            "lower it."
        )
    context = request.context or min(model.context, AUTO_CONTEXT)
    slots = 1
    if model.together:
        slots = request.max_batch or max(1, min(AUTO_SLOTS, cached_sequences(model, context)))
    elif request.max_batch not in (None, 1):
        raise ConfigError(
            f"{request.model.target} generates one text at a time, because its layers do not support batches; remove "
            "--max-batch."
        )
    progress("reserving memory", 0, 0)
    worker = GenerationWorker(model, slots, context, longest_token(loaded.tokenizer), warn)
    return worker, f"{counted(slots, 'text')} at once, each of up to {counted(context, 'token')} with its prompt"


def longest_token(tokenizer: Any) -> int:
    """Returns the size in bytes of the longest token of a vocabulary."""
    vocabulary = (tokenizer.backend if isinstance(tokenizer, Tokenizer) else tokenizer).get_vocab()
    return max(len(token.encode()) for token in vocabulary)


def _name_of(target: str) -> str:
    """Returns the name under which clients find a model: that of its run, folder or file, or its name on the Hub."""
    path = local_path(target)
    if not path.exists():
        return target
    path = path.resolve()
    return path.parent.name if path.name == "final" else path.stem if path.is_file() else path.name
