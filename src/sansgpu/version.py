"""The version of sansgpu."""

__version__ = "0.2.0"
