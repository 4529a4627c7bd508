"""The `sansgpu tokenizer` commands."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import JsonOption, option, path_option, preparation_bar, print_json, show

tokenizer = typer.Typer(no_args_is_help=True, help="Train a byte-level BPE tokenizer, or encode text.")


@tokenizer.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, folder, Hugging Face dataset or python-stdlib.")
    ],
    output: Annotated[Path, path_option("Folder for the tokenizer.", "DIR")],
    vocab_size: Annotated[int, option("Vocabulary size.")] = 8192,
    sample_mb: Annotated[int, option("Megabytes of text to train on.", min=1)] = 32,
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
    from sansgpu.config import ConfigError

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", newline="")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"standard input is not UTF-8 text (byte 0x{byte:02x}); convert it first.") from None
