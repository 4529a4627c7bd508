"""Knowledge distillation for causal models: the predictions of a teacher.

B sequences, N tokens in total, D width, V vocabulary, M tokens after which the next token is predicted, K most likely
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sansgpu.config import SansGPUError
from sansgpu.kernels.attention import token_places
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight
from sansgpu.kernels.frozen_linear import quantized_linear
from sansgpu.kernels.matmul import is_native, matmul_into
from sansgpu.kernels.mixed_loss import LEAST_REST
from sansgpu.models.decoder import IGNORED_LABEL, TransformerLM

LOGIT_ROWS = 256  # tokens whose logits are computed at a time: bounds the memory, and fewer would be slower per token


@dataclass(frozen=True)
class Teacher:
    """A causal model to learn from. `before` are the token ids that it needs at the start of each sequence."""

    model: nn.Module
    states: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens (N,), lengths (B,) -> head inputs (N, D)
    logits: Callable[[torch.Tensor], torch.Tensor]  # head inputs (M, D) -> logits (M, V) in fp32
    context: int | None  # maximum number of tokens, if known
    before: tuple[int, ...] = ()

    def predict(
        self, tokens: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, top_k: int, vocabulary: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Predicts the M `targets` (N,) other than -100: each is the token after one of the `tokens`.

        `tokens` (N,) are concatenated sequences of `lengths` (B,), which do not attend to each other. Only the first
        `vocabulary` ids can be predicted. Returns the ids of the K = `top_k` most likely tokens (M, K), their
        log-probabilities followed by that of all other tokens together (M, K + 1), and the log-probabilities of the
        targets (M,). Raises SansGPUError if a log-probability is not finite.
        """
        tokens, lengths, targets = self._with_prefix(tokens, lengths, targets)
        has_target = targets != IGNORED_LABEL
        states, targets = self.states(tokens, lengths)[has_target], targets[has_target]
        parts = [
            _log_probabilities(self.logits(rows)[:, :vocabulary], of_rows, top_k)
            for rows, of_rows in zip(states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
        ]
        ids, known, of_targets = (torch.cat(part) for part in zip(*parts, strict=True))
        if not bool(known.isfinite().all() and of_targets.isfinite().all()):
            raise SansGPUError("the teacher's predictions are NaN or infinite; check its weights with `sansgpu eval`.")
        return ids, known, of_targets

    def _with_prefix(
        self, tokens: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self.before:
            return tokens, lengths, targets
        prefix, sizes = torch.tensor(self.before), lengths.tolist()
        rows = [torch.cat((prefix, row)) for row in tokens.split(sizes)]
        ignored = torch.full_like(prefix, IGNORED_LABEL)
        of_rows = [torch.cat((ignored, row)) for row in targets.split(sizes)]
        return torch.cat(rows), lengths + len(prefix), torch.cat(of_rows)


def decoder_teacher(model: TransformerLM, before: tuple[int, ...] = ()) -> Teacher:
    def states(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        documents, positions = token_places(lengths)
        return model.hidden(tokens[None], positions[None], documents[None])[0]

    return Teacher(model, states, lambda rows: head_product(rows, model.head_matrix), model.config.max_seq_len, before)


def head_product(rows: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Returns logits (M, V) in fp32, because rounding to bf16 would change probabilities by up to a few percent."""
    if isinstance(weight, QuantizedWeight):
        with torch.autocast(rows.device.type, enabled=False):
            return quantized_linear(rows.float(), weight)
    rows = rows.to(weight.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        if not is_native(rows, weight):
            return (rows @ weight.T).float()
        out = rows.new_empty(len(rows), len(weight), dtype=torch.float32)
        matmul_into(out, rows, weight.T)
        return out


def _log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the most likely tokens, their log-probabilities followed by that of all others, and those of the targets.

    Overwrites `logits`.
    """
    known, ids = logits.topk(top_k, dim=1)
    of_targets = logits.gather(1, targets[:, None])
    largest = known[:, :1] if top_k else logits.amax(dim=1, keepdim=True)
    lse = logits.sub_(largest).exp_().sum(dim=1, keepdim=True).log() + largest
    known = known - lse
    rest = (1 - known.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST_REST)
    return ids, torch.cat((known, rest.log()), dim=1), (of_targets - lse)[:, 0]
