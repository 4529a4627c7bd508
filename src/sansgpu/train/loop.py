"""The training loop, shared by all tasks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sansgpu.config import Config, RunPaths, SansGPUError, derive_seed, identity
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.prefetch import Prefetcher
from sansgpu.machine.peers import LostRankError
from sansgpu.machine.pressure import MemoryGuard
from sansgpu.machine.probe import Environment, available_memory, held_memory
from sansgpu.reporting.controls import Controls, Request
from sansgpu.reporting.events import Event, Sinks, finite, now
from sansgpu.reporting.jsonl import read_record
from sansgpu.tasks import Collecting, Task, add_sums
from sansgpu.train.branches import record_of
from sansgpu.train.budget import Budget
from sansgpu.train.evaluate import evaluate
from sansgpu.train.health import Health
from sansgpu.train.interrupt import Interrupt
from sansgpu.train.resume import Metrics, load_snapshot
from sansgpu.train.schedule import learning_rate
from sansgpu.train.snapshots import Snapshot
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.step import PhaseTimer, StepPlan, StepResult, train_step
from sansgpu.train.step_log import StepLog, System
from sansgpu.train.tensor_file import Tensors, in_file_order, unchanged
from sansgpu.train.threads import AdaptiveThreads
from sansgpu.train.writer import SnapshotWriter

SIGNAL_GRACE_SECONDS = 3.0  # within which a launcher may forward a signal that its processes already received
PAUSE_SECONDS = 0.1  # polling interval while paused
_SIGNAL_FACTOR = 1 << 4  # encodes a signal number above the flags of Request in one integer
EARLY_END_RATIO = 0.2  # warn if the run would end with more than this share of its time budget unused


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of the run in `folder`. `reason` is done, interrupted or out_of_time."""

    folder: Path
    reason: str
    step: int
    snapshot: Snapshot | None
    signal: int | None = None


class Trainer:
    """Trains a task from its initial weights or from a snapshot."""

    def __init__(
        self,
        task: Task,
        config: Config,
        paths: RunPaths,
        plan: StepPlan,
        environment: Environment,
        sinks: Sinks,
        gemm_flops_per_second: float,
        steps: int,
        started: float | None = None,
        evaluated: float = 0.0,
        controls: Controls | None = None,
        system: System = lambda: None,
    ) -> None:
        """Prepares model and optimizer for training.

        `steps` is the total number of steps, or `schedule.UNKNOWN`. The run's time counts from `started`, a value of
        time.monotonic(). `evaluated` is tokens per evaluation / tokens per step. `controls` supplies requests to save,
        evaluate, pause or stop, and `system` returns machine statistics since its last call.
        """
        self.task, self.config, self.paths, self.plan = task, config, paths, plan
        self.environment, self.sinks = environment, sinks
        training = config.training
        self.group = plan.group
        self.state = TrainState.create(task.model, training, plan.device, plan.compute_dtype, plan.group)
        self._sharded = self.group.size > 1 and training.sharding != "none"  # no process has the complete state
        self.total_steps = self._max_steps = steps
        self._warned = False  # whether the warning about an early end was sent
        self._started = time.monotonic() if started is None else started
        self._earlier_seconds = 0.0  # taken by the run's earlier processes
        weights, moments = (sum(t.nbytes for t in tensors.values()) for tensors in self._tensors())
        self._budget = Budget(
            training, self._elapsed, evaluated, snapshot_bytes=weights + moments, export_bytes=weights
        )
        self._guard = MemoryGuard(
            plan.micro_batch,
            environment.compile == "on",
            lambda: available_memory(plan.device),
            lambda: held_memory(plan.device),
            lambda message: self.sinks.warn(message),
            self._shed,
        )
        self._fully_sharded = self._sharded and training.sharding == "full"
        if not self._fully_sharded:
            task.between_blocks(self._guard.check)
        self._controls = controls or Controls()
        self._log = StepLog(task, gemm_flops_per_second, plan, system)
        self._health = Health(training)
        self._threads = AdaptiveThreads(training, environment)
        self._snapshot: Snapshot | None = None  # the newest; it may still be being written
        self._snapshot_reported, self._save_seconds = True, 0.0
        self._pending: Snapshot | None = None  # to be reported by `_flush`; later events wait for it
        self._writer = SnapshotWriter(paths.snapshots, training.keep_last, paths.metrics, lambda m: self.sinks.warn(m))
        self._first_step = True  # the first step of a process compiles, so its duration predicts nothing
        self._metrics: Metrics | None = None  # of the evaluation at the current step

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def resume(self, snapshot: Snapshot, strict: bool = False) -> None:
        """Restores the run from a snapshot.

        Raises ConfigError if the snapshot does not fit the model, or with `strict` if the environment differs.
        """
        fingerprint, folder = self.task.fingerprint, self.paths.snapshots
        warn = self.sinks.warn if self.group.is_main else lambda message: None
        self._metrics = load_snapshot(
            self.state, snapshot, folder, self.environment, fingerprint, strict, warn, self.group
        )
        self._snapshot, self._snapshot_reported = Snapshot.of(self.paths.snapshots, snapshot.step), False
        recorded, problem = read_record(record_of(snapshot, self.paths)) if self.group.is_main else ([], None)
        if problem:
            warn(problem)
        for event in (e for e in recorded if (e.get("step") or 0) <= snapshot.step):
            self._health.observe(event)  # replayed, so that warnings are neither repeated nor lost
        self._log.restore(recorded, self.environment)
        # From the events, because a killed process ran longer than its last snapshot.
        elapsed = [e.get("elapsed_seconds") or 0.0 for e in recorded]
        self._earlier_seconds = self.group.broadcast_object(lambda: max(elapsed, default=0.0))
        planned = self.progress.total_steps
        finished = self.group.broadcast_object(lambda: not self._budget.worth_more())
        if self.config.training.time_limited and planned and (self.progress.step < planned or finished):
            self.total_steps = min(self._max_steps, planned)

    def train(self) -> TrainingResult:
        """Trains until a limit is reached, time is up or the run is interrupted.

        Takes snapshots as configured and one at the end. `final/` is written unless the run was interrupted.
        """
        training = self.config.training
        prefetch = Prefetcher(self._batch, training.dataloader_num_workers, training.prefetch)
        self.task.model.train()
        try:
            grace = SIGNAL_GRACE_SECONDS if self.group.size > 1 else 0.0
            with Interrupt(grace, lambda: self._controls.leaving()) as interrupt:
                if self.progress.step:
                    self._finish_step(interrupt)
                while (ending := self._handle_requests(interrupt)) is None and not self._finished():
                    self._one_step(prefetch)
                    if not self._writer.busy:
                        self._flush()
                    self._replan(prefetch)
                    self._finish_step(interrupt)
                if ending is not None:
                    if self.progress.step:  # else there is nothing to save
                        self._save()
                    self._flush()
                    return self._end("interrupted", ending)
                self._evaluate()
                self._save()
                self._flush()
            if isinstance(self.task, Collecting):
                self.task.collect(self.group.all_gather_object)
            self.state.optimizer.release_state()
            if self.group.is_main:
                self.task.export(self.paths.final)
            return self._end("out_of_time" if self.progress.step >= self.total_steps < self._max_steps else "done")
        except LostRankError:
            self._rescue()
            raise
        finally:
            prefetch.close()
            self._flush_all()

    def _handle_requests(self, interrupt: Interrupt) -> int | None:
        """Handles requests between steps and returns the signal that ends the run, received by any rank, or None."""
        while True:
            requested = self._controls.take() if self.group.is_main else Request.NONE
            agreed = int(self.group.all_reduce_max(_SIGNAL_FACTOR * (interrupt.signal or 0) + requested))
            number, wish = agreed // _SIGNAL_FACTOR, Request(agreed % _SIGNAL_FACTOR)
            if number or Request.STOP in wish:
                return number or signal.SIGINT
            if self.progress.step:
                self._finish_step(interrupt, wish)
            if Request.PAUSE not in wish:
                return None
            if not self._writer.busy:
                self._flush()
            time.sleep(PAUSE_SECONDS)

    def _rescue(self) -> None:
        """Saves the last completed step after another rank was lost, if this process has the complete state."""
        if self.group.is_main and not self._sharded and self.progress.step:
            try:
                self._save()
                self._flush()
            except SansGPUError as error:  # only a warning: the loss of the rank is the error to report
                self.sinks.warn(str(error))

    def _batch(self, step: int) -> ExampleBatch:
        """Returns the global batch of a step; called ahead of time by prefetch workers."""
        batch = self.task.batch(step, self.total_steps)
        pin = self.config.training.dataloader_pin_memory and self.plan.device.type == "cuda"
        return batch.pinned() if pin else batch

    def _finished(self) -> bool:
        most_tokens = self.config.training.max_tokens
        return self.progress.step >= self.total_steps or (
            most_tokens is not None and self.progress.tokens >= most_tokens
        )

    def _elapsed(self) -> float:
        """Returns the seconds the run has taken, including its earlier processes."""
        return self._earlier_seconds + time.monotonic() - self._started

    def _replan(self, prefetch: Prefetcher) -> None:
        """Updates `total_steps` of a time-limited run from the remaining time."""
        if not self.config.training.time_limited:
            return
        total = int(self.group.all_reduce_max(self._fitting_steps() if self.group.is_main else 0))
        if total != self.total_steps:
            self.total_steps = self.progress.total_steps = total
            prefetch.forget()  # window lengths depend on the total number of steps

    def _fitting_steps(self) -> int:
        """Returns the total number of steps that currently fits into the run's time."""
        if self._finished() or not self._budget.should_replan():
            return self.total_steps
        fitting = self._budget.steps_left(self.progress.step)
        if fitting is None:
            return self.total_steps
        total = min(self._max_steps, self.progress.step + fitting)
        if not self._warned and self._budget.idle_ratio(self._max_steps - self.progress.step) > EARLY_END_RATIO:
            self._warned = True
            self.sinks.warn(
                f"num_epochs, max_steps or max_tokens end the run after {total:,} steps, long before its time is up; "
                "set them to null to use all of the time."
            )
        return total

    def _shed(self) -> str | None:
        """Frees memory that training can do without; returns the consequence, or None if nothing was freed."""
        return "snapshots are written before training goes on" if self._writer.release_copies() else None

    def _one_step(self, prefetch: Prefetcher) -> None:
        start, phases = time.perf_counter(), PhaseTimer()
        progress, training = self.progress, self.config.training
        lr = learning_rate(training, progress.step, self.total_steps)
        batch = prefetch(progress.step, self.total_steps)
        phases.lap("data")
        allowed = (lambda size: size) if self._fully_sharded else self._guard.allowed
        result = train_step(self.state, self.task, batch, self.plan, training, lr, allowed, phases)
        if self._guard.micro_batch != self.plan.micro_batch:
            self.plan = replace(self.plan, micro_batch=self._guard.micro_batch)
            self.environment = replace(self.environment, micro_batch=self._guard.micro_batch)
        seconds = time.perf_counter() - start
        progress.step += 1
        progress.tokens += result.tokens
        progress.logged_loss += result.loss_sum
        progress.logged_targets += result.targets
        add_sums(progress.logged_sums, result.sums)
        if not self._first_step:
            self._budget.record_step(seconds)
        to_log = progress.step % training.logging_steps == 0 or self._finished()
        if not self._first_step or to_log:
            self._log.add(seconds, result.tokens, phases)
        self._first_step = False
        self._metrics = None
        in_background = self.group.is_main and not self._sharded
        if in_background and not self._writer.prepared and (training.save_steps or training.eval_steps):
            self._writer.reserve_copies(*self._tensors())
        if to_log:
            self._emit_step(result, lr)

    def _emit_step(self, result: StepResult, lr: float) -> None:
        event = self._log.event(self.progress, result, lr, self.total_steps)
        times = {"eta_seconds": self._eta_seconds(event["step_seconds"]), "elapsed_seconds": self._elapsed()}
        self._emit({**event, **times, "threads": self.environment.threads})
        if changed := self._threads.observe(event):
            self.environment = replace(self.environment, threads=changed[0])
            self.sinks.emit({"event": "warning", "step": event["step"], "cause": "threads", "message": changed[1]})

    def _emit(self, event: Event) -> None:
        """Emits an event and the health warnings it causes."""
        event = finite(event)
        self.sinks.emit(event)
        for warning in self._health.observe(event) if self.group.is_main else ():
            self.sinks.emit(warning)

    def _eta_seconds(self, step_seconds: float) -> float:
        left = max(0.0, self._budget.seconds_left())
        return min(left, (self.total_steps - self.progress.step) * step_seconds)

    def _finish_step(self, interrupt: Interrupt, wish: Request = Request.NONE) -> None:
        """Evaluates and saves if due or requested. An evaluation that an interrupt cuts short is repeated on resume."""
        step, training, start = self.progress.step, self.config.training, time.perf_counter()
        due = self._finished() or (training.eval_steps and step % training.eval_steps == 0)
        to_evaluate = due or Request.EVALUATE in wish
        evaluated = to_evaluate and self._metrics is None  # metrics may have been restored from a snapshot
        if to_evaluate:
            self._evaluate(stop=lambda: interrupt.signal is not None)
            if self._metrics is None:
                return
        is_best = self._metrics is not None and self.progress.best_step == step
        due = is_best or self._finished() or (training.save_steps and step % training.save_steps == 0)
        to_save = due or Request.SAVE in wish
        if to_save:
            self._save()
        if evaluated:
            self._budget.record_evaluation(time.perf_counter() - start)
        elif to_save:
            self._budget.record_save(time.perf_counter() - start)

    def _evaluate(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Evaluates the current step unless it was already evaluated, and updates the best step."""
        progress, training = self.progress, self.config.training
        if self._metrics is not None:
            return
        start = time.perf_counter()
        self._metrics = finite(evaluate(self.task, self.plan, training.eval_batches, stop))
        if self._metrics is None:
            return
        seconds = time.perf_counter() - start
        event: Event = {"event": "eval", "step": progress.step, **self._metrics, "seconds": seconds}
        loss = self._metrics["loss"]
        if training.sample_tokens and loss is not None and self.group.is_main and not self._fully_sharded:
            seed = derive_seed(training.seed, "sample", progress.step)
            with self.plan.autocast():
                event["sample"] = self.task.sample(training.sample_prompt, training.sample_tokens, seed)
        self._emit(event)
        if loss is not None and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss, progress.best_step = loss, progress.step
        self._snapshot = None  # an existing snapshot of this step lacks these metrics

    def _save(self) -> None:
        """Saves the current step unless it is already saved; `_flush` reports each snapshot once."""
        if self._snapshot is None or self._snapshot.step != self.progress.step:
            self._flush()
            start = time.perf_counter()
            record = {
                "progress": self.progress.to_json(),
                "metrics": self._metrics,
                "environment": asdict(self.environment),
                "data": self.task.fingerprint,
                "configuration": identity(self.config),
            }
            best, in_background = self.progress.best_step, not (self._finished() or self._sharded)
            whole = self.state.gather_tensor if self._sharded else unchanged
            if self.group.is_main:
                self._snapshot = self._writer.submit(
                    self.progress.step, *self._tensors(), record, best, in_background=in_background, whole=whole
                )
            else:
                self._snapshot = Snapshot.of(self.paths.snapshots, self.progress.step)
                self._send_to_writer()
            self._snapshot_reported, self._save_seconds = False, time.perf_counter() - start
        if not self._snapshot_reported:
            self._snapshot_reported = True
            self._pending = self._snapshot
            self.sinks.hold()

    def _send_to_writer(self) -> None:
        """Sends this rank's part of the state to rank 0, which is writing a snapshot."""
        for tensors in self._tensors() if self._sharded else ():
            for name in in_file_order(tensors):
                self.state.gather_tensor(name, tensors[name])

    def _tensors(self) -> tuple[Tensors, Tensors]:
        return self.state.weights(), self.state.moments()

    def _flush(self) -> None:
        """Waits until the snapshot is written and reports it, then releases the events that were held back.

        So the order of events does not depend on how long writing takes. Raises SansGPUError if writing failed.
        """
        if self._pending is not None:
            snapshot, self._pending, start = self._pending, None, time.perf_counter()
            self._writer.wait()
            seconds = self._save_seconds + time.perf_counter() - start  # that training waited
            event = {"event": "snapshot", "step": snapshot.step, "path": snapshot.folder.name, "seconds": seconds}
            self.sinks.release({**event, "elapsed_seconds": self._elapsed()})

    def _flush_all(self) -> None:
        """Completes a snapshot being written and releases the held events, however training ended."""
        try:
            self._flush()
        except Exception as error:  # only a warning: another error may have ended the training
            self.sinks.warn(str(error))
        finally:
            self.sinks.release()

    def _end(self, reason: str, ending: int | None = None) -> TrainingResult:
        end = TrainingResult(self.paths.root, reason, self.progress.step, self._snapshot, ending)
        name = self._snapshot.folder.name if self._snapshot else None
        event = {"event": "end", "step": end.step, "time": now(), "reason": reason}
        self.sinks.emit({**event, "seconds": self._elapsed(), "snapshot": name})
        return end
