"""The commands that use a trained model: `sansgpu eval`, `generate`, `chat`, `predict` and `export`."""

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
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, Hugging Face model or GGUF file.")],
    data: Annotated[
        str | None,
        typer.Option(help="Dataset to evaluate on (file, folder or Hub name). Default: the run's validation split."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    window: Annotated[int | None, typer.Option(min=2, help="With --data: context length in tokens.")] = None,
    link_prediction: Annotated[
        bool, typer.Option("--link-prediction", help="Task graph: rank all entities as tails of held-out triples.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="With --link-prediction: maximum triples per side.")] = None,
    trust_remote_code: RemoteCodeOption = False,
    objective: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="Python class that the run was trained with."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model: loss, perplexity and bits per byte.

    Task qa: exact match and F1; the answers are written to the run folder. Task graph: accuracy on masked tokens
    and leaves.

    Example: sansgpu eval runs/default --data notes.txt
    """
    from sansgpu.reporting.events import finite
    from sansgpu.reporting.terminal import PreparationBar, RunConsole, Terminal

    if limit is not None and not link_prediction:
        raise typer.BadParameter("--limit requires --link-prediction")
    if window is not None and link_prediction:
        raise typer.BadParameter("--window has no effect with --link-prediction; leave it out")
    if objective and link_prediction:
        raise typer.BadParameter("--objective has no effect with --link-prediction; leave it out")
    bar = PreparationBar(RunConsole(stderr=True))
    try:
        if link_prediction:
            from sansgpu.jobs.evaluate import link_prediction as rank
            from sansgpu.reporting.tables import print_link_prediction

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
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, Hugging Face model or GGUF file.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0: always the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens. 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed.")] = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Generate text, streaming it token by token.

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
        str, typer.Argument(metavar="RUN", help="Run of task sft, or a chat model (Hugging Face folder or GGUF file).")
    ],
    prompt: Annotated[str | None, typer.Option(help="Send this message, print the answer and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0: always the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens. 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed.")] = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Chat with a model.

    Each line is a message, /new starts a new conversation, Ctrl-D exits. Messages can also be piped in.

    Example: sansgpu chat runs/assistant
    """
    import sys

    from sansgpu.jobs.chat import ChatSession
    from sansgpu.models.generate import Sampling

    conversation = ChatSession(run, system, snapshot, warn, trust_remote_code)
    interactive = prompt is None and sys.stdin.isatty()
    lines = iter([prompt]) if prompt is not None else _lines("> " if interactive else "")
    for number, line in enumerate(lines):
        if line.strip() == "/new":
            conversation.reset()
        elif line.strip():
            sampling = Sampling(temperature, top_k, top_p, seed + number)
            for piece in conversation.say(line, max_new_tokens, sampling):
                show(piece, end="")
            show()
    if interactive:
        show()


def _lines(prompt: str) -> Iterator[str]:
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run of task qa, or a Hugging Face model for it.")],
    question: Annotated[str, typer.Option(help="Question to answer.")],
    context: Annotated[str, typer.Option(help="Text that contains the answer.")],
    null_answers: Annotated[
        bool | None,
        typer.Option("--null-answers/--no-null-answers", help="Allow an empty answer. Default: as in training."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from a text.

    Example: sansgpu predict runs/squad --question "Who wrote it?" --context "It was written by Ada."
    """
    from sansgpu.jobs.predict import predict as job

    rows = [{"question": question, "context": context}]
    result = job(run, rows, snapshot, warn, trust_remote_code, null_answers=null_answers)[0]
    if as_json:
        print_json(result)
    else:
        show(result["answer"] or "(no answer)")


@app.command()
def export(
    run: RunArgument,
    form: Annotated[
        str, typer.Option("--format", metavar="hf|gguf", help="hf: a Hugging Face folder. gguf: a file for llama.cpp.")
    ] = "hf",
    kind: Annotated[
        str | None,
        typer.Option("--type", metavar="f32|f16|bf16|q8_0", help="With gguf: data type of matrices. Default: f16."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    output: Annotated[
        Path | None,
        typer.Option(parser=written_path, metavar="PATH", help="Output. Default: RUN/export or RUN/NAME-TYPE.gguf."),
    ] = None,
    merge: Annotated[
        bool | None,
        typer.Option("--merge/--no-merge", help="With hf: merge the adapter into the model, or write it alone."),
    ] = None,
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Export a snapshot as a Hugging Face folder or a GGUF file.

    Example: sansgpu export runs/default --format gguf --type q8_0 --snapshot best
    """
    if form not in ("hf", "gguf"):
        raise typer.BadParameter(f"--format is {form}, but must be hf or gguf")
    if form == "hf" and kind is not None:
        raise typer.BadParameter("--type requires --format gguf")
    if form == "gguf" and merge is not None:
        raise typer.BadParameter("--merge and --no-merge require --format hf; a GGUF file always holds the whole model")
    if form == "gguf":
        from sansgpu.jobs.export import export_gguf

        show(export_gguf(run, snapshot, output, kind or "f16", warn, trust_remote_code))
    else:
        from sansgpu.jobs.export import export_run

        show(export_run(run, snapshot, output, merge, warn, trust_remote_code))
