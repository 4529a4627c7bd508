"""What the costs of every kind of model are made of: measured constants, and what training keeps in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sansgpu.config import ModelConfig
from sansgpu.kernels.newton_schulz import orthogonalise_flops
from sansgpu.machine.memory import Execution, Memory

FULL, COMPUTE = 4, {"fp32": 4, "bf16": 2}  # bytes of a master's number, and of a product's
MOMENTS = {"fp32": 8.0, "8bit": 2.0 + 8 / 256}  # bytes a weight: two numbers, or two codes and their blocks' scales
# Measured on Linux: the process with torch and the libraries around it, what compiling leaves behind, and the share of
# everything that blocks of memory are larger than what is in them.
_PROCESS_BYTES, _COMPILER_BYTES, _ROUNDING = 434 << 20, 96 << 20, 0.05
_PARTLY_TOGETHER = 0.25  # of gradients and activations, the smaller: the one grows while the other is freed; measured

Shapes = dict[tuple[int, int], int]  # (inputs, outputs) of a block's matrices, and how many have this shape


def counted(shapes: Iterable[tuple[int, int]]) -> Shapes:
    """Each shape once, with how many there are."""
    return dict(Counter(shapes))


def numbers_of(shapes: Shapes) -> int:
    """In a block's matrices."""
    return sum(inputs * outputs * count for (inputs, outputs), count in shapes.items())


def muon_flops(shapes: Shapes) -> float:
    """Of orthogonalising a block's matrices."""
    return sum(count * orthogonalise_flops(outputs, inputs) for (inputs, outputs), count in shapes.items())


def master_bytes(numbers: int, precision: str, masters: str) -> int:
    """Of trained weights, and of the narrower copies that products read."""
    compute = COMPUTE[precision]
    return numbers * (compute if masters == "bf16" else FULL + (compute if compute < FULL else 0))


def copy_bytes(numbers: int, moments: int, masters: str, how: Execution) -> int:
    """Of the copy from which a snapshot is written."""
    return (2 if masters == "bf16" else FULL) * numbers + moments if how.copies else 0


def gradient_bytes(matrices: int, rest: int, how: Execution) -> int:
    """Of what backward leaves: of products in their type, unless micro-batches are summed up."""
    return (FULL if how.accumulation > 1 else COMPUTE[how.precision]) * matrices + FULL * rest


def activation_bytes(layers: int, kept: int, numbers: int, checkpointing: bool) -> int:
    """Of blocks that keep so many bytes each, and between them so many `numbers`."""
    return layers * FULL * numbers + kept if checkpointing else layers * kept


def beside_gradients(activations: int, gradients: int) -> int:
    """Bytes of activations at the peak, where some of them are gone."""
    return activations - int(_PARTLY_TOGETHER * min(gradients, activations))


def with_process(needed: dict[str, int], how: Execution) -> Memory:
    """The parts of a step, with what the process takes besides."""
    process = _PROCESS_BYTES + (_COMPILER_BYTES if how.compile == "on" else 0)
    return Memory(**needed, overhead=process + int(_ROUNDING * sum(needed.values())))


def vocabulary_of(model: ModelConfig) -> int:
    """Tokens. Raises ValueError where that is not settled yet."""
    if model.vocab_size is None:
        raise ValueError("model.vocab_size must be set")
    return model.vocab_size
