"""The abilities of a task's models, each needed by a command: the class of a task derives from one class for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sansgpu.config import Config
from sansgpu.data.rows import SourceRow
from sansgpu.data.shards import ReportProgress
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.formats.weights import StoredTensor
from sansgpu.models.generation.generate import BatchModel
from sansgpu.tasks.task import TrainedModel, Verb

if TYPE_CHECKING:  # the latter imports transformers, which takes seconds
    from sansgpu.models.teacher import Teacher
    from sansgpu.tasks.distillation import Lesson

# config.json, the weights as transformers names them, and the tokenizer
GGUFParts = tuple[dict[str, Any], Mapping[str, torch.Tensor | StoredTensor], TokenizerParts]


class Predicts:
    """Answers rows, for `sansgpu predict`."""

    row_forms: ClassVar[tuple[tuple[str, ...], ...]] = ()  # columns of a single row that flags give, for each form
    # A class method of a TrainedModel, rows and the task's own options that returns a prediction for each row. Raises
    # ConfigError.
    predict: ClassVar[Callable[..., Sequence[dict[str, Any]]]]

    @classmethod
    def rows_to_predict(cls, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        """Returns the rows of a dataset that get a prediction each."""
        return rows

    @staticmethod
    def in_words(prediction: dict[str, Any]) -> str:
        """Returns a prediction as text, by default its score."""
        return f"{prediction['score']:.4f}"


class Generates(ABC):
    """Completes prompts."""

    @classmethod
    @abstractmethod
    def batch_model(cls, loaded: TrainedModel) -> BatchModel:
        """Returns the model to complete prompts. It cannot be trained further."""


class Chats(Generates):
    """Answers conversations."""


class Embeds:
    """Turns texts into vectors."""


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
    """Finds triples in texts."""


class ExportsGGUF(ABC):
    """Writes GGUF files."""

    @classmethod
    @abstractmethod
    def gguf_parts(cls, loaded: TrainedModel) -> GGUFParts:
        """Returns the contents of a GGUF file."""


class Teaches(ABC):
    """Predicts texts for other models to learn from, for `sansgpu distill`."""

    @classmethod
    @abstractmethod
    def lesson(cls, config: Config, tokenizer: Any, cache: Path, progress: ReportProgress) -> Lesson:
        """Reads and tokenizes the data as `prepare` does, for a teacher to predict. Raises ConfigError."""

    @classmethod
    @abstractmethod
    def teacher(cls, loaded: TrainedModel) -> Teacher:
        """Returns a model whose predictions others learn."""


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
    """Returns whether a command can be used with the models of a task's class."""
    return issubclass(task_class, CAPABILITIES[verb])
