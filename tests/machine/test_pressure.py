"""The micro-batch is reduced before memory runs out."""

import pytest

from sansgpu.machine.execution import Execution
from sansgpu.machine.pressure import COMPILER_BYTES, MIN_FREE_BYTES, MemoryGuard, MemoryShortError

MEGABYTE = 1 << 20


class Machine:
    """Free memory, memory of the process and a clock, all set by the test."""

    def __init__(self) -> None:
        self.free, self.ours, self.now = 4000 * MEGABYTE, 1000 * MEGABYTE, 0.0
        self.said: list[str] = []

    def guard(self, size: int, compiled: str = "off", shed: str | None = None) -> MemoryGuard:
        sheds = iter([shed, None, None])
        self.execution = Execution(size, compile=compiled)
        return MemoryGuard(
            self.execution,
            lambda: self.free,
            lambda: self.ours,
            self.said.append,
            lambda: next(sheds),
            lambda: self.now,
        )

    def passes(self, seconds: float, taken_by_others: int = 0) -> None:
        self.now += seconds
        self.free -= taken_by_others


def test_with_memory_left_nothing_changes() -> None:
    machine = Machine()
    guard = machine.guard(16)
    for _ in range(20):
        assert guard.allowed(16) == 16
        machine.passes(1.0)
        guard.check()
    assert machine.said == []


def test_short_memory_cuts_the_micro_batch_then_sheds_then_says_so_once() -> None:
    machine = Machine()
    guard = machine.guard(3, shed="copies are gone")
    machine.free = MIN_FREE_BYTES - 1
    assert [guard.allowed(3) for _ in range(5)] == [1, 1, 1, 1, 1]
    assert ["lowered from 3 to 1" in machine.said[0], "copies are gone" in machine.said[1]] == [True, True]
    assert "cannot free more memory" in machine.said[2]
    assert len(machine.said) == 3


def test_others_that_take_memory_are_expected_to_continue() -> None:
    machine = Machine()
    guard = machine.guard(16)
    guard.allowed(16)
    machine.passes(1.0, taken_by_others=1500 * MEGABYTE)
    assert guard.allowed(16) == 16, "after one more second 1,000 MB would be free"
    machine.passes(1.0, taken_by_others=1500 * MEGABYTE)
    assert guard.allowed(16) < 16, "after one more second nothing would be free"


def test_a_forward_pass_is_ended_on_its_way_and_tried_again_smaller() -> None:
    machine = Machine()
    guard = machine.guard(8)
    guard.allowed(8)
    machine.passes(0.2)
    guard.check()
    machine.free = 10 * MEGABYTE
    guard.check()  # too soon after the last check
    machine.passes(0.2)
    with pytest.raises(MemoryShortError):
        guard.check()
    assert guard.allowed(8) < 8
    assert machine.execution.micro_batch < 8


def test_a_compiled_run_keeps_room_for_the_compiler() -> None:
    machine = Machine()
    machine.free = MIN_FREE_BYTES + COMPILER_BYTES // 2
    assert machine.guard(4).allowed(4) == 4
    assert machine.guard(4, compiled="on").allowed(4) < 4


def test_growth_is_not_extrapolated_over_a_slow_pass() -> None:
    machine = Machine()
    machine.free = 20_000 * MEGABYTE
    guard = machine.guard(8)
    for _ in range(4):
        guard.allowed(8)
        machine.passes(60.0)
    guard.allowed(8)
    machine.passes(1.0, taken_by_others=1000 * MEGABYTE)  # would be 60 GB in a pass
    guard.check()
    assert machine.said == []
    assert machine.execution.micro_batch == 8
