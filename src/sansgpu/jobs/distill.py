"""Writes a teacher's predictions for a corpus, to be used by `training.distillation`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from filelock import FileLock, Timeout

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.schema import Config
from sansgpu.config.training import Precision, TrainingConfig
from sansgpu.config.wording import counted
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.teacher_folder import (
    OF_TARGET,
    TeacherFolder,
    create_teacher_folder,
    is_teacher_folder,
    open_teacher_folder,
    record_type,
)
from sansgpu.data.tokenizer import Tokenizer, load_tokenizer
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import LOCK, require_no_links
from sansgpu.kernels.roofline import resolve_precision
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.disk import free_disk_bytes
from sansgpu.machine.distributed.world import require_one_process
from sansgpu.machine.probe import has_bf16_tensors, mixed_precision
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.models.huggingface.tokenizer_files import save_tokenizer
from sansgpu.models.modules import narrow_matrices, set_matmul_precision
from sansgpu.models.teacher import Teacher
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.distillation import Lesson, vocabulary_fingerprint
from sansgpu.tasks.fine_tuning import PASS_TOKENS
from sansgpu.tasks.registry import TASKS
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model

DEFAULT_LENGTH = {"pretrain": 512, "sft": 1024}  # maximum tokens per example, unless the teacher's context is shorter
NAMES = ("teacher", "data")  # settings that may differ when the command is repeated, because files may have moved


@dataclass(frozen=True)
class DistillRequest:
    """Arguments of the command. `task` is the task of the students, pretrain or sft."""

    model: ModelRequest
    data: str
    output: Path
    top_k: int = 32
    task: str = "pretrain"
    max_length: int | None = None
    text_column: str | None = None


def distill(request: DistillRequest, warn: Warn, progress: ReportProgress) -> dict[str, Any]:
    """Writes a folder of predictions, or completes an unfinished one; returns a summary. Raises ConfigError."""
    require_one_process("distill")
    if request.task not in DEFAULT_LENGTH:
        raise ConfigError(f"--task is {request.task}, but must be {' or '.join(DEFAULT_LENGTH)}.")
    _require_output(request.output)
    verb: Any = "distill" if request.task == "pretrain" else "chat"  # chat models have the template of conversations
    loaded = open_model(replace(request.model, precision=_chosen_precision(request)), verb, warn, progress)
    teacher = loaded.task_class.teacher(loaded)
    config = _config(request, teacher)
    tokenizer = _tokenizer(request, loaded)
    backend = tokenizer.backend if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
    vocabulary = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    if request.top_k >= vocabulary:
        raise ConfigError(
            f"--top-k {request.top_k} must be less than the size of the vocabulary, {counted(vocabulary, 'token')}; "
            "lower it."
        )
    task: Any = TASKS[request.task]
    lesson = task.lesson(config, tokenizer, cache_dir(None), progress)
    for note in lesson.notes:
        warn(note)
    settings = {
        "task": request.task,
        "teacher": request.model.target,
        "data": request.data,
        "precision": _precision(loaded),
        "weights": weights_sha256(loaded.objective.model),
        "corpus": lesson.fingerprint,
        "vocabulary": vocabulary_fingerprint(backend),
        "vocab_size": vocabulary,
        "top_k": request.top_k,
        "max_length": config.data.max_length,
    }
    with write_failures_as(SansGPUError, request.output, "--output"):
        folder = _folder(request, settings, lesson, tokenizer)
        with _locked(folder.root):
            folder = _write_shards(folder, teacher, lesson, progress)
    tokens = int(folder.counts.sum())
    size = tokens * folder.record.itemsize
    return {"output": str(request.output), **settings, "tokens": tokens, "shards": len(folder.shards), "bytes": size}


def _require_output(output: Path) -> None:
    require_no_links([output])
    if output.is_dir() and any(output.iterdir()) and not is_teacher_folder(output):
        raise ConfigError(f"{output} contains files that `sansgpu distill` did not write; choose another --output.")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a folder; choose another --output.")


def _config(request: DistillRequest, teacher: Teacher) -> Config:
    """Returns the configuration for reading and tokenizing the corpus."""
    room = None if teacher.context is None else teacher.context - len(teacher.before)
    length = request.max_length or min(DEFAULT_LENGTH[request.task], room or DEFAULT_LENGTH[request.task])
    if room is not None and length > room:
        raise ConfigError(
            f"--max-length {length} is longer than the teacher's context of {counted(room, 'token')}; lower it."
        )
    data = {"dataset_name": request.data, "max_length": length, "text_column": request.text_column}
    if request.task == "sft" and request.text_column is not None:
        raise ConfigError("--text-column has no effect with --task sft; remove it.")
    model = {"name_or_path": request.model.target} if request.task == "sft" else {"max_seq_len": max(length, 2)}
    return as_config({"task": request.task, "model": model, "data": data}, "the request")


def _tokenizer(request: DistillRequest, loaded: TrainedModel) -> Any:
    """Returns the teacher's tokenizer. For task pretrain, it starts documents with the end token, as in pretraining."""
    tokenizer = loaded.tokenizer
    if request.task == "sft":
        return tokenizer
    if isinstance(tokenizer, Tokenizer):
        return Tokenizer(tokenizer.backend, tokenizer.end_of_text)
    assert loaded.source.tokenizer is not None
    return load_tokenizer(loaded.source.tokenizer)


def _chosen_precision(request: DistillRequest) -> Precision:
    """Returns the requested precision. auto becomes that of a folder that was begun before, maybe elsewhere."""
    chosen = request.model.precision
    if chosen == "auto" and is_teacher_folder(request.output):
        begun = open_teacher_folder(request.output).settings["precision"]
        return next((known for known in get_args(Precision) if known == begun), chosen)
    return chosen


def _precision(loaded: TrainedModel) -> str:
    return loaded.precision if loaded.is_precision_chosen else resolve_precision(TrainingConfig(), loaded.device)


def _folder(request: DistillRequest, settings: dict[str, Any], lesson: Lesson, tokenizer: Any) -> TeacherFolder:
    """Creates the folder, or opens an existing one. Raises ConfigError if that was written with different settings."""
    root = request.output
    if not is_teacher_folder(root):
        _require_space(root, int(lesson.counts.sum()), settings)

        def save(folder: Path) -> None:
            tokenizer.save(folder) if isinstance(tokenizer, Tokenizer) else save_tokenizer(tokenizer, folder)

        create_teacher_folder(root, settings, {**lesson.arrays, "counts": lesson.counts}, save)
    folder = open_teacher_folder(root)
    for key, value in settings.items():
        if key not in NAMES and folder.settings.get(key) != value:
            raise ConfigError(
                f"{root} was written with a different {key.replace('_', ' ')} ({folder.settings.get(key)}, now "
                f"{value}); choose another --output, or delete it."
            )
    return folder


def _require_space(root: Path, tokens: int, settings: dict[str, Any]) -> None:
    needed = tokens * record_type(settings["top_k"], settings["vocab_size"]).itemsize
    free = free_disk_bytes(root.absolute())
    if needed > free:
        raise ConfigError(
            f"the predictions need {needed / 1e9:.1f} GB, but {root.absolute().parent} has {free / 1e9:.1f} GB free; "
            "lower --top-k or choose another --output."
        )


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Locks a folder. Raises ConfigError if another process is writing to it."""
    try:
        with FileLock(root / LOCK, timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"{root} is being written by another process; wait for it, or stop it first.") from None


def _write_shards(folder: TeacherFolder, teacher: Teacher, lesson: Lesson, progress: ReportProgress) -> TeacherFolder:
    """Predicts the shards that are missing or damaged."""
    precision = folder.settings["precision"]
    if has_bf16_tensors(precision):
        narrow_matrices(teacher.model)
    set_matmul_precision(teacher.model, precision)
    done, total = 0, int(folder.counts.sum())
    with torch.no_grad(), mixed_precision(torch.device("cpu"), precision):
        for number, (first, stop) in enumerate(folder.shard_examples()):
            if not folder.has_shard(number):
                parts: list[np.ndarray] = []
                size = max(1, PASS_TOKENS // folder.settings["max_length"])
                for start in range(first, stop, size):
                    parts.append(_records(folder, teacher, lesson.sequences(start, min(start + size, stop))))
                    progress("distilling", done + sum(map(len, parts)), total, "token")
                folder = folder.write_shard(number, np.concatenate(parts))
            done += int(folder.counts[first:stop].sum())
            progress("distilling", done, total, "token")
    return folder


def _records(folder: TeacherFolder, teacher: Teacher, examples: PackedSequences) -> np.ndarray:
    settings = folder.settings
    predicted = teacher.predict(
        examples.tokens, examples.lengths, examples.targets, settings["top_k"], settings["vocab_size"]
    )
    records = np.zeros(len(predicted[0]), folder.record)
    for name, values in zip(("ids", "log_probabilities", OF_TARGET), predicted, strict=True):
        if name in folder.fields:
            records[name] = values.numpy()
    return records
