"""The choice of the micro-batch from timed steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sansgpu.config import Config
from sansgpu.events.progress import ignore_progress
from sansgpu.machine.execution import Execution
from sansgpu.tasks.registry import task_of
from sansgpu.train.calibrate import Calibration, Timing


@dataclass(frozen=True)
class Recorded(Calibration):
    """Returns recorded seconds per example instead of timing steps."""

    seconds: tuple[float, ...] = ()  # the first is that of micro-batches of 1 example, then 2, 4, ...

    def time_parts(self, size: int) -> Timing:
        seconds = self.seconds[size.bit_length() - 1]
        return Timing(size, 0.0, seconds * size, 0.0, 0.0)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.9, 0.8, 0.7), 8),
        ((1.0, 1.2, 0.8, 0.7), 8),  # another program ran while two examples were timed
        ((1.0, 0.98, 0.98, 0.98), 1),  # equal within noise
        ((1.0, 0.8, 0.9, 0.9, 0.1), 2),  # the last is not timed
    ],
)
def test_the_fastest_micro_batch_is_found_beside_noise(seconds: tuple[float, ...], chosen: int) -> None:
    config = Config()
    calibration = Recorded(task_of(config), config, Execution(), config.window, True, seconds=seconds)
    assert calibration.fastest([1 << n for n in range(len(seconds))], ignore_progress).micro_batch == chosen
