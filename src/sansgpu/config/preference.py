"""The section `training.preference` of a configuration."""

from __future__ import annotations
