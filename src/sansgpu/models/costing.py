"""Memory estimates that all kinds of models share, and the measured constants behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sansgpu.config import ModelConfig
from sansgpu.kernels.newton_schulz import newton_schulz_flops
from sansgpu.machine.memory import Execution, Memory

FULL, COMPUTE = 4, {"fp32": 4, "bf16": 2}  # bytes per value: master weights, and compute dtype by precision
MOMENTS = {"fp32": 8.0, "8bit": 2.0 + 8 / 256}  # bytes per weight: two values, or two codes and their block scales
# Measured on Linux: the process with torch and its libraries, the memory that the compiler leaves behind, and the share
# that the allocator adds by rounding up.
_PROCESS_BYTES, _COMPILER_BYTES, _ALLOCATOR_OVERHEAD = 434 << 20, 96 << 20, 0.05
_OVERLAP_SAVING = 0.25  # share of the smaller of gradients and activations; one grows as the other is freed

Shapes = dict[tuple[int, int], int]  # (inputs, outputs) of the matrices of a block -> number of such matrices


def counting_mode(shapes: Iterable[tuple[int, int]]) -> Shapes:
    return dict(Counter(shapes))


def numbers_of(shapes: Shapes) -> int:
    """Returns the number of weights in the matrices of a block."""
    return sum(inputs * outputs * count for (inputs, outputs), count in shapes.items())


def muon_flops(shapes: Shapes) -> float:
    """Returns the FLOPs to orthogonalize the matrices of a block."""
    return sum(count * newton_schulz_flops(outputs, inputs) for (inputs, outputs), count in shapes.items())


def master_bytes(numbers: int, precision: str, masters: str) -> int:
    """Returns the bytes of trained weights and, if the compute dtype is narrower, their copies in that dtype."""
    compute = COMPUTE[precision]
    return numbers * (compute if masters == "bf16" else FULL + (compute if compute < FULL else 0))


def copy_bytes(numbers: int, moments: int, masters: str, how: Execution) -> int:
    """Returns the bytes of the copy of weights and moments from which a snapshot is written."""
    return (2 if masters == "bf16" else FULL) * numbers + moments if how.copies else 0


def gradient_bytes(matrices: int, rest: int, how: Execution) -> int:
    """Returns the bytes of gradients; those of matrices have the compute dtype unless micro-batches accumulate."""
    return (FULL if how.accumulation > 1 else COMPUTE[how.precision]) * matrices + FULL * rest


def activation_bytes(layers: int, kept: int, numbers: int, checkpointing: bool) -> int:
    """Returns the bytes of activations; each block saves `kept` bytes, and its input has `numbers` elements."""
    return layers * FULL * numbers + kept if checkpointing else layers * kept


def beside_gradients(activations: int, gradients: int) -> int:
    """Returns the bytes of activations at the peak of memory, when backward has freed some of them."""
    return activations - int(_OVERLAP_SAVING * min(gradients, activations))


def with_process(needed: dict[str, int], how: Execution) -> Memory:
    """Adds the overhead of process, compiler and allocator to the parts of a step, in bytes."""
    process = _PROCESS_BYTES + (_COMPILER_BYTES if how.compile == "on" else 0)
    return Memory(**needed, overhead=process + int(_ALLOCATOR_OVERHEAD * sum(needed.values())))


def vocabulary_of(model: ModelConfig) -> int:
    """Returns the vocabulary size. Raises ValueError if it is not set yet."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size must be set")
    return model.vocab_size
