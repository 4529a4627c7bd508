"""Advice from the validation metrics of a short measurement: which of them are no better than their baselines."""

from __future__ import annotations

from collections.abc import Mapping

from sansgpu.config import Config, ConfigError, change_config, setting
from sansgpu.config.metrics import Metric

NEAR_RATIO = 1.2  # a metric below this multiple of its baseline is near it
MORE_STEPS = 10  # times as many steps are suggested to measure


def learning_advice(config: Config, metrics: Mapping[str, float], steps: int) -> list[str]:
    """Returns advice on the task's metrics near their baselines after `steps` steps at a tenth of the learning rate."""
    declared = {metric.name: metric for metric in config.settings.metrics}
    compared = [metric for name, metric in declared.items() if name in metrics and metric.baseline in metrics]
    found = [
        _sentence(config, metric, declared[metric.baseline], metrics)
        for metric in compared
        if metrics[metric.name] <= NEAR_RATIO * metrics[metric.baseline]
    ]
    if found:
        more = MORE_STEPS * steps
        found.insert(
            0, f"{steps} steps at a tenth of the learning rate teach little; measure again with --steps {more}"
        )
    return found


def _sentence(config: Config, metric: Metric, baseline: Metric, metrics: Mapping[str, float]) -> str:
    value, limit = metrics[metric.name], metrics[metric.baseline]
    settings = [setting for key in metric.remedies if (setting := _doubled(config, key))]
    better = "no better" if value <= limit else "little better"
    return (
        f"{metric.label} {metric.form.format(value)} is {better} than without a model ({baseline.words(metrics)}); "
        f"if that remains after longer training, try {' or '.join(settings)}"
    )


def _doubled(config: Config, key: str) -> str | None:
    """Returns the setting that doubles a number, or None if the key has no effect in this configuration."""
    override = f"{key}={2 * setting(config, key):g}"
    try:
        changed = change_config(config, (override,))
    except ConfigError:
        return None
    return None if changed == config else override
