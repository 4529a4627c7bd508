"""The training loop, shared by all tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sansgpu.config import ConfigError, SansGPUError, derive_seed
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.prefetch import Prefetcher
from sansgpu.data.shards import ReportProgress, ignore_progress
from sansgpu.events.controls import Controls, Request
from sansgpu.events.event import Event, Sinks, finite, now
from sansgpu.events.jsonl import read_record
from sansgpu.machine.peers import LostRankError
from sansgpu.machine.pressure import MemoryGuard
from sansgpu.machine.probe import Environment, available_memory, held_memory
from sansgpu.tasks.task import Collecting, Task
from sansgpu.train.branches import record_of
from sansgpu.train.control import RunControl
from sansgpu.train.evaluate import evaluate, fit_head
from sansgpu.train.resume import Metrics, load_snapshot
from sansgpu.train.run_length import RunLength
from sansgpu.train.run_log import RunLog, SystemStatistics
from sansgpu.train.run_setup import RunSetup
from sansgpu.train.saving import Saver
from sansgpu.train.schedule import UNKNOWN_STEPS, learning_rate
from sansgpu.train.snapshots import Snapshot
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.step import PhaseTimer, StepPlan, train_step

PAUSE_SECONDS = 0.1  # polling interval while paused


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
        run: RunSetup,
        sinks: Sinks,
        controls: Controls | None = None,
        system: SystemStatistics = lambda: None,
        progress: ReportProgress = ignore_progress,
    ) -> None:
        """Prepares model and optimizer for training.

        `controls` supplies requests to save, evaluate, pause or stop; `system` supplies machine statistics. `progress`
        shows what is done between events.
        """
        plan, training = run.plan, run.config.training
        self._task, self._run, self._training, self._group, self._sinks = task, run, training, plan.group, sinks
        self._state = TrainState.create(task.model, training, plan.device, plan.compute_dtype, plan.group)
        self._length = RunLength(run, self._state, sinks.warn)
        self._saver = Saver(run, self._state, task.fingerprint, sinks, self._length.elapsed_seconds)
        self._log = RunLog(task, run, self._length, sinks, system)
        self._control = RunControl(controls or Controls(), plan.group)
        self._guard = MemoryGuard(
            plan.micro_batch,
            run.environment.compile == "on",
            lambda: available_memory(plan.device),
            lambda: held_memory(plan.device),
            sinks.warn,
            self._saver.release_copies,
        )
        if run.sharding != "full":
            task.between_blocks(self._guard.check)
        self._show = progress
        self._metrics: Metrics | None = None  # results of an evaluation at the current step
        self._head_step: int | None = None  # the step whose weights a fitted head was fitted to

    @property
    def _progress(self) -> Progress:
        return self._state.progress

    @property
    def _plan(self) -> StepPlan:
        return replace(self._run.plan, micro_batch=self._guard.micro_batch)

    @property
    def _environment(self) -> Environment:
        return replace(self._run.environment, micro_batch=self._guard.micro_batch, threads=self._log.threads)

    def resume(self, snapshot: Snapshot, strict: bool = False) -> None:
        """Restores the run from a snapshot.

        Raises ConfigError if the snapshot does not fit the model, or with `strict` if the environment differs.
        """

        def warn(message: str) -> None:
            if self._group.is_main:
                self._sinks.warn(message)

        def differ(message: str) -> None:
            if strict:
                raise ConfigError(f"{message} Without --strict this is only a warning.")
            warn(message)

        self._metrics = load_snapshot(self._state, snapshot, self._run, self._task.fingerprint, differ)
        self._saver.restore(snapshot, self._metrics)
        record = record_of(snapshot, self._run.paths)
        events, problem = read_record(record) if self._group.is_main else ([], None)
        if problem:
            warn(problem)
        self._log.restore(events, snapshot.step)
        self._length.restore(events)

    def train(self) -> TrainingResult:
        """Trains until a limit is reached, time is up or the run is interrupted.

        Takes snapshots as configured and one at the end. `final/` is written unless the run was interrupted.
        """
        training, timeout = self._training, self._run.config.data.timeout_seconds
        prefetch = Prefetcher(self._batch, training.dataloader_num_workers, training.prefetch, timeout)
        self._task.model.train()
        try:
            with self._control.interrupt, self._group.diagnosing_torch():
                if training.eval_on_start and not self._progress.step:
                    self._evaluate(stop=self._control.is_interrupted)
                signal = self._run_steps(prefetch)
                if signal is None:
                    self._evaluate()
                self._show("saving", 0, 0)
                if self._progress.step:  # else there is nothing to save
                    self._save()
                self._saver.flush()
                if signal is not None:
                    return self._end("interrupted", signal)
            if isinstance(self._task, Collecting):
                self._task.collect(self._group.all_gather_object)
            self._state.optimizer.release_state()
            self._show("writing the final model", 0, 0)
            if self._group.is_main:
                self._task.export(self._run.paths.final)
            return self._end("out_of_time" if self._length.is_out_of_time() else "done")
        except LostRankError:
            self._rescue()
            raise
        finally:
            prefetch.close()
            self._saver.close()

    def _run_steps(self, prefetch: Prefetcher) -> int | None:
        """Trains until the run is finished, or until a signal, which is returned, interrupts it."""
        if self._progress.step:
            self._finish_step()
        is_first, start = True, self._progress.step
        while (signal := self._follow_commands()) is None and not self._length.is_finished():
            self._show_first_steps(start)
            self._one_step(prefetch, is_first)
            self._saver.flush_if_written()
            if self._length.replan():
                prefetch.forget()  # window lengths depend on the total number of steps
            self._finish_step()
            is_first = False
        return signal

    def _show_first_steps(self, start: int) -> None:
        """Shows the steps before the first logged one, because the first step may compile for a minute."""
        every, step = self._training.logging_steps, self._progress.step
        logged = min(start - start % every + every if every else UNKNOWN_STEPS, self._length.total_steps)
        if step < logged < UNKNOWN_STEPS:
            self._show("training up to the first logged step", step - start, logged - start, "step")

    def _follow_commands(self) -> int | None:
        """Follows requests, waits while the run is paused, and returns the signal that ends it, or None."""
        while True:
            command = self._control.command()
            if command.signal is not None:
                return command.signal
            if self._progress.step:
                self._finish_step(command.request)
            if Request.PAUSE not in command.request:
                return None
            self._saver.flush_if_written()
            time.sleep(PAUSE_SECONDS)

    def _batch(self, step: int) -> ExampleBatch:
        """Returns the global batch of a step; called ahead of time by prefetch workers."""
        batch = self._task.batch(step, self._length.total_steps)
        pin = self._training.dataloader_pin_memory and self._run.plan.device.type == "cuda"
        return batch.pinned() if pin else batch

    def _one_step(self, prefetch: Prefetcher, is_first: bool) -> None:
        """Trains one step. The first one of a process compiles, so its duration predicts nothing."""
        start, phases = time.perf_counter(), PhaseTimer()
        progress, total_steps = self._progress, self._length.total_steps
        lr = learning_rate(self._training, progress.step, total_steps)
        batch = prefetch(progress.step, total_steps)
        phases.lap("data")
        allowed = (lambda size: size) if self._run.sharding == "full" else self._guard.allowed
        result = train_step(self._state, self._task, batch, self._plan, self._training, lr, allowed, phases)
        seconds = time.perf_counter() - start
        progress.add_step(result.tokens, result.loss_sum, result.targets, result.sums)
        if not is_first:
            self._length.budget.record_step(seconds)
        to_log = _is_due(self._training.logging_steps, progress.step) or self._length.is_finished()
        if not is_first or to_log:
            self._log.add_step(seconds, result.tokens, phases)
        self._metrics = None
        self._saver.reserve_copies()
        if to_log:
            self._log.emit_step(progress, result, lr)

    def _finish_step(self, request: Request = Request.NONE) -> None:
        """Evaluates and saves if due or requested. An evaluation that an interrupt cuts short is repeated on resume."""
        step, training, start = self._progress.step, self._training, time.perf_counter()
        is_last, has_metrics = (
            self._length.is_finished(),
            self._metrics is not None,
        )  # a resumed run has those of its snapshot
        to_evaluate = is_last or _is_due(training.eval_steps, step) or Request.EVALUATE in request
        if to_evaluate:
            self._evaluate(stop=self._control.is_interrupted)
            if self._metrics is None:
                return
        is_best = self._metrics is not None and self._progress.best_step == step
        to_save = is_best or is_last or _is_due(training.save_steps, step) or Request.SAVE in request
        if to_save:
            self._save()
        if to_evaluate and not has_metrics:
            self._length.budget.record_evaluation(time.perf_counter() - start)
        elif to_save:
            self._length.budget.record_save(time.perf_counter() - start)

    def _evaluate(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Evaluates the current step unless it was already evaluated, and updates the best step."""
        if self._metrics is not None:
            return
        progress, training, start = self._progress, self._training, time.perf_counter()
        self._fit_head()
        self._metrics = finite(evaluate(self._task.evaluator, self._plan, training.eval_batches, stop, self._show))
        if self._metrics is None:
            return
        seconds, loss = time.perf_counter() - start, self._metrics["loss"]
        event: Event = {"event": "eval", "step": progress.step, **self._metrics, "seconds": seconds}
        if training.sample_tokens and loss is not None and self._group.is_main and self._run.sharding != "full":
            seed = derive_seed(training.seed, "sample", progress.step)
            with self._plan.autocast():
                event["sample"] = self._task.sample(training.sample_prompt, training.sample_tokens, seed)
        self._log.emit(event)
        if not progress.step:
            return  # there is no snapshot of untrained weights that could be the best one
        if loss is not None and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss, progress.best_step = loss, progress.step

    def _fit_head(self) -> None:
        """Fits a head that is not trained, so that evaluations and snapshots have that of the current weights."""
        if self._head_step != self._progress.step:
            fit_head(self._task, self._plan)
            self._head_step = self._progress.step

    def _save(self) -> None:
        self._fit_head()
        self._saver.save(self._metrics, self._environment, is_last=self._length.is_finished())

    def _rescue(self) -> None:
        """Saves the last completed step after another rank was lost, if this process has the complete state."""
        if self._group.is_main and self._run.sharding == "none" and self._progress.step:
            try:
                self._save()
                self._saver.flush()
            except SansGPUError as error:  # only a warning: the loss of the rank is the error to report
                self._sinks.warn(str(error))

    def _end(self, reason: str, signal: int | None = None) -> TrainingResult:
        end = TrainingResult(self._run.paths.root, reason, self._progress.step, self._saver.newest, signal)
        name = end.snapshot.folder.name if end.snapshot else None
        event = {"event": "end", "step": end.step, "time": now(), "reason": reason}
        self._sinks.emit({**event, "seconds": self._length.elapsed_seconds(), "snapshot": name})
        return end


def _is_due(every: int, step: int) -> bool:
    """Returns whether something that happens after every `every` steps, or never if 0, is due after `step`."""
    return every > 0 and step % every == 0
