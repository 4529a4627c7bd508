"""The operands of the output head, whose logits are computed in chunks of tokens.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sansgpu.kernels.block_quantization import NOT_QUANTIZED, as_values, row_length
from sansgpu.kernels.matmul import is_native

CHUNK_ROWS = 1024  # tokens per chunk; with fewer, accumulating the (V, D) gradient takes longer than the matmuls
PLAIN_ROWS = 256  # tokens per chunk in plain torch, which holds several tensors of the size of the logits
# A frozen head accumulates no gradient, so smaller chunks save memory: a token has 1 MB of logits in a vocabulary of
# 262,144. With fewer rows, dequantizing the head for each chunk takes more than a tenth of the time of its products.
FROZEN_HEAD_BYTES, FROZEN_HEAD_ROWS = 256 << 20, 256  # maximum bytes of a chunk's logits, but at least these rows
SUMMED_ROWS = 4096  # rows of a quantized weight that are dequantized at a time to sum them


def chunk_rows(outputs: int, itemsize: int, trained: bool) -> int:
    """Returns the tokens per chunk of logits with `itemsize` bytes, for a head with `outputs` rows."""
    return CHUNK_ROWS if trained else min(CHUNK_ROWS, max(FROZEN_HEAD_ROWS, FROZEN_HEAD_BYTES // (outputs * itemsize)))


@dataclass(frozen=True)
class HeadOperands:
    """The operands of the output head, and memory for their gradients, which is None for frozen operands."""

    hidden: torch.Tensor
    weight: torch.Tensor  # in the dtype of `hidden`, or quantized
    format: int
    targets: torch.Tensor
    hidden_grad: torch.Tensor | None
    weight_grad: torch.Tensor | None  # in fp32 or wider

    @property
    def is_native(self) -> bool:
        """True if our kernels support these operands."""
        return is_native(self.hidden) and (self.format != NOT_QUANTIZED or is_native(self.weight))

    def column_sums(self) -> torch.Tensor:
        """Returns the sum of the rows of the weight, (D,) fp32."""
        parts = self.weight.split(len(self.weight) if self.format == NOT_QUANTIZED else SUMMED_ROWS)
        values = (as_values(part, self.format, self.hidden.dtype) for part in parts)
        return sum(rows.sum(0, dtype=torch.float32) for rows in values)  # type: ignore[return-value]

    def parts(self, size: int) -> list[slice]:
        """Returns the rows of each chunk, or a single empty chunk if there are no rows."""
        return [slice(start, start + size) for start in range(0, max(1, len(self.hidden)), size)]

    def buffer(self) -> torch.Tensor | None:
        """Returns memory for a chunk's logits, or None without gradients.

        All chunks use the same memory, because allocating and freeing large blocks would fragment the heap.
        """
        if self.hidden_grad is None and self.weight_grad is None:
            return None
        rows = chunk_rows(len(self.weight), self.hidden.itemsize, self.weight_grad is not None)
        return self.hidden.new_empty(min(rows, len(self.hidden)), len(self.weight))


def head_operands(
    hidden: torch.Tensor, weight: torch.Tensor, format: int, targets: torch.Tensor, of_hidden: bool, of_weight: bool
) -> HeadOperands:
    """Returns contiguous operands of the head, with memory for the gradients of its hidden states and its weight."""
    if weight.shape[1] != row_length(hidden.shape[1], format) or len(targets) != len(hidden):
        raise RuntimeError("the shapes of the hidden states, the output head and the targets do not match.")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise IndexError(f"a target is out of bounds: targets must be from 0 to {len(weight) - 1}.")
    return HeadOperands(
        hidden.contiguous(),
        (weight.to(hidden.dtype) if format == NOT_QUANTIZED else weight).contiguous(),
        format,
        targets.to(torch.int64).contiguous(),
        hidden.new_empty(hidden.shape) if of_hidden else None,
        hidden.new_empty(weight.shape, dtype=wide(hidden)) if of_weight else None,
    )


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
