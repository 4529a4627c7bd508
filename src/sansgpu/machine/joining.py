"""How the processes of a run find each other, before anything else is done."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sansgpu.config import ConfigError
from sansgpu.machine import cores
from sansgpu.machine.group import ALONE, Group
from sansgpu.machine.network import interface_for, interfaces, is_loopback, way_to
from sansgpu.machine.peers import POLL_SECONDS, LostRankError, Peer, SignsOfLife, this_process
from sansgpu.machine.world import World


def require_backend(backend: str) -> None:
    """Raises ConfigError where this torch was built without it."""
    if not dist.is_backend_available(backend):
        raise ConfigError(f"training.distributed_backend is {backend}, which this torch has not; set it to gloo.")


def join(world: World, backend: str, timeout: float, interface: str | None) -> Group:
    """The group of this process, once all have come. Raises ConfigError or LostRankError, naming who has not."""
    if world.size == 1:
        return Group(0, ALONE.peers, world.restarts > 0, timeout, shared=None)
    if world.unbound:
        cores.unbind()
    own, first = way_to(world.address)
    name, address = interface_for(own, interface)
    limit = time.monotonic() + timeout
    root = _shared_store(world, timeout)
    number = _start_number(root, world, limit, timeout)
    store = PrefixStore(f"sansgpu/{number}", root)
    this = this_process(address, first)
    store.set(f"peer/{world.rank}", json.dumps(asdict(this)))
    peers = _all_peers(store, world.size, limit, timeout)
    beats = PrefixStore(f"sansgpu/{number}", root.clone())  # type: ignore[attr-defined]  # which the stubs lack
    signs = SignsOfLife(world.rank, peers, store, beats, f"{world.address}:{world.port}", timeout)
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
        raise signs.explained(error) from None
    return Group(world.rank, peers, world.restarts > 0 or number > 1, timeout, (store, signs))


def _shared_store(world: World, timeout: float) -> TCPStore:
    """Where all processes read what each writes: kept by the launcher, or by rank 0."""
    hosting = world.rank == 0 and not world.hosted
    where, wait = f"{world.address}:{world.port}", timedelta(seconds=timeout)
    try:
        return TCPStore(world.address, world.port, is_master=hosting, timeout=wait, wait_for_workers=False)
    except RuntimeError as error:
        if hosting:
            reason = "it is taken" if "EADDRINUSE" in str(error) else " ".join(str(error).split())[:120]
            raise ConfigError(
                f"rank 0 cannot listen on port {world.port}: {reason}; set MASTER_PORT to a free one for all processes."
            ) from None
        raise LostRankError(
            f"rank {world.rank} on {socket.gethostname()} finds nobody at {where} in {timeout:.0f} s: is rank 0 "
            "started, and is MASTER_ADDR its host?"
        ) from None


def _start_number(store: Store, world: World, limit: float, timeout: float) -> int:
    """Which start of the run this is, as rank 0 counts: a launcher that starts all processes anew may keep what earlier
    ones have written, so each asks rank 0 under a name of its own.
    """
    if world.rank:
        name = uuid.uuid4().hex
        store.set(f"asks/{world.rank}", name)
        return int(_from(0, world.size, store, f"answer/{name}", limit, timeout))
    number = int(store.add("starts", 1))
    answered: set[bytes] = set()
    while missing := [r for r in range(1, world.size) if not store.check([f"sansgpu/{number}/peer/{r}"])]:
        for rank in missing:
            name_of = store.get(f"asks/{rank}") if store.check([f"asks/{rank}"]) else None
            if name_of is not None and name_of not in answered:
                answered.add(name_of)
                store.set(f"answer/{name_of.decode()}", str(number))
        if time.monotonic() > limit:
            names = ", ".join(map(str, missing))
            raise LostRankError(f"of {world.size} processes, rank {names} has not come in {timeout:.0f} s.")
        time.sleep(POLL_SECONDS)
    return number


def _all_peers(store: Store, size: int, limit: float, timeout: float) -> list[Peer]:
    texts = [_from(rank, size, store, f"peer/{rank}", limit, timeout) for rank in range(size)]
    return [Peer(**json.loads(text)) for text in texts]


def _from(rank: int, size: int, store: Store, key: str, limit: float, timeout: float) -> bytes:
    """What a rank sets. Raises LostRankError where it has not by `limit`."""
    while not store.check([key]):
        if time.monotonic() > limit:
            raise LostRankError(f"rank {rank} of {size} has not come in {timeout:.0f} s.")
        time.sleep(POLL_SECONDS)
    return bytes(store.get(key))


def _reachable(rank: int, peers: list[Peer], name: str, wanted: str | None) -> str:
    """The interface to listen on. A host's own name often stands for its loopback, where no other host comes in."""
    this = peers[rank]
    elsewhere = [peer for peer in peers if peer.machine != this.machine]
    if not elsewhere or not is_loopback(this.address):
        return name
    have = {n: addresses for n, addresses in interfaces().items() if not is_loopback(addresses[0])}
    called = [n for n, addresses in have.items() if any(peer.master in addresses for peer in elsewhere)]
    if wanted or len(found := called or list(have)) != 1:
        raise ConfigError(
            f"{this.host} would listen on {this.address}, which no other host reaches; set training.network_interface "
            f"to one of {', '.join(have)}."
        )
    return found[0]
