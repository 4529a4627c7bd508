"""Pretraining tasks with a fault: the batch of step 4 hangs or fails, or the fifth step hangs in C."""

import threading
from pathlib import Path
from typing import Any

from sansgpu.tasks.pretrain.task import Pretrain
from tests.hanging import hang_in_c


class Hanging(Pretrain):
    def batch(self, step: int, total_steps: int | None = None) -> Any:
        if step == 3:
            self.fail()
        return super().batch(step, total_steps)

    def fail(self) -> None:
        threading.Event().wait()


class Failing(Hanging):
    def fail(self) -> None:
        raise OSError(5, "Input/output error")


class Exiting(Hanging):
    def fail(self) -> None:
        raise SystemExit(3)


class Stuck(Pretrain):
    """Hangs in C at the fifth step if there is a file `stuck` next to the data."""

    steps = 0

    def step_sums(self) -> dict[str, float]:
        self.steps += 1
        if self.steps == 5 and (Path(self.config.data.dataset_name).parent / "stuck").exists():
            hang_in_c()
        return super().step_sums()
