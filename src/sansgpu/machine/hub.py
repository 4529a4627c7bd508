"""The Hugging Face hub's client, as a guest in our terminal."""

from __future__ import annotations


def quiet_hub() -> None:
    """Keep the client from reporting its retries line by line; what fails in the end is our one sentence."""
    from huggingface_hub.utils import logging  # a second of imports that local files never need

    logging.set_verbosity_error()
