"""Keeps the documents that a text classifier, trained by task classify, finds best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError, RunPaths
from sansgpu.config.errors import FINE_TUNING_PACKAGES, require
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted, shown
from sansgpu.data.cleaning import cached_array, chosen_documents, read_array
from sansgpu.data.settings import CorpusDataConfig
from sansgpu.data.shards import cache_key, pieces_with_progress
from sansgpu.data.sources import Source, files_fingerprint
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import PRIVATE_MODE, atomic_write, make_folder
from sansgpu.files.folders import delete_folder, entries_below
from sansgpu.tasks.classify.settings import LabelDataConfig
from sansgpu.tasks.configuration import SCHEMA, load_config
from sansgpu.tasks.inference import load_for_use, predictions
from sansgpu.tasks.registry import TASKS
from sansgpu.tasks.task import ModelSource, TaskClass, TrainedModel

TASK = "classify"
CHARS_PER_TOKEN = 32  # read from the beginning of a document per token that the model reads: several times the usual
SAVED_DOCUMENTS = 1024  # documents whose scores are saved at a time: what a killed process loses at most
NO_TEXT = -math.inf  # the score of documents with only white space


@dataclass(frozen=True)
class QualityFilter:
    """Keeps a share of the documents: those that a text classifier gives the highest scores."""

    folder: Path
    task: TaskClass
    max_length: int  # tokens; longer documents are truncated
    label: str | None  # the score is this label's probability; None: the number that the model predicts
    share: float
    device: torch.device

    @classmethod
    def open(cls, config: Config) -> QualityFilter:
        """Finds the configured classifier. Raises ConfigError if there is none, or it does not know the label."""
        data = CorpusDataConfig.of(config)
        require("data.quality_model", *FINE_TUNING_PACKAGES)
        given = local_path(str(data.quality_model))
        folder = _model_folder(given)
        kinds = (kind for kind, settings in SCHEMA.tasks.kinds.items() if settings.task == TASK)
        task: Any = next((TASKS[kind] for kind in kinds if TASKS[kind].recognizes(str(folder))), None)
        if task is None:
            raise _wrong_model(given, "is not a text classifier")
        model = LabelDataConfig.of(task.config_of_model(ModelSource(str(folder))))
        _require_label(model, data)
        length = (load_config(RunPaths(given).config, trusted=False)[0].data if given != folder else model).max_length
        assert length is not None  # it has a default
        return cls(folder, task, length, data.quality_label, data.quality_share, config.get_effective_device())

    def best_documents(self, source: Source, cache: Path, progress: ReportProgress) -> tuple[Source, str]:
        """Keeps the documents with the highest scores, and of equal ones the first. Also returns a message.

        Scores are computed once and cached. Raises ConfigError if one is not a number.
        """
        key = cache_key("scores", source.fingerprint, self._fingerprint(), self.max_length, self.label)
        folder, parts = cache / "scores" / key, cache / "scores" / f"{key}.parts"
        scores = cached_array(folder, lambda: self._scores(source, parts, progress))
        delete_folder(parts)
        kept = math.ceil(self.share * len(scores))
        best = np.argsort(-scores, kind="stable")[:kept]
        chosen = np.zeros(len(scores), bool)
        chosen[best] = True
        note = f"data.quality_model: {kept:,} of {counted(len(scores), 'document')} kept"
        if kept and scores[best[-1]] > NO_TEXT:
            what = "score" if self.label is None else f"probability of {shown(self.label)}"
            note += f", whose {what} is {scores[best[-1]]:.4g} or more"
        return chosen_documents(source, chosen), note

    def _fingerprint(self) -> str:
        files = {str(path.relative_to(self.folder)): path for path in sorted(entries_below(self.folder))}
        return files_fingerprint({name: path for name, path in files.items() if path.is_file()}, (CHARS_PER_TOKEN,))

    def _scores(self, source: Source, parts: Path, progress: ReportProgress) -> np.ndarray:
        """Returns the score of each document, (D,) float32. Files in `parts` save them until all are complete."""
        make_folder(parts, PRIVATE_MODE)
        model: TrainedModel | None = None
        scores, beginnings = [np.empty(0, np.float32)], self._beginnings(source, progress)
        while texts := list(islice(beginnings, SAVED_DOCUMENTS)):
            file = parts / f"{len(scores):06d}.npy"
            if not file.is_file():
                model = model or self._load()
                with atomic_write(file) as partial, partial.open("wb") as opened:
                    np.save(opened, self._predicted(model, texts))
            scores.append(read_array(file))
        return np.concatenate(scores)

    def _load(self) -> TrainedModel:
        model = load_for_use(self.task, ModelSource(str(self.folder)), self.device, "fp32")
        return replace(model, config=model.config.with_values("data", max_length=self.max_length))

    def _predicted(self, model: TrainedModel, texts: list[str]) -> np.ndarray:
        scores = np.full(len(texts), NO_TEXT, np.float32)
        with_text = [number for number, text in enumerate(texts) if text.strip()]
        rows = ({"text": texts[number]} for number in with_text)
        for number, row in zip(with_text, predictions(model, rows), strict=True):
            scores[number] = row["score"] if self.label is None else row["scores"][self.label]
        if np.isnan(scores).any():
            raise ConfigError(f"{self.folder} predicts values that are not numbers; choose another data.quality_model.")
        return scores

    def _beginnings(self, source: Source, progress: ReportProgress) -> Iterator[str]:
        """Yields the beginning of each document, from which the tokenizer takes the tokens that the model reads."""
        text, limit = "", CHARS_PER_TOKEN * self.max_length
        for piece in pieces_with_progress(source, "scoring documents", progress):
            text += piece.text[: limit - len(text)]
            if piece.ends_document:
                yield text
                text = ""


def _model_folder(folder: Path) -> Path:
    """Returns a model's folder, which is final/ of a run. Raises ConfigError if it does not exist."""
    paths = RunPaths(folder)
    if not folder.is_dir():
        raise _wrong_model(folder, "is not a folder")
    if not paths.config.is_file():
        return folder
    if not paths.final.is_dir():
        raise _wrong_model(folder, "is a run that has not finished, so it has no final/")
    return paths.final


def _wrong_model(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder} {problem}; set data.quality_model to a finished run of task {TASK}, or to the folder of a "
        "transformers model for sequence classification."
    )


def _require_label(model: LabelDataConfig, data: CorpusDataConfig) -> None:
    """Raises ConfigError unless the data's quality_label is a label of the model, or missing for a regression."""
    name, label = data.quality_model, data.quality_label
    if model.label_kind == "regression":
        if label is not None:
            raise ConfigError(f"{name} predicts a number and has no labels; remove data.quality_label.")
    elif label not in (model.labels or ()):
        known = ", ".join(model.labels or ())
        raise ConfigError(f"data.quality_label is {shown(label)}, but must be a label of {name}: {known}.")
