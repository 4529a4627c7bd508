"""Whether a run goes well: warnings that name the cause and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median, stdev
from typing import NamedTuple

from sansgpu.config import TrainingConfig
from sansgpu.watch.events import NEAR_LIMIT, Event

# Assumptions all, chosen so that runs that go well hear nothing.
FEWEST = 20  # step events before anything is said of the loss
RECENT = 5  # step events at least whose mean is called the loss now
RISE = 0.03  # of the loss, above its best mean
NOISE = 4.0  # standard errors of a mean, likewise
FLAT = 0.003  # of the loss; a power law of -0.1 falls by 1.7 % from the first to the second half of the time looked at
LOOKED_AT = 0.3  # of the run so far
ENDING = 0.8  # of the run, from where on a flat loss is how runs end
SPIKE = 10.0  # times the usual gradient norm
SPIKE_WINDOW = 50  # step events that make the usual
OVERFITTED = 1.01  # times the best validation loss, twice
STARVED = 0.1  # of a step's time
BUSY_PERCENT = 25.0  # of a core
WITHHELD_PERCENT = 5.0
SWAPPING = 20.0  # major page faults a second
_NOT_FINITE = (
    "the validation loss is infinite or not a number, so this evaluation is null and never the best; go on from an "
    "earlier snapshot with a lower training.learning_rate or more warmup_steps."
)
TWICE = 2  # step events in a row, as one may be an accident


class _Step(NamedTuple):
    step: int
    loss: float
    grad_norm: float


class Health:
    """Sees a run's events in order. What it says of losses depends on them alone, so that a resumed run, which shows
    it the earlier events again, hears the same.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self._steps: list[_Step] = []
        self._sums = [0.0]  # of the first losses, of more and more of them
        self._validation: list[tuple[int, float]] = []  # steps and losses
        self._seen: dict[str, int] = {}  # by cause, in how many step events in a row

    def see(self, event: Event) -> list[Event]:
        """Warnings that this event gives rise to; each once, until its cause was gone."""
        found: list[tuple[str, str | None, int]] = []
        if event["event"] == "step":
            self._steps.append(_Step(event["step"], event["loss"], event.get("grad_norm") or 0.0))
            self._sums.append(self._sums[-1] + event["loss"])
            found = [
                ("rising", self._rising(), 1),
                ("flat", self._flat(event.get("total_steps")), 1),
                ("spike", self._spike(), 1),
                *((cause, look(event), TWICE) for cause, look in _OF_THE_MACHINE.items()),
            ]
        elif event["event"] == "eval" and event["loss"] is None:
            found = [("not_finite", _NOT_FINITE, 1)]
        elif event["event"] == "eval":
            self._validation.append((event["step"], event["loss"]))
            found = [("overfitting", self._overfitting(), TWICE), ("not_finite", None, 1)]
        return [
            {"event": "warning", "step": event["step"], "cause": cause, "message": message}
            for cause, message in self._new(found)
        ]

    def _new(self, found: list[tuple[str, str | None, int]]) -> Iterator[tuple[str, str]]:
        for cause, message, times in found:
            self._seen[cause] = self._seen.get(cause, 0) + 1 if message else 0
            if message and self._seen[cause] == times:
                yield cause, message

    def _rising(self) -> str | None:
        count = len(self._steps)
        if count < FEWEST:
            return None
        size = max(RECENT, count // 20)  # the longer a run, the lower the lowest of many short means
        ends = range(size, count + 1)
        means = [(self._sums[end] - self._sums[end - size]) / size for end in ends]
        now, best = means[-1], min(means)
        lowest = self._steps[means.index(best) :][:size]
        noise = stdev(step.loss for step in lowest) / size**0.5
        if now < best + max(RISE * abs(best), NOISE * noise):
            return None
        return (
            f"the training loss rises: {now:.3f}, after {best:.3f} around step {lowest[-1].step:,}; lower "
            f"training.learning_rate ({self._training.learning_rate:g}) and go on from a snapshot before it."
        )

    def _flat(self, total_steps: int | None) -> str | None:
        now = self._steps[-1].step
        looked_at = [step for step in self._steps if step.step > (1 - LOOKED_AT) * now]
        if len(looked_at) < FEWEST or (total_steps and now > ENDING * total_steps):
            return None
        half = len(looked_at) // 2
        earlier, later = (mean(step.loss for step in part) for part in (looked_at[:half], looked_at[half:]))
        if abs(earlier - later) > FLAT * abs(earlier):
            return None
        return (
            f"the training loss is flat: {later:.3f} since step {looked_at[0].step:,}; where it should still fall, "
            f"try another training.learning_rate ({self._training.learning_rate:g}), a larger model or more data."
        )

    def _spike(self) -> str | None:
        before, now = self._steps[-SPIKE_WINDOW - 1 : -1], self._steps[-1].grad_norm
        if len(before) < FEWEST // 2 or now < SPIKE * (usual := median(step.grad_norm for step in before)):
            return None
        limit = self._training.max_grad_norm
        clipped = f"it was clipped to {limit:g}" if limit else "set training.max_grad_norm"
        return (
            f"the gradient norm of this step is {now:.3g}, usually it is {usual:.3g}; {clipped}. If it comes again, "
            "lower training.learning_rate or look for broken rows in the data."
        )

    def _overfitting(self) -> str | None:
        best_step, best = min(self._validation, key=lambda at: at[1])
        step, now = self._validation[-1]
        if now < OVERFITTED * best or step == best_step:
            return None
        return (
            f"the validation loss rises: {now:.4f}, after {best:.4f} at step {best_step:,}; that snapshot is kept "
            "(--snapshot best). More data, dropout, weight_decay or fewer epochs help."
        )


def _memory(event: Event) -> str | None:
    system = event.get("system") or {}
    left, limit = system.get("memory_available_bytes"), system.get("memory_limit_bytes")
    if not left or not limit or left > NEAR_LIMIT * limit:
        return None
    return (
        f"memory is near its limit: {left / 1e9:.1f} of {limit / 1e9:.1f} GB are left, this run has "
        f"{(event.get('rss_bytes') or 0) / 1e9:.1f}. Stop other programs, lower training.batch_size or set "
        "model.gradient_checkpointing; if it runs short, the micro-batch is cut."
    )


def _swapping(event: Event) -> str | None:
    system = event.get("system") or {}
    faults = system.get("major_faults_per_second") or 0.0
    if faults < SWAPPING or not system.get("swap_bytes"):
        return None
    return (
        f"the machine swaps: {faults:,.0f} times a second a page came from the disk. Stop other programs, or lower "
        "training.batch_size."
    )


def _starved(event: Event) -> str | None:
    waited, seconds = (event.get("phase_seconds") or {}).get("data"), event.get("step_seconds")
    share = waited / seconds if waited and seconds else 0.0  # older records do not have them
    if share < STARVED:
        return None
    return (
        f"steps wait for data for {share:.0%} of their time: raise training.dataloader_num_workers or "
        "training.dataloader_prefetch_factor, or put the data on a faster disk."
    )


def _neighbour(event: Event) -> str | None:
    system = event.get("system") or {}
    others, stolen = system.get("other_percent") or 0.0, system.get("stolen_percent") or 0.0
    if max(others, stolen) < BUSY_PERCENT:
        return None
    who = "other programs take" if others >= stolen else "the host of this virtual machine takes"
    return (
        f"{who} {max(others, stolen) / 100:.1f} cores, and every step waits for the slowest: stop them, lower "
        "training.threads by as many, or let training.adapt_threads do so while they run, which changes the last bits."
    )


def _hot(event: Event) -> str | None:
    throttled = (event.get("system") or {}).get("throttled") or 0
    if not throttled:
        return None
    return "the processor is slowed down for heat: clean its fans, give it air, or lower training.threads."


def _withheld(event: Event) -> str | None:
    withheld = (event.get("system") or {}).get("withheld_percent") or 0.0
    if withheld < WITHHELD_PERCENT:
        return None
    return (
        f"this container's processor limit stopped the run for {withheld:.0f} % of the time: lower "
        "training.threads to the cores it is given, or give it more."
    )


_OF_THE_MACHINE: dict[str, Callable[[Event], str | None]] = {
    "memory": _memory,
    "swap": _swapping,
    "data": _starved,
    "neighbour": _neighbour,
    "heat": _hot,
    "threads": _withheld,
}
