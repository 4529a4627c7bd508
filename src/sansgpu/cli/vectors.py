"""The `sansgpu embed` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sansgpu.cli.options import RemoteCodeOption, SnapshotOption, option, path_option, preparation_bar, show, warn

if TYPE_CHECKING:
    from sansgpu.config.training import Precision


def embed(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run of task embed, Sentence Transformers folder or Hugging Face encoder."),
    ],
    data: Annotated[str, option("Rows with texts (file, folder or Hub name).")],
    output: Annotated[Path, path_option("New file of vectors: .npy, or .parquet with the rows' columns.", "FILE")],
    text_column: Annotated[
        str | None, option("Column with the text. Default: as in training, otherwise `text` or the only text.")
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
        count = job(run, data, output, text_column, chosen, snapshot, warn, bar, trust_remote_code)
    show(f"{output}: {count:,} vectors")
