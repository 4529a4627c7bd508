"""The command that writes a model for other programs: `sansgpu export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sansgpu.cli.options import (
    OUTPUT,
    ObjectiveOption,
    RemoteCodeOption,
    RunArgument,
    SnapshotOption,
    complain,
    flag,
    option,
    path_option,
    preparation_bar,
    show,
    warn,
    with_fields,
)

if TYPE_CHECKING:
    from sansgpu.events.progress import ReportProgress


@dataclass(frozen=True, kw_only=True)
class _ExportOptions:
    run: RunArgument
    form: Annotated[
        str,
        option(
            "hf: a Hugging Face folder; gguf: a file for llama.cpp; ollama: that file with a Modelfile; onnx: an "
            "encoder for onnxruntime; static: an encoder distilled to static embeddings for Sentence Transformers.",
            OUTPUT,
            "--format",
            metavar="hf|gguf|ollama|onnx|static",
        ),
    ] = "hf"
    weight_type: Annotated[
        str | None,
        option(
            "Data type of the weight matrices. gguf, ollama: f32, f16 (default), bf16, q8_0, q6_k, q4_k, q4_1, q4_0; "
            "onnx: f32 (default), int8.",
            OUTPUT,
            "--type",
            "--quantization",
        ),
    ] = None
    snapshot: SnapshotOption = "final"
    output: Annotated[
        Path | None,
        path_option(
            "File or folder to write. Default: RUN/export, RUN/NAME-TYPE.gguf, RUN/ollama-TYPE, RUN/onnx-TYPE or "
            "RUN/static.",
            "PATH",
        ),
    ] = None
    merge: Annotated[
        bool | None,
        flag(
            "With --format hf and gguf: export the whole model with the adapter merged, or only the adapter. Default: "
            "as in training; gguf: merged.",
            OUTPUT,
            "--merge/--no-merge",
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        option("With --format static: dimensions of the embeddings. Default: 256, or the encoder's.", OUTPUT, min=1),
    ] = None
    push_to_hub: Annotated[
        str | None,
        option("Also upload the model to this repository of the Hugging Face Hub.", OUTPUT, metavar="OWNER/NAME"),
    ] = None
    private: Annotated[
        bool, flag("With --push-to-hub: create the repository as a private one.", OUTPUT, "--private")
    ] = False
    trust_remote_code: RemoteCodeOption = False
    objective: ObjectiveOption = None


@with_fields
def export(given: _ExportOptions) -> None:
    """Export a run as a Hugging Face, GGUF, ONNX or static model.

    With a format other than hf, RUN may also be a Hugging Face folder, such as the folder final/ of a run.

    Example: sansgpu export runs/default --format gguf --type q8_0 --snapshot best
    """
    if given.form not in ("hf", "gguf", "ollama", "onnx", "static"):
        raise typer.BadParameter(f"--format is {given.form}, but must be hf, gguf, ollama, onnx or static")
    if given.form in ("hf", "static") and given.weight_type is not None:
        raise typer.BadParameter("--type requires --format gguf, ollama or onnx")
    if given.form not in ("hf", "gguf") and given.merge is not None:
        raise typer.BadParameter(
            "--merge and --no-merge require --format hf or gguf; other formats always contain the merged model"
        )
    if given.form != "static" and given.dimensions is not None:
        raise typer.BadParameter("--dimensions requires --format static; add it")
    if given.private and given.push_to_hub is None:
        raise typer.BadParameter("--private requires --push-to-hub; add it")
    with preparation_bar() as bar:
        from sansgpu.config.paths import contains_run
        from sansgpu.jobs.upload import gguf_card, push_to_hub, require_hub

        if given.push_to_hub is not None:
            require_hub(given.push_to_hub)
        written, note, command = _write_export(given, bar)
        address = None
        if given.push_to_hub is not None:
            whole, card = written.parent if given.form == "onnx" else written, None
            if given.form == "gguf" and contains_run(given.run):
                card = gguf_card(given.run, given.snapshot, written, given.merge is False, warn)
            address = push_to_hub(whole, given.push_to_hub, given.private, bar, card)
    if note is not None:
        complain(note)
    for line in filter(None, (written, command, address)):
        show(line)


def _write_export(given: _ExportOptions, progress: ReportProgress) -> tuple[Path, str | None, str | None]:
    """Returns the path that was written, a message about it, and a command that uses it."""
    from sansgpu.jobs.export import export_gguf, export_ollama, export_onnx, export_run, export_static
    from sansgpu.train.loading import ModelRequest

    model = ModelRequest(str(given.run), given.snapshot, given.trust_remote_code, given.objective)
    if given.form == "gguf":
        path = export_gguf(model, given.output, given.weight_type or "f16", given.merge, warn, progress)
        return path, None, None
    if given.form == "ollama":
        folder, command = export_ollama(model, given.output, given.weight_type or "f16", warn, progress)
        return folder, None, command
    if given.form == "onnx":
        file, check = export_onnx(model, given.output, given.weight_type or "f32", warn, progress)
        return file, f"checked with onnxruntime: {check}", None
    if given.form == "static":
        return export_static(model, given.output, given.dimensions, warn, progress), None, None
    return export_run(model, given.output, given.merge, warn, progress), None, None
