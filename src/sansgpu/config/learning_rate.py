"""The default learning rates."""

from __future__ import annotations

# Peak rates of the optimizers at this width. Measured at widths from 64 to 512, see docs/lab-notes.md; that of AdamW is
# 6e-4 at GPT-3's smallest width, 768, as published (arXiv 2005.14165, table 2.1).
WIDTH, MUON, ADAMW = 256, 0.004, 0.001
# Default rates of fine-tuning are those of models of these widths. Narrower models learn faster with higher rates, up
# to MOST times as high, as docs/lab-notes.md measured at widths of 384 and 576. The power for adapters is the one for
# Llama of Schulman et al. ("LoRA Without Regret", 2025).
FULL_WIDTH, ADAPTER_WIDTH, ADAPTER_POWER, MOST = 768, 2048, 0.78, 2.0
SGD_RATIO = 100  # learning rate of SGD with momentum / that of AdamW; its steps with clipped gradients are smaller


def default_learning_rate(optimizer: str, width: float, own: float | None = None) -> float:
    """Returns the default peak learning rate for `training.optimizer` and `model.d_model`.

    `own` is the default of a fine-tuning task, for AdamW. Muon's rate scales with the width like AdamW's, but only
    above a width of 256, because higher rates do not help below. Until the optimizer `auto` is resolved, the rate is
    Muon's.
    """
    scale = (WIDTH / width) ** 0.5
    adamw = ADAMW * scale if own is None else own
    rates = {"adamw": adamw, "adam": adamw, "sgd": SGD_RATIO * adamw}
    return float(f"{rates.get(optimizer, MUON * min(1.0, scale) if own is None else own):.2g}")


def rate_for_width(rate: float, width: int, adapter: bool) -> float:
    """Converts a task's default learning rate to that of a model of `width`, trained with or without an adapter."""
    factor = (ADAPTER_WIDTH / width) ** ADAPTER_POWER if adapter else max(1.0, FULL_WIDTH / width)
    return float(f"{rate * min(factor, MOST):.2g}")
