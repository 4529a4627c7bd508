"""Capabilities of tasks. The class of a task inherits from one class here per command that it supports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from sansgpu.config.schema import Config
from sansgpu.data.rows import SourceRow
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.group import Group
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.formats.weights import StoredTensor
from sansgpu.tasks.task import TrainedModel, Verb

if TYPE_CHECKING:  # only some commands need these modules
    from sansgpu.models.generation.generate import BatchModel
    from sansgpu.models.scoring import Scorer
    from sansgpu.models.teacher import Teacher
    from sansgpu.tasks.distillation import Lesson

# (config.json, weights under transformers' names, tokenizer)
GGUFParts = tuple[dict[str, Any], Mapping[str, torch.Tensor | StoredTensor], TokenizerParts]


class Predicts:
    """Makes a prediction for each row, for `sansgpu predict`."""

    flag_columns: ClassVar[tuple[tuple[str, ...], ...]] = ()  # sets of columns that flags may give for one row
    # Class method that takes a TrainedModel, rows and the task's own options, and returns a prediction for each row.
    # Raises ConfigError.
    predict: ClassVar[Callable[..., Sequence[dict[str, Any]]]]

    @classmethod
    def rows_to_predict(cls, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        """Converts the rows of a dataset to the rows to predict, which may be more."""
        return rows

    @staticmethod
    def in_words(prediction: dict[str, Any]) -> str:
        """Formats a prediction as text, by default its score."""
        return f"{prediction['score']:.4f}"


class Generates(ABC):
    """Generates text after a prompt, and computes the probabilities of given texts."""

    @classmethod
    @abstractmethod
    def batch_model(cls, loaded: TrainedModel) -> BatchModel:
        """Returns the model for generating text. It cannot be trained further."""

    @classmethod
    @abstractmethod
    def scorer(cls, loaded: TrainedModel) -> Scorer:
        """Returns the model for computing the probabilities of texts."""


class Chats(Generates):
    """Generates the next answer in a conversation."""

    @classmethod
    @abstractmethod
    def system_message(cls, config: Config) -> str | None:
        """Returns the system message with which all conversations of a run's data start, or None if they differ.

        Raises ConfigError if the data cannot be read.
        """


def ignore_count(done: int) -> None:
    """Ignores the number of finished texts. Used as a progress callback."""


class Embeds(ABC):
    """Computes text embeddings. Its objectives have a `width` and the `layout` of a Sentence Transformers model."""

    @classmethod
    @abstractmethod
    def encode_texts(
        cls, loaded: TrainedModel, texts: Sequence[str], encoded: Callable[[int], None] = ignore_count, prompt: str = ""
    ) -> np.ndarray:
        """Returns the embeddings of texts, (S, D) float32, from a model that `jobs.embed.open_encoder` has loaded.

        Reports progress by calling `encoded` with the number of finished texts. Prepends `prompt` to each text. Raises
        ConfigError if a text cannot be embedded.
        """


class RanksEntities(ABC):
    """Ranks the entities of a knowledge graph, for `sansgpu eval --link-prediction`."""

    @classmethod
    @abstractmethod
    def rank_entities(
        cls,
        loaded: TrainedModel,
        data: str | None,
        limit: int | None,
        progress: ReportProgress,
        warn: Callable[[str], None],
    ) -> dict[str, Any]:
        """Returns metrics of link prediction."""


class ExtractsTriples:
    """Extracts triples from texts."""


class ExportsGGUF(ABC):
    """Can be exported as a GGUF file."""

    @classmethod
    @abstractmethod
    def gguf_parts(cls, loaded: TrainedModel) -> GGUFParts:
        """Returns the content of the GGUF file."""


class Teaches(ABC):
    """Can be the teacher of other models, for `sansgpu distill`."""

    @classmethod
    @abstractmethod
    def lesson(cls, config: Config, tokenizer: Any, cache: Path, progress: ReportProgress) -> Lesson:
        """Reads and tokenizes the data like `prepare`, for a teacher to predict. Raises ConfigError."""

    @classmethod
    @abstractmethod
    def teacher(cls, loaded: TrainedModel) -> Teacher:
        """Returns the model as a teacher."""


CAPABILITIES: dict[Verb, type] = {
    "evaluate": object,
    "export": object,
    "rank": RanksEntities,
    "generate": Generates,
    "complete": Generates,
    "chat": Chats,
    "predict": Predicts,
    "extract": ExtractsTriples,
    "embed": Embeds,
    "gguf": ExportsGGUF,
    "distill": Teaches,
}


def can(task_class: Any, verb: Verb) -> bool:
    """Returns whether a command supports the models of a task."""
    return issubclass(task_class, CAPABILITIES[verb])


@runtime_checkable
class FreezesLayers(Protocol):
    """A task whose lower layers can stop learning during a run."""

    def freeze_layers(self) -> tuple[int, int]:
        """Freezes them, and returns the number of frozen blocks and of all blocks."""


@dataclass(frozen=True)
class ActivationOwner:
    """A run that has trained its frozen layers, so that no other run can use what they compute."""

    folder: Path
    is_interrupted: Callable[[], bool]  # if it returns True, the run will end and needs no activations


@runtime_checkable
class KeepsActivations(Protocol):
    """A task that can compute the outputs of a model's frozen layers once for all data."""

    def keep_activations(
        self,
        device: torch.device,
        precision: str,
        cache: Path,
        progress: ReportProgress,
        group: Group,
        owner: ActivationOwner | None = None,
    ) -> str | None:
        """Computes them, or reads them from the cache. Returns why they are not kept, if so. Raises ConfigError.

        `owner` is the run, if it has trained the layers.
        """

    def forget_activations(self) -> None:
        """Runs the frozen layers again from now on, because their weights have changed."""

    def delete_activations(self) -> None:
        """Deletes the files that only this run uses, at its end."""
