"""What can go wrong, as one sentence: what is wrong, where, what to do."""

from __future__ import annotations


class SansGPUError(Exception):
    """A failure at work. The message is one sentence for the user; `exit_code` is the process's."""

    exit_code = 1


class ConfigError(SansGPUError):
    """What was asked for cannot work: a usage, configuration or input error, found before any work is done."""

    exit_code = 2


class UnreachableError(ConfigError):
    """Data is neither on this machine nor can it be read from the network now."""
