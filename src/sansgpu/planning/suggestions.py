"""Suggestions of `bench`: variations of a configuration, which it times, and remedies for metrics near a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from sansgpu.config import ConfigError, SansGPUError, change_config, setting
from sansgpu.config.schema import Config
from sansgpu.config.tasks import Metric
from sansgpu.config.wording import duration, truncate
from sansgpu.events.progress import ReportProgress
from sansgpu.kernels import library
from sansgpu.machine.memory import effective_batch, micro_batch_choices
from sansgpu.machine.probe import has_native_bf16
from sansgpu.machine.torch_compile import missing_compiler
from sansgpu.models.architectures import DecoderConfig
from sansgpu.planning.measure import Measured, MeasureRequest, measure_in_subprocess
from sansgpu.planning.memory_fit import estimate_memory
from sansgpu.planning.results import Variation
from sansgpu.tasks.registry import task_of
from sansgpu.train.run import TrainingRun

WHAT_IF_STEPS = 4  # timed per variation
WHAT_IF_SECONDS = 120.0  # time for the built-in variations together, unless all are requested
COMPILE_COST, FEWER = (
    "half a minute for compilation at the start",
    "parameters",
)  # the latter becomes e.g. "50% fewer parameters"
HARMLESS_COSTS = ("nothing", "memory", COMPILE_COST)  # costs that do not change what the model learns
HARMLESS_KEYS = ("training.threads", "training.compile", "training.kernels")
TIMED_DATA_KEY = "data.max_length"  # the only `data` key that affects random tokens

NEAR_RATIO = 1.2  # a metric below this multiple of its baseline is near it
MORE_STEPS = 10  # suggest measuring this many times as many steps

Change = tuple[str, tuple[str, ...], str]  # name, settings, cost


def asked_changes(config: Config, asked: Sequence[str]) -> list[Change]:
    """Parses `key=value,value` arguments into one change per value. Raises ConfigError if a key or value is invalid."""
    changes: list[Change] = []
    for text in asked:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--vary {truncate(text)} has no values; write --vary model.n_layers=4,8.")
        if key.startswith("data.") and key != TIMED_DATA_KEY:
            raise ConfigError(
                f"--vary {key} has no effect, because measurements use random tokens; vary keys of model or training."
            )
        settings = [f"{key}={value.strip()}" for value in values.split(",")]
        if "training.batch_size=auto" in settings:
            raise ConfigError("--vary training.batch_size requires numbers, because auto is already measured.")
        changes += [(setting, (setting,), _cost(config, _with_setting(config, setting), key)) for setting in settings]
    return changes


def _with_setting(config: Config, setting: str) -> Config:
    try:
        return change_config(config, (setting,))
    except ConfigError as error:
        raise ConfigError(f"--vary {setting}: {str(error).removeprefix('the configuration: ')}") from None


def _cost(config: Config, changed: Config, key: str) -> str:
    if key in HARMLESS_KEYS:
        return "nothing"
    if key.startswith("model."):
        return FEWER
    tokens = effective_batch(changed.training) * changed.window
    if tokens != effective_batch(config.training) * config.window:
        return f"{tokens:,} tokens per step"
    return "changes the training"


def time_variations(
    chosen: Config,
    run: TrainingRun,
    baseline: Measured,
    changes: Sequence[Change],
    seconds: float,
    progress: ReportProgress,
) -> list[Variation]:
    """Times each change of `chosen` on random tokens. The first row is `baseline`, the configuration itself.

    `seconds` is how long the baseline took, and so about how long each change will.
    """
    rows = [_row("unchanged", (), "", chosen, baseline, run)]
    for number, (name, settings, cost) in enumerate(changes, start=1):
        progress(f"timing variation {number} of {len(changes)}, about {duration(seconds)}: {name}", 0, 0)
        try:
            changed = change_config(chosen, settings)
            _require_memory(changed, run)
            measured = measure_in_subprocess(
                MeasureRequest(changed, WHAT_IF_STEPS, run.usual_tokens, run.shared_tokens)
            )
        except SansGPUError as error:
            rows.append({"name": name, "set": list(settings), "gives_up": cost, "problem": str(error)})
            continue
        rows.append(_row(name, settings, cost, changed, measured, run))
    for row in rows[1:]:
        if "tokens_per_second" in row:
            row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
            (slowest, fastest), (base_slowest, base_fastest) = _pace(row), _pace(rows[0])
            row["speedup_range"] = [slowest / base_fastest, fastest / base_slowest]
    return rows


def _pace(row: Variation) -> tuple[float, float]:
    """Returns the tokens per second of the slowest and of the fastest timed step."""
    tokens, seconds = row["tokens_per_second"] * row["step_seconds"], row["all_step_seconds"]
    return tokens / max(seconds), tokens / min(seconds)


def affordable(changes: Sequence[Change], seconds: float) -> list[Change]:
    """Returns the changes that take at most WHAT_IF_SECONDS together if each takes `seconds`.

    If not all do, those that keep the training result come first, because they can make the run itself faster.
    """
    count = int(WHAT_IF_SECONDS / seconds)
    if count >= len(changes):
        return list(changes)
    return sorted(changes, key=lambda change: change[2] not in HARMLESS_COSTS)[:count]


def _require_memory(config: Config, run: TrainingRun) -> None:
    """Raises SansGPUError if the run does not fit into memory, because it would disturb other programs."""
    size = config.training.batch_size
    assert size != "auto"
    memory = estimate_memory(config, replace(run.execution, micro_batch=size))
    if not memory.fits(run.available):
        raise SansGPUError(
            f"it needs {memory.least / 1e9:.1f} GB of memory, but {run.available / 1e9:.1f} GB are available; "
            "stop other programs"
        )


def _row(
    name: str, settings: Sequence[str], cost: str, config: Config, measured: Measured, run: TrainingRun
) -> Variation:
    parameters = sum(task_of(config).costs(config).parameters().values())
    timed = measured["step_seconds"][-WHAT_IF_STEPS:]
    seconds = median(timed)
    more = parameters / sum(run.costs.parameters().values()) - 1
    if cost == FEWER:
        cost = f"{abs(more):.0%} {'more' if more > 0 else 'fewer'} parameters" if more else "as many parameters"
    return {
        "name": name,
        "set": list(settings),
        "gives_up": cost,
        "parameters": parameters,
        "step_seconds": seconds,
        "all_step_seconds": timed,
        "tokens_per_second": effective_batch(config.training) * min(run.example_tokens, config.window) / seconds,
        "peak_rss_bytes": measured["peak_rss_bytes"],
        "speedup": 1.0,
        "speedup_range": [1.0, 1.0],
    }


def built_in_changes(chosen: Config) -> list[Change]:
    """Returns the valid variations that suit a configuration, all with the same tokens per step."""
    return [change for change in _variations(chosen) if _is_valid(chosen, change)]


def _is_valid(chosen: Config, change: Change) -> bool:
    try:
        change_config(chosen, change[1])
    except ConfigError:  # the model's shape is not divisible
        return False
    return True


def _variations(chosen: Config) -> list[Change]:
    model, training, window = DecoderConfig.of(chosen), chosen.training, chosen.window
    size, accumulation, threads = training.batch_size, training.gradient_accumulation_steps, training.threads
    assert size != "auto"
    assert threads != "auto"
    found: list[Change] = []
    for part, word in ((2, "half"), (4, "a quarter of")):
        settings = (f"data.max_length={window // part}", f"training.batch_size={size * part}")
        found.append((f"{word} the sequence length", settings, f"context: {window // part} tokens"))
    found.append(("half the layers", (f"model.n_layers={max(1, model.n_layers // 2)}",), FEWER))
    narrow = [f"model.{key}={getattr(model, key) // 2}" for key in ("d_model", "d_ff", "n_heads")]
    narrow += [f"model.n_kv_heads={model.kv_heads // 2}"] if model.n_kv_heads else []
    found.append(("half the width", tuple(narrow), FEWER))
    fast = "bf16" if has_native_bf16() else "int16" if library.available() else None
    other = "fp32" if training.precision != "fp32" else fast
    if other is not None:
        note = "nothing" if other == "fp32" else "precision of matrix products"
        found.append((f"{other} products", (f"training.precision={other}",), note))
    rows = size * accumulation
    largest = micro_batch_choices(
        training.model_copy(update={"batch_size": "auto", "gradient_accumulation_steps": rows}), window
    )[-1]
    others = {"half the micro-batch size": size // 2 if size % 2 == 0 else 0}
    others |= {"twice the micro-batch size": size * 2 if accumulation % 2 == 0 else 0}
    others |= {f"a micro-batch size of {largest}": largest if largest > 2 * size else 0}
    for name, rows_each in others.items():
        if rows_each:
            settings = (f"training.batch_size={rows_each}", f"training.gradient_accumulation_steps={rows // rows_each}")
            found.append((name, settings, "memory" if rows_each > size else "nothing"))
    if threads > 1:
        found.append(("half the threads", (f"training.threads={threads // 2}",), "nothing"))
    if training.compile == "on":
        found.append(("not compiled", ("training.compile='off'",), "nothing"))
    elif not library.available() and missing_compiler() is None:
        found.append(("compiled", ("training.compile='on'",), COMPILE_COST))
    return found


def learning_advice(config: Config, metrics: Mapping[str, float], steps: int) -> list[str]:
    """Returns advice on the task's metrics near their baselines after `steps` steps at a tenth of the learning rate."""
    declared = {metric.name: metric for metric in config.settings.metrics}
    compared = [metric for name, metric in declared.items() if name in metrics and metric.baseline in metrics]
    found = [
        _advice(config, metric, declared[metric.baseline], metrics)
        for metric in compared
        if metrics[metric.name] <= NEAR_RATIO * metrics[metric.baseline]
    ]
    if found:
        more = MORE_STEPS * steps
        found.insert(
            0,
            f"the model learns little in {steps} steps at a tenth of the learning rate; measure again with --steps "
            f"{more}",
        )
    return found


def _advice(config: Config, metric: Metric, baseline: Metric, metrics: Mapping[str, float]) -> str:
    value, limit = metrics[metric.name], metrics[metric.baseline]
    settings = [setting for key in metric.remedies if (setting := _doubled(config, key))]
    better = "no better" if value <= limit else "little better"
    return (
        f"{metric.label} {metric.shown(value)} is {better} than the baseline without a model "
        f"({baseline.words(metrics)}); if that is still the case after more training, try {' or '.join(settings)}"
    )


def _doubled(config: Config, key: str) -> str | None:
    """Returns the setting that doubles a number, or None if the key has no effect in this configuration."""
    override = f"{key}={2 * setting(config, key):g}"
    try:
        changed = change_config(config, (override,))
    except ConfigError:
        return None
    return None if changed == config else override
