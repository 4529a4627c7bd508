"""The settings of task pretrain: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.parse import Values
from sansgpu.config.paths import PYTHON_STDLIB
from sansgpu.config.tasks import CardText, Purpose, TaskSettings
from sansgpu.data.settings import CorpusDataConfig, WindowedTrainingConfig
from sansgpu.models.architectures import ARCHITECTURES, DecoderConfig, architecture_name
from sansgpu.tasks.settings import TEXT_METRICS, DistilledTrainingConfig, distillation_problems, window_problems

QUALITY_KEYS = "data.quality_label", "data.quality_share"  # have an effect only with data.quality_model
CORPUS_KEYS = (
    "data.max_tokens", "data.max_gb", "data.streaming", "data.deduplicate", "data.quality_model", *QUALITY_KEYS,
)  # fmt: skip
DATA_KEYS = "data.text_column", "data.tokenizer", "data.vocab_size", "data.tokenizer_sample_mb", "data.pack_sequences"


def _pretraining_problems(config: Any) -> Iterator[str]:
    yield from window_problems(config)
    yield from _streaming_problems(config.data)
    if config.data.quality_model is None:
        yield from config.without_effect(QUALITY_KEYS, "data.quality_model is not set")
    yield from distillation_problems(config, (*DATA_KEYS, *CORPUS_KEYS))


def _streaming_problems(data: Any) -> Iterator[str]:
    if not data.streaming or data.max_gb is not None:
        return
    if data.max_tokens is None:
        yield (
            "data.streaming needs data.max_tokens or data.max_gb, so that the download ends; set one of them, or "
            "streaming to false"
        )
    elif data.deduplicate != "none" or data.quality_model is not None:
        cleaning = "deduplicate" if data.deduplicate != "none" else "quality_model"
        yield (
            f"data.{cleaning} reads all of the text before its first tokens are known, so with data.streaming it needs "
            "data.max_gb; set that, or remove one of them"
        )


def _decoder_card(model: Values) -> CardText:
    return CardText(
        "a decoder that continues text, trained from scratch",
        "text-generation",
        "CausalLM",
        'sansgpu generate MODEL --prompt "Once"',
        ARCHITECTURES[str(architecture_name(model))].title,
        "In training, every document starts with the end-of-text token, so start prompts with `tokenizer.bos_token`.",
    )


SETTINGS = TaskSettings(
    "pretrain",
    ("from scratch", "texts", "text generation", "samples", "packing"),
    implementation="sansgpu.tasks.pretrain.task:Pretrain",
    description="train a decoder from scratch",
    purpose=Purpose("A model from scratch", "continue text, trained from scratch", "documents", built_in=PYTHON_STDLIB),
    sections=(DecoderConfig, CorpusDataConfig, WindowedTrainingConfig, DistilledTrainingConfig),
    problems=_pretraining_problems,
    varying_length=False,
    metrics=TEXT_METRICS,
    card=_decoder_card,
)
