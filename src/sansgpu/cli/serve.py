"""The command `sansgpu serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from sansgpu.cli.options import (
    GenerationPrecisionOption,
    ObjectiveOption,
    RemoteCodeOption,
    SnapshotOption,
    option,
    preparation_bar,
    run_names,
    show,
    warn,
    with_fields,
)

SERVER = "Server"  # group of options in the command's help


@dataclass(frozen=True, kw_only=True)
class _ServeOptions:
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run folder, Hugging Face model, GGUF file or Sentence Transformers folder.",
            autocompletion=run_names,
        ),
    ]
    host: Annotated[str, option("Address to listen on. Others than this machine's own need an API key.", SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("Port to listen on. 0: any free port.", SERVER, min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None,
        option(
            "Key that each request must contain. Set the variable rather than the flag: other users of this machine "
            "see flags in the list of processes.",
            SERVER,
            envvar="SANSGPU_API_KEY",
            metavar="KEY",
        ),
    ] = None
    max_batch: Annotated[
        int | None,
        option(
            "Maximum number of texts to generate at once. Default: 16, or fewer if memory is short.", min=1, max=1024
        ),
    ] = None
    context: Annotated[
        int | None,
        option(
            "Maximum tokens of a prompt with its answer. Default: 4096, or the model's context if that is shorter.",
            min=2,
        ),
    ] = None
    precision: GenerationPrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    objective: ObjectiveOption = None


@with_fields
def serve(given: _ServeOptions) -> None:
    """Serve a model over HTTP, as OpenAI does, with a chat page.

    Answers requests to /v1/models, /v1/completions, /v1/chat/completions and /v1/embeddings. Ctrl-C stops it.

    Example: sansgpu serve runs/assistant
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.serve import ServeRequest
        from sansgpu.jobs.serve import serve as job
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        request = ServeRequest(model, given.host, given.port, given.api_key, given.max_batch, given.context)
        run = job(request, warn, bar)
    run(show)
