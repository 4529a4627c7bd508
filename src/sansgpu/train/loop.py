"""The training loop, shared by all tasks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.prefetch import Prefetcher
from sansgpu.events.controls import Controls, Request
from sansgpu.events.event import Sinks, now
from sansgpu.events.history import LogHistory
from sansgpu.events.jsonl import read_record
from sansgpu.events.progress import ReportProgress, ignore_progress
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.distributed.peers import LostRankError
from sansgpu.machine.distributed.world import find_world, grace_seconds
from sansgpu.machine.interrupt import Interrupt, write_line
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.pressure import MemoryGuard
from sansgpu.machine.probe import available_memory, held_memory
from sansgpu.tasks.capabilities import ActivationOwner, FreezesLayers, KeepsActivations
from sansgpu.tasks.task import Collecting, Sums, Task, add_sums
from sansgpu.train.branches import record_of
from sansgpu.train.checkpoint import Saver, load_snapshot, load_weights
from sansgpu.train.evaluate import Validation
from sansgpu.train.health import not_finite_remedy
from sansgpu.train.run import TrainingRun, keep_activations
from sansgpu.train.run_length import RunLength
from sansgpu.train.run_log import RunLog, SystemStatistics
from sansgpu.train.schedule import UNKNOWN_STEPS, ends_with_best, learning_rate, stops_early
from sansgpu.train.snapshots import Progress, Snapshot
from sansgpu.train.state import TrainState
from sansgpu.train.step import NotFiniteError, train_step

PAUSE_SECONDS = 0.1  # polling interval while paused
FORWARD_SECONDS = 3.0  # within this time, a launcher may forward a signal that its processes have already received


@dataclass(frozen=True)
class TrainingResult:
    """The outcome of the run in `folder`. `reason` is done, interrupted, out_of_time or early_stopping.

    `final_step` is the step whose weights final/ has, or None if final/ was not written.
    """

    folder: Path
    reason: str
    step: int
    snapshot: Snapshot | None
    final_step: int | None = None
    signal: int | None = None


class Due(NamedTuple):
    """The actions that are due after a step."""

    evaluate: bool
    save: bool


class Trainer:
    """Trains a task from its initial weights or from a snapshot."""

    def __init__(
        self,
        task: Task,
        run: TrainingRun,
        sinks: Sinks,
        controls: Controls | None = None,
        system: SystemStatistics = lambda: None,
        progress: ReportProgress = ignore_progress,
    ) -> None:
        """Prepares model and optimizer for training.

        `controls` supplies requests to save, evaluate, pause or stop; `system` supplies machine statistics. `progress`
        displays work that emits no events, such as saving.
        """
        execution = run.execution
        self._task, self._run, self._training, self._sinks, self._show = task, run, run.config.training, sinks, progress
        self._state = TrainState.create(task.model, self._training, execution)
        self._length = RunLength(run, self._state, sinks.warn)
        if self._training.load_best_model_at_end and isinstance(task, Collecting):
            self._length.budget.final_evaluations += 1
        self._saver = Saver(run, self._state, task.fingerprint, sinks, self._length.elapsed_seconds)
        self._validation = Validation(task, run, self._state, progress)
        self._log = RunLog(task, run, self._length, sinks, system)
        self._control = RunControl(controls or Controls(), execution.group)
        self.state = LogHistory(effective_batch(run.config.training))  # as transformers' `trainer.state`
        sinks.add(self.state)
        self._is_frozen = False  # layers have stopped learning
        self._sums: Sums = {}  # logged sums of the steps since the last synchronization
        self._guard: MemoryGuard | None = None
        if run.sharding != "full":
            available, used = (lambda: available_memory(execution.device)), (lambda: held_memory(execution.device))
            self._guard = MemoryGuard(execution, available, used, sinks.warn, self._saver.release_copies)
            task.between_blocks(self._guard.check)

    @property
    def expected_steps(self) -> int | None:
        """The steps after which a time-limited run will probably end, according to an estimate; otherwise None."""
        return self._length.expected_steps()

    @property
    def _progress(self) -> Progress:
        return self._state.progress

    def resume(self, snapshot: Snapshot, strict: bool = False) -> None:
        """Restores the run from a snapshot.

        Raises ConfigError if the snapshot does not fit the model, or with `strict` if the environment differs.
        """
        is_main = self._run.execution.group.is_main

        def warn(message: str) -> None:
            if is_main:
                self._sinks.warn(message)

        def differ(message: str) -> None:
            if strict:
                raise ConfigError(f"{message.removesuffix('.')}; remove --strict to resume anyway.")
            warn(message)

        metrics = load_snapshot(self._state, snapshot, self._run, self._task.fingerprint, differ)
        self._validation.restore(metrics)
        self._saver.restore(snapshot, metrics)
        events, problem = read_record(record_of(snapshot, self._run.paths)) if is_main else ([], None)
        if problem:
            warn(problem)
        self._log.restore(events, snapshot.step)
        for event in events:
            if event["event"] != "end" and (event.get("step") or 0) <= snapshot.step:
                self.state.emit(event)
        self._length.restore(events)
        if is_main and (change := self._length.schedule_change(events)):
            warn(change)

    def train(self) -> TrainingResult:
        """Trains until a limit is reached, time is up, the validation loss stops falling or the run is interrupted.

        Takes snapshots as configured and one at the end. `final/` is written unless the run was interrupted.
        """
        training, timeout, group = self._training, self._run.config.data.timeout_seconds, self._run.execution.group
        prefetch = Prefetcher(self._batch, training.dataloader_num_workers, training.prefetch, timeout)
        self._task.model.train()
        try:
            with self._control.interrupt, group.diagnosing_torch():
                if training.eval_on_start and not self._progress.step:
                    self._evaluate(stop=self._control.is_interrupted)
                stopped_by = self._run_steps(prefetch)
                if stopped_by is None:
                    self._evaluate()
                self._show("saving", 0, 0)
                if self._progress.step:  # else there is nothing to save
                    self._save()
                self._saver.flush()
                if stopped_by is not None:
                    return self._end("interrupted", None, stopped_by)
            final_step = self._choose_final_weights()
            self._validation.collect(is_stale=final_step != self._progress.step)
            self._state.optimizer.release_state()
            self._show("writing the final model", 0, 0)
            if group.is_main:
                self._task.export(self._run.paths.final)
            if group.rank == group.local_ranks[0] and isinstance(self._task, KeepsActivations):
                self._task.delete_activations()
            if not self._length.is_finished():
                return self._end("early_stopping", final_step)
            return self._end("out_of_time" if self._length.is_out_of_time() else "done", final_step)
        except LostRankError:
            self._rescue()
            raise
        finally:
            prefetch.close()
            self._saver.close()

    def _run_steps(self, prefetch: Prefetcher) -> int | None:
        """Trains until the run is finished, stops early or is interrupted by a signal; returns the signal or None."""
        first = self._progress.step
        if first > self._length.phases.freeze_step:
            self._freeze_layers()
        if first:
            self._do(self._due())
        while (stopped_by := self._follow_commands()) is None and not self._is_over():
            if self._freeze_layers():
                continue  # it takes time, in which a signal may have arrived
            self._show_first_steps(first)
            # The first step of a process compiles, so its duration says nothing about later steps.
            self._one_step(prefetch, is_timed=self._progress.step > first)
            self._saver.flush_if_written()
            if self._length.replan():
                prefetch.forget()  # window lengths depend on the total number of steps
                if self._sums and self._is_synchronized():  # the time is up before the next regular synchronization
                    self._synchronize()
            self._do(self._due())
        return stopped_by

    def _is_over(self) -> bool:
        return self._length.is_finished() or stops_early(self._training, self._progress)

    def _freeze_layers(self) -> bool:
        """Freezes the lower layers once all have learned for `model.freeze_after`. Returns whether it did.

        Evaluations and snapshots of the last step before come first, so that a resumed run repeats it.
        """
        step, first = self._progress.step, self._length.phases.freeze_step
        if self._is_frozen or step < first or not isinstance(self._task, FreezesLayers):
            return False
        self._is_frozen = True
        frozen, blocks = self._task.freeze_layers()
        self._state.optimizer.drop_frozen()
        self._length.budget.forget_steps()

        def say(message: str) -> None:
            if step == first:  # otherwise it is in the record of the resumed run
                self._sinks.emit({"event": "warning", "step": step + 1, "cause": "layers", "message": message})

        say(f"the embeddings and the lower {frozen} of {blocks} blocks stop learning after step {step:,}.")
        owner = ActivationOwner(self._run.paths.root, self._control.is_interrupted)
        if problem := keep_activations(self._run, self._task, self._show, owner):
            say(problem)
        return True

    def _follow_commands(self) -> int | None:
        """Handles requests, and waits while the run is paused. Returns the signal that ends the run, or None."""
        while self._is_synchronized():
            number, request = self._control.command()
            if number is not None:
                return number
            if self._progress.step and request & (Request.EVALUATE | Request.SAVE):
                self._do(Due(Request.EVALUATE in request, Request.SAVE in request))
            if Request.PAUSE not in request:
                return None
            self._saver.flush_if_written()
            time.sleep(PAUSE_SECONDS)
        return None

    def _one_step(self, prefetch: Prefetcher, is_timed: bool) -> None:
        start, progress, total_steps = time.perf_counter(), self._progress, self._length.total_steps
        lr = learning_rate(self._training, progress.step, total_steps)
        batch = prefetch(progress.step, total_steps)
        data_seconds = time.perf_counter() - start
        try:
            result = train_step(self._state, self._task, batch, lr, self._guard)
        except NotFiniteError as error:
            newest = None if self._saver.newest is None else self._saver.newest.folder.name
            raise SansGPUError(f"{error}; {not_finite_remedy(self._training, progress.step, newest)}") from None
        progress.add_step(result.tokens)
        add_sums(self._sums, result.logged_sums())
        if self._is_synchronized():
            result.phase_seconds["reduce"] += self._synchronize()
        seconds = time.perf_counter() - start
        if is_timed:
            self._length.budget.record_step(seconds)
        to_log = self._is_due(self._training.logging_steps)
        if is_timed or to_log:
            self._log.add_step(seconds, data_seconds, result)
        self._saver.reserve_copies()
        if to_log:
            self._log.emit_step(progress, result, lr)

    def _is_synchronized(self) -> bool:
        """Returns whether the ranks synchronize after the current step."""
        return self._progress.step % self._training.sync_every == 0 or self._length.is_finished()

    def _synchronize(self) -> float:
        """Adds up the logged sums of all ranks, after synchronizing those that train by themselves; returns seconds."""
        start = time.perf_counter()
        self._progress.add_logged(self._state.synchronize(self._sums))
        self._sums = {}
        return time.perf_counter() - start

    def _is_due(self, every: int) -> bool:
        """Returns whether an action that is due every `every` steps (0: never) is due after the current step.

        Between two synchronizations nothing is; it is due at the next one. After the last step everything is due.
        """
        step, sync_every = self._progress.step, self._training.sync_every
        if not self._is_synchronized():
            return False
        since = (step - 1) // sync_every * sync_every  # the step of the last synchronization
        return self._length.is_finished() or (every > 0 and step // every > since // every)

    def _due(self) -> Due:
        """Returns the actions that the configuration schedules after the current step."""
        return Due(self._is_due(self._training.eval_steps), self._is_due(self._training.save_steps))

    def _do(self, due: Due) -> None:
        """Evaluates and saves the current step if due; also saves it if its validation loss is the lowest so far.

        If an interrupt ends the evaluation, nothing is saved, and the step is evaluated on resume.
        """
        start = time.perf_counter()
        is_new = due.evaluate and self._evaluate(stop=self._control.is_interrupted)
        if due.evaluate and self._validation.metrics is None:
            return
        to_save = due.save or self._validation.is_best
        if to_save:
            self._save()
        if is_new:
            self._length.budget.record_evaluation(time.perf_counter() - start)
        elif to_save:
            self._length.budget.record_save(time.perf_counter() - start)

    def _evaluate(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Evaluates the current step unless it has been evaluated already. Returns whether there is a new result."""
        event = self._validation.evaluate(stop)
        if event is not None:
            self._log.emit(event)
        return event is not None

    def _save(self) -> None:
        self._validation.fit_head()
        self._saver.save(self._validation.metrics, is_last=self._length.is_finished())

    def _choose_final_weights(self) -> int:
        """Loads the weights of the best snapshot if the final model is to have them; returns the step of the weights.

        If that snapshot is damaged, warns and keeps the weights of the last step.
        """
        progress = self._progress
        if not ends_with_best(self._training, progress) or progress.best_step in (None, progress.step):
            return progress.step
        best = Snapshot.of(self._run.paths.snapshots, progress.best_step)
        self._show(f"loading {best.folder.name}", 0, 0)
        if problem := self._run.execution.group.broadcast_object(best.problem):
            self._sinks.warn(f"{problem} The final model is therefore that of the last step, not of the best one.")
            return progress.step
        load_weights(self._state, best)
        if best.step < self._length.phases.freeze_step and isinstance(self._task, KeepsActivations):
            self._task.forget_activations()
        return best.step

    def _show_first_steps(self, first: int) -> None:
        """Displays progress up to the first logged step, because the first step may spend a minute compiling."""
        every, step = self._training.logging_steps, self._progress.step
        logged = min(first - first % every + every if every else UNKNOWN_STEPS, self._length.total_steps)
        if step < logged < UNKNOWN_STEPS:
            self._show("training up to the first logged step", step - first, logged - first, "step")

    def _batch(self, step: int) -> ExampleBatch:
        """Returns the global batch of a step; called ahead of time by prefetch workers."""
        batch = self._task.batch(step, self._length.total_steps)
        pin = self._training.dataloader_pin_memory and self._run.execution.device.type == "cuda"
        return batch.pinned() if pin else batch

    def _rescue(self) -> None:
        """Saves the last completed step after another rank was lost, if this process has the complete state."""
        is_complete = self._run.sharding == "none" and self._state.outer is None
        if self._run.execution.group.is_main and is_complete and self._progress.step:
            try:
                self._save()
                self._saver.flush()
            except SansGPUError as error:  # only a warning: the loss of the rank is the error to report
                self._sinks.warn(str(error))

    def _end(self, reason: str, final_step: int | None, stopped_by: int | None = None) -> TrainingResult:
        newest, paths = self._saver.newest, self._run.paths
        end = TrainingResult(paths.root, reason, self._progress.step, newest, final_step, stopped_by)
        event = {"event": "end", "step": end.step, "time": now(), "reason": reason}
        name, seconds = newest.folder.name if newest else None, self._length.elapsed_seconds()
        self._sinks.emit({**event, "seconds": seconds, "snapshot": name, "final_step": final_step})
        return end


class RunControl:
    """Agrees on one command for all ranks: a signal to any of them, or a request to rank 0."""

    def __init__(self, controls: Controls, group: Group) -> None:
        self._controls, self._group = controls, group

        def say(message: str) -> None:
            if group.is_main:
                write_line(message)

        self.interrupt = Interrupt(
            grace_seconds(),
            FORWARD_SECONDS if find_world().launcher else 0.0,
            say,
            lambda message: (controls.on_signal or say)(message),
            lambda: controls.on_exit(),
        )

    def command(self) -> tuple[int | None, Request]:
        """Returns the signal that ends the run, or None, and the requests; all ranks must call it."""
        request = self._controls.take() if self._group.is_main else Request.NONE
        number, flags = map(int, self._group.all_reduce_maxima([self.interrupt.signal or 0, request]))
        request = Request(flags)
        if not number and Request.STOP in request:
            number = signal.SIGINT
        return number or None, request

    def is_interrupted(self) -> bool:
        """Returns whether this rank received a signal."""
        return self.interrupt.signal is not None
