"""The commands that write, find or encode texts: `sansgpu generate`, `chat`, `embed`, `search` and `tokenizer`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.options import (
    LARGEST_INTEGER,
    SAMPLING,
    GenerationPrecisionOption,
    JsonOption,
    ModelArgument,
    ObjectiveOption,
    RemoteCodeOption,
    SnapshotOption,
    TemplateVariableOption,
    number_option,
    option,
    path_option,
    precision_option,
    preparation_bar,
    print_json,
    print_result,
    show,
    suggest,
    suggest_export,
    warn,
    with_fields,
)

if TYPE_CHECKING:
    from sansgpu.views.terminal import RunConsole

tokenizer = typer.Typer(no_args_is_help=True, help="Train a byte-level BPE tokenizer, or encode text.")
LARGEST_BATCH = 65536  # prompts at once
TemperatureOption = Annotated[
    float, number_option("Sampling temperature. 0: always choose the most likely token.", SAMPLING)
]
TopKOption = Annotated[int, option("Sample from the k most likely tokens. 0: sample from all tokens.", SAMPLING)]
TopPOption = Annotated[
    float, number_option("Sample from the most likely tokens whose probabilities add up to this value.", SAMPLING)
]
SeedOption = Annotated[int, option("Random seed.", SAMPLING, min=0, max=LARGEST_INTEGER, metavar="N")]
EncoderArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run of task embed, Sentence Transformers folder or Hugging Face encoder.")
]


@dataclass(frozen=True, kw_only=True)
class _GenerateOptions:
    run: ModelArgument
    prompt: Annotated[str | None, option("Text to continue.")] = None
    data: Annotated[str | None, option("Prompts to complete in batches (file, folder or Hub name).")] = None
    output: Annotated[Path | None, path_option("With --data: JSON lines file to write.", "FILE")] = None
    batch_size: Annotated[
        str,
        option(
            "With --data: number of prompts to complete at once. auto: as many as fit in memory.",
            None,
            metavar="auto|N",
        ),
    ] = "auto"
    template_variable: TemplateVariableOption = None
    max_new_tokens: Annotated[int, option("Maximum number of tokens to generate.", min=1)] = 200
    temperature: TemperatureOption = 0.8
    top_k: TopKOption = 0
    top_p: TopPOption = 1.0
    seed: SeedOption = 0
    precision: GenerationPrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    objective: ObjectiveOption = None
    as_json: JsonOption = False


@with_fields
def generate(given: _GenerateOptions) -> None:
    """Continue a prompt, or complete the prompts in a file.

    With --data: rows have a prompt, messages or a text. The output contains each row with its completion.
    Run the command again to continue after an interruption.

    Example: sansgpu generate runs/default --prompt "def main" --max-new-tokens 100
    """
    slots, variables = _batch_size(given.batch_size), dict(given.template_variable or ())
    if given.data is None and (given.output is not None or given.as_json or slots is not None or variables):
        raise typer.BadParameter("--output, --batch-size, --template-variable and --json require --data")
    if given.data is not None and (given.prompt is not None or given.output is None):
        raise typer.BadParameter("--data requires --output and replaces --prompt; add --output and remove --prompt")
    with preparation_bar() as bar:
        from sansgpu.jobs.generate import GenerateRequest, generate_rows, generate_text
        from sansgpu.models.generation.sampling import Sampling
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
        text, summary = given.prompt or "", None
        if given.data is not None and given.output is not None:
            request = GenerateRequest(model, given.data, given.output, given.max_new_tokens, sampling, slots, variables)
            summary = generate_rows(request, warn, bar)
        else:
            pieces = generate_text(model, text, given.max_new_tokens, sampling, warn, bar)
    if summary is not None:
        print_result(summary, given.as_json, _print_generated)
        return
    show(text, end="")
    is_empty = True
    for piece in pieces:
        show(piece, end="")
        is_empty = False
    show()
    if is_empty:
        warn(
            f"{given.run} generated no text, because its first token ends the text; use `sansgpu chat` if it is a chat "
            "model, or a longer prompt or a higher --temperature."
        )
    suggest_export(given.run)


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


@dataclass(frozen=True, kw_only=True)
class _ChatOptions:
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run of task sft, or a chat model (Hugging Face folder or GGUF file).")
    ]
    prompt: Annotated[str | None, option("Message to send; prints the answer and exits.")] = None
    system: Annotated[str | None, option("System message.")] = None
    template_variable: TemplateVariableOption = None
    max_new_tokens: Annotated[int, option("Maximum number of tokens per answer.", min=1)] = 512
    temperature: TemperatureOption = 0.7
    top_k: TopKOption = 0
    top_p: TopPOption = 0.9
    seed: SeedOption = 0
    precision: GenerationPrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    objective: ObjectiveOption = None


@with_fields
def chat(given: _ChatOptions) -> None:
    """Chat with a model.

    Each line is a message, /new starts a new conversation, Ctrl-D exits. Messages can also be piped in.

    Example: sansgpu chat runs/assistant
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.generate import ChatSession
        from sansgpu.models.generation.sampling import Sampling
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        conversation = ChatSession(model, given.system, warn, bar, dict(given.template_variable or ()))
    interactive = given.prompt is None and sys.stdin.isatty()
    lines = iter([given.prompt]) if given.prompt is not None else _typed() if interactive else _piped()
    for number, line in enumerate(lines):
        if line.strip() == "/new":
            conversation.reset()
        elif line.strip():
            sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed + number)
            for piece in conversation.say(line, given.max_new_tokens, sampling):
                show(piece, end="")
            show()
    if interactive:
        show()


def _typed() -> Iterator[str]:
    """Yields the lines that the user types, until Ctrl-D."""
    with suppress(EOFError):
        while True:
            yield input("> ")


def _piped() -> Iterator[str]:
    """Yields the lines of standard input. Raises ConfigError if it is not UTF-8."""
    with _reading_utf8(newline=None):
        for line in sys.stdin:
            yield line.rstrip("\n")


_ENCODER_PRECISION = "bf16, or int16 without bf16, if that is faster on this machine."


@dataclass(frozen=True, kw_only=True)
class _EmbedOptions:
    run: EncoderArgument
    data: Annotated[str, option("Rows with texts (file, folder or Hub name).")]
    output: Annotated[
        Path,
        path_option(
            "File to write: .npy for the vectors alone, .parquet for the vectors with the columns of the rows.", "FILE"
        ),
    ]
    text_column: Annotated[
        str | None,
        option(
            "Name or number of the column with the text. Default: as in training, otherwise `text` or the only column "
            "with text."
        ),
    ] = None
    prompt: Annotated[
        str | None, option("Name of the model's prompt to put before each text. Default: the model's default prompt.")
    ] = None
    precision: Annotated[
        Any,
        precision_option(
            f"{_ENCODER_PRECISION} For at least 512 texts int8, if that is faster still and, on a sample of the texts, "
            "the mean cosine similarity of the vectors is at least 0.995."
        ),
    ] = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False


@with_fields
def embed(given: _EmbedOptions) -> None:
    """Write embedding vectors of texts to a file.

    Row n of the array is the vector of row n of the data, in float32.

    Example: sansgpu embed runs/embedder --data texts.jsonl --output vectors.npy
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.embed import EmbedRequest
        from sansgpu.jobs.embed import embed as job
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, precision=given.precision)
        column = _column(given.text_column)
        result = job(EmbedRequest(model, given.data, given.output, column, given.prompt), warn, bar)
    show(f"{given.output}: {result}")
    suggest("search", given.run, "FOLDER", "WORDS")


@dataclass(frozen=True, kw_only=True)
class _SearchOptions:
    run: EncoderArgument
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of documents, or a file.")]
    words: Annotated[str, typer.Argument(metavar="WORDS", help="Question or phrase to search for.")]
    top_k: Annotated[int, option("Number of passages to print.", min=1)] = 5
    text_column: Annotated[
        str | None,
        option(
            "Name or number of the column with the text, for files with rows. Default: `text` or the only column with "
            "text."
        ),
    ] = None
    precision: Annotated[Any, precision_option(f"{_ENCODER_PRECISION} Each precision has its own index.")] = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    as_json: JsonOption = False


@with_fields
def search(given: _SearchOptions) -> None:
    """Find passages of documents by their meaning.

    The first search embeds every file. Later ones embed only files that changed.

    Example: sansgpu search runs/embedder docs "how to resume a run"
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.embed import search as job
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, precision=given.precision)
        column = _column(given.text_column)
        found = job(model, given.folder, given.words, given.top_k, column, warn, bar)
    if given.as_json:
        print_json({"query": given.words, "passages": [passage.as_json() for passage in found]})
        return
    for passage in found:
        show(f"{passage.place}  score {passage.score:.3f}")
        show("".join(f"    {line}\n" for line in passage.passage.text.splitlines()))


def _column(name: str | None) -> str | int | None:
    """Returns the name of a column, or its number in a file without a header."""
    from sansgpu.config.parse import whole_number

    if name is None or (number := whole_number(name.removeprefix("-"), LARGEST_INTEGER)) is None:
        return name
    return -number if name.startswith("-") else number


@tokenizer.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, folder, Hugging Face dataset or python-stdlib.")
    ],
    output: Annotated[Path, path_option("Folder for the tokenizer.", "DIR")],
    vocab_size: Annotated[int, option("Vocabulary size.")] = 8192,
    sample_mb: Annotated[int, option("Maximum megabytes of text to train on.", min=1)] = 32,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level BPE tokenizer.

    Example: sansgpu tokenizer train notes/ --vocab-size 8192 --output tokenizer
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.tokenize import train_tokenizer

        result = train_tokenizer(source, vocab_size, sample_mb, output, bar)
    if as_json:
        print_json(result)
    else:
        show(f"{result['vocab_size']:,} tokens, written to {output}")
        if "note" in result:
            show(f"{result['note']}.")
        suggest("train", "--set", f"data.tokenizer={output}", "--set", f"data.dataset_name={source}")


@tokenizer.command("encode")
def tokenizer_encode(
    name: Annotated[
        str, typer.Argument(metavar="TOKENIZER", help="Tokenizer folder, tokenizer.json file or model name.")
    ],
    text: Annotated[str | None, option("Text to encode. Default: standard input.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the token ids of a text.

    Example: sansgpu tokenizer encode tokenizer --text "def main"
    """
    from sansgpu.jobs.tokenize import encode_text

    result = encode_text(name, _standard_input() if text is None else text)
    if as_json:
        print_json(result)
    else:
        show(" ".join(map(str, result["ids"])))


def _standard_input() -> str:
    """Reads standard input without translating line ends. Raises ConfigError if it is not UTF-8."""
    with _reading_utf8(newline=""):
        return sys.stdin.read()


@contextmanager
def _reading_utf8(newline: str | None) -> Iterator[None]:
    """Reads standard input as UTF-8 in its context, regardless of the locale. Raises ConfigError if it is not UTF-8."""
    from sansgpu.config import ConfigError

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", newline=newline)
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"standard input is not UTF-8 text (byte 0x{byte:02x}); convert it first.") from None
