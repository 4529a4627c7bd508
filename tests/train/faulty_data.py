"""Pretraining whose batch of step 4 hangs or fails in a data worker."""

import threading
from typing import Any

from sansgpu.tasks.pretrain import Pretrain


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
