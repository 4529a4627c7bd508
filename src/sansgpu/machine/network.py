"""Selects the network interface that connects this host to the other processes."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from sansgpu.config import ConfigError

_DISCARD_PORT = 9  # names a destination for a route lookup; nothing is sent


def interfaces() -> dict[str, list[str]]:
    """Returns the IP addresses of each interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {name: [_bare(a.address) for a in all_ if a.family in families]
             for name, all_ in psutil.net_if_addrs().items()}  # fmt: skip
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Returns whether only this host can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def route_to(host: str) -> tuple[str, str]:
    """Returns (local address, remote address) of the route to `host`. Raises ConfigError if there is none."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return _bare(probe.getsockname()[0]), _bare(target[0])
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} has no route to {host}, the host of rank 0: {error.strerror or error}; set "
            "MASTER_ADDR to a name or address of rank 0 that every host can reach."
        ) from None


def _bare(address: object) -> str:
    """Strips the interface suffix (%eth0) of an IPv6 address."""
    return str(address).partition("%")[0]


def interface_for(address: str, requested: str | None) -> tuple[str, str]:
    """Returns (interface, its address) for gloo: `requested`, else GLOO_SOCKET_IFNAME, else the one with `address`.

    Raises ConfigError if the interface does not exist.
    """
    have = interfaces()
    requested = requested or os.environ.get("GLOO_SOCKET_IFNAME")
    if requested and requested not in have:
        raise ConfigError(
            f"training.network_interface is {requested}, but {socket.gethostname()} has {', '.join(have)}; "
            "set it to one of these, or leave it out."
        )
    for name, addresses in have.items():
        if name == requested or (not requested and address in addresses):
            return name, address if address in addresses else addresses[0]
    raise ConfigError(
        f"{socket.gethostname()} has no interface with the address {address}; set training.network_interface to one "
        f"of {', '.join(have)}."
    )
