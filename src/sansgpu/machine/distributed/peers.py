"""The processes of a run, and heartbeats that show which of them are alive."""

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
from sansgpu.machine.distributed.world import allowed_cpus

BEAT_SECONDS = 1.0  # interval of heartbeats
SILENT_SECONDS = 30.0  # a rank without a heartbeat for this long counts as lost during preparation
STORE_TIMEOUT_SECONDS = 10.0  # time that the store has to answer during a diagnosis
DIAGNOSIS_SECONDS = 4.0  # duration of the diagnosis of a failed collective: a few heartbeats
LINGER_SECONDS = 3.0  # a failed process stays this long, so that the others can read its error
REPORT_SECONDS = 1.0  # others then stay this long, because launchers kill all processes when the first exits
POLL_SECONDS = 0.05
_MAX_ERROR_CHARS = 200  # quoted from an error of torch


class LostRankError(SansGPUError):
    """Raised if another rank has exited or cannot be reached. Weights are those of the last completed step.

    `reported` is True if that rank reports the error itself on the same machine.
    """

    def __init__(self, message: str, exit_code: int = 1, reported: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.reported = exit_code, reported


@dataclass(frozen=True)
class Peer:
    """A process of a run."""

    host: str
    pid: int
    machine: str  # equal for processes on the same machine and in the same container
    address: str  # its own address on the route to rank 0
    master: str  # rank 0's address as resolved on this host
    cpus: list[int]  # processors it may run on


def this_process(address: str = "", master: str = "") -> Peer:
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = f"{boot.read_text().strip() if boot.exists() else ''} {socket.gethostname()}"
    return Peer(socket.gethostname(), os.getpid(), machine, address, master, allowed_cpus())


class Heartbeats:
    """Writes this rank's heartbeats to the shared store and diagnoses failures from those of the other ranks.

    `beats` is a separate connection to the same store, because a wait blocks all other calls on a connection.
    """

    def __init__(self, rank: int, peers: list[Peer], store: Store, beats: Store, where: str, timeout: float) -> None:
        self._rank, self._peers, self._store, self._beats = rank, peers, store, beats
        self._where, self._timeout = where, timeout
        self._collectives = 0
        self._left = threading.Event()
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        threading.Thread(target=self._send_beats, daemon=True, name="heartbeats").start()

    def start(self) -> None:
        """Counts a collective. Heartbeats contain the count, which shows which ranks are late."""
        self._collectives += 1

    def sign_off(self) -> None:
        """Stops the heartbeats at a regular end of the process."""
        self._left.set()

    def report_failure(self, reason: str, exit_code: int) -> bool:
        """Reports to the other ranks why this process ends; returns whether rank 0 reports the same error."""
        try:
            self._store.set(f"error/{self._rank}", json.dumps([reason, exit_code]))
            limit = time.monotonic() + LINGER_SECONDS
            others = [rank for rank in range(len(self._peers)) if rank != self._rank]
            while time.monotonic() < limit:
                if self._rank and (self.reported_error(0) or ("", 0))[0] == reason:
                    return True
                if all(self._store.check([f"heard/{r}"]) or self.reported_error(r) for r in others):
                    return False
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            pass  # the store has exited, and so have the others
        return False

    def reported_error(self, rank: int) -> tuple[str, int] | None:
        """Returns the message and exit code that a rank reported when it ended, or None."""
        key = f"error/{rank}"
        return tuple(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def ended(self, rank: int) -> LostRankError | None:
        """Returns the error to raise on this rank if `rank` has reported that it ended, or None."""
        failure = self.reported_error(rank)
        if failure is None:
            return None
        self._store.set(f"heard/{self._rank}", "")
        local = self._peers[rank].machine == self._peers[self._rank].machine
        return LostRankError(f"{self.describe(rank)} ended: {failure[0]}", failure[1], reported=local)

    def require(self, ranks: Iterable[int]) -> None:
        """Raises LostRankError if one of the ranks has ended or has sent no heartbeat for SILENT_SECONDS."""
        for rank in ranks:
            if ended := self.ended(rank):
                raise ended
            beat, now = self._beat_of(rank), time.monotonic()
            if rank not in self._last_beats or self._last_beats[rank][0] != beat:
                self._last_beats[rank] = beat, now
            elif now - self._last_beats[rank][1] > SILENT_SECONDS:
                raise LostRankError(
                    f"{self.describe(rank)} is lost: no heartbeat for {SILENT_SECONDS:.0f} s; start all processes "
                    "again with --resume latest."
                )

    def describe(self, rank: int) -> str:
        peer = self._peers[rank]
        return f"rank {rank} of {len(self._peers)} (process {peer.pid} on {peer.host})"

    def diagnose(self, error: RuntimeError) -> LostRankError:
        """Returns an error that explains a failed collective: which rank is lost or late, judging by heartbeats."""
        found: list[LostRankError] = []
        thread = threading.Thread(target=lambda: found.append(self._diagnosis(error)), daemon=True)
        thread.start()
        thread.join(DIAGNOSIS_SECONDS + STORE_TIMEOUT_SECONDS)
        message = f"{self._where} does not respond: {self.describe(0)} is lost, or the network to its host is down."
        return found[0] if found else LostRankError(message)

    def _diagnosis(self, error: RuntimeError) -> LostRankError:
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        try:
            before = {rank: self._beat_of(rank) for rank in others}
            limit = time.monotonic() + DIAGNOSIS_SECONDS
            while time.monotonic() < limit:
                if ended := next(filter(None, map(self.ended, others)), None):
                    return ended
                time.sleep(POLL_SECONDS)
            after = {rank: self._beat_of(rank) for rank in others}
        except RuntimeError:
            return LostRankError(f"{self.describe(0)} is lost, and with it the rendezvous store at {self._where}.")
        return LostRankError(self._explain(error, before, after))

    def _explain(self, error: RuntimeError, before: dict[int, bytes], after: dict[int, bytes]) -> str:
        others = list(before)
        if silent := [rank for rank in others if after[rank] == before[rank]]:
            return f"{self._describe_all(silent)} lost: no heartbeat for {DIAGNOSIS_SECONDS:.0f} s."
        if late := [rank for rank in others if int(after[rank].split()[-1]) < self._collectives]:
            late_by = f"did not reach the same collective within {self._timeout:.0f} s"
            return f"{self._describe_all(late)} alive, but {late_by}; training.timeout_seconds may be too short."
        reason = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
        return f"the connection of {self.describe(self._rank)} failed, although all other ranks are alive: {reason}."

    def _describe_all(self, ranks: list[int]) -> str:
        return " and ".join(map(self.describe, ranks)) + (" is" if len(ranks) == 1 else " are")

    def _send_beats(self) -> None:
        count = 0
        while not self._left.wait(BEAT_SECONDS if count else 0.0):
            count += 1
            try:
                self._beats.set(f"beat/{self._rank}", f"{count} {self._collectives}")
            except RuntimeError:
                return  # the host of the store has exited; the next collective raises the error

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b"0"
