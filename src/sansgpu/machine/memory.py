"""The memory of a run by part, and the candidate micro-batch sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from sansgpu.config.training import TrainingConfig

MARGIN = 1.05  # required memory / estimate; estimates are a few percent off, and other programs' memory changes
MICRO_BATCH_TOKENS = 4096  # default limit: beyond it matmuls gain little, and activations no longer fit the cache
MAX_MICRO_BATCH_TOKENS = 16384  # the largest micro-batch to calibrate


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step in bytes, by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int  # logits, their gradients and the gradient of the output head's weight
    snapshot: int  # the copy that is written in the background
    overhead: int  # the process with its libraries, and heap fragmentation

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def least(self) -> int:
        """The total without the snapshot copy, which is optional."""
        return self.total - self.snapshot

    def fits(self, available: int) -> bool:
        """Returns whether the run fits. The copy of a snapshot is not counted, because saving works without it."""
        return self.least * MARGIN <= available

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def effective_batch(training: TrainingConfig) -> int:
    """Returns the examples per step over all ranks, which does not depend on the chosen micro-batch size."""
    accumulated = training.gradient_accumulation_steps
    return accumulated if training.batch_size == "auto" else training.batch_size * accumulated


def micro_batches_per_rank(training: TrainingConfig, micro_batch: int, world_size: int = 1) -> int:
    """Returns the number of micro-batches per step and rank."""
    return -(-effective_batch(training) // (micro_batch * world_size))


def micro_batch_choices(training: TrainingConfig, window: int, world_size: int = 1) -> list[int]:
    """Returns candidate micro-batch sizes in ascending order.

    These are the configured size, or with `auto` all divisors of a rank's share up to MAX_MICRO_BATCH_TOKENS.
    """
    share = -(-effective_batch(training) // world_size)
    if training.batch_size != "auto":
        return [min(training.batch_size, share)]
    largest = max(1, min(share, MAX_MICRO_BATCH_TOKENS // window))
    return [size for size in range(1, largest + 1) if share % size == 0]


def usual_micro_batch(window: int, sizes: list[int]) -> int:
    """Returns the default choice among `sizes` for runs too short to calibrate."""
    return max((size for size in sizes if size * window <= MICRO_BATCH_TOKENS), default=sizes[0])
