"""The Hugging Face Hub's client: quiet, and offline at once where the Hub cannot be reached."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

CONNECT_SECONDS = 3.0  # for a name and a connection; the client itself would retry for about half a minute
PORTS = {"http": 80, "https": 443}


def quiet_hub() -> None:
    """Keep the client from reporting its retries line by line; our one sentence reports the final failure."""
    from huggingface_hub.utils import logging  # a second of imports that local files never need

    logging.set_verbosity_error()


@contextmanager
def reading_hub() -> Iterator[None]:
    """Read from the Hub, or where it cannot be reached from its cache alone, without waiting for retries."""
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
    """Whether a connection to the server of a URL, or to the proxy set for it, opens within CONNECT_SECONDS."""
    target = urlsplit(address)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    place = target.hostname or "", target.port or PORTS.get(target.scheme, 80)
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=CONNECT_SECONDS).close()
        except OSError:
            return
        opened.set()

    attempt = threading.Thread(target=connect, daemon=True)  # a name server may keep silent for longer
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    return opened.is_set()
