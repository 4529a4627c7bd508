"""The process group of a run: collectives with errors that name a lost rank."""

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
from sansgpu.machine.distributed.peers import (
    LINGER_SECONDS,
    POLL_SECONDS,
    Heartbeats,
    LostRankError,
    Peer,
    this_process,
)

Answer = TypeVar("Answer")


class Group:
    """The processes of a run. With a single process every collective is a no-op.

    Collectives raise LostRankError, which names the missing rank, if one does not take part within `timeout` seconds.
    """

    def __init__(
        self, rank: int, peers: list[Peer], restarted: bool, timeout: float, shared: tuple[Store, Heartbeats] | None
    ) -> None:
        """`restarted` is True if the launcher started this run before; `shared` is None for a single process."""
        self.rank, self.peers, self.restarted = rank, peers, restarted
        self._timeout, self._shared = timedelta(seconds=timeout), shared
        self._exchanges = 0  # exchanges of JSON objects so far; all ranks make them in the same order

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.peers)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and reports."""
        return self.rank == 0

    @property
    def local_ranks(self) -> list[int]:
        """The ranks on this machine."""
        machine = self.peers[self.rank].machine
        return [rank for rank, peer in enumerate(self.peers) if peer.machine == machine]

    # Collectives of JSON values, which go through the key-value store. They have no timeout: they wait for a rank as
    # long as it sends heartbeats.

    def broadcast_object(self, produce: Callable[[], Answer]) -> Answer:
        """Calls `produce` on rank 0 and broadcasts its JSON-serializable result."""
        if self._shared is None:
            return produce()
        self._exchanges += 1
        key = f"decided/{self._exchanges}"
        if self.is_main:
            self._shared[0].set(key, json.dumps(produce()))
        answer: Answer = self._await_keys({0: key})[0]
        return answer

    def all_gather_object(self, value: Answer) -> list[Answer]:
        """Returns the JSON-serializable values of all ranks, in rank order."""
        if self._shared is None:
            return [value]
        self._exchanges += 1
        self._shared[0].set(f"gathered/{self._exchanges}/{self.rank}", json.dumps(value))
        return self._await_keys({rank: f"gathered/{self._exchanges}/{rank}" for rank in range(self.size)})

    def shutdown(self) -> None:
        """Waits until all ranks are done, because a rank that exits early would look lost.

        Rank 0 exits last, as it may host the store.
        """
        if self._shared is None:
            return
        self.all_gather_object(None)
        store, heartbeats = self._shared
        heartbeats.sign_off()
        limit = time.monotonic() + LINGER_SECONDS
        with suppress(RuntimeError):
            store.set(f"left/{self.rank}", "")
            others = [f"left/{rank}" for rank in range(self.size)] if self.is_main else []
            while others and not store.check(others) and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)

    def report_failure(self, error: BaseException) -> bool:
        """Reports to the other ranks why this process ends; returns whether rank 0 reports the same error."""
        if self._shared is None or isinstance(error, LostRankError):
            return False
        code = error.exit_code if isinstance(error, SansGPUError) else 1
        return self._shared[1].report_failure(str(error) or type(error).__name__, code)

    @contextmanager
    def diagnosing_torch(self) -> Iterator[None]:
        """Raises LostRankError in place of gloo's errors in collectives that torch starts, as fully_shard does."""
        try:
            yield
        except RuntimeError as error:
            if self._shared is None or "gloo" not in str(error):
                raise
            raise self._shared[1].diagnose(error) from None

    def _await_keys(self, keys: dict[int, str]) -> list[Any]:
        """Waits until each rank in `keys` has set its key in the store, and returns the values."""
        assert self._shared is not None
        store, heartbeats = self._shared
        try:
            missing = keys
            while missing := {rank: key for rank, key in missing.items() if not store.check([key])}:
                heartbeats.require(missing)
                time.sleep(POLL_SECONDS)
            return [json.loads(store.get(key)) for key in keys.values()]
        except RuntimeError as error:
            raise heartbeats.diagnose(error) from None

    # Collectives on tensors.

    def all_reduce_async(self, tensor: torch.Tensor) -> dist.Work:
        """Starts summing a tensor over all ranks, in place; the sum is ready after `wait`."""
        return self._begin(lambda: dist.all_reduce(tensor, async_op=True))

    def reduce_async(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Starts summing a tensor to `rank`, in place; its content on other ranks becomes undefined."""
        return self._begin(lambda: dist.reduce(tensor, rank, async_op=True))

    def broadcast_async(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Starts broadcasting `rank`'s tensor, in place."""
        return self._begin(lambda: dist.broadcast(tensor, rank, async_op=True))

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Broadcasts `rank`'s tensor, in place."""
        self.wait(self.broadcast_async(tensor, rank))

    def transfer(self, tensor: torch.Tensor, source: int, target: int) -> torch.Tensor:
        """Sends a tensor from rank `source` to `target` and returns it there.

        All ranks must call it. Ranks other than `source` pass a tensor of its shape, which may be on the meta device.
        """
        if source == target:
            return tensor
        if self.rank == source:
            self.wait(self._begin(lambda: dist.isend(tensor.contiguous(), target)))
        elif self.rank == target:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.wait(self._begin(lambda: dist.irecv(received, source)))
            return received
        elif self._shared is not None:
            self._shared[1].start()  # keeps this rank's count of operations equal to that of the other ranks
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, which must have equal shapes."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(self._begin(lambda: dist.all_gather(parts, tensor, async_op=True)))
        return parts

    def all_gather_rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, whose first dimensions may differ."""
        if self.size == 1:
            return [tensor]
        counts = [int(count) for count in self.all_gather(torch.tensor([len(tensor)]))]
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        return [part[:count] for part, count in zip(self.all_gather(padded), counts, strict=True)]

    def all_reduce_sums(self, values: dict[str, float]) -> dict[str, float]:
        """Sums values by name over all ranks, in rank order; a name may be missing on some ranks."""
        if self.size == 1:
            return values
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(text)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(text)] = text
        total: dict[str, float] = {}
        for other, length in zip(self.all_gather(padded), lengths, strict=True):
            for name, value in json.loads(bytes(other[: int(length)].numpy())).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def all_reduce_max(self, value: float) -> float:
        return self.all_reduce_maxima([value])[0]

    def all_reduce_maxima(self, values: list[float]) -> list[float]:
        """Returns the element-wise maxima of the lists of all ranks, in one collective."""
        if self.size == 1:
            return values
        largest = torch.tensor(values, dtype=torch.float64)
        self.wait(self._begin(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)))
        return largest.tolist()

    def wait(self, work: dist.Work) -> None:
        """Waits for a collective to finish."""
        assert self._shared is not None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._shared[1].diagnose(error) from None

    def _begin(self, start: Callable[[], dist.Work | None]) -> dist.Work:
        assert self._shared is not None
        self._shared[1].start()
        try:
            work = start()
        except RuntimeError as error:
            raise self._shared[1].diagnose(error) from None
        assert work is not None
        return work


SINGLE_PROCESS = Group(0, [this_process()], restarted=False, timeout=0.0, shared=None)
