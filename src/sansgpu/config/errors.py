"""Exceptions whose message is one sentence: what is wrong, where, and what to do."""

from __future__ import annotations


class SansGPUError(Exception):
    """A runtime failure. The message is shown to the user, and the process exits with `exit_code`."""

    exit_code = 1


class ConfigError(SansGPUError):
    """A usage, configuration or input error, found before any work starts."""

    exit_code = 2


class UnreachableError(ConfigError):
    """Data is neither on this machine nor reachable over the network."""
