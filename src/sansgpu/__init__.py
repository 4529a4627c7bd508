"""Train language models on machines without a GPU."""

__version__ = "0.1.0"
