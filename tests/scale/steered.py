"""Trains from Python under a launcher with a callback that requests actions. Arguments: folder, overrides."""

import sys
from typing import Any

import sansgpu
from sansgpu.events.controls import Controls


class Steers(sansgpu.Callback):
    """Requests a snapshot and an evaluation at step 2, and stops the run at step 6."""

    def on_step(self, event: dict[str, Any], run: Controls) -> None:
        if event["step"] == 2:
            run.save()
            run.evaluate()
        elif event["step"] == 6:
            run.stop()


if __name__ == "__main__":
    print(sansgpu.fit(None, sys.argv[1], overrides=sys.argv[2:], callbacks=[Steers()]))
