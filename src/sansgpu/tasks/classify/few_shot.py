"""Few-shot classification: trains an encoder on pairs of texts, then fits a linear classifier on the embeddings.

The method is SetFit's (arXiv 2209.11055). Unlike SetFit, which encodes each pair separately, a step encodes each of its
texts once and compares it with all others.

B texts, D width of an embedding, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.order import steps_per_epoch
from sansgpu.data.sequences import PackedSequences
from sansgpu.events.progress import ReportProgress
from sansgpu.kernels.linear import linear
from sansgpu.machine.probe import one_thread
from sansgpu.models.huggingface.sentence_embedding import LINEAR_HEAD, LinearHead, pool, read_linear_head, write_layout
from sansgpu.tasks.classify.data import LabeledCorpus
from sansgpu.tasks.classify.objective import ClassifyObjective
from sansgpu.tasks.classify.settings import FEW_SHOT
from sansgpu.tasks.classify.task import Classify
from sansgpu.tasks.embed.objective import embedding_layout
from sansgpu.tasks.fine_tuning import FineTuning, StepWideTask
from sansgpu.tasks.task import ModelSource

INVERSE_REGULARIZATION = 1.0  # `C` of scikit-learn's LogisticRegression; 1 is the default there
FIT_ITERATIONS = 500
_WEIGHT, _BIAS = "head_weight", "head_bias"  # buffers of the model, so that they are part of snapshots


class FewShotObjective(ClassifyObjective):
    """An encoder with a loss over all pairs of texts in a step, and a linear classifier fitted to the embeddings."""

    head_type = "none"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.layout = replace(embedding_layout(self.config, self.unpadded.causal), normalize=True)
        if self.layout.dense:
            raise ConfigError(
                f"{self.config.model.name_or_path} has Dense modules, which training.few_shot does not support; choose "
                "another model, or set training.few_shot to false."
            )
        self.width, labels = int(self.model.config.get_text_config().hidden_size), len(self.head.labels)
        self.set_head(LinearHead(torch.zeros(labels, self.width), torch.zeros(labels)))

    def set_head(self, head: LinearHead) -> None:
        self.model.register_buffer(_WEIGHT, head.weight)
        self.model.register_buffer(_BIAS, head.bias)

    def outputs(self, batch: PackedSequences) -> torch.Tensor:
        """Returns the normalized embeddings of the texts, (B, D) fp32."""
        with self.forward_pass():
            return pool(self.unpadded.hidden_states(batch.tokens, batch.lengths), batch.lengths, self.layout)

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[PackedSequences]) -> torch.Tensor:
        labels = torch.cat([batch.targets[:, 0] for batch in batches])
        known = torch.cat([batch.has_target() for batch in batches])
        return pair_loss(outputs[known], labels[known]) * known.sum()

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        return self.step_loss(self.outputs(batch), [batch])

    def logits(self, batch: PackedSequences) -> torch.Tensor:
        vectors = self.outputs(batch)
        with torch.autocast(vectors.device.type, enabled=False):
            logits: torch.Tensor = linear(vectors, getattr(self.model, _WEIGHT)) + getattr(self.model, _BIAS)
        return logits

    def export_to(self, tokenizer: Any, folder: Path, merge: bool | None = None) -> None:
        """Writes a Sentence Transformers folder, with the classifier in a separate file."""
        if merge is False:
            raise ConfigError("the classifier of a few-shot run works only with the merged model; remove --no-merge.")
        head = LinearHead(*(self.model._buffers.pop(name).cpu() for name in (_WEIGHT, _BIAS)))  # type: ignore[union-attr]
        try:
            self._exported_head = head
            super().export_to(tokenizer, folder, merge)
        finally:
            self.set_head(head)

    def write_more(self, folder: Path) -> None:
        write_layout(self.layout, self.width, folder)
        self._exported_head.save(folder)


class FewShot(StepWideTask, Classify):
    """`task: classify` with `training.few_shot`."""

    settings = FEW_SHOT
    objective_class = FewShotObjective

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, LabeledCorpus]:
        config, corpus = super().prepare(config, cache, progress)
        found = np.unique(corpus.train.targets)
        if len(found) == 1:
            raise ConfigError(
                f"{config.data.dataset_name}: all training rows have the label {corpus.labels.names[found[0]]!r}, "
                "because the others are held out for validation; add rows or set data.validation_name."
            )
        return with_even_steps(config, len(corpus.train)), corpus

    @classmethod
    def require_readable(cls, texts: Sequence[LabeledText]) -> None:
        if pair := next((text for text in texts if text.pair is not None), None):
            raise pair.error("it has a second text, but training.few_shot supports only single texts")

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return (local_path(target) / LINEAR_HEAD).is_file()

    @classmethod
    def config_of_model(cls, source: ModelSource) -> Config:
        return super().config_of_model(source).with_values("training", few_shot=True)

    @classmethod
    def load(cls, source: ModelSource) -> tuple[FineTuning, Any, Config]:
        objective, tokenizer, config = super().load(source)
        if source.snapshot is None and isinstance(objective, FewShotObjective):
            head, labels = read_linear_head(config.model), len(objective.head.labels)
            if head is None or head.weight.shape != (labels, objective.width):
                raise ConfigError(
                    f"{source.target}: {LINEAR_HEAD} does not match the model's {labels} labels and {objective.width} "
                    "features; export it again."
                )
            objective.set_head(head)
        return objective, tokenizer, config

    def fit_head(self, micro_batch: int, device: torch.device) -> None:
        part = self.corpus.train
        order = self.objective.ordered(np.arange(len(part)), part.lengths)
        batches = (part.batch(order[start : start + micro_batch]) for start in range(0, len(order), micro_batch))
        vectors = torch.cat([self.objective.outputs(batch.to(device)).cpu() for batch in batches])
        head = logistic_regression(vectors, torch.from_numpy(part.targets[order, 0]), len(self.objective.head.labels))
        getattr(self.model, _WEIGHT).copy_(head.weight)
        getattr(self.model, _BIAS).copy_(head.bias)


def with_even_steps(config: Config, rows: int) -> Config:
    """Sets the batch size so that all steps of an epoch have about the same number of rows.

    Without this, the last step of an epoch could be almost empty.
    """
    training = config.training
    if training.batch_size != "auto":
        return config
    steps = steps_per_epoch(rows, training.gradient_accumulation_steps)
    return config.with_values("training", gradient_accumulation_steps=-(-rows // steps))


def pair_loss(vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the squared error of the cosine similarity over all pairs of normalized embeddings (B, D): () fp32.

    The target is 1 for pairs with the same value in `labels` (B,), and 0 for others. Both kinds have the same total
    weight.
    """
    with torch.autocast(vectors.device.type, enabled=False):
        alike = labels[:, None] == labels
        pairs = torch.ones_like(alike).triu(1)
        weights = torch.zeros_like(alike, dtype=torch.float32)
        groups = [group for group in (pairs & alike, pairs & ~alike) if group.any()]
        for group in groups:
            weights += group / (group.sum() * len(groups))
        errors = (linear(vectors, vectors) - alike.float()).square()
        return (weights * errors).sum(1).sum()  # first by row, so that the result is the same for any thread count


def logistic_regression(vectors: torch.Tensor, targets: torch.Tensor, labels: int) -> LinearHead:
    """Fits a multinomial logistic regression with an L2 penalty on the weights, like scikit-learn.

    `vectors` are (B, D), `targets` (B,) int64. Computes in float64 on one thread, so that the result is reproducible.
    """
    inputs = vectors.double()
    weight = torch.zeros(labels, inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(labels, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=FIT_ITERATIONS,
        tolerance_grad=1e-7,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * INVERSE_REGULARIZATION)
        total = F.cross_entropy(F.linear(inputs, weight, bias), targets, reduction="sum") + penalty
        total.backward()
        return total

    with one_thread(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        optimizer.step(loss)
    return LinearHead(weight.detach().float(), bias.detach().float())
