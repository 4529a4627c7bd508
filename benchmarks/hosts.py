"""Emulates two hosts on one machine: connected network namespaces with their own host names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NET = "10.77.{}.{}"


def refused() -> str | None:
    """Returns the reason why hosts cannot be emulated on this machine, or None."""
    if not (shutil.which("ip") and shutil.which("unshare") and os.geteuid() == 0):
        return "network namespaces need root, iproute2 and unshare"
    probe = f"sansgpu-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else "network namespaces are not allowed here"


@dataclass(frozen=True)
class Host:
    """A network namespace. Inside it, the host's name resolves to its loopback address, as on Debian."""

    name: str
    address: str

    def start(self, arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts a Python process on this host."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named, sys.executable, *arguments],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Creates two hosts that can reach each other and nothing else."""
    number = os.getpid() % 250
    hosts = tuple(Host(f"sg{os.getpid()}{letter}", NET.format(number, 1 + i)) for i, letter in enumerate("ab"))
    ends = [f"v{os.getpid()}{letter}" for letter in "ab"]
    _run(*(f"ip netns add {host.name}" for host in hosts), f"ip link add {ends[0]} type veth peer name {ends[1]}")
    try:
        for host, end in zip(hosts, ends, strict=True):
            _run(
                f"ip link set {end} netns {host.name} name eth0",
                f"ip -n {host.name} addr add {host.address}/24 dev eth0",
                f"ip -n {host.name} link set lo up",
                f"ip -n {host.name} link set eth0 up",
            )
            folder = Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            others = "".join(f"{other.address} {other.name}\n" for other in hosts if other is not host)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            _run(f"ip netns pids {host.name} | xargs -r kill -9; ip netns del {host.name}")
            shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def cut(host: Host, now: bool = True) -> None:
    """Disconnects or reconnects a host; packets are dropped silently."""
    _run(f"ip -n {host.name} link set eth0 {'down' if now else 'up'}")


def shape(hosts: tuple[Host, Host], rate: str) -> None:
    """Limits the bandwidth in both directions to `rate`, in the syntax of tc (100mbit)."""
    for host in hosts:
        _run(f"tc -n {host.name} qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 100ms")


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(["sh", "-c", command], check=True, capture_output=True)
