"""Base classes with defaults for everything that a task does not have to implement itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from sansgpu.config import ConfigError, TaskSettings
from sansgpu.config.schema import Config
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.order import batch_indices
from sansgpu.data.tokenizer import load_tokenizer
from sansgpu.models.costing import Costs
from sansgpu.models.formats.folders import export_module
from sansgpu.models.formats.weights import set_weights
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.module_costs import ModuleCosts, ModuleShape, module_shape
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.task import EvaluationRequest, Evaluator, ModelSource, Objective, Sums, TrainedModel, Verb

EXPECTED_CHARACTERS = 512  # vocabulary of a character tokenizer, including the 256 bytes
VOCABULARY_MULTIPLE = 64  # vocabulary sizes are rounded up to a multiple of this, for fast matmuls


def with_vocabulary_of(config: Config, tokens: int) -> Config:
    """Sets model.vocab_size for a tokenizer of `tokens` tokens. Raises ConfigError if it is set but too small."""
    size = config.model.vocab_size
    if size is None:
        return _sized(config, tokens)
    if size < tokens:
        remedy = f"set data.vocab_size to {size} too, or remove model.vocab_size"
        if config.data.tokenizer != "bpe" or tokens > config.data.vocab_size:  # its size is not data.vocab_size
            remedy = f"raise it to {tokens} or remove it"
        raise ConfigError(
            f"model.vocab_size {size} is smaller than the tokenizer's vocabulary of {tokens} tokens; {remedy}."
        )
    return config


def with_expected_vocabulary(config: Config) -> Config:
    """Sets model.vocab_size to an estimate, without reading the data."""
    if config.model.vocab_size:
        return config
    return _sized(config, EXPECTED_CHARACTERS if config.data.tokenizer == "char" else config.data.vocab_size)


def _sized(config: Config, vocabulary: int) -> Config:
    size = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config.with_values("model", vocab_size=size)


@dataclass(frozen=True)
class ModelUse:
    """Says what a pretrained model is loaded for, which is training unless a field says otherwise."""

    random: bool = False  # the weights are random instead of pretrained
    layers: int | None = None  # another number of layers, if the weights are random
    frozen: bool = False  # for inference only, so that quantized matrices stay quantized
    computes: bool = True  # if False, only the weights are read, so that the layers stay those of transformers


TRAINING = ModelUse()


class TaskDefaults:
    """Defaults for `TaskBase` and `ComposedTask`."""

    settings: ClassVar[TaskSettings]
    verbs_for_any_model: ClassVar[tuple[Verb, ...]] = ()
    verbs_without_kernels: ClassVar[tuple[Verb, ...]] = ()
    has_windows: ClassVar[bool] = False
    corpus: Any
    model: Any  # nn.Module

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        return with_expected_vocabulary(config)

    @classmethod
    def recorded_settings(cls, config: Config, recorded: dict[str, Any]) -> list[str]:
        return []

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return False

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 8

    @classmethod
    def kept_tokens(cls, corpus: Any) -> int:
        return 0

    def sample(self, prompt: str, tokens: int, sampling: Sampling) -> str:
        return ""

    def save_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)


class ObjectiveBase:
    """Base of objectives that have no training metrics other than the loss."""

    def step_sums(self) -> Sums:
        return {}

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return {}


class TaskBase(TaskDefaults, ObjectiveBase):
    """Base of custom tasks in a single class, which is also their objective and evaluator.

    A subclass defines `settings`, `model_class`, `prepare`, `loss`, `random_batch`, `evaluate` and `metrics`; see
    docs/examples/sentence_order.py. The corpus is a `TokenizedCorpus`. Without one, the task is only a model and its
    loss.
    """

    # Builds the model. Initial weights must depend on `training.seed`, not on torch's global random state.
    model_class: ClassVar[Callable[[Config], nn.Module]]

    def __init__(self, config: Config, corpus: Any = None, effective_batch: int = 1) -> None:
        self.config, self.corpus, self._effective_batch = config, corpus, effective_batch
        self.notes: Any = ()
        self.model = type(self).model_class(config)
        self.evaluator: Any = self  # an Evaluator
        if corpus is not None:
            self.fingerprint: str = corpus.fingerprint
            costs = replace(self.costs(config), example_tokens=corpus.example_tokens)
            self.flops_per_token: float = costs.work(1).needed

    @classmethod
    def new_objective(cls, config: Config, layers: int | None = None) -> Any:
        return cls(with_layers(config, layers))

    @classmethod
    def costs(cls, config: Config) -> Costs:
        shape = _shape(cls.model_class, config.model_dump_json())
        return ModuleCosts(config.model, config.training, config.window, config.window, shape=shape)

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        part = self.corpus.train
        indices = batch_indices(self.config.training.seed, step, len(part), self._effective_batch)
        batch: ExampleBatch = part.batch(indices)
        return batch

    def between_blocks(self, callback: Callable[[], None]) -> None:
        """Ignores `callback`, so that it is only called between micro-batches."""

    def validation_batches(self, size: int) -> Iterator[ExampleBatch]:
        part = self.corpus.validation
        for start in range(0, len(part), size):
            yield part.batch(np.arange(start, min(start + size, len(part))))

    def export(self, folder: Path) -> None:
        export_module(self.model, self.config.model, self.corpus.tokenizer, folder)

    @classmethod
    def load(cls, source: ModelSource) -> tuple[Any, Any, Config]:
        """Loads a run."""
        assert source.config is not None
        assert source.snapshot is not None
        assert source.tokenizer is not None
        task = cls.new_objective(source.config)
        set_weights(task.model, source.snapshot.weights(), source.snapshot.folder)
        return task, load_tokenizer(source.tokenizer), source.config

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> Evaluator:
        if request.data is not None:
            raise ConfigError(
                f"task {loaded.config.task} can be evaluated only on its validation split; remove --data."
            )
        loaded.objective.corpus = request.own_corpus()
        evaluator: Evaluator = loaded.objective
        return evaluator

    @classmethod
    def export_model(cls, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        export_module(loaded.objective.model, loaded.config.model, loaded.tokenizer, folder)


class ComposedTask(TaskDefaults):
    """Base of tasks composed of an objective (the model with its loss) and an evaluator.

    Both can be used without the task's training data.
    """

    def __init__(self, config: Config, objective: Objective, corpus: Any, effective_batch: int) -> None:
        """Subclasses must set `evaluator`, `fingerprint` and `flops_per_token`."""
        self.config, self.objective, self.corpus = config, objective, corpus
        self._effective_batch = effective_batch
        self.model = objective.model
        self.notes = getattr(objective, "notes", ())

    def loss(self, batch: Any) -> torch.Tensor:
        return self.objective.loss(batch)

    def step_sums(self) -> Sums:
        return self.objective.step_sums()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return self.objective.step_metrics(sums)

    def between_blocks(self, callback: Callable[[], None]) -> None:
        self.objective.between_blocks(callback)


def with_layers(config: Config, layers: int | None) -> Config:
    """Returns `config` with a different number of layers, or unchanged if `layers` is None."""
    if layers is None:
        return config
    return config.with_values("model", n_layers=layers)


@lru_cache(maxsize=8)
def _shape(build: Callable[[Config], nn.Module], config_json: str) -> ModuleShape:
    config = as_config(json.loads(config_json))
    with torch.device("meta"):
        model = build(config)
    assert config.model.vocab_size is not None
    return module_shape(model, config.model.d_model, config.model.n_heads, config.model.vocab_size)
