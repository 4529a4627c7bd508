"""Estimates what training static embeddings costs. D dimensions of an embedding, V rows of the table."""

from __future__ import annotations

from typing import Self

from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.models.costing import FULL, Costs, LinearShapes, StepTraffic, StepWork, vocabulary_of
from sansgpu.tasks.embed.settings import EmbeddingTrainingConfig
from sansgpu.tasks.static.settings import StaticModelConfig

_PAIR_BYTES = 17  # per score of two texts: the score, its mask, the masked score, its log-softmax and its gradient
_PROCESS_BYTES = 380 << 20  # more than usual: a process that has imported transformers, and the tokenized texts


class StaticCosts(Costs):
    """Estimates the costs of a table of embeddings, and of a loss that compares all texts of a step.

    The table has no blocks; everything counts as the only one.
    """

    model: StaticModelConfig
    training: EmbeddingTrainingConfig

    @property
    def layers(self) -> int:
        return 1

    @property
    def width(self) -> int:
        assert self.model.embedding_dim is not None
        return self.model.embedding_dim

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self.model)

    def with_layers(self, layers: int) -> Self:
        return self

    def parameters(self) -> dict[str, int]:
        return {"embedding": self.vocabulary * self.width}

    def products(self) -> LinearShapes:
        """Returns the product of each text's vector with those of the step, the only large one."""
        return LinearShapes({(self.width, effective_batch(self.training)): 1}, (self.width, 1))

    @property
    def _compared_dims(self) -> int:
        """The sum of the dimensions that the loss compares, which are several with Matryoshka embeddings."""
        return sum(self.training.matryoshka_dims or [self.width])

    def work(self, tokens: float) -> StepWork:
        """Counts the sums of vectors, and the similarities of each example with all others of a step."""
        examples = tokens / self.example_tokens
        compared = 6.0 * examples * effective_batch(self.training) * self._compared_dims
        return StepWork(matmul=4.0 * self.width * tokens, attention=0.0, loss=compared, muon=0.0)

    def traffic(self, execution: Execution) -> StepTraffic:
        memory = self.memory(execution)
        return StepTraffic(2.0 * (memory.weights + memory.optimizer) + memory.gradients, 2.0 * memory.activations)

    def trained_matrices(self) -> int:
        return 0

    def saved_bytes(self, execution: Execution) -> int:
        return 2 * FULL * self.width * self.micro_batch_tokens(execution)  # the looked-up vectors and their gradients

    def head_bytes(self, execution: Execution) -> int:
        batch = effective_batch(self.training)
        losses = len(self.training.matryoshka_dims or [self.width])
        return losses * (_PAIR_BYTES * batch * batch + 8 * FULL * batch * self.width)

    def overhead_bytes(self, execution: Execution, needed: int) -> int:
        return super().overhead_bytes(execution, needed) + _PROCESS_BYTES
