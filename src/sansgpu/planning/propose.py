"""Proposes the model, batch size and length that make the best use of a time budget (`sansgpu plan --hours`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from sansgpu.config import ConfigError, change_config
from sansgpu.config.load import commented_yaml
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.training import require_hours
from sansgpu.config.wording import count
from sansgpu.data.sources import BYTES_PER_TOKEN
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.files.ownership import require_file
from sansgpu.planning.forecast import describe_plan, expected_bits_per_byte, forecast_of, roofline_of, step_limits
from sansgpu.planning.presets import Processor, largest_memory
from sansgpu.planning.resolve import ResolveOptions, ignore_message, resolve_run
from sansgpu.planning.results import PlanCandidate, ProposedPlan, RunPlan, length_text
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.pretrain.data import MAX_BIGRAM_EPOCHS
from sansgpu.tasks.registry import task_of
from sansgpu.train.run import TrainingRun
from sansgpu.train.schedule import MAX_EPOCHS

WIDTHS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
HEAD_DIM, WIDTH_PER_LAYER, MIN_LAYERS, FEED_FORWARD_RATIO = 64, 48, 4, 3
MEASURED_WIDTHS = (128, 384, 768)  # efficiency is measured at these widths and interpolated between them
LONG_WINDOW, LONG_WINDOW_MIN_WIDTH = 512, 512  # tokens, and the minimum width for this window
WINDOW = 256
# Tokens per step, tuned for runs of BATCH_REFERENCE_TOKENS; longer runs use larger batches.
BATCH_TOKENS, BATCH_REFERENCE_TOKENS, MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 4096, 10e6, 2048, 65536
# Short texts need more weight decay: weights that average their updates over about one epoch (Wang and Aitchison, arXiv
# 2405.13698) have a decay of 1 / (learning rate x steps per epoch).
MIN_WEIGHT_DECAY, MAX_WEIGHT_DECAY = 0.1, 3.0
VOCABULARIES = (  # (bytes of text, vocabulary size)
    (1.5e6, 2048), (2e6, 4096), (100e6, 8192), (1e9, 16384), (math.inf, 32768),
)  # fmt: skip
DEFAULT_TEXT_BYTES = 10e6  # assumed if the size of the data is unknown
REPEATED_EMBEDDING_RATE = 1  # with the default of 3, embeddings learn a text by heart that is read more than twice
OVERHEAD_RATIO = 0.04  # share of time for starting, evaluating and saving
EQUAL_LOSS_RATIO = 0.01  # a larger model that is better by less than this does not pay
MIN_GAIN, SHORTEST_HOURS = 0.03, 1 / 60  # twice the time pays if it lowers the expected loss by this share
EVALUATIONS, SNAPSHOTS = 10, 5  # number in a run


@dataclass(frozen=True)
class ProposedRun:
    """A model size with the loss that it is expected to reach."""

    config: Config
    parameters: int
    tokens_per_second: float
    tokens: float
    epochs: float
    bits_per_byte: float

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_second / (1 - OVERHEAD_RATIO)


@dataclass(frozen=True)
class ProposedLength:
    """A run that is as long as pays."""

    run: ProposedRun
    gain: float  # share by which twice the time would lower the expected loss


def propose(
    hours: float, data: str, overrides: Sequence[str], output: Path, progress: ReportProgress, warn: Warn
) -> ProposedPlan:
    """Writes the proposed configuration to `output` and returns its plan and the candidates.

    `overrides` may only change `data` keys. Raises ConfigError if the data is missing or no candidate fits into memory.
    """
    require_hours(hours)
    if others := [setting for setting in overrides if not setting.startswith("data.")]:
        raise ConfigError(f"--hours chooses all settings of the model and its training; remove --set {others[0]}.")
    require_file(output)
    base = _base(data, overrides, progress, warn)
    efficiencies = [(width, _measured_efficiency(base, width, hours, progress)) for width in MEASURED_WIDTHS]
    candidates = [c for width in WIDTHS if (c := _candidate(base, width, hours, efficiencies, progress)) is not None]
    best = _best(candidates)
    if best.epochs >= MAX_EPOCHS:
        warn(
            f"the text is short: the run reads it {MAX_EPOCHS} times and may end before its time is over, because a "
            "model that reads it more often learns it by heart; add more text."
        )
    config = _with_length(best, hours)
    plan = describe_plan(resolve_run(config, progress, warn, ResolveOptions("report", timed="always")), progress)
    _write(config, output, plan)
    rows: list[PlanCandidate] = [
        {
            "parameters": c.parameters,
            "d_model": c.config.model.d_model,
            "n_layers": c.config.model.n_layers,
            "tokens_per_second": c.tokens_per_second,
            "tokens": c.tokens,
            "epochs": c.epochs,
            "behind": c.bits_per_byte / best.bits_per_byte - 1,
        }
        for c in candidates
    ]
    return {**plan, "candidates": rows, "file": str(output)}


def propose_quickly(data: str, text_bytes: float, hours: float, processor: Processor, memory: int) -> ProposedRun:
    """Proposes a run without reading the data or timing a step. Takes a second; `propose` takes a minute.

    Estimates speeds from the rate of matrix products, so they are off by up to a third. `text_bytes` is 0 if it is
    unknown. Raises ConfigError if no model fits into `memory`.
    """
    config, unique = _data_config(data, text_bytes), (text_bytes or DEFAULT_TEXT_BYTES) / BYTES_PER_TOKEN
    config = task_of(config).with_vocabulary(config)
    candidates = []
    for width in WIDTHS:
        shaped = _shape(config, width)
        if largest_memory(shaped, 1).fits(memory):
            costs = task_of(shaped).costs(shaped)
            parameters = sum(costs.parameters().values())
            speed = processor.tokens_per_second(costs.work(1).needed)
            candidates.append(_proposed(shaped, parameters, speed, hours, unique))
    best = _best(candidates)
    # The run takes the vocabulary size from its tokenizer, which has fewer tokens if the text is short.
    return replace(best, config=change_config(_with_length(best, hours), ["model.vocab_size=null"]))


def propose_length(
    data: str, text_bytes: float, most_hours: float, processor: Processor, memory: int
) -> ProposedLength:
    """Doubles the time of `propose_quickly` until that lowers the expected loss by less than `MIN_GAIN`."""
    hours, better = SHORTEST_HOURS, propose_quickly(data, text_bytes, SHORTEST_HOURS, processor, memory)
    while True:
        run, hours = better, 2 * hours
        better = propose_quickly(data, text_bytes, hours, processor, memory)
        gain = 1 - better.bits_per_byte / run.bits_per_byte
        if gain < MIN_GAIN or hours > most_hours:
            return ProposedLength(run, gain)


def _best(candidates: list[ProposedRun]) -> ProposedRun:
    if not candidates:
        raise ConfigError(
            "not even the smallest model fits into memory; stop other programs or use a machine with more memory."
        )
    best = min(candidates, key=lambda candidate: candidate.bits_per_byte)
    # If a smaller model reads the text as often as pays, too, more parameters gain little and learn it by heart.
    good = (c for c in candidates if c.bits_per_byte <= best.bits_per_byte * (1 + EQUAL_LOSS_RATIO))
    return next((c for c in good if c.epochs >= MAX_EPOCHS), best)


def _proposed(config: Config, parameters: int, speed: float, hours: float, unique: float) -> ProposedRun:
    """Returns a run of `hours` at `speed` tokens per second on a text of `unique` tokens."""
    tokens = min(speed * hours * 3600 * (1 - OVERHEAD_RATIO), MAX_EPOCHS * unique)
    loss = expected_bits_per_byte(parameters, tokens, unique)
    return ProposedRun(config, parameters, speed, tokens, tokens / unique, loss)


def _data_config(data: str, text_bytes: float, overrides: Sequence[str] = ()) -> Config:
    """Returns a configuration with a vocabulary size that suits the data."""
    vocabulary = next(tokens for limit, tokens in VOCABULARIES if (text_bytes or DEFAULT_TEXT_BYTES) < limit)
    name = json.dumps(data, ensure_ascii=False)  # valid YAML, too
    return change_config(SCHEMA(), (f"data.dataset_name={name}", f"data.vocab_size={vocabulary}", *overrides))


def _base(data: str, overrides: Sequence[str], progress: ReportProgress, warn: Warn) -> TrainingRun:
    """Prepares the data with a vocabulary size that suits it."""
    file = local_path(data)
    size = file.stat().st_size if file.is_file() else 0
    return resolve_run(_data_config(data, size, overrides), progress, warn, ResolveOptions("report", timed="never"))


def _shape(base: Config, width: int, batch: int = BATCH_TOKENS) -> Config:
    window = LONG_WINDOW if width >= LONG_WINDOW_MIN_WIDTH else WINDOW
    settings = (
        f"model.d_model={width}",
        f"model.n_heads={width // HEAD_DIM}",
        f"model.n_layers={max(MIN_LAYERS, round(width / WIDTH_PER_LAYER))}",
        f"model.d_ff={FEED_FORWARD_RATIO * width}",
        f"model.max_seq_len={window}",
        f"model.vocab_size={base.model.vocab_size}",
        f"training.gradient_accumulation_steps={batch // window}",
        "training.optimizer=muon",
    )
    return change_config(base, settings)


def _resolved(config: Config, hours: float, timed: bool, progress: ReportProgress) -> TrainingRun:
    """Resolves a run of `hours` without reading the data again or compiling, which hardly affects the estimate."""
    changed = change_config(config, [f"training.max_hours={hours}", "training.compile='off'"])
    options = ResolveOptions("report", data="unread", timed="always" if timed else "never")
    return resolve_run(changed, progress, ignore_message, options)


def _of_width(width: int, progress: ReportProgress) -> ReportProgress:
    """Names the width of the model in the descriptions of `progress`."""

    def report(doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        progress(f"width {width}: {doing}", done, total, unit)

    return report


def _measured_efficiency(base: TrainingRun, width: int, hours: float, progress: ReportProgress) -> float:
    """Returns the ratio of a step's roofline time to its measured time. Measured once and then read from the cache."""
    progress = _of_width(width, progress)
    run = _resolved(_shape(base.config, width), hours, timed=True, progress=progress)
    if run.timing is None:
        return 0.5  # unused: a model too large to time here is not a candidate
    return _limit_seconds(run, progress) / forecast_of(run).step_seconds


def _limit_seconds(run: TrainingRun, progress: ReportProgress) -> float:
    return sum(step_limits(run, roofline_of(run, progress)).values())


def _candidate(
    base: TrainingRun, width: int, hours: float, efficiencies: list[tuple[int, float]], progress: ReportProgress
) -> ProposedRun | None:
    progress = _of_width(width, progress)
    proposed, batch = None, BATCH_TOKENS
    # The batch size depends on the number of tokens, which depends on the speed with that batch size.
    for _ in range(2):
        config = _shape(base.config, width, batch)
        run = _resolved(config, hours, timed=False, progress=progress)
        if not run.fits:
            return None
        speed = run.tokens_per_step / _limit_seconds(run, progress) * _interpolated(width, efficiencies)
        parameters = sum(run.costs.parameters().values())
        proposed = _proposed(config, parameters, speed, hours, base.corpus.train_tokens)
        batch = _batch_tokens(proposed.tokens)
    return proposed


def _interpolated(width: int, efficiencies: list[tuple[int, float]]) -> float:
    """Interpolates the efficiency at `width` linearly in log(width)."""
    for (low, at_low), (high, at_high) in pairwise(efficiencies):
        if width <= high:
            fraction = max(0.0, math.log(width / low) / math.log(high / low))
            return at_low + fraction * (at_high - at_low)
    return efficiencies[-1][1]


def _batch_tokens(tokens: float) -> int:
    """Returns the tokens per step of a run of `tokens`."""
    batch = round(BATCH_TOKENS * 2.0 ** round(math.log2((tokens / BATCH_REFERENCE_TOKENS) ** 0.5)))
    return min(max(batch, MIN_BATCH_TOKENS), MAX_BATCH_TOKENS)


def _with_length(best: ProposedRun, hours: float) -> Config:
    batch = _batch_tokens(best.tokens)
    steps = best.tokens / batch
    decay = best.epochs / (best.config.training.learning_rate * steps)
    is_repeated = best.epochs > MAX_BIGRAM_EPOCHS
    settings = (
        f"model.initialization={'random' if is_repeated else 'auto'}",
        *([f"training.muon_embedding_rate={REPEATED_EMBEDDING_RATE}"] if is_repeated else []),
        f"training.weight_decay={min(max(decay, MIN_WEIGHT_DECAY), MAX_WEIGHT_DECAY):.2g}",
        f"training.gradient_accumulation_steps={batch // best.config.window}",
        f"training.max_hours={hours}",
        f"training.num_epochs={MAX_EPOCHS}",
        f"training.warmup_steps={max(10, min(200, round(steps / 50)))}",
        f"training.eval_steps={max(1, round(steps / EVALUATIONS))}",
        f"training.save_steps={max(1, round(steps / SNAPSHOTS))}",
    )
    return change_config(best.config, settings)


def _write(config: Config, output: Path, plan: RunPlan) -> None:
    head = (
        f"Best configuration for {config.training.max_hours:g} hours of training on {config.data.dataset_name}: "
        f"{length_text(plan)} with {count(plan['parameters'])} parameters."
    )
    with write_failures_as(ConfigError, output, "--output"):
        write_text(output, commented_yaml(config, head))
