"""The processes that train one run together: how they agree, and how they add up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from sansgpu.config import SansGPUError
from sansgpu.machine.peers import (
    HEARD_SECONDS,
    POLL_SECONDS,
    SPEAK_SECONDS,
    LostRankError,
    Peer,
    SignsOfLife,
    this_process,
)

Answer = TypeVar("Answer")


class Group:
    """All processes of a run, of which this is one. Of one process alone everything here is a matter of course.

    Its collectives raise LostRankError, which names who is missing, where one does not come within `timeout` seconds.
    """

    def __init__(
        self, rank: int, peers: list[Peer], restarted: bool, timeout: float, shared: tuple[Store, SignsOfLife] | None
    ) -> None:
        """`restarted`: the launcher has started this run before. `shared` is None of one process alone."""
        self.rank, self.peers, self.restarted = rank, peers, restarted
        self._timeout, self._shared = timedelta(seconds=timeout), shared
        self._asked = 0  # questions answered by `decide` and `gather`, in the same order everywhere

    @property
    def size(self) -> int:
        """How many processes."""
        return len(self.peers)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    @property
    def local(self) -> list[int]:
        """The ranks on this machine."""
        mine = self.peers[self.rank].machine
        return [rank for rank, peer in enumerate(self.peers) if peer.machine == mine]

    # What is agreed on, however long one of them takes.

    def decide(self, ask: Callable[[], Answer]) -> Answer:
        """What rank 0 finds out, as JSON; the others wait for it while rank 0 gives signs of life."""
        if self._shared is None:
            return ask()
        self._asked += 1
        key = f"decided/{self._asked}"
        if self.first:
            self._shared[0].set(key, json.dumps(ask()))
        answer: Answer = self._awaited({0: key})[0]
        return answer

    def gather(self, value: Answer) -> list[Answer]:
        """Everyone's value, as JSON, in the order of ranks; waits for all who give signs of life."""
        if self._shared is None:
            return [value]
        self._asked += 1
        self._shared[0].set(f"gathered/{self._asked}/{self.rank}", json.dumps(value))
        return self._awaited({rank: f"gathered/{self._asked}/{rank}" for rank in range(self.size)})

    def leave(self) -> None:
        """Wait until all are done: who leaves first would look lost, and rank 0 may keep what the others read."""
        if self._shared is None:
            return
        self.gather(None)
        store, signs = self._shared
        signs.leave()
        limit = time.monotonic() + HEARD_SECONDS
        with suppress(RuntimeError):
            store.set(f"left/{self.rank}", "")
            others = [f"left/{rank}" for rank in range(self.size)] if self.first else []
            while others and not store.check(others) and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)

    def fail(self, error: BaseException) -> bool:
        """Tell the others why this process ends. Whether the user hears the same from rank 0."""
        if self._shared is None or isinstance(error, LostRankError):
            return False
        code = error.exit_code if isinstance(error, SansGPUError) else 1
        return self._shared[1].fail(str(error) or type(error).__name__, code)

    def _awaited(self, keys: dict[int, str]) -> list[Any]:
        """The values of these keys, each by the rank that sets it."""
        assert self._shared is not None
        store, signs = self._shared
        try:
            missing = keys
            while missing := {rank: key for rank, key in missing.items() if not store.check([key])}:
                signs.require(missing)
                time.sleep(POLL_SECONDS)
            return [json.loads(store.get(key)) for key in keys.values()]
        except RuntimeError as error:
            raise signs.explained(error) from None

    # What training adds up.

    def sum_later(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to add up a tensor over all ranks, in place; it is whole after `finish`."""
        return self._begin(lambda: dist.all_reduce(tensor, async_op=True))

    def sum_at_later(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """The same for one rank alone; the others' tensors are of no use any more."""
        return self._begin(lambda: dist.reduce(tensor, rank, async_op=True))

    def send_later(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begin to give `rank`'s tensor to all others, in place."""
        return self._begin(lambda: dist.broadcast(tensor, rank, async_op=True))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Give `rank`'s tensor to all others, in place."""
        self.finish(self.send_later(tensor, rank))

    def hand(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        """`source`'s tensor, on `target`; the others give one of its shape, and it may be on the meta device."""
        if source == target:
            return tensor
        if self.rank == source:
            self.finish(self._begin(lambda: dist.isend(tensor.contiguous(), target)))
        elif self.rank == target:
            taken = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.finish(self._begin(lambda: dist.irecv(taken, source)))
            return taken
        elif self._shared is not None:
            self._shared[1].begin()  # as the two do
        return tensor

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of this shape."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.finish(self._begin(lambda: dist.all_gather(parts, tensor, async_op=True)))
        return parts

    def add_up(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, added in their order; a name may be missing in some."""
        if self.size == 1:
            return values
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        lengths = self.collect(torch.tensor([len(text)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(text)] = text
        total: dict[str, float] = {}
        for other, length in zip(self.collect(padded), lengths, strict=True):
            for name, value in json.loads(bytes(other[: int(length)].numpy())).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.size == 1:
            return value
        largest = torch.tensor([value], dtype=torch.float64)
        self.finish(self._begin(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)))
        return float(largest)

    def finish(self, work: dist.Work) -> None:
        """Wait for what was begun."""
        assert self._shared is not None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._shared[1].explained(error) from None

    def _begin(self, start: Callable[[], dist.Work | None]) -> dist.Work:
        assert self._shared is not None
        self._shared[1].begin()
        try:
            work = start()
        except RuntimeError as error:
            raise self._shared[1].explained(error) from None
        assert work is not None
        return work


ALONE = Group(0, [this_process()], restarted=False, timeout=0.0, shared=None)


@contextmanager
def telling(group: Group) -> Iterator[None]:
    """Have the others hear of an error that ends this process; what rank 0 says too, it says alone."""
    try:
        yield
    except SansGPUError as error:
        heard = isinstance(error, LostRankError) and error.heard
        if heard:
            time.sleep(SPEAK_SECONDS)
        if heard or group.fail(error):
            raise SystemExit(error.exit_code) from None
        raise
    except BaseException as error:
        group.fail(error)
        raise
