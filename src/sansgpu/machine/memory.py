"""What a run takes of memory, part by part, and the micro-batches there are to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from sansgpu.config import TrainingConfig

MICRO_BATCH_TOKENS = 4096  # unmeasured: beyond this matmuls gain little, and activations leave the cache
MOST_TOKENS = 16384  # worth measuring


@dataclass(frozen=True)
class Execution:
    """How a step is computed, as far as its memory depends on it."""

    micro_batch: int
    accumulation: int
    precision: str  # fp32 | bf16
    compile: str  # on | off
    kernels: str  # native | torch
    optimizer: str  # adamw | muon
    most_tokens: Callable[[int], int] | None = None  # of so many examples; by default all are as long as they may be
    copies: bool = True  # snapshots are copied in memory and written behind training
    world_size: int = 1  # processes that share a step

    def tokens(self, window: int) -> int:
        """Of the largest micro-batch, where examples have up to `window`."""
        most = self.micro_batch * window
        return most if self.most_tokens is None else min(most, self.most_tokens(self.micro_batch))


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int  # the head's, their gradients and the weights' they add up to
    snapshot: int  # the copy that is written while training goes on
    overhead: int  # the process with its libraries, and holes in the heap

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def least(self) -> int:
        """Without the copy of snapshots, which a run can do without."""
        return self.total - self.snapshot

    def to_json(self) -> dict[str, int]:
        """By part, and `total`."""
        return {**asdict(self), "total": self.total}


MemoryOf = Callable[[int], Memory]  # of a micro-batch


def effective_batch(training: TrainingConfig) -> int:
    """Examples of a step, over however many ranks; `batch_size: auto` keeps it whatever the micro-batch."""
    accumulated = training.gradient_accumulation_steps
    return accumulated if training.batch_size == "auto" else training.batch_size * accumulated


def micro_batches_each(training: TrainingConfig, micro_batch: int, world_size: int = 1) -> int:
    """Micro-batches of a step on every rank."""
    return -(-effective_batch(training) // (micro_batch * world_size))


def micro_batch_choices(training: TrainingConfig, window: int, world_size: int = 1) -> list[int]:
    """Micro-batches in examples, smallest first: the configured one, or with `auto` all that divide a rank's share."""
    share = -(-effective_batch(training) // world_size)
    if training.batch_size != "auto":
        return [min(training.batch_size, share)]
    largest = max(1, min(share, MOST_TOKENS // window))
    return [size for size in range(1, largest + 1) if share % size == 0]


def usual_micro_batch(window: int, sizes: list[int]) -> int:
    """Of `sizes`, what serves most models, for runs too short to measure."""
    return max((size for size in sizes if size * window <= MICRO_BATCH_TOKENS), default=sizes[0])
