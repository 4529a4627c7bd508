"""Continues masked language modeling (MLM) of Hugging Face encoders."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.events.progress import ReportProgress
from sansgpu.models.formats.folders import has_architecture
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, save_tokenizer
from sansgpu.tasks.base import TRAINING, ModelUse
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask
from sansgpu.tasks.graph.batch import GraphBatch, MaskRules, mask_example
from sansgpu.tasks.graph.data import GraphCorpus, graph_corpus
from sansgpu.tasks.graph.evaluate import EVALUATION_EXAMPLES, masked_evaluation
from sansgpu.tasks.graph.leafy import LeafyExample
from sansgpu.tasks.graph.masked_prediction import (
    MaskedEvaluation,
    Masking,
    MetricSums,
    majority_of,
    mask_rules,
    masked_metrics,
    validation_masking,
)
from sansgpu.tasks.graph.settings import MASKED, MaskedDataConfig
from sansgpu.tasks.graph.tokenizer import GraphCodec, from_pretrained
from sansgpu.tasks.task import EvaluationRequest, Sums, TrainedModel


class MaskedObjective(FineTuning):
    """A transformers encoder with its masked LM head, and its loss."""

    head_type = "masked"

    def __init__(self, config: Config, use: ModelUse = TRAINING) -> None:
        super().__init__(config, use)
        self._sums = MetricSums()

    def masked_logits(self, batch: GraphBatch) -> torch.Tensor:
        return self.unpadded.masked_lm_logits(batch.tokens, batch.lengths, batch.targets != IGNORE)

    def query_sums(self, batch: GraphBatch) -> Sums:
        return Sums()  # plain text has no entity queries

    def summed_loss(self, batch: GraphBatch) -> torch.Tensor:
        """Computes the cross-entropy summed over masked tokens, ()."""
        targets = batch.targets[batch.targets != IGNORE]
        logits = self.masked_logits(batch).float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        hits = float((logits.argmax(dim=1) == targets).sum())
        self._sums.add_target("mlm", 1.0, float(loss.detach()), float(len(targets)), hits=hits)
        return loss

    def step_sums(self) -> Sums:
        return self._sums.take()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return masked_metrics(sums)


class MaskedLM(FineTuningTask):
    """`task: graph` with `model.name_or_path`."""

    settings = MASKED
    objective_class = MaskedObjective

    def __init__(self, config: Config, corpus: GraphCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch, MaskedDataConfig.of(config).mask_ratio)
        rules, seed = mask_rules(config, corpus.codec.tokenizer), config.training.seed
        self._masking = Masking(corpus.train, rules, seed, self.objective.ordered)
        held = validation_masking(corpus.validation, rules, seed, self.objective.ordered)
        self.evaluator = MaskedEvaluation(self.objective, held, majority_of(corpus.train))

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, GraphCorpus]:
        """Reads and tokenizes texts. Raises ConfigError if there are too few, or windows are too long for the model."""
        tokenizer = load_tokenizer_of(config.model)
        places = getattr(pretrained_config(config.model), "max_position_embeddings", config.roots)
        longest = min(int(tokenizer.model_max_length), int(places))
        if config.roots > longest:
            raise ConfigError(
                f"data.max_length {config.roots} exceeds the maximum of {longest} tokens of "
                f"{config.model.name_or_path}; lower it."
            )
        return config, graph_corpus(config, cache, progress, GraphCodec(from_pretrained(tokenizer), ()))

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> GraphBatch:
        ids = np.arange(cls.costs(config).shape.vocabulary)
        rules = MaskRules(MaskedDataConfig.of(config).mask_ratio, 1, 0.0, 0, 0, ids)
        examples = [
            LeafyExample(t, np.ones(len(t), bool), []) for t in cls.objective_class.random_tokens(config, size, tokens)
        ]
        masked_examples = [mask_example(e, rules, config.training.seed, 0, number) for number, e in enumerate(examples)]
        return GraphBatch.of(examples, masked_examples)

    def batch(self, step: int, total_steps: int | None = None) -> GraphBatch:
        return self._masking.of_step(step, self._effective_batch)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer_of(self.config.model)

    def save_tokenizer(self, folder: Path) -> None:
        save_tokenizer(self._tokenizer, folder)

    def export(self, folder: Path) -> None:
        self.objective.export_to(self._tokenizer, folder)

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return has_architecture(local_path(target), "ForMaskedLM")

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return EVALUATION_EXAMPLES

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> MaskedEvaluation:
        return masked_evaluation(loaded, GraphCodec(from_pretrained(loaded.tokenizer), ()), request)
