"""Which of this host's network interfaces the other processes are reached through."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from sansgpu.config import ConfigError

_DISCARD = 9  # a port that a route is asked for; nothing is sent to it


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {name: [_bare(a.address) for a in all_ if a.family in families]
             for name, all_ in psutil.net_if_addrs().items()}  # fmt: skip
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Whether only this host can reach it."""
    return ipaddress.ip_address(address).is_loopback


def way_to(host: str) -> tuple[str, str]:
    """(address of this host, address of `host`) that packets to it go between. Raises ConfigError where none do."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return _bare(probe.getsockname()[0]), _bare(target[0])
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} has no way to {host}, the host of the first process: {error.strerror or error}; "
            "set MASTER_ADDR to a name or an address of it that every host reaches."
        ) from None


def _bare(address: object) -> str:
    """Without the interface that IPv6 adds behind a %."""
    return str(address).partition("%")[0]


def interface_for(address: str, wanted: str | None) -> tuple[str, str]:
    """(interface, its address) that gloo is to listen on: `wanted`, else GLOO_SOCKET_IFNAME, else the one that has
    `address`. Raises ConfigError where there is none of that name.
    """
    have = interfaces()
    wanted = wanted or os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted and wanted not in have:
        raise ConfigError(
            f"training.network_interface is {wanted}, but {socket.gethostname()} has {', '.join(have)}; name one of "
            "these, or leave it out."
        )
    for name, addresses in have.items():
        if name == wanted or (not wanted and address in addresses):
            return name, address if address in addresses else addresses[0]
    raise ConfigError(
        f"{socket.gethostname()} has no interface with the address {address}; set training.network_interface to one "
        f"of {', '.join(have)}."
    )
