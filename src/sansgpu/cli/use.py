"""The commands that use a trained model: `sansgpu eval`, `predict`, `generate`, `chat` and `export`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.options import (
    LARGEST_INTEGER,
    OUTPUT,
    SAMPLING,
    JsonOption,
    ModelArgument,
    ObjectiveOption,
    RemoteCodeOption,
    RunArgument,
    SnapshotOption,
    check_tables_for,
    complain,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_json,
    print_result,
    show,
    warn,
    write_json_lines,
)

if TYPE_CHECKING:
    from sansgpu.data.shards import ReportProgress
    from sansgpu.views.terminal import RunConsole

LARGEST_BATCH = 65536  # prompts at once
_GRAPH = "Task graph"
TemperatureOption = Annotated[float, number_option("Sampling temperature. 0: always the most likely token.", SAMPLING)]
TopKOption = Annotated[int, option("Sample from the k most likely tokens. 0: from all.", SAMPLING)]
TopPOption = Annotated[
    float, number_option("Sample from the most likely tokens with this total probability.", SAMPLING)
]
SeedOption = Annotated[int, option("Random seed.", SAMPLING, min=0, max=LARGEST_INTEGER, metavar="N")]


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

    Prints the loss, perplexity and bits per byte of texts, or of the answers in conversations.
    Task qa: exact match and F1; the answers are written to the run folder.
    Task classify: accuracy, F1 and Matthews correlation, or correlations with the scores.
    Task tokens: precision, recall and F1 of entities, and accuracy of tags.
    Task graph: accuracy on masked tokens and leaves.

    Example: sansgpu eval runs/default --data notes.txt
    """
    if limit is not None and not link_prediction:
        raise typer.BadParameter("--limit requires --link-prediction")
    if window is not None and link_prediction:
        raise typer.BadParameter("--window has no effect with --link-prediction; leave it out")
    if data is not None:
        check_tables_for(run, data)
    from sansgpu.events.event import finite
    from sansgpu.views.tables import print_link_prediction
    from sansgpu.views.terminal import Terminal

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
    prompt: Annotated[str | None, option("Text to continue.")] = None,
    data: Annotated[str | None, option("Prompts to complete, many at once (file, folder or Hub name).")] = None,
    output: Annotated[Path | None, path_option("With --data: new JSON lines file for the rows.", "FILE")] = None,
    batch_size: Annotated[
        str, option("With --data: prompts at once. auto: by the available memory.", None, metavar="auto|N")
    ] = "auto",
    max_new_tokens: Annotated[int, option("Maximum number of tokens to generate.", min=1)] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    objective: ObjectiveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, or complete the prompts of a file.

    With --data: rows have a prompt, messages or a text. The output has each row with its completion.
    A command that was killed continues when it is repeated.

    Example: sansgpu generate runs/default --prompt "def main" --max-new-tokens 100
    """
    slots = _batch_size(batch_size)
    if data is None and (output is not None or as_json or slots is not None):
        raise typer.BadParameter("--output, --batch-size and --json require --data")
    if data is not None and (prompt is not None or output is None):
        raise typer.BadParameter("--data requires --output, and no --prompt")
    with preparation_bar() as bar:
        from sansgpu.jobs.generate import generate_text
        from sansgpu.models.generation.sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, seed)
        if data is not None and output is not None:
            from sansgpu.jobs.generate_rows import GenerateRequest, generate_rows

            chosen = slots, snapshot, trust_remote_code, objective
            request = GenerateRequest(run, data, output, max_new_tokens, sampling, *chosen)
            print_result(generate_rows(request, warn, bar), as_json, _print_generated)
            return
        text = prompt or ""
        pieces = generate_text(run, text, max_new_tokens, sampling, snapshot, warn, trust_remote_code, objective, bar)
    show(text, end="")
    is_empty = True
    for piece in pieces:
        show(piece, end="")
        is_empty = False
    show()
    if is_empty:
        warn(
            f"{run} ended the text right after the prompt; use `sansgpu chat` if it is a chat model, or give a longer "
            "prompt or a higher --temperature."
        )


def _batch_size(value: str) -> int | None:
    """Returns the number of prompts at once, or None for auto. Raises BadParameter."""
    if value == "auto":
        return None
    from sansgpu.config.parse import whole_number

    if not (number := whole_number(value, LARGEST_BATCH)):
        raise typer.BadParameter(f"--batch-size is {value}, but must be auto or a number from 1 to {LARGEST_BATCH:,}")
    return number


def _print_generated(console: RunConsole, summary: dict[str, Any]) -> None:
    figures = (
        f"{summary['rows']:,} rows, {summary['tokens']:,} new tokens, {summary['tokens_per_second']:,.0f} per second"
    )
    console.print(f"{summary['output']}: {figures}", highlight=False, markup=False)


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
        from sansgpu.models.generation.sampling import Sampling

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
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run of task qa, classify or tokens, or a Hugging Face model for it.")
    ],
    text: Annotated[str | None, option("Text to predict.")] = None,
    text_pair: Annotated[str | None, option("With --text: second text, for a model of pairs.")] = None,
    question: Annotated[str | None, option("Question to answer.")] = None,
    context: Annotated[str | None, option("With --question: text that contains the answer.")] = None,
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
    """Classify texts, find entities in them or answer questions.

    With --data: prints one JSON line per row.

    Example: sansgpu predict runs/reviews --text "I liked it."
    """
    from sansgpu.files.ownership import require_file

    row = _single_row({"text": text, "text_pair": text_pair, "question": question, "context": context}, data)
    if output is not None and data is None:
        raise typer.BadParameter("--output requires --data")
    if output is not None:
        require_file(output)
    options = {} if null_answers is None else {"null_answers": null_answers}
    with preparation_bar() as bar:
        from sansgpu.jobs.predict import in_words
        from sansgpu.jobs.predict import predict as job

        results = job(run, row if data is None else data, snapshot, warn, bar, trust_remote_code, objective, **options)
        if output is not None:
            write_json_lines(_with_progress(results, bar), output)
        elif data is None:
            (result,) = results
    if data is not None and output is None:
        write_json_lines(results, None)
    elif data is None and as_json:
        print_json(result)
    elif data is None:
        show(in_words(result))


def _with_progress(predictions: Iterable[dict[str, Any]], progress: ReportProgress) -> Iterator[dict[str, Any]]:
    for number, prediction in enumerate(predictions, 1):
        progress("predicting", number, 0, "row")
        yield prediction


_SINGLE_ROWS = (("text",), ("text", "text_pair"), ("question", "context"))  # columns of a row given by flags


def _single_row(flags: dict[str, str | None], data: str | None) -> dict[str, str]:
    """Returns the row that flags give; empty if `data` names a dataset. Raises BadParameter for other combinations."""
    row = {name: value for name, value in flags.items() if value is not None}
    if (data is not None and row) or (data is None and tuple(row) not in _SINGLE_ROWS):
        raise typer.BadParameter("give --text, or --text with --text-pair, or --question with --context, or --data")
    if empty := next((name for name, value in row.items() if not value.strip()), None):
        raise typer.BadParameter(f"--{empty.replace('_', '-')} must not be empty")
    return row


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
            "Data type of matrices. gguf: f32, f16 (default), bf16, q8_0, q6_k, q4_k, q4_1, q4_0. onnx: f32 (default), "
            "int8.",
            OUTPUT,
            "--type",
            "--quantization",
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
