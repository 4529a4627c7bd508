"""Emulates two hosts on one machine: connected network namespaces with their own host names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NET = "10.77.{}.{}"


def refused(delay: bool = False) -> str | None:
    """Returns the reason why hosts, or a `delay` between them, cannot be emulated on this machine, or None."""
    if not (shutil.which("ip") and shutil.which("unshare") and os.geteuid() == 0):
        return "network namespaces need root, iproute2 and unshare"
    probe = f"sansgpu-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    netem = ["tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    delayed = not delay or subprocess.run(netem, capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    if made.returncode:
        return "network namespaces are not allowed here"
    return None if delayed else "this kernel has no netem (CONFIG_NET_SCH_NETEM), which delays packets"


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


def shape(hosts: tuple[Host, Host], rate: str, delay: str | None = None) -> None:
    """Limits the bandwidth in both directions to `rate`, and delays packets, in the syntax of tc (100mbit, 5ms)."""
    limit = f"netem rate {rate} delay {delay}" if delay else f"tbf rate {rate} burst 256kb latency 100ms"
    for host in hosts:
        _run(f"tc -n {host.name} qdisc replace dev eth0 root {limit}")


def sent_bytes(host: Host) -> int:
    """Returns the bytes that a host has sent to the other one so far, with the headers of packets."""
    [link] = json.loads(subprocess.run(["ip", "-n", host.name, "-s", "-j", "link", "show", "eth0"], check=True,
                                       capture_output=True).stdout)  # fmt: skip
    return int(link["stats64"]["tx"]["bytes"])


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(["sh", "-c", command], check=True, capture_output=True)
