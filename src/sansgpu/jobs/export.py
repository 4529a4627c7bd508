"""Export of a snapshot as a Hugging Face folder, a GGUF file or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.data.shards import ReportProgress
from sansgpu.files.marks import is_output
from sansgpu.files.ownership import GGUF, require_file, require_folder
from sansgpu.jobs.report import write_model_card
from sansgpu.jobs.runs import require_run
from sansgpu.models.formats.folders import base_of, is_adapter_folder
from sansgpu.models.formats.onnx import FILES, OnnxCheck, decoder_error, require_onnx, write_onnx
from sansgpu.tasks.capabilities import can
from sansgpu.tasks.task import TrainedModel, Verb
from sansgpu.train.loading import ModelRequest, class_of_run, open_model
from sansgpu.train.run_folders import open_run

if TYPE_CHECKING:  # gguf is optional
    from sansgpu.models.formats.gguf_file import ModelDescription


def export_run(
    model: ModelRequest,
    output: Path | None,
    merge: bool | None,
    warn: Callable[[str], None],
    progress: ReportProgress,
) -> Path:
    """Writes a run's snapshot as a Hugging Face folder (default: RUN/export) and returns its path.

    `merge` says whether to merge an adapter into the model; None follows the run's configuration. Raises ConfigError if
    this is not a run.
    """
    run = Path(model.target)
    if is_adapter_folder(run):
        return _export_merged(model, output, merge, warn, progress)
    if (run / "config.json").is_file() and not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is already a Hugging Face folder; pass a run folder.")
    config, _ = open_run(run)
    folder = output or run / "export"
    if output is None:
        require_run(run)
    require_folder(folder, "model", "--output")
    _require_no_other_run(folder, run)
    if merge is not None and config.model.adapter == "none":
        raise ConfigError(f"{run} has no adapter; remove --merge or --no-merge.")
    loaded = open_model(model, "export", warn, progress)
    progress(f"writing {folder}", 0, 0)
    loaded.task_class.export_model(loaded, folder, merge)
    write_model_card(run, folder, loaded.source.step, warn)
    return folder


def _export_merged(
    model: ModelRequest,
    output: Path | None,
    merge: bool | None,
    warn: Callable[[str], None],
    progress: ReportProgress,
) -> Path:
    """Merges the adapter of a causal language model into its base model and writes the result. Raises ConfigError."""
    adapter = Path(model.target)
    if merge is False:
        raise ConfigError(f"{adapter} already contains only an adapter; remove --no-merge.")
    folder = _require_output(adapter, output)
    require_folder(folder, "model", "--output")
    _require_no_other_run(folder, adapter.resolve().parent)
    loaded = open_model(model, "chat", warn, progress)
    progress(f"writing {folder}", 0, 0)
    loaded.task_class.export_model(loaded, folder, True)
    return folder


def _require_output(target: Path, output: Path | None) -> Path:
    if output is None:
        raise ConfigError(f"{target} is not a run; set --output to the file to write.")
    if output.resolve() == target.resolve():
        raise ConfigError(f"{output} is the folder of the adapter to export; choose another --output.")
    return output


def _require_no_other_run(folder: Path, run: Path) -> None:
    """Raises ConfigError if `folder` is inside another run's folder, e.g. its `final/`."""
    owner = folder.resolve().parent
    if owner != run.resolve() and is_output(owner, "run"):
        raise ConfigError(f"{folder} belongs to the run {owner}, not to {run}; choose another --output.")


def export_gguf(
    model: ModelRequest, output: Path | None, weight_type: str, warn: Callable[[str], None], progress: ReportProgress
) -> Path:
    """Writes a run's snapshot as a GGUF file (default: RUN/NAME-KIND.gguf) and returns its path.

    `weight_type` is the data type of matrices. Raises ConfigError if llama.cpp does not support the model.
    """
    require("--format gguf", "gguf")
    from sansgpu.models.formats.gguf_file import write_gguf
    from sansgpu.models.formats.gguf_reader import TYPES, describe_substitutes

    run = Path(model.target)
    if weight_type not in TYPES:
        raise ConfigError(f"--type is {weight_type}, but must be one of {', '.join(TYPES)}.")
    if is_adapter_folder(run):
        verb: Verb = "chat"
        path = _require_output(run, output)
    else:
        verb = "gguf"
        config, _ = open_run(run)
        class_of_run(run, config, verb, model.objective)  # before the output is checked
        path = output or run / f"{run.resolve().name}-{weight_type}.gguf"
        if output is None:
            require_run(run)
    require_file(path, GGUF)
    loaded = open_model(model, verb, warn, progress)
    progress(f"writing {path}", 0, 0)
    about = _about(run, loaded)
    settings, weights, tokenizer = loaded.task_class.gguf_parts(loaded)
    choices = write_gguf(path, settings, weights, tokenizer, weight_type, about)
    if (replaced := describe_substitutes(choices)) is not None:
        warn(replaced)
    return path


def _about(run: Path, loaded: TrainedModel) -> ModelDescription:
    """Returns the file's metadata, with names only, so that no local paths are published."""
    from sansgpu.models.formats.gguf_file import ModelDescription

    config, step = loaded.config, loaded.source.step
    of_run = f"Step {step} of a run of task {config.task}, trained with sansgpu."
    model = base_of(config.model) or config.model
    base = model.name_or_path
    return ModelDescription(
        name=run.resolve().name,
        description="A model with an adapter, merged by sansgpu." if step is None else of_run,
        dataset=None if step is None else Path(config.data.dataset_name).name,
        base_model=Path(base).name if base else None,
    )


def export_onnx(
    model: ModelRequest, output: Path | None, weight_type: str, warn: Callable[[str], None], progress: ReportProgress
) -> tuple[Path, OnnxCheck]:
    """Writes an encoder as an ONNX file into a folder (default: RUN/onnx-KIND).

    Takes a run or a Hugging Face folder. Returns the file's path and how close its results are to torch's. Raises
    ConfigError if the model is not an encoder.
    """
    require_onnx()
    target = Path(model.target)
    if weight_type not in FILES:
        raise ConfigError(f"--type is {weight_type}, but with --format onnx must be one of {', '.join(FILES)}.")
    is_run = (target / "config.yaml").is_file()
    if not is_run:
        _require_plain_folder(target, model, output)
    folder = output or target / f"onnx-{weight_type}"
    if output is None:
        require_run(target)
    require_folder(folder, "model", "--output")
    _require_no_other_run(folder, target if is_run else target.resolve().parent)
    with TemporaryDirectory() as temporary:
        source = target
        if is_run:
            source = Path(temporary) / "model"
            _write_encoder(model, source, warn, progress)
        progress(f"writing {folder}", 0, 0)
        check = write_onnx(source, model.target, folder, weight_type, model.remote_code)
    return folder / FILES[weight_type], check


def _require_plain_folder(target: Path, model: ModelRequest, output: Path | None) -> None:
    """Raises ConfigError unless `target` is a Hugging Face folder, and the options are for one."""
    if not (target / "config.json").is_file():
        raise ConfigError(f"{target} is neither a run nor a Hugging Face folder: it has no config.yaml or config.json.")
    if output is None:
        raise ConfigError(f"{target} is not a run; set --output to the folder to write.")
    if model.snapshot != "latest" or model.objective is not None:
        raise ConfigError(f"{target} is not a run; remove --snapshot and --objective.")


def _write_encoder(model: ModelRequest, folder: Path, warn: Callable[[str], None], progress: ReportProgress) -> None:
    """Writes a run's snapshot as a Hugging Face folder, with an adapter merged. Raises ConfigError for a decoder."""
    run = Path(model.target)
    config, _ = open_run(run)
    if can(class_of_run(run, config, "export", model.objective), "generate"):
        raise decoder_error(model.target)
    loaded = open_model(model, "export", warn, progress)
    loaded.task_class.export_model(loaded, folder, True)
