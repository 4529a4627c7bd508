"""The commands that use a trained model: `sansgpu eval`, `predict`, `generate`, `chat` and `export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
    LARGEST_SEED,
    OUTPUT,
    SAMPLING,
    JsonOption,
    ModelArgument,
    ObjectiveOption,
    RemoteCodeOption,
    RunArgument,
    SnapshotOption,
    complain,
    flag,
    option,
    path_option,
    preparation_bar,
    print_json,
    print_result,
    show,
    warn,
    write_json_lines,
)

_GRAPH = "Task graph"
TemperatureOption = Annotated[float, option("Sampling temperature. 0: always the most likely token.", SAMPLING)]
TopKOption = Annotated[int, option("Sample from the k most likely tokens. 0: from all.", SAMPLING)]
TopPOption = Annotated[float, option("Sample from the most likely tokens with this total probability.", SAMPLING)]
SeedOption = Annotated[int, option("Random seed.", SAMPLING, min=0, max=LARGEST_SEED, metavar="N")]


def evaluate(
    run: ModelArgument,
    data: Annotated[
        str | None,
        option("Dataset to evaluate on (file, folder or Hub name). Default: the run's validation split."),
    ] = None,
    snapshot: SnapshotOption = "latest",
    window: Annotated[int | None, option("With --data: context length in tokens.", min=2)] = None,
    link_prediction: Annotated[
        bool, flag("Rank all entities as tails of held-out triples.", _GRAPH, "--link-prediction")
    ] = False,
    limit: Annotated[int | None, option("With --link-prediction: maximum triples per side.", _GRAPH, min=1)] = None,
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on text or labeled data.

    Prints the loss, perplexity and bits per byte.
    Task qa: exact match and F1; the answers are written to the run folder.
    Task graph: accuracy on masked tokens and leaves.

    Example: sansgpu eval runs/default --data notes.txt
    """
    if limit is not None and not link_prediction:
        raise typer.BadParameter("--limit requires --link-prediction")
    if window is not None and link_prediction:
        raise typer.BadParameter("--window has no effect with --link-prediction; leave it out")
    from sansgpu.reporting.events import finite
    from sansgpu.reporting.tables import print_link_prediction
    from sansgpu.reporting.terminal import Terminal

    if link_prediction:
        with preparation_bar() as bar:
            from sansgpu.jobs.evaluate import link_prediction as rank

            ranked = rank(run, data, snapshot, limit, bar, warn, objective)
        print_result(ranked, as_json, print_link_prediction)
        return
    with preparation_bar() as bar:
        from sansgpu.jobs.evaluate import evaluate_model

        event, settings = evaluate_model(run, data, snapshot, window, bar, warn, trust_remote_code, objective)
    print_result(
        finite(event), as_json, lambda console, event: Terminal(console, settings, data or "validation").emit(event)
    )


def generate(
    run: ModelArgument,
    prompt: Annotated[str, option("Text to continue.")] = "",
    max_new_tokens: Annotated[int, option("Maximum number of tokens to generate.", min=1)] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
) -> None:
    """Continue a prompt with generated text.

    Example: sansgpu generate runs/default --prompt "def main" --max-new-tokens 100
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.generate import generate_text
        from sansgpu.models.generate import Sampling

        sampling = Sampling(temperature, top_k, top_p, seed)
        pieces = generate_text(run, prompt, max_new_tokens, sampling, snapshot, warn, trust_remote_code, objective, bar)
    show(prompt, end="")
    for piece in pieces:
        show(piece, end="")
    show()


def chat(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run of task sft, or a chat model (Hugging Face folder or GGUF file).")
    ],
    prompt: Annotated[str | None, option("Send this message, print the answer and exit.")] = None,
    system: Annotated[str | None, option("System message.")] = None,
    max_new_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 512,
    temperature: TemperatureOption = 0.7,
    top_k: TopKOption = 0,
    top_p: TopPOption = 0.9,
    seed: SeedOption = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
) -> None:
    """Chat with a model.

    Each line is a message, /new starts a new conversation, Ctrl-D exits. Messages can also be piped in.

    Example: sansgpu chat runs/assistant
    """
    import sys

    with preparation_bar() as bar:
        from sansgpu.jobs.chat import ChatSession
        from sansgpu.models.generate import Sampling

        conversation = ChatSession(run, system, snapshot, warn, trust_remote_code, objective, bar)
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


def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run of task qa, or a Hugging Face model for it.")],
    question: Annotated[str | None, option("Question to answer.")] = None,
    context: Annotated[str | None, option("Text that contains the answer.")] = None,
    data: Annotated[str | None, option("Rows to predict (file, folder or Hub name).")] = None,
    null_answers: Annotated[
        bool | None,
        flag("Allow an empty answer. Default: as in training.", None, "--null-answers/--no-null-answers"),
    ] = None,
    output: Annotated[Path | None, path_option("With --data: new JSON lines file. Default: stdout.", "FILE")] = None,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from a text, or predict rows of data.

    With --data: prints one JSON line per row.

    Example: sansgpu predict runs/squad --question "Who wrote it?" --context "It was written by Ada."
    """
    from sansgpu.reporting.outputs import require_file

    if (data is None) == (question is None) or (question is None) != (context is None):
        raise typer.BadParameter("give either --question with --context, or --data")
    if output is not None and data is None:
        raise typer.BadParameter("--output requires --data")
    if output is not None:
        require_file(output)
    if data is None and not (str(question).strip() and str(context).strip()):
        raise typer.BadParameter("--question and --context must not be empty")
    options = {} if null_answers is None else {"null_answers": null_answers}
    with preparation_bar() as bar:
        from sansgpu.jobs.predict import predict as job
        from sansgpu.jobs.predict import rows_of

        rows = [{"question": question, "context": context}] if data is None else rows_of(data)
        results = job(run, rows, snapshot, warn, bar, trust_remote_code, objective, **options)
    if data is not None:
        write_json_lines(results, output)
    elif as_json:
        print_json(results[0])
    else:
        show(results[0]["answer"] or "(no answer)")


def export(
    run: RunArgument,
    form: Annotated[
        str,
        option(
            "hf: a Hugging Face folder. gguf: a file for llama.cpp. onnx: an encoder for onnxruntime.",
            OUTPUT,
            "--format",
            metavar="hf|gguf|onnx",
        ),
    ] = "hf",
    kind: Annotated[
        str | None,
        option(
            "Data type of matrices. gguf: f32, f16 (default), bf16, q8_0. onnx: f32 (default), int8.", OUTPUT, "--type"
        ),
    ] = None,
    snapshot: SnapshotOption = "latest",
    output: Annotated[
        Path | None,
        path_option("Output. Default: RUN/export, RUN/NAME-TYPE.gguf or RUN/onnx-TYPE.", "PATH"),
    ] = None,
    merge: Annotated[
        bool | None,
        flag("With hf: merge the adapter into the model, or write it alone.", OUTPUT, "--merge/--no-merge"),
    ] = None,
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
) -> None:
    """Export a Hugging Face folder, a GGUF file or an ONNX file.

    With onnx, RUN may also be a Hugging Face folder, such as the final/ of a run.

    Example: sansgpu export runs/default --format gguf --type q8_0 --snapshot best
    """
    if form not in ("hf", "gguf", "onnx"):
        raise typer.BadParameter(f"--format is {form}, but must be hf, gguf or onnx")
    if form == "hf" and kind is not None:
        raise typer.BadParameter("--type requires --format gguf or onnx")
    if form != "hf" and merge is not None:
        raise typer.BadParameter("--merge and --no-merge require --format hf; other files always hold the whole model")
    with preparation_bar() as bar:
        from sansgpu.jobs.export import export_gguf, export_onnx, export_run

        if form == "gguf":
            written = export_gguf(run, snapshot, output, kind or "f16", warn, bar, trust_remote_code, objective)
        elif form == "onnx":
            chosen = snapshot, output, kind or "f32", warn, bar, trust_remote_code, objective
            written, check = export_onnx(run, *chosen)
        else:
            written = export_run(run, snapshot, output, merge, warn, bar, trust_remote_code, objective)
    if form == "onnx":
        complain(f"checked with onnxruntime: {check}")
    show(written)
