"""Export of a model as a Hugging Face folder, a GGUF file, a folder for Ollama, an ONNX file or static embeddings."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import contains_run
from sansgpu.config.schema import Config
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_text
from sansgpu.files.ownership import GGUF_SIGNATURE, OutputFolder, require_file
from sansgpu.jobs.embed import open_encoder
from sansgpu.jobs.report import write_model_card
from sansgpu.models.formats.folders import base_of, is_adapter_folder, write_folder_atomically
from sansgpu.models.formats.ollama import (
    COMPLETION,
    MAX_CONTEXT,
    ChatFormat,
    chat_format,
    is_expressible,
    model_name,
    modelfile,
    stop_texts,
)
from sansgpu.models.huggingface.onnx import FILES, OnnxCheck, decoder_error, require_onnx, write_onnx
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.tasks.capabilities import Chats, GGUFParts, can
from sansgpu.tasks.static.distill import static_folder
from sansgpu.tasks.static.model import write_static_folder
from sansgpu.tasks.static.task import StaticEmbeddings
from sansgpu.tasks.task import TrainedModel, Verb
from sansgpu.train.loading import FINAL, ModelRequest, class_of_run, open_model
from sansgpu.train.run_folders import open_run, require_run

if TYPE_CHECKING:  # gguf is optional
    from sansgpu.models.formats.gguf_file import ModelDescription
    from sansgpu.models.formats.gguf_reader import GGUFType


def export_run(
    model: ModelRequest, output: Path | None, merge: bool | None, warn: Warn, progress: ReportProgress
) -> Path:
    """Writes a run's snapshot as a Hugging Face folder (default: RUN/export) and returns its path.

    `merge` says whether to merge an adapter into the model; None follows the run's configuration. Raises ConfigError if
    this is not a run.
    """
    run = Path(model.target)
    if is_adapter_folder(run):
        return _export_merged(model, output, merge, warn, progress)
    if (run / "config.json").is_file() and not contains_run(run):
        raise ConfigError(f"{run} is already a Hugging Face folder; pass a run folder.")
    config, _ = open_run(run)
    folder = _output_of_run(run, output, "export")
    _require_model_folder(folder, run)
    _require_adapter(run, config, merge)
    loaded = open_model(model, "export", warn, progress, computes=False)
    progress(f"writing {folder}", 0, 0)
    loaded.task_class.export_model(loaded, folder, merge)
    write_model_card(run, folder, loaded.source.step, warn)
    return folder


def _export_merged(
    model: ModelRequest, output: Path | None, merge: bool | None, warn: Warn, progress: ReportProgress
) -> Path:
    """Merges the adapter of a causal language model into its base model and writes the result. Raises ConfigError."""
    adapter = Path(model.target)
    if merge is False:
        raise ConfigError(f"{adapter} already contains only an adapter; remove --no-merge.")
    folder = _require_output(adapter, output)
    _require_model_folder(folder, adapter.resolve().parent)
    loaded = open_model(model, "chat", warn, progress, computes=False)
    progress(f"writing {folder}", 0, 0)
    loaded.task_class.export_model(loaded, folder, True)
    return folder


def _require_adapter(run: Path, config: Config, merge: bool | None) -> None:
    if merge is not None and config.model.adapter == "none":
        raise ConfigError(f"{run} has no adapter; remove --merge or --no-merge.")


def _output_of_run(run: Path, output: Path | None, name: str) -> Path:
    """Returns `output`, or else its default in the folder of a run. Raises ConfigError if that may not be written."""
    if output is None:
        require_run(run)
    return output or run / name


def _require_output(target: Path, output: Path | None) -> Path:
    if output is None:
        raise ConfigError(f"{target} is not a run; set --output to the file to write.")
    if output.resolve() == target.resolve():
        raise ConfigError(f"{output} is the folder of the adapter to export; choose another --output.")
    return output


def _require_model_folder(folder: Path, run: Path) -> None:
    """Raises ConfigError unless a model may be written to `folder`, e.g. if it is inside another run's folder."""
    OutputFolder(folder, "model", "--output").require()
    owner = folder.resolve().parent
    if owner != run.resolve() and OutputFolder(owner, "run").is_own:
        raise ConfigError(f"{folder} belongs to the run {owner}, not to {run}; choose another --output.")


def export_gguf(
    model: ModelRequest, output: Path | None, weight_type: str, merge: bool | None, warn: Warn, progress: ReportProgress
) -> Path:
    """Writes a model as a GGUF file (default: RUN/NAME-KIND.gguf) and returns its path.

    Takes a run or a Hugging Face folder. `weight_type` is the data type of matrices. If `merge` is False, the file has
    only the adapter, for a GGUF file of the base model. Raises ConfigError if llama.cpp does not support the model.
    """
    if merge is False:
        return _export_gguf_adapter(model, output, weight_type, warn, progress)
    if merge and not _is_model_folder(Path(model.target)):
        _require_adapter(Path(model.target), open_run(Path(model.target))[0], merge)
    path = _gguf_output(model, output, weight_type, f"{Path(model.target).resolve().name}-{weight_type}.gguf")
    require_file(path, GGUF_SIGNATURE)
    loaded = _open_for_gguf(model, warn, progress)
    progress(f"writing {path}", 0, 0)
    _write_gguf(path, Path(model.target), loaded, loaded.task_class.gguf_parts(loaded), weight_type, warn)
    return path


def _export_gguf_adapter(
    model: ModelRequest, output: Path | None, weight_type: str, warn: Warn, progress: ReportProgress
) -> Path:
    """Writes the adapter of a run or in a folder as a GGUF file (default: RUN/NAME-lora-KIND.gguf)."""
    target = Path(model.target)
    path = _gguf_output(model, output, weight_type, f"{target.resolve().name}-lora-{weight_type}.gguf")
    from sansgpu.models.formats.gguf_adapter import ADAPTER_TYPES, write_gguf_adapter

    if weight_type not in ADAPTER_TYPES:
        raise ConfigError(
            f"--type is {weight_type}, but an adapter's must be {', '.join(ADAPTER_TYPES)}; adapters are small."
        )
    require_file(path, GGUF_SIGNATURE)
    if is_adapter_folder(target):
        base = ModelConfig(name_or_path=model.target, trust_remote_code=model.remote_code)
        words = _description(target, base, "A LoRA adapter, converted by sansgpu.")
        write_gguf_adapter(path, target, pretrained_config(base).to_dict(), weight_type, words)
        return path
    if _is_model_folder(target):
        raise ConfigError(f"{target} has no adapter; remove --no-merge.")
    _require_adapter(target, open_run(target)[0], False)
    loaded = _open_for_gguf(model, warn, progress)
    progress(f"writing {path}", 0, 0)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        loaded.task_class.export_model(loaded, folder, False)
        base_settings = loaded.objective.model.config.to_dict()
        write_gguf_adapter(path, folder, base_settings, weight_type, _about(target, loaded))
    return path


def export_ollama(
    model: ModelRequest, output: Path | None, weight_type: str, warn: Warn, progress: ReportProgress
) -> tuple[Path, str]:
    """Writes a folder with a GGUF file and a Modelfile (default: RUN/ollama-KIND).

    Takes a run or a Hugging Face folder. Returns the folder and the command that adds the model to Ollama. Raises
    ConfigError if llama.cpp does not support the model, or Ollama its chat template.
    """
    from sansgpu.tasks.sft.rendering import with_fixed_date

    run = Path(model.target)
    folder = _gguf_output(model, output, weight_type, f"ollama-{weight_type}")
    _require_model_folder(folder, run)
    loaded = _open_for_gguf(model, warn, progress)
    settings, weights, tokenizer = loaded.task_class.gguf_parts(loaded)
    name, found = model_name(run.resolve().name), None
    if tokenizer.chat_template is not None:
        bos = tokenizer.token(tokenizer.bos_id) or ""
        dated = replace(tokenizer, chat_template=with_fixed_date(tokenizer.chat_template))
        found = chat_format(dated)
        adds_bos = bool(bos) and found.start.startswith(bos)
        if adds_bos:
            found = found.without(bos)  # because Ollama adds it to each conversation
        tokenizer = replace(tokenizer, adds_bos=adds_bos)
    file = f"{name}-{weight_type}.gguf"
    template = COMPLETION if found is None else found.go_template()
    system = None if found is None or found.system is None else _system_message(loaded, found)
    content = modelfile(file, template, stop_texts(tokenizer, found), _parameters(loaded, settings), system)
    if system is not None and not is_expressible(system):
        warn("the Modelfile lacks the system message, which contains three quotation marks or control characters.")
    progress(f"writing {folder}", 0, 0)

    def write(partial: Path) -> None:
        _write_gguf(partial / file, run, loaded, (settings, weights, tokenizer), weight_type, warn)
        write_text(partial / "Modelfile", content)

    write_folder_atomically(folder, write)
    if not _is_model_folder(run):
        write_model_card(run, folder, loaded.source.step, warn, file)
    return folder, shlex.join(["ollama", "create", name, "-f", str(folder / "Modelfile")])


def _system_message(loaded: TrainedModel, found: ChatFormat) -> str | None:
    """Returns the system message with which all conversations of a run's data start, or else the template's own."""
    message = None
    if loaded.source.config is not None and issubclass(loaded.task_class, Chats):
        with suppress(ConfigError):  # the data may have been moved since
            message = loaded.task_class.system_message(loaded.config)
    return message or found.default_system


def _parameters(loaded: TrainedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a Modelfile: the context, and the temperature if the model's author chose one."""
    generation = getattr(loaded.objective.model, "generation_config", None)
    context = settings.get("max_position_embeddings") or settings.get("n_positions") or MAX_CONTEXT
    chosen = {} if generation is None else generation.to_diff_dict()
    return {"num_ctx": min(context, MAX_CONTEXT), **{k: v for k, v in chosen.items() if k == "temperature"}}


def _gguf_output(model: ModelRequest, output: Path | None, weight_type: str, default: str) -> Path:
    """Returns the path to write. Raises ConfigError if the model cannot be exported as GGUF."""
    require("--format gguf", "gguf")
    from sansgpu.models.formats.gguf_reader import TYPES

    run = Path(model.target)
    if weight_type not in TYPES:
        raise ConfigError(f"--type is {weight_type}, but must be one of {', '.join(TYPES)}.")
    if _is_model_folder(run):
        return _require_output(run, output)
    config, _ = open_run(run)
    class_of_run(run, config, "gguf", model.objective)  # before the output is checked
    return _output_of_run(run, output, default)


def _is_model_folder(folder: Path) -> bool:
    is_run = contains_run(folder)
    return not is_run and ((folder / "config.json").is_file() or is_adapter_folder(folder))


def _open_for_gguf(model: ModelRequest, warn: Warn, progress: ReportProgress) -> TrainedModel:
    verb: Verb = "chat" if _is_model_folder(Path(model.target)) else "gguf"
    return open_model(model, verb, warn, progress, computes=False)


def _write_gguf(path: Path, run: Path, loaded: TrainedModel, parts: GGUFParts, weight_type: str, warn: Warn) -> None:
    from sansgpu.models.formats.gguf_file import write_gguf
    from sansgpu.models.formats.gguf_reader import describe_substitutes

    choices = write_gguf(path, *parts, cast("GGUFType", weight_type), _about(run, loaded))
    if "text_config" in parts[0]:
        warn("the file has only the language model; for images or sounds, use the mmproj file of the original model.")
    if (replaced := describe_substitutes(choices)) is not None:
        warn(replaced)


def _about(run: Path, loaded: TrainedModel) -> ModelDescription:
    config, step = loaded.config, loaded.source.step
    if step is not None:
        words = f"Step {step} of a run of task {config.task}, trained with sansgpu."
        return _description(run, config.model, words, Path(config.data.dataset_name).name)
    adapter = "A model with an adapter, merged by sansgpu."
    words = adapter if is_adapter_folder(run) else "A Hugging Face model, converted by sansgpu."
    return _description(run, config.model, words)


def _description(run: Path, model: ModelConfig, words: str, dataset: str | None = None) -> ModelDescription:
    """Returns the metadata of a GGUF file, with names only, so that no local paths are published."""
    from sansgpu.models.formats.gguf_file import ModelDescription

    base = (base_of(model) or model).name_or_path
    return ModelDescription(run.resolve().name, words, dataset, Path(base).name if base else None)


def export_onnx(
    model: ModelRequest, output: Path | None, weight_type: str, warn: Warn, progress: ReportProgress
) -> tuple[Path, OnnxCheck]:
    """Writes an encoder as an ONNX file into a folder (default: RUN/onnx-KIND).

    Takes a run or a Hugging Face folder. Returns the file's path and how close its results are to torch's. Raises
    ConfigError if the model is not an encoder.
    """
    require_onnx()
    target = Path(model.target)
    if weight_type not in FILES:
        raise ConfigError(f"--type is {weight_type}, but with --format onnx must be one of {', '.join(FILES)}.")
    is_run = contains_run(target)
    if not is_run:
        _require_plain_folder(target, model, output)
    folder = _output_of_run(target, output, f"onnx-{weight_type}")
    _require_model_folder(folder, target if is_run else target.resolve().parent)
    with TemporaryDirectory() as temporary:
        source = target
        if is_run:
            source = Path(temporary) / "model"
            _write_encoder(model, source, warn, progress)
        progress(f"writing {folder}", 0, 0)
        check = write_onnx(source, model.target, folder, weight_type, model.remote_code)
    return folder / FILES[weight_type], check


def export_static(
    model: ModelRequest, output: Path | None, dim: int | None, warn: Warn, progress: ReportProgress
) -> Path:
    """Distills an embedding model to static embeddings of `dim` dimensions, and writes them (default: RUN/static).

    Takes a run, a Sentence Transformers folder or any Hugging Face encoder. Raises ConfigError if the model cannot be
    distilled.
    """
    target = Path(model.target)
    is_run = contains_run(target)
    folder = _output_of_run(target, output, "static") if is_run else _require_output(target, output)
    _require_model_folder(folder, target)
    static = static_folder(open_encoder(model, warn, progress), dim, progress)
    progress(f"writing {folder}", 0, 0)
    write_static_folder(static, folder)
    return folder


def _require_plain_folder(target: Path, model: ModelRequest, output: Path | None) -> None:
    """Raises ConfigError unless `target` is a Hugging Face folder, and the options are for one."""
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"{target} is neither a run nor a Hugging Face folder, which have a config.yaml or a config.json; "
            "pass one of them."
        )
    if output is None:
        raise ConfigError(f"{target} is not a run; set --output to the folder to write.")
    if model.snapshot != FINAL or model.objective is not None:
        raise ConfigError(f"{target} is not a run; remove --snapshot and --objective.")


def _write_encoder(model: ModelRequest, folder: Path, warn: Warn, progress: ReportProgress) -> None:
    """Writes a run's snapshot as a Hugging Face folder, with an adapter merged. Raises ConfigError for a decoder."""
    run = Path(model.target)
    config, _ = open_run(run)
    task = class_of_run(run, config, "export", model.objective)
    if can(task, "generate"):
        raise decoder_error(model.target)
    if issubclass(cast(type, task), StaticEmbeddings):
        raise ConfigError(f"{model.target} has static embeddings, which --format onnx does not support; use hf.")
    loaded = open_model(model, "export", warn, progress, computes=False)
    loaded.task_class.export_model(loaded, folder, True)
