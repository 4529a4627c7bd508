"""The training loop: one for every task."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sansgpu.config import Config, RunPaths, SansGPUError, fold_seed, identity
from sansgpu.data.batch import Examples
from sansgpu.data.prefetch import Prefetcher
from sansgpu.machine.peers import LostRankError
from sansgpu.machine.pressure import MemoryGuard
from sansgpu.machine.probe import Environment, available_memory, held_memory
from sansgpu.tasks import Collecting, Task, add_sums
from sansgpu.train.branches import record_of
from sansgpu.train.budget import Budget
from sansgpu.train.checkpoint import Snapshot
from sansgpu.train.evaluate import evaluate
from sansgpu.train.health import Health
from sansgpu.train.interrupt import Interrupt
from sansgpu.train.resume import Metrics, restore
from sansgpu.train.schedule import learning_rate
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.step import Phases, StepPlan, StepResult, train_step
from sansgpu.train.step_log import StepLog, System
from sansgpu.train.tensor_file import Tensors, as_it_is, in_file_order
from sansgpu.train.threads import AdaptiveThreads
from sansgpu.train.writer import SnapshotWriter
from sansgpu.watch.controls import Controls, Wish
from sansgpu.watch.events import Event, Sinks, finite, now
from sansgpu.watch.jsonl import read_record

SAME_WISH = 3.0  # seconds in which a launcher hands on the signal that its processes got, too
PAUSE_SECONDS = 0.1  # between two looks whether to go on
_SIGNALS = 1 << 4  # what a signal's number is told by, above all wishes
LONG_BEFORE = 0.2  # of the time a run may take, left over at its end


@dataclass(frozen=True)
class End:
    """How the run in `folder` ended: `reason` is done, interrupted or out_of_time; `signal` is what interrupted it."""

    folder: Path
    reason: str
    step: int
    snapshot: Snapshot | None
    signal: int | None = None


class Trainer:
    """Trains a task as the configuration says, from the start or from a snapshot."""

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
        """`steps` are all of the run's, or `schedule.UNKNOWN`; it counts its time from `started` (time.monotonic).

        `evaluated` are the tokens of an evaluation over those of a step, `controls` what is wished for on the way,
        and `system` tells what the machine went through since it was last asked.
        """
        self.task, self.config, self.paths, self.plan = task, config, paths, plan
        self.environment, self.sinks = environment, sinks
        training = config.training
        self.group = plan.group
        self.state = TrainState.begin(task.model, training, plan.device, plan.compute_dtype, plan.group)
        self._spread = self.group.size > 1 and training.sharding != "none"  # so that no process has all to save
        self.total_steps = self._most_steps = steps
        self._told = False  # that another limit ends the run long before its time is up
        self._started = time.monotonic() if started is None else started
        self._before = 0.0  # seconds of the run's earlier processes
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
        self._cut_by_rows = self._spread and training.sharding == "full"
        if not self._cut_by_rows:
            task.between_blocks(self._guard.look)
        self._controls = controls or Controls()
        self._log = StepLog(task, gemm_flops_per_second, plan, system)
        self._health = Health(training)
        self._threads = AdaptiveThreads(training, environment)
        self._snapshot: Snapshot | None = None  # the newest, perhaps still being written
        self._snapshot_said, self._save_seconds = True, 0.0
        self._unsettled: Snapshot | None = None  # what `_settle` has to say; all events wait for it
        self._writer = SnapshotWriter(paths.snapshots, training.keep_last, paths.metrics, lambda m: self.sinks.warn(m))
        self._first_step = True  # of this process: it compiles and warms up, and says nothing about the next
        self._metrics: Metrics | None = None  # of the evaluation after this very step

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.state.progress

    def resume(self, snapshot: Snapshot, strict: bool = False) -> None:
        """Take up a snapshot. Raises ConfigError where it does not fit the model, or with `strict` the environment."""
        fingerprint, folder = self.task.fingerprint, self.paths.snapshots
        warn = self.sinks.warn if self.group.first else lambda message: None
        self._metrics = restore(self.state, snapshot, folder, self.environment, fingerprint, strict, warn, self.group)
        self._snapshot, self._snapshot_said = Snapshot.of(self.paths.snapshots, snapshot.step), False
        recorded, problem = read_record(record_of(snapshot, self.paths)) if self.group.first else ([], None)
        if problem:
            warn(problem)
        for event in (e for e in recorded if (e.get("step") or 0) <= snapshot.step):
            self._health.see(event)  # so that it warns of nothing twice, and of the same as a run that went on
        self._log.recall(recorded, self.environment)
        # One that was killed took time that no snapshot knows of.
        self._before = self.group.decide(lambda: max((e.get("elapsed_seconds") or 0.0 for e in recorded), default=0.0))
        laid = self.progress.total_steps
        over = self.group.decide(lambda: not self._budget.worth_more())
        if self.config.training.time_limited and laid and (self.progress.step < laid or over):
            self.total_steps = min(self._most_steps, laid)

    def train(self) -> End:
        """Run to the first limit, an interrupt or the end of the time allowed; snapshots as configured, and one at
        the end. `final/` is written when the run is done or out of time.
        """
        training = self.config.training
        prefetch = Prefetcher(self._batch, training.dataloader_num_workers, training.prefetch)
        self.task.model.train()
        try:
            with Interrupt(SAME_WISH if self.group.size > 1 else 0.0, lambda: self._controls.leaving()) as interrupt:
                if self.progress.step:
                    self._finish_step(interrupt)
                while (ending := self._heeded(interrupt)) is None and not self._finished():
                    self._one_step(prefetch)
                    if not self._writer.busy:
                        self._settle()
                    self._lay_steps(prefetch)
                    self._finish_step(interrupt)
                if ending is not None:
                    if self.progress.step:  # else there is nothing to lose, and no moments to save
                        self._save()
                    self._settle()
                    return self._end("interrupted", ending)
                self._evaluate()
                self._save()
                self._settle()
            if isinstance(self.task, Collecting):
                self.task.collect(self.group.gather)
            self.state.optimizer.release()
            if self.group.first:
                self.task.export(self.paths.final)
            return self._end("out_of_time" if self.progress.step >= self.total_steps < self._most_steps else "done")
        except LostRankError:
            self._rescue()
            raise
        finally:
            prefetch.close()
            self._leave_nothing_unsaid()

    def _heeded(self, interrupt: Interrupt) -> int | None:
        """Do what is wished for between two steps; the signal that ends the run, whichever rank was sent it."""
        while True:
            wished = self._controls.take() if self.group.first else Wish.NONE
            agreed = int(self.group.most(_SIGNALS * (interrupt.signal or 0) + wished))
            number, wish = agreed // _SIGNALS, Wish(agreed % _SIGNALS)
            if number or Wish.STOP in wish:
                return number or signal.SIGINT
            if self.progress.step:
                self._finish_step(interrupt, wish)
            if Wish.PAUSE not in wish:
                return None
            if not self._writer.busy:
                self._settle()
            time.sleep(PAUSE_SECONDS)

    def _rescue(self) -> None:
        """Save the last whole step, where another process was lost and this one has all of it."""
        if self.group.first and not self._spread and self.progress.step:
            try:
                self._save()
                self._settle()
            except SansGPUError as error:  # what there is to say is who was lost
                self.sinks.warn(str(error))

    def _batch(self, step: int) -> Examples:
        """The global batch of a step, as it is learned from; made ahead of it."""
        batch = self.task.batch(step, self.total_steps)
        pin = self.config.training.dataloader_pin_memory and self.plan.device.type == "cuda"
        return batch.pinned() if pin else batch

    def _finished(self) -> bool:
        most_tokens = self.config.training.max_tokens
        return self.progress.step >= self.total_steps or (
            most_tokens is not None and self.progress.tokens >= most_tokens
        )

    def _elapsed(self) -> float:
        """Seconds the run has taken, over all its processes."""
        return self._before + time.monotonic() - self._started

    def _lay_steps(self, prefetch: Prefetcher) -> None:
        """Where time limits the run: lay its steps over what is left of it."""
        if not self.config.training.time_limited:
            return
        total = int(self.group.most(self._fitting_steps() if self.group.first else 0))
        if total != self.total_steps:
            self.total_steps = self.progress.total_steps = total
            prefetch.forget()  # how windows are cut depends on how many steps there are

    def _fitting_steps(self) -> int:
        """Steps of the run, as they fit into its time now."""
        if self._finished() or not self._budget.due():
            return self.total_steps
        fitting = self._budget.steps_left(self.progress.step)
        if fitting is None:
            return self.total_steps
        total = min(self._most_steps, self.progress.step + fitting)
        if not self._told and self._budget.idle_ratio(self._most_steps - self.progress.step) > LONG_BEFORE:
            self._told = True
            self.sinks.warn(
                f"num_epochs, max_steps or max_tokens end the run after {total:,} steps, long before its time is up; "
                "set them to null to use all of it."
            )
        return total

    def _shed(self) -> str | None:
        """Give up the memory that training can do without."""
        return "snapshots are written before training goes on" if self._writer.drop_copies() else None

    def _one_step(self, prefetch: Prefetcher) -> None:
        start, phases = time.perf_counter(), Phases()
        progress, training = self.progress, self.config.training
        lr = learning_rate(training, progress.step, self.total_steps)
        batch = prefetch(progress.step, self.total_steps)
        phases.lap("data")
        allowed = (lambda size: size) if self._cut_by_rows else self._guard.allowed
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
            self._budget.stepped(seconds)
        to_say = progress.step % training.logging_steps == 0 or self._finished()
        if not self._first_step or to_say:
            self._log.add(seconds, result.tokens, phases)
        self._first_step = False
        self._metrics = None
        behind = self.group.first and not self._spread
        if behind and not self._writer.prepared and (training.save_steps or training.eval_steps):
            self._writer.prepare(*self._tensors())  # moments exist from the first step on
        if to_say:
            self._say_step(result, lr)

    def _say_step(self, result: StepResult, lr: float) -> None:
        event = self._log.event(self.progress, result, lr, self.total_steps)
        times = {"eta_seconds": self._eta_seconds(event["step_seconds"]), "elapsed_seconds": self._elapsed()}
        self._say({**event, **times, "threads": self.environment.threads})
        if changed := self._threads.see(event):
            self.environment = replace(self.environment, threads=changed[0])
            self.sinks.emit({"event": "warning", "step": event["step"], "cause": "threads", "message": changed[1]})

    def _say(self, event: Event) -> None:
        """Emit an event, and what is to be said of how the run goes."""
        event = finite(event)
        self.sinks.emit(event)
        for warning in self._health.see(event) if self.group.first else ():
            self.sinks.emit(warning)

    def _eta_seconds(self, step_seconds: float) -> float:
        left = max(0.0, self._budget.seconds_left())
        return min(left, (self.total_steps - self.progress.step) * step_seconds)

    def _finish_step(self, interrupt: Interrupt, wish: Wish = Wish.NONE) -> None:
        """Evaluate and save where this step is due or it is wished for; what an interrupt cuts short is made up for
        on resume.
        """
        step, training, start = self.progress.step, self.config.training, time.perf_counter()
        due = self._finished() or (training.eval_steps and step % training.eval_steps == 0)
        to_evaluate = due or Wish.EVALUATE in wish
        evaluated = to_evaluate and self._metrics is None  # it may stand in the snapshot that was taken up
        if to_evaluate:
            self._evaluate(stop=lambda: interrupt.signal is not None)
            if self._metrics is None:
                return
        is_best = self._metrics is not None and self.progress.best_step == step
        due = is_best or self._finished() or (training.save_steps and step % training.save_steps == 0)
        to_save = due or Wish.SAVE in wish
        if to_save:
            self._save()
        if evaluated:
            self._budget.evaluated(time.perf_counter() - start)
        elif to_save:
            self._budget.saved(time.perf_counter() - start)

    def _evaluate(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Evaluate this step, unless it was. The best loss so far makes it the best step."""
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
        if training.sample_tokens and loss is not None and self.group.first and not self._cut_by_rows:
            seed = fold_seed(training.seed, "sample", progress.step)
            with self.plan.autocast():
                event["sample"] = self.task.sample(training.sample_prompt, training.sample_tokens, seed)
        self._say(event)
        if loss is not None and (progress.best_loss is None or loss < progress.best_loss):
            progress.best_loss, progress.best_step = loss, progress.step
        self._snapshot = None  # one of this step would not know the evaluation

    def _save(self) -> None:
        """Save this step, unless it is saved already; `_settle` says so, once for every snapshot."""
        if self._snapshot is None or self._snapshot.step != self.progress.step:
            self._settle()
            start = time.perf_counter()
            record = {
                "progress": self.progress.to_json(),
                "metrics": self._metrics,
                "environment": asdict(self.environment),
                "data": self.task.fingerprint,
                "configuration": identity(self.config),
            }
            best, behind = self.progress.best_step, not (self._finished() or self._spread)
            whole = self.state.whole if self._spread else as_it_is
            if self.group.first:
                self._snapshot = self._writer.begin(
                    self.progress.step, *self._tensors(), record, best, behind=behind, whole=whole
                )
            else:
                self._snapshot = Snapshot.of(self.paths.snapshots, self.progress.step)
                self._hand_over()
            self._snapshot_said, self._save_seconds = False, time.perf_counter() - start
        if not self._snapshot_said:
            self._snapshot_said = True
            self._unsettled = self._snapshot
            self.sinks.hold()

    def _hand_over(self) -> None:
        """Give rank 0, which is writing a snapshot, what is here."""
        for tensors in self._tensors() if self._spread else ():
            for name in in_file_order(tensors):
                self.state.whole(name, tensors[name])

    def _tensors(self) -> tuple[Tensors, Tensors]:
        return self.state.weights(), self.state.moments()

    def _settle(self) -> None:
        """Wait until what is saved is whole, and say so: before all that happened since, so that how long the
        writing took makes no difference to the record. Raises SansGPUError where it could not be written.
        """
        if self._unsettled is not None:
            snapshot, self._unsettled, start = self._unsettled, None, time.perf_counter()
            self._writer.wait()
            seconds = self._save_seconds + time.perf_counter() - start  # that training waited
            said = {"event": "snapshot", "step": snapshot.step, "path": snapshot.folder.name, "seconds": seconds}
            self.sinks.release({**said, "elapsed_seconds": self._elapsed()})

    def _leave_nothing_unsaid(self) -> None:
        """However training ends: a snapshot begun is made whole, and the events held back are handed on."""
        try:
            self._settle()
        except Exception as error:  # another one ended the training, and is what is to be heard of
            self.sinks.warn(str(error))
        finally:
            self.sinks.release()

    def _end(self, reason: str, ending: int | None = None) -> End:
        end = End(self.paths.root, reason, self.progress.step, self._snapshot, ending)
        name = self._snapshot.folder.name if self._snapshot else None
        said = {"event": "end", "step": end.step, "time": now(), "reason": reason}
        self.sinks.emit({**said, "seconds": self._elapsed(), "snapshot": name})
        return end
