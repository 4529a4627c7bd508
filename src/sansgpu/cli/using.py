"""`sansgpu eval`, `generate`, `chat`, `predict` and `export`: what a trained model is good for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
    LARGEST_SEED,
    JsonOption,
    RemoteCodeOption,
    RunArgument,
    SnapshotOption,
    app,
    print_json,
    show,
    warn,
    written_path,
)


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a Hugging Face model, or a GGUF file.")],
    data: Annotated[str | None, typer.Option(help="A source as data.dataset_name; by default the run's own.")] = None,
    snapshot: SnapshotOption = "latest",
    window: Annotated[int | None, typer.Option(min=2, help="Tokens a window, with --data.")] = None,
    link_prediction: Annotated[
        bool, typer.Option("--link-prediction", help="Of task graph: rank all entities as tails of held-out triples.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="With --link-prediction: this many triples.")] = None,
    trust_remote_code: RemoteCodeOption = False,
    objective: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="Import the class that the run was trained with, for its own data."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure loss, perplexity and bits per byte; of a run of task qa exact match and F1, with the answers beside it;
    of task graph the accuracies of masked tokens and leaves.

    Example: sansgpu eval runs/default --data notes.txt
    """
    from sansgpu.watch.events import finite
    from sansgpu.watch.terminal import PreparationBar, RunConsole, Terminal

    if limit is not None and not link_prediction:
        raise typer.BadParameter("--limit is for --link-prediction; leave it out")
    if window is not None and link_prediction:
        raise typer.BadParameter("--window does nothing with --link-prediction; leave it out")
    if objective and link_prediction:
        raise typer.BadParameter("--objective does nothing with --link-prediction; leave it out")
    bar = PreparationBar(RunConsole(stderr=True))
    try:
        if link_prediction:
            from sansgpu.jobs.link_prediction import link_prediction as rank
            from sansgpu.watch.tables import print_link_prediction

            ranked = rank(run, data, snapshot, limit, bar, warn)
            bar.close()
            print_json(ranked) if as_json else print_link_prediction(RunConsole(), ranked)
            return
        from sansgpu.jobs.evaluate import evaluate_model

        event = finite(evaluate_model(run, data, snapshot, window, bar, warn, trust_remote_code, objective))
    finally:
        bar.close()
    if as_json:
        print_json(event)
    else:
        Terminal(RunConsole()).emit(event)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a Hugging Face model, or a GGUF file.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that make up this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The same seed writes the same text.")] = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Write a text, token by token.

    Example: sansgpu generate runs/default --prompt "def main" --max-new-tokens 100
    """
    from sansgpu.jobs.generate import generate_text
    from sansgpu.models.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    pieces = generate_text(run, prompt, max_new_tokens, sampling, snapshot, warn, trust_remote_code)
    show(prompt, end="")
    for piece in pieces:
        show(piece, end="")
    show()


@app.command()
def chat(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run of task sft, or a chat model: Hugging Face's, or a GGUF file.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Say this, print the answer, and end.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that make up this probability.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The same seed gives the same answers.")] = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Talk to a model: a line is what you say, /new begins anew, Ctrl-D ends. Lines may also come from a pipe.

    Example: sansgpu chat runs/assistant
    """
    import sys

    from sansgpu.jobs.chat import Conversation
    from sansgpu.models.generate import Sampling

    conversation = Conversation(run, system, snapshot, warn, trust_remote_code)
    attended = prompt is None and sys.stdin.isatty()
    lines = iter([prompt]) if prompt is not None else _lines("> " if attended else "")
    for number, line in enumerate(lines):
        if line.strip() == "/new":
            conversation.forget()
        elif line.strip():
            sampling = Sampling(temperature, top_k, top_p, seed + number)
            for piece in conversation.say(line, max_new_tokens, sampling):
                show(piece, end="")
            show()
    if attended:
        show()


def _lines(prompt: str) -> Iterator[str]:
    """Lines of standard input, each asked for by `prompt`."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of task qa, or a Hugging Face model for it.")],
    question: Annotated[str, typer.Option(help="What is asked.")],
    context: Annotated[str, typer.Option(help="The text in which the answer stands.")],
    null_answers: Annotated[
        bool | None,
        typer.Option("--null-answers/--no-null-answers", help="Whether there may be none; by default as was learned."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the answer to a question in a text.

    Example: sansgpu predict runs/squad --question "Who wrote it?" --context "It was written by Ada."
    """
    from sansgpu.jobs.predict import predict as job

    result = job(run, question, context, null_answers, snapshot, warn, trust_remote_code)
    if as_json:
        print_json(result)
    else:
        show(result["answer"] or "(no answer)")


@app.command()
def export(
    run: RunArgument,
    form: Annotated[
        str, typer.Option("--format", metavar="hf|gguf", help="hf: a Hugging Face folder; gguf: a file for llama.cpp.")
    ] = "hf",
    kind: Annotated[
        str | None,
        typer.Option("--type", metavar="f32|f16|bf16|q8_0", help="With gguf: numbers of matrices; by default f16."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    output: Annotated[
        Path | None,
        typer.Option(
            parser=written_path, metavar="PATH", help="Where to write. Default: RUN/export or RUN/NAME-TYPE.gguf."
        ),
    ] = None,
    merge: Annotated[
        bool | None,
        typer.Option("--merge/--no-merge", help="With hf: make an adapter part of the model, or write it alone."),
    ] = None,
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Write a snapshot as a model that others load.

    Example: sansgpu export runs/default --format gguf --type q8_0 --snapshot best
    """
    if form not in ("hf", "gguf"):
        raise typer.BadParameter(f"--format is {form}, but only hf and gguf are known")
    if form == "hf" and kind is not None:
        raise typer.BadParameter("--type is for --format gguf; leave it out")
    if form == "gguf" and merge is not None:
        raise typer.BadParameter("--merge and --no-merge are for --format hf; gguf always holds the whole model")
    if form == "gguf":
        from sansgpu.jobs.export import export_gguf

        show(export_gguf(run, snapshot, output, kind or "f16", warn, trust_remote_code))
    else:
        from sansgpu.jobs.export import export_run

        show(export_run(run, snapshot, output, merge, warn, trust_remote_code))
