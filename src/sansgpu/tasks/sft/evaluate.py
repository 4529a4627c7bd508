"""Evaluates models on conversations: loss, perplexity and bits per byte of the assistant turns."""

from __future__ import annotations

from sansgpu.data.sequences import PackedSequences
from sansgpu.tasks.evaluation import SplitEvaluator, text_metrics
from sansgpu.tasks.sft.data import ConversationExamples
from sansgpu.tasks.sft.objective import DecoderChat, SFTObjective
from sansgpu.tasks.task import Sums


class SFTEvaluator(SplitEvaluator[SFTObjective | DecoderChat, ConversationExamples]):
    """Evaluates a model on the assistant turns of conversations."""

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the summed loss, the number of targets and the bytes of text that they cover."""
        assert batch.numbers is not None
        size = self._part.target_bytes(batch.numbers.cpu().numpy())
        loss = float(self._objective.plain_loss(batch))
        return {"loss": loss, "tokens": float(batch.target_count()), "bytes": float(size)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums)
