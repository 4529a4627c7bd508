"""Rendezvous: the processes of a run connect and form a process group."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
import uuid
from dataclasses import asdict
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sansgpu.config import ConfigError
from sansgpu.config.training import TrainingConfig
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.distributed.peers import POLL_SECONDS, Heartbeats, LostRankError, Peer, this_process
from sansgpu.machine.distributed.world import World, unbind

_DISCARD_PORT = 9  # names a destination for a route lookup; nothing is sent


def resolve_backend(training: TrainingConfig) -> tuple[str, str | None]:
    """Returns the backend and, if it is gloo because nccl supports only GPUs, a message for the user.

    Raises ConfigError if this build of torch lacks the backend.
    """
    backend = training.distributed_backend
    if backend == "nccl" and training.get_effective_device().type == "cpu":
        return "gloo", "training.distributed_backend nccl works only on GPUs, so this run uses gloo; set it to gloo."
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f"training.distributed_backend is {backend}, but this build of torch does not support it; set it to gloo."
        )
    return backend, None


def join(world: World, backend: str, timeout: float, interface: str | None) -> Group:
    """Waits for all ranks and returns their process group. Raises ConfigError, or LostRankError for a missing rank."""
    if world.size == 1:
        return Group(0, SINGLE_PROCESS.peers, world.restarts > 0, timeout, shared=None)
    if world.unbound:
        unbind()
    own, first = route_to(world.address)
    name, address = interface_for(own, interface)
    deadline = time.monotonic() + timeout
    root, number = _numbered_store(world, deadline, timeout)
    store = PrefixStore(f"sansgpu/{number}", root)
    this = this_process(address, first)
    store.set(f"peer/{world.rank}", json.dumps(asdict(this)))
    peers = _all_peers(store, world.size, deadline, timeout)
    beats = PrefixStore(f"sansgpu/{number}", root.clone())  # type: ignore[attr-defined]  # missing in the stubs
    heartbeats = Heartbeats(world.rank, peers, store, beats, f"{world.address}:{world.port}", timeout)
    os.environ["GLOO_SOCKET_IFNAME"] = _reachable(world.rank, peers, name, interface)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=PrefixStore("tensors", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise heartbeats.diagnose(error) from None
    return Group(world.rank, peers, world.restarts > 0 or number > 1, timeout, (store, heartbeats))


def _shared_store(world: World, timeout: float) -> TCPStore:
    """Connects to the run's key-value store, which rank 0 hosts if the launcher does not."""
    hosting = world.rank == 0 and not world.hosted
    where, wait = f"{world.address}:{world.port}", timedelta(seconds=timeout)
    try:
        return TCPStore(world.address, world.port, is_master=hosting, timeout=wait, wait_for_workers=False)
    except RuntimeError as error:
        if hosting:
            reason = "it is in use" if "EADDRINUSE" in str(error) else " ".join(str(error).split())[:120]
            raise ConfigError(
                f"rank 0 cannot listen on port {world.port}: {reason}; set MASTER_PORT to a free port for all "
                "processes."
            ) from None
        raise LostRankError(
            f"rank {world.rank} on {socket.gethostname()} cannot connect to rank 0 at {where} within {timeout:.0f} s; "
            "check that rank 0 is running and that MASTER_ADDR is set to its host."
        ) from None


def _numbered_store(world: World, deadline: float, timeout: float) -> tuple[TCPStore, int]:
    """Returns the run's key-value store and the number of this launch.

    When the same processes start a second run, a rank may still reach the store of the first, which rank 0 is closing,
    so it connects again.
    """
    while True:
        store = _shared_store(world, timeout)
        try:
            return store, _launch_number(store, world, deadline, timeout)
        except dist.DistNetworkError:
            if world.rank == 0 or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def _launch_number(store: Store, world: World, deadline: float, timeout: float) -> int:
    """Returns the number of this launch of the run, counted by rank 0.

    If a launcher hosts the store and restarts all processes, the store may still hold keys of earlier launches, so each
    process requests the number under a unique name.
    """
    if world.rank:
        name = uuid.uuid4().hex
        store.set(f"asks/{world.rank}", name)
        return int(_wait_for(0, world.size, store, f"answer/{name}", deadline, timeout))
    number = int(store.add("starts", 1))
    answered: set[bytes] = set()
    while missing := [r for r in range(1, world.size) if not store.check([f"sansgpu/{number}/peer/{r}"])]:
        for rank in missing:
            name_of = store.get(f"asks/{rank}") if store.check([f"asks/{rank}"]) else None
            if name_of is not None and name_of not in answered:
                answered.add(name_of)
                store.set(f"answer/{name_of.decode()}", str(number))
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise LostRankError(f"rank {names} of {world.size} did not connect within {timeout:.0f} s; check its log.")
        time.sleep(POLL_SECONDS)
    return number


def _all_peers(store: Store, size: int, deadline: float, timeout: float) -> list[Peer]:
    texts = [_wait_for(rank, size, store, f"peer/{rank}", deadline, timeout) for rank in range(size)]
    return [Peer(**json.loads(text)) for text in texts]


def _wait_for(rank: int, size: int, store: Store, key: str, deadline: float, timeout: float) -> bytes:
    """Waits for a key that `rank` sets and returns its value. Raises LostRankError at the deadline."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise LostRankError(f"rank {rank} of {size} did not connect within {timeout:.0f} s; check its log.")
        time.sleep(POLL_SECONDS)
    return bytes(store.get(key))


def _reachable(rank: int, peers: list[Peer], name: str, configured: str | None) -> str:
    """Returns the interface to listen on, which is not the loopback if there are ranks on other hosts.

    A host's own name often resolves to its loopback address, which other hosts cannot reach.
    """
    this = peers[rank]
    elsewhere = [peer for peer in peers if peer.machine != this.machine]
    if not elsewhere or not is_loopback(this.address):
        return name
    have = {n: addresses for n, addresses in interfaces().items() if not is_loopback(addresses[0])}
    called = [n for n, addresses in have.items() if any(peer.master in addresses for peer in elsewhere)]
    if configured or len(found := called or list(have)) != 1:
        raise ConfigError(
            f"{this.host} would listen on {this.address}, which is not reachable from other hosts; set "
            f"training.network_interface to one of {', '.join(have)}."
        )
    return found[0]


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
            "set it to one of these, or remove it."
        )
    for name, addresses in have.items():
        if name == requested or (not requested and address in addresses):
            return name, address if address in addresses else addresses[0]
    raise ConfigError(
        f"{socket.gethostname()} has no interface with the address {address}; set training.network_interface to one "
        f"of {', '.join(have)}."
    )
