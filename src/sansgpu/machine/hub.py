"""Settings of the Hugging Face Hub client: no retry messages, and offline mode if the Hub is unreachable."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

CONNECT_SECONDS = 3.0  # time limit of DNS and connecting; the client itself would retry for about half a minute
PORTS = {"http": 80, "https": 443}


def quiet_hub() -> None:
    """Silences the client's retry messages, because our own error reports the final failure."""
    from huggingface_hub.utils import logging  # takes a second to import

    logging.set_verbosity_error()


@contextmanager
def reading_hub() -> Iterator[None]:
    """Switches to offline mode, which reads only the Hub's cache, while the Hub is unreachable; avoids slow retries."""
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
    """Returns whether the server of a URL, or its proxy, accepts a connection within CONNECT_SECONDS."""
    target = urlsplit(address)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    host_and_port = target.hostname or "", target.port or PORTS.get(target.scheme, 80)
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(host_and_port, timeout=CONNECT_SECONDS).close()
        except OSError:
            return
        opened.set()

    attempt = threading.Thread(target=connect, daemon=True)  # a thread, because a DNS query may block for longer
    attempt.start()
    attempt.join(CONNECT_SECONDS)
    return opened.is_set()
