"""Settings of the Hugging Face Hub client: no retry messages, and offline mode if the Hub is unreachable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWER_SECONDS = 5.0  # time limit for DNS, connection and response; the client would retry for about half a minute


def quiet_hub() -> None:
    """Silences the client's retry messages, because our own error reports the final failure."""
    from huggingface_hub.utils import logging  # takes a second to import

    logging.set_verbosity_error()


@contextmanager
def reading_hub() -> Iterator[None]:
    """Context that enables offline mode, i.e. uses only the cache, if the Hub is unreachable; avoids slow retries."""
    import datasets.config
    from huggingface_hub import constants

    quiet_hub()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not (before[0] or reachable(constants.ENDPOINT)):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def reachable(address: str) -> bool:
    """Returns whether a server, through the configured proxy if there is one, answers within ANSWER_SECONDS.

    Uses the session of the Hub client, so proxies and certificates are those that a download would use.
    """
    from huggingface_hub import get_session

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # DNS, the connection, its encryption or the proxy may fail, each in its own way
            get_session().head(address, timeout=ANSWER_SECONDS)
            answered.set()

    attempt = threading.Thread(target=ask, daemon=True)  # a thread, because a DNS query may block for longer
    attempt.start()
    attempt.join(ANSWER_SECONDS)
    return answered.is_set()
