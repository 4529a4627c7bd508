"""Base class for the memory and FLOPs that training a model costs, with the constants it was calibrated with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from sansgpu.config.model import ModelConfig
from sansgpu.config.training import TrainingConfig
from sansgpu.kernels.cross_entropy import PLAIN_ROWS, chunk_rows
from sansgpu.kernels.newton_schulz import newton_schulz_flops
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory

FULL, HALF = 4, 2  # bytes of an fp32 and of a bf16 value
# Bytes of optimizer state for (a weight of a hidden matrix, any other weight), by (optimizer, optimizer_state).
_8BIT = 2.0 + 8 / 256  # two 8-bit moments, and their fp32 scales per block of 256
MOMENTS = {
    ("adamw", "fp32"): (8.0, 8.0),
    ("adamw", "8bit"): (_8BIT, _8BIT),
    ("adam", "fp32"): (8.0, 8.0),
    ("sgd", "fp32"): (4.0, 4.0),
    ("muon", "fp32"): (4.0, 8.0),
}
# Measured on Linux: memory of a process that has imported torch, memory that torch.compile never frees, and the
# overhead of the allocator as a share of the requested memory.
_PROCESS_BYTES, _COMPILER_BYTES, _ALLOCATOR_OVERHEAD = 434 << 20, 96 << 20, 0.05
# The backward pass frees activations while it allocates gradients, so the peak of both together is below the sum of
# their sizes, by this share of the smaller one.
_OVERLAP_SAVING = 0.25

Shapes = dict[tuple[int, int], int]  # (inputs, outputs) of the matrices of a block -> number of such matrices


@dataclass(frozen=True)
class LinearShapes:
    """The shapes of the linear layers in a block, and the (inputs, outputs) of the output head."""

    block: Shapes
    head: tuple[int, int]


@dataclass(frozen=True)
class StepWork:
    """FLOPs of a training step, by part. Causal attention counts only the unmasked scores, and recurrent layers."""

    matmul: float
    attention: float
    loss: float
    muon: float  # orthogonalization, counted whatever the optimizer is

    @property
    def needed(self) -> float:
        """FLOPs that the model itself needs, without the optimizer and recomputed activations."""
        return self.matmul + self.attention + self.loss


@dataclass(frozen=True)
class StepTraffic:
    """Lower bounds of the bytes that a step reads and writes in memory, apart from matmuls."""

    optimizer: float  # weights and moments, read and written once
    other: float  # saved activations, written and read once


@dataclass(frozen=True)
class Costs(ABC):
    """Estimates what training a model costs, without building it. Each type of architecture has a subclass."""

    model: ModelConfig
    training: TrainingConfig
    window: int  # tokens of the longest example
    example_tokens: float  # mean tokens per example
    target_ratio: float = 1.0  # targets per token

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return self.model.n_layers

    @property
    def trained_layers(self) -> int:
        """The number of blocks that are trained, which are the last ones."""
        return self.layers

    @property
    def skips_frozen(self) -> bool:
        """Whether the outputs of blocks that are not trained are kept, so that training steps skip these blocks."""
        return False

    def kept_token_bytes(self, execution: Execution) -> int:
        """Returns the bytes on the disk of the kept output of frozen layers for a token."""
        return 0

    @property
    def forward_share(self) -> float:
        """The forward pass's share of the work of forward and backward pass."""
        return 1 / 3

    @property
    def frozen_pass_layers(self) -> float:
        """The work of a forward pass through the blocks that are not trained, in passes through a trained block."""
        return self.forward_share * (self.layers - self.trained_layers)

    @property
    def pass_layers(self) -> float:
        """The work of a training step's passes in all blocks, in forward and backward passes through a trained block.

        It is the number of blocks if all are trained.
        """
        return self.trained_layers + (0.0 if self.skips_frozen else self.frozen_pass_layers)

    @property
    def evaluated_layers(self) -> int:
        """The number of blocks that run in an evaluation."""
        return self.trained_layers if self.skips_frozen else self.layers

    @property
    def width(self) -> int:
        """The hidden size."""
        return self.model.d_model

    @property
    def vocabulary(self) -> int:
        """The vocabulary size: the outputs of the head, unless a subclass says otherwise."""
        return self.products().head[1]

    def with_layers(self, layers: int) -> Self:
        """Returns the costs of the same model, truncated to at most `layers` blocks."""
        return replace(self, model=self.model.model_copy(update={"n_layers": min(layers, self.layers)}))

    @abstractmethod
    def parameters(self) -> dict[str, int]:
        """Returns the number of parameters of each part; tied parameters count once."""

    @abstractmethod
    def products(self) -> LinearShapes:
        """Returns the shapes of the linear layers."""

    @abstractmethod
    def work(self, tokens: float) -> StepWork:
        """Estimates the FLOPs of a step over `tokens` tokens."""

    @abstractmethod
    def traffic(self, execution: Execution) -> StepTraffic:
        """Counts one read and one write of weights and optimizer state, and of saved activations."""

    @property
    def shares_beginnings(self) -> bool:
        """Whether the model computes a beginning that examples of a micro-batch share only once."""
        return False

    def micro_batch_tokens(self, execution: Execution) -> int:
        """Returns the tokens of the largest micro-batch."""
        return execution.tokens(self.window)

    def memory(self, execution: Execution) -> Memory:
        """Estimates the peak memory of a step in bytes; `benchmarks/speed/memory.py` compares it with real runs."""
        weights, matrices, accumulated = self.trained(), self.trained_matrices(), execution.accumulation > 1
        # Gradients of matrices have the compute dtype, unless they are accumulated over micro-batches.
        gradients = (FULL if accumulated else execution.compute_dtype.itemsize) * matrices + FULL * (weights - matrices)
        moments, activations = self.moment_bytes(execution), self.saved_bytes(execution)
        if self.model.gradient_checkpointing:
            activations += self.trained_layers * FULL * self.micro_batch_tokens(execution) * self.width
        else:
            activations *= self.trained_layers
        needed = {
            "weights": self.weight_bytes(execution),
            "gradients": gradients,
            "optimizer": moments,
            "activations": activations - int(_OVERLAP_SAVING * min(gradients, activations)),
            "logits": self.head_bytes(execution),
            "snapshot": (2 if self.training.master_weights == "bf16" else FULL) * weights + moments,
        }
        return Memory(**needed, overhead=self.overhead_bytes(execution, sum(needed.values())))

    def trained(self) -> int:
        """Returns the number of trainable weights."""
        return sum(self.parameters().values())

    @abstractmethod
    def trained_matrices(self) -> int:
        """Returns the number of trainable weights in hidden matrices."""

    @abstractmethod
    def saved_bytes(self, execution: Execution) -> int:
        """Returns the bytes of activations, including its output, that one block saves per micro-batch for backward."""

    @abstractmethod
    def head_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the logits, their gradient and the gradient of the output head's weight."""

    def weight_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the weights and, if the compute dtype is bf16, of their copies in bf16."""
        compute = execution.compute_dtype.itemsize
        if self.training.master_weights == "bf16":
            return self.trained() * compute
        return self.trained() * (FULL + (compute if compute < FULL else 0))

    def moment_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the optimizer state."""
        in_matrix, elsewhere = MOMENTS[execution.optimizer, self.training.optimizer_state]
        return int(in_matrix * self.trained_matrices() + elsewhere * (self.trained() - self.trained_matrices()))

    def overhead_bytes(self, execution: Execution, needed: int) -> int:
        """Returns the bytes used by the process and the compiler, and wasted by the allocator on `needed` bytes."""
        process = _PROCESS_BYTES + (_COMPILER_BYTES if execution.compile == "on" else 0)
        return process + int(_ALLOCATOR_OVERHEAD * needed)


def shapes_of(matrices: Iterable[tuple[int, int]]) -> Shapes:
    return dict(Counter(matrices))


def numbers_of(shapes: Shapes) -> int:
    """Returns the number of weights in the matrices of one block."""
    return sum(inputs * outputs * count for (inputs, outputs), count in shapes.items())


def muon_flops(shapes: Shapes) -> float:
    """Returns the FLOPs with which Muon orthogonalizes the matrices of one block."""
    return sum(count * newton_schulz_flops(outputs, inputs) for (inputs, outputs), count in shapes.items())


def cross_entropy_bytes(execution: Execution, tokens: int, head: tuple[int, int], trained: bool) -> int:
    """Returns the bytes that the fused output head and loss need for `tokens` tokens.

    `head` is the (inputs, outputs) of the head. Its weight's gradient counts if it is `trained`.
    """
    (width, outputs), compute = head, execution.compute_dtype.itemsize
    rows, per_logit = chunk_rows(outputs, compute, trained), compute
    if execution.kernels == "torch":
        rows, per_logit = PLAIN_ROWS, compute + 5 * FULL
    logits = min(tokens, rows) * outputs * per_logit + tokens * width * (2 * compute + 2 * FULL)
    if trained:
        logits += outputs * width * FULL * (2 if execution.accumulation > 1 else 1)
    return logits


def vocabulary_of(model: ModelConfig) -> int:
    """Returns the vocabulary size. Raises ValueError if it is not set yet."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size must be set")
    return model.vocab_size
