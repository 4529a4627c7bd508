"""The processes of a run, and which of them still live."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store

from sansgpu.config import SansGPUError
from sansgpu.machine import cores

BEAT_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 30.0  # without one, after which a process counts as lost while it prepares
ANSWER_SECONDS = 10.0  # that a store has to answer in: a network that is cut says nothing at all
LOOK_SECONDS = 4.0  # that a failure is looked into: time for a few signs of life
HEARD_SECONDS = 3.0  # that a process stays, so that the others hear why it ends
SPEAK_SECONDS = 1.0  # that one which has heard it stays, as launchers end the others when the first is gone
POLL_SECONDS = 0.05
_QUOTED = 200  # characters of an error that is not ours


class LostRankError(SansGPUError):
    """Another process of the run is gone, or cannot be reached. Weights are as the last whole step left them.

    `heard`: the other one says why itself, where the user sees it.
    """

    def __init__(self, message: str, exit_code: int = 1, heard: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.heard = exit_code, heard


@dataclass(frozen=True)
class Peer:
    """A process of a run."""

    host: str
    pid: int
    machine: str  # the same for all on one machine and in one container
    address: str  # that it reaches rank 0 from
    master: str  # what it takes for rank 0's address
    cpus: list[int]  # it may run on


def this_process(address: str = "", master: str = "") -> Peer:
    """This one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{boot.read_text().strip() if boot.exists() else ''} {socket.gethostname()}"
    return Peer(socket.gethostname(), os.getpid(), machine, address, master, [cpu.number for cpu in cores.cpus()])


class SignsOfLife:
    """What each process says of itself in the store that all can read, and what a silence means.

    `beats` is a connection of its own to the same store, as a wait in one holds up the other.
    """

    def __init__(self, rank: int, peers: list[Peer], store: Store, beats: Store, where: str, timeout: float) -> None:
        self._rank, self._peers, self._store, self._beats = rank, peers, store, beats
        self._where, self._timeout = where, timeout
        self._place = 0
        self._left = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        threading.Thread(target=self._live, daemon=True, name="signs of life").start()

    def begin(self) -> None:
        """Another collective begins: how far a process is tells whom the others wait for."""
        self._place += 1

    def leave(self) -> None:
        """This process ends as it should."""
        self._left.set()

    def fail(self, reason: str, exit_code: int) -> bool:
        """Tell the others why this process ends. Whether the user hears the same from rank 0."""
        try:
            self._store.set(f"error/{self._rank}", json.dumps([reason, exit_code]))
            limit = time.monotonic() + HEARD_SECONDS
            others = [rank for rank in range(len(self._peers)) if rank != self._rank]
            while time.monotonic() < limit:
                if self._rank and (self.said(0) or ("", 0))[0] == reason:
                    return True
                if all(self._store.check([f"heard/{r}"]) or self.said(r) for r in others):
                    return False
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the others are gone, too
        return False

    def said(self, rank: int) -> tuple[str, int] | None:
        """Why a rank ended, in its own words, and its exit code."""
        key = f"error/{rank}"
        return tuple(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def ended(self, rank: int) -> LostRankError | None:
        """What that means for this process."""
        said = self.said(rank)
        if said is None:
            return None
        self._store.set(f"heard/{self._rank}", "")
        near = self._peers[rank].machine == self._peers[self._rank].machine
        return LostRankError(f"{self.named(rank)} ended: {said[0]}", said[1], heard=near)

    def require(self, ranks: Iterable[int]) -> None:
        """Raises LostRankError where one of them has ended, or has been silent for too long."""
        for rank in ranks:
            if ended := self.ended(rank):
                raise ended
            beat, now = self._beat_of(rank), time.monotonic()
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
            elif now - self._seen[rank][1] > SILENT_SECONDS:
                raise LostRankError(f"{self.named(rank)} is lost: no sign of life for {SILENT_SECONDS:.0f} s.")

    def named(self, rank: int) -> str:
        """For people."""
        peer = self._peers[rank]
        return f"rank {rank} of {len(self._peers)} (process {peer.pid} on {peer.host})"

    def explained(self, error: RuntimeError) -> LostRankError:
        """What a failed collective means: who is gone, as far as the signs of life tell."""
        found: list[LostRankError] = []
        looking = threading.Thread(target=lambda: found.append(self._looked_into(error)), daemon=True)
        looking.start()
        looking.join(LOOK_SECONDS + ANSWER_SECONDS)
        cut = f"nothing answers at {self._where}: {self.named(0)} is lost, or the network to its host is cut."
        return found[0] if found else LostRankError(cut)

    def _looked_into(self, error: RuntimeError) -> LostRankError:
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        try:
            before = {rank: self._beat_of(rank) for rank in others}
            limit = time.monotonic() + LOOK_SECONDS
            while time.monotonic() < limit:
                if ended := next(filter(None, map(self.ended, others)), None):
                    return ended
                time.sleep(POLL_SECONDS)
            after = {rank: self._beat_of(rank) for rank in others}
        except RuntimeError:
            where = f"{self._where}, where the processes find each other"
            return LostRankError(f"{self.named(0)} is lost, and with it {where}.")
        return LostRankError(self._meaning(error, before, after))

    def _meaning(self, error: RuntimeError, before: dict[int, bytes], after: dict[int, bytes]) -> str:
        others = list(before)
        if silent := [rank for rank in others if after[rank] == before[rank]]:
            return f"{self._all_named(silent)} lost: no sign of life for {LOOK_SECONDS:.0f} s."
        if late := [rank for rank in others if int(after[rank].split()[-1]) < self._place]:
            waited = f"within {self._timeout:.0f} s to what this one waits for"
            return f"{self._all_named(late)} alive, but did not come {waited}; see training.timeout_seconds."
        reason = " ".join(str(error).split())[:_QUOTED]
        return f"the connection from {self.named(self._rank)} broke, though all others give signs of life: {reason}."

    def _all_named(self, ranks: list[int]) -> str:
        return " and ".join(map(self.named, ranks)) + (" is" if len(ranks) == 1 else " are")

    def _live(self) -> None:
        count = 0
        while not self._left.wait(BEAT_SECONDS if count else 0.0):
            count += 1
            try:
                self._beats.set(f"beat/{self._rank}", f"{count} {self._place}")
            except RuntimeError:
                return  # who keeps the store is gone; the next collective says so

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b"0"
