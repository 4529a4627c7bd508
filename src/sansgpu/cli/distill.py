"""`sansgpu distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
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


def distill(
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help="Run folder, Hugging Face model or GGUF file.")],
    data: Annotated[str, option("Texts to predict (file, folder or Hub name).")],
    output: Annotated[Path, path_option("Folder for the predictions. An unfinished one is completed.", "DIR")],
    top_k: Annotated[int, option("Number of most likely tokens to write for each token.", min=1)] = 32,
    task: Annotated[
        str,
        option(
            "Task of the students. pretrain: plain text; sft: conversations.", None, "--task", metavar="pretrain|sft"
        ),
    ] = "pretrain",
    max_length: Annotated[
        int | None,
        option("Tokens of an example at most. Default: 512, or 1,024 for sft, or the teacher's context.", min=2),
    ] = None,
    text_column: Annotated[
        str | None, option("Column with the text. Default: `text`, `content` or the only one.")
    ] = None,
    snapshot: SnapshotOption = "latest",
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a teacher's predictions for a smaller model.

    The smaller model trains with training.distillation.teacher=DIR.
    Run the command again to continue after an interruption.

    Example: sansgpu distill models/teacher --data notes/ --output lessons
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.distill import DistillRequest
        from sansgpu.jobs.distill import distill as job

        request = DistillRequest(
            teacher, data, output, top_k, task, max_length, text_column, snapshot, trust_remote_code
        )
        result = job(request, warn, bar)
    if as_json:
        print_json(result)
    else:
        size = f"{result['bytes'] / 1e6:,.1f} MB"
        show(f"{output}: the {top_k} most likely tokens at {result['tokens']:,} places ({size})")
