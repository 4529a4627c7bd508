"""The commands that use vectors of texts: `sansgpu embed` and `sansgpu search`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sansgpu.cli.options import (
    LARGEST_INTEGER,
    JsonOption,
    RemoteCodeOption,
    SnapshotOption,
    option,
    path_option,
    preparation_bar,
    print_json,
    show,
    warn,
)

if TYPE_CHECKING:
    from sansgpu.config.training import Precision


EncoderArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run of task embed, Sentence Transformers folder or Hugging Face encoder."),
]


def embed(
    run: EncoderArgument,
    data: Annotated[str, option("Rows with texts (file, folder or Hub name).")],
    output: Annotated[Path, path_option("New file of vectors: .npy, or .parquet with the rows' columns.", "FILE")],
    text_column: Annotated[
        str | None,
        option("Column with the text, or its number. Default: as in training, otherwise `text` or the only text."),
    ] = None,
    prompt: Annotated[
        str | None,
        option("Prompt to write before each text, by its name in the model. Default: the model's default prompt."),
    ] = None,
    precision: Annotated[
        str, option("Precision of matrix products; auto: bf16 if that is faster here.", metavar="auto|fp32|bf16")
    ] = "auto",
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
) -> None:
    """Write the vectors of texts to a file.

    Row n of the array is the vector of row n of the data, in float32.

    Example: sansgpu embed runs/embedder --data texts.jsonl --output vectors.npy
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise typer.BadParameter(f"--precision is {precision}, but must be auto, fp32 or bf16")
    with preparation_bar() as bar:
        from sansgpu.jobs.embed import embed as job

        chosen = cast("Precision", precision)
        column = _column(text_column)
        count = job(run, data, output, column, prompt, chosen, snapshot, warn, bar, trust_remote_code)
    show(f"{output}: {count:,} vectors")


def search(
    run: EncoderArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of texts, or one file.")],
    words: Annotated[str, typer.Argument(metavar="WORDS", help="Question or words to search for.")],
    top_k: Annotated[int, option("Number of passages to print.", min=1)] = 5,
    text_column: Annotated[
        str | None, option("Column with the text of rows, or its number. Default: `text` or the only text.")
    ] = None,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find passages of texts by their meaning.

    The first search embeds every file. Later ones embed only files that changed.

    Example: sansgpu search runs/embedder docs "how to resume a run"
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.search import search as job

        found = job(run, folder, words, top_k, _column(text_column), snapshot, warn, bar, trust_remote_code)
    if as_json:
        print_json({"query": words, "passages": [passage.as_json() for passage in found]})
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
