"""Who may reach a server on this machine, and from which pages. A browser on it opens pages of other sites, too."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

from sansgpu.config import ConfigError


def is_this_machine(host: str) -> bool:
    """Returns whether only programs on this machine can reach a server at `host`, a name or an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def name_in(host: str) -> str:
    """Returns the name or address in a Host header, without the port; "" if it is malformed."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def is_same_origin(origin: str, host: str) -> bool:
    """Returns whether a request with these headers Origin and Host comes from the server's own pages."""
    return origin in (f"http://{host}", f"https://{host}")


def bind(host: str, port: int) -> socket.socket:
    """Reserves the address, so that a server that cannot use it says so before it loads a model.

    Raises ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"{host} port {port} cannot be used: {error.strerror}; choose another --port.") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the address of a server for a browser, without a slash at its end."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
