"""Memory that runs short while a run goes on."""

from __future__ import annotations

from collections.abc import Callable

from sansgpu.machine.allocator import give_back_memory

PATIENCE = 2  # micro-batches after a cut before the next: the first shows what it saved
# Free memory below which the micro-batch is cut. What one of a second takes in that another process may take a few
# hundred MB; the compiler that a new shape needs, a little more.
LEAST_FREE_BYTES, COMPILER_BYTES = 256 << 20, 256 << 20


class MemoryGuard:
    """Says how large a micro-batch may be, and cuts it in halves before memory runs out.

    `room` tells the bytes that can still be had, `warn` is told of every cut. Where nothing is left to cut, `shed` is
    asked once to give up what the run can do without, and says what that was, or nothing.
    """

    def __init__(
        self,
        micro_batch: int,
        compiled: bool,
        room: Callable[[], int],
        warn: Callable[[str], None],
        shed: Callable[[], str | None],
    ) -> None:
        self.micro_batch = micro_batch
        self._room, self._warn, self._shed = room, warn, shed
        self._least = LEAST_FREE_BYTES + (COMPILER_BYTES if compiled else 0)
        self._since_cut, self._ended = PATIENCE, False

    def allowed(self, size: int) -> int:
        """Rows of the next micro-batch, at most `size`; asked before each."""
        self._since_cut += 1
        if self._since_cut > PATIENCE and not self._ended and (room := self._room()) < self._least:
            give_back_memory()
            self._cut(room)
            self._since_cut = 0
        return min(size, self.micro_batch)

    def _cut(self, room: int) -> None:
        short = f"memory runs short: {room / 1e6:.0f} MB are left"
        if self.micro_batch > 1:
            old, self.micro_batch = self.micro_batch, -(-self.micro_batch // 2)
            self._warn(
                f"{short}; the micro-batch is halved from {old} to {self.micro_batch}, the batch and what is learned "
                "stay the same."
            )
        elif shed := self._shed():
            self._warn(f"{short}; {shed}.")
        else:
            self._ended = True
            self._warn(f"{short}, and there is nothing left to give up; stop other programs, or resume elsewhere.")
