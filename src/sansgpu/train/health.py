"""Warnings about the health of a run, each with its cause and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median, stdev
from typing import NamedTuple

from sansgpu.config.tasks import LOSS, Metric
from sansgpu.config.training import TrainingConfig
from sansgpu.events.event import NEAR_LIMIT, Event

# All thresholds are assumptions, chosen so that healthy runs get no warnings.
MIN_EVENTS = 20  # step events before the loss is judged
MIN_WINDOW = 5  # smallest number of step events in a mean loss
RISE_RATIO = 0.03  # warn if the mean loss exceeds the lowest mean by this share of that mean,
RISE_STANDARD_ERRORS = 4.0  # and by this many standard errors
FLAT_RATIO = 0.003  # relative change of the loss between two halves; under a power law of -0.1 it would be 1.7%
FLAT_WINDOW_RATIO = 0.3  # test for a flat loss over this share of the steps so far, the latest ones
FLAT_EXPECTED_RATIO = 0.8  # after this share of all steps a flat loss is normal
SPIKE_FACTOR = 10.0  # gradient norm / median gradient norm
SPIKE_WINDOW = 50  # step events in the median
OVERFIT_RATIO = 0.01  # warn if the validation loss exceeds the lowest one by this share of it
DATA_WAIT_RATIO = 0.1  # waiting for data / step time
BUSY_PERCENT = 25.0  # share of one core that other programs use
THROTTLED_PERCENT = 5.0  # share of time in which the container's CPU quota stops the run
SWAPPING_FAULTS_PER_SECOND = 20.0  # major page faults
LOWER_RATE_DIVISOR = 5  # a suggested lower learning rate is the current one divided by this
HIGHEST_USUAL_RATE = 0.02  # highest learning rate that is suggested for Muon
LASTING_STEPS = 10  # a problem that the task itself finds is reported if it lasts for this many steps
CONSECUTIVE = 2  # events in a row before a warning, because a single one may be an outlier


def not_finite_remedy(training: TrainingConfig, step: int, snapshot: str | None) -> str:
    """Returns what to change after `step` steps if the next loss is infinite or NaN.

    `snapshot` is the name of the newest snapshot, or None if there is none.
    """
    if step == 0:
        return (
            "no weight has changed yet, so the cause is the model, the data or the precision, not the learning rate: "
            "check that the weights are finite, and try training.precision=fp32."
        )
    lower = min(training.learning_rate / LOWER_RATE_DIVISOR, HIGHEST_USUAL_RATE)
    ratio, steps = training.warmup_ratio, training.warmup_steps
    warmup = f"training.warmup_steps (now {steps})" if ratio is None else f"training.warmup_ratio (now {ratio:g})"
    again = "start the run again" if snapshot is None else f"resume from {snapshot}, or from an earlier snapshot,"
    limit = "" if training.max_grad_norm else ", and set training.max_grad_norm to 1"
    same = "" if snapshot is None else "; without a change it would fail at the same step again"
    return (
        f"the learning rate is probably too high: {again} with --set training.learning_rate="
        f"{lower:.1g} (it is {training.learning_rate:g}) or more "
        f"{warmup}{limit}{same}."
    )


class _ObservedStep(NamedTuple):
    step: int
    loss: float
    grad_norm: float


class Health:
    """Derives warnings from a run's events, which `observe` must receive in order.

    Warnings about losses depend on the events alone, so a resumed run that replays the earlier ones gets the same.
    """

    def __init__(
        self, training: TrainingConfig, metric: Metric = LOSS, problem: Callable[[Event], str | None] | None = None
    ) -> None:
        """`metric` is the task's main one. If it is not the loss, the training loss says nothing about the model.

        `problem` is the task's own check of step events.
        """
        self._training, self._metric, self._problem = training, metric, problem
        self._sound_step = 0  # the last step event without a problem
        self._steps: list[_ObservedStep] = []
        self._sums = [0.0]  # cumulative sums of the losses
        self._validation: list[Event] = []
        self._streaks: dict[str, int] = {}  # number of consecutive events with each cause

    def observe(self, event: Event) -> list[Event]:
        """Returns the warnings due after this event. A cause is reported again only after it went away."""
        found: list[tuple[str, str | None, int]] = []
        if event["event"] == "step":
            self._steps.append(_ObservedStep(event["step"], event["loss"], event.get("grad_norm") or 0.0))
            self._sums.append(self._sums[-1] + event["loss"])
            found = [
                ("rising", self._rising() if self._metric == LOSS else None, 1),
                ("flat", self._flat(event.get("total_steps")) if self._metric == LOSS else None, 1),
                ("spike", self._spike(), 1),
                ("task", self._lasting_problem(event), 1),
                *((cause, check(event), CONSECUTIVE) for cause, check in _MACHINE_CHECKS.items()),
            ]
        elif event["event"] == "eval" and event["loss"] is None:
            rate = self._training.learning_rate
            message = (
                "the validation loss is infinite or NaN, so it is recorded as null; start again, or resume from an "
                f"earlier snapshot, with a lower training.learning_rate (it is {rate:g}) or more warmup_steps."
            )
            found = [("not_finite", message, 1)]
        elif event["event"] == "eval":
            self._validation.append(event)
            found = [("overfitting", self._overfitting(), CONSECUTIVE), ("not_finite", None, 1)]
        return [
            {"event": "warning", "step": event["step"], "cause": cause, "message": message}
            for cause, message in self._new(found)
        ]

    def _new(self, checks: list[tuple[str, str | None, int]]) -> Iterator[tuple[str, str]]:
        for cause, message, times in checks:
            self._streaks[cause] = self._streaks.get(cause, 0) + 1 if message else 0
            if message and self._streaks[cause] == times:
                yield cause, message

    def _rising(self) -> str | None:
        count = len(self._steps)
        if count < MIN_EVENTS:
            return None
        size = max(MIN_WINDOW, count // 20)  # grows, because the lowest of many short means is low by chance
        ends = range(size, count + 1)
        means = [(self._sums[end] - self._sums[end - size]) / size for end in ends]
        now, best = means[-1], min(means)
        lowest = self._steps[means.index(best) :][:size]
        noise = stdev(step.loss for step in lowest) / size**0.5
        if now < best + max(RISE_RATIO * abs(best), RISE_STANDARD_ERRORS * noise):
            return None
        return (
            f"the training loss is rising: it is {now:.3f} and was {best:.3f} around step {lowest[-1].step:,}; lower "
            f"training.learning_rate ({self._training.learning_rate:g}) and resume from a snapshot before the rise."
        )

    def _flat(self, total_steps: int | None) -> str | None:
        now = self._steps[-1].step
        window = [step for step in self._steps if step.step > (1 - FLAT_WINDOW_RATIO) * now]
        if len(window) < MIN_EVENTS or (total_steps and now > FLAT_EXPECTED_RATIO * total_steps):
            return None
        half = len(window) // 2
        earlier, later = (mean(step.loss for step in part) for part in (window[:half], window[half:]))
        if abs(earlier - later) > FLAT_RATIO * abs(earlier):
            return None
        return (
            f"the training loss is flat: {later:.3f} since step {window[0].step:,}; if it is expected to fall "
            f"further, try a different training.learning_rate ({self._training.learning_rate:g}), a larger model or "
            "more data."
        )

    def _lasting_problem(self, event: Event) -> str | None:
        message = self._problem(event) if self._problem else None
        if message is None:
            self._sound_step = event["step"]
        return message if event["step"] - self._sound_step >= LASTING_STEPS else None

    def _spike(self) -> str | None:
        before, now = self._steps[-SPIKE_WINDOW - 1 : -1], self._steps[-1].grad_norm
        if len(before) < MIN_EVENTS // 2 or now < SPIKE_FACTOR * (usual := median(step.grad_norm for step in before)):
            return None
        limit = self._training.max_grad_norm
        clipped = f"it was clipped to {limit:g}" if limit else "set training.max_grad_norm"
        return (
            f"the gradient norm of this step is {now:.3g}, compared to {usual:.3g} usually; {clipped}. If this "
            "happens again, lower training.learning_rate or check the data for broken rows."
        )

    def _overfitting(self) -> str | None:
        best, now, metric = min(self._validation, key=lambda event: event["loss"]), self._validation[-1], self._metric
        if now["loss"] <= best["loss"] + OVERFIT_RATIO * abs(best["loss"]) or now["step"] == best["step"]:
            return None
        interval = now.get(f"{metric.name}_interval")
        if interval and interval[0] <= best[metric.name] <= interval[1]:
            return None
        change = "rising" if metric.better == "lower" else "falling"
        remedies = "More data, dropout, weight_decay or fewer epochs" if metric == LOSS else "A lower learning_rate"
        stops = self._training.early_stopping_patience is not None
        stopping = "" if stops else "; training.early_stopping_patience ends a run when this happens"
        return (
            f"the validation {metric.label} is {change}: it is {metric.shown(now[metric.name])} and was "
            f"{metric.shown(best[metric.name])} at step {best['step']:,}; --snapshot best selects that snapshot. "
            f"{remedies} may help{stopping}."
        )


def _memory(event: Event) -> str | None:
    system = event.get("system") or {}
    left, limit = system.get("memory_available_bytes"), system.get("memory_limit_bytes")
    if not left or not limit or left > NEAR_LIMIT * limit:
        return None
    return (
        f"memory is near its limit: {left / 1e9:.1f} of {limit / 1e9:.1f} GB are available, and this run uses "
        f"{(event.get('rss_bytes') or 0) / 1e9:.1f} GB. Stop other programs, lower training.batch_size or set "
        "model.gradient_checkpointing; if memory runs out, the micro-batch is halved."
    )


def _swapping(event: Event) -> str | None:
    system = event.get("system") or {}
    faults = system.get("major_faults_per_second") or 0.0
    if faults < SWAPPING_FAULTS_PER_SECOND or not system.get("swap_bytes"):
        return None
    return (
        f"the machine is swapping: it reads {faults:,.0f} pages per second from disk; stop other programs, or lower "
        "training.batch_size."
    )


def _waiting_for_data(event: Event) -> str | None:
    waited, seconds = (event.get("phase_seconds") or {}).get("data"), event.get("step_seconds")
    share = waited / seconds if waited and seconds else 0.0  # older records do not have them
    if share < DATA_WAIT_RATIO:
        return None
    return (
        f"steps spend {share:.0%} of their time waiting for data: raise training.dataloader_num_workers or "
        "training.dataloader_prefetch_factor, or put the data on a faster disk."
    )


def _busy_cores(event: Event) -> str | None:
    system = event.get("system") or {}
    others, stolen = system.get("other_percent") or 0.0, system.get("stolen_percent") or 0.0
    if max(others, stolen) < BUSY_PERCENT:
        return None
    who = "other programs use" if others >= stolen else "other virtual machines on this host use"
    return (
        f"{who} {max(others, stolen) / 100:.1f} cores, and every step waits for the slowest thread: stop them, lower "
        "training.threads by that number, or set training.adapt_threads (results are then no longer bit-reproducible)."
    )


def _thermal_throttling(event: Event) -> str | None:
    throttled = (event.get("system") or {}).get("throttled") or 0
    if not throttled:
        return None
    return "the processor is throttled because it is too hot: improve its cooling, or lower training.threads."


def _limited_by_container(event: Event) -> str | None:
    withheld = (event.get("system") or {}).get("withheld_percent") or 0.0
    if withheld < THROTTLED_PERCENT:
        return None
    return (
        f"the container's CPU limit paused the run for {withheld:.0f}% of the time: lower training.threads to the "
        "container's number of cores, or raise the limit."
    )


_MACHINE_CHECKS: dict[str, Callable[[Event], str | None]] = {
    "memory": _memory,
    "swap": _swapping,
    "data": _waiting_for_data,
    "neighbour": _busy_cores,
    "heat": _thermal_throttling,
    "threads": _limited_by_container,
}
