"""Configurations that come with sansgpu: the built-in one, and presets that can be named instead of a file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

PRESETS = ("small", "medium", "large")
# Takes minutes on two cores and writes samples.
BUILT_IN: dict[str, dict[str, Any]] = {"training": {"max_steps": 500, "sample_tokens": 64}}
LENGTH_KEYS = frozenset(f"training.{key}" for key in ("num_epochs", "max_steps", "max_tokens", "max_hours", "until"))


def built_in(overridden: Collection[str]) -> dict[str, Any]:
    """Returns the values of a run without a configuration file, except those that keys in `overridden` replace."""
    if "task" in overridden:
        return {}
    drops = {"max_steps"} if LENGTH_KEYS & set(overridden) else set()
    return {name: {k: v for k, v in section.items() if k not in drops} for name, section in BUILT_IN.items()}
