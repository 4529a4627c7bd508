"""The section `training.distillation` of a configuration."""

from __future__ import annotations
