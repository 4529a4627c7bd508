"""Times one configuration in a separate process, for `bench`."""

from __future__ import annotations

import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sansgpu.config import SansGPUError
from sansgpu.config.schema import Config
from sansgpu.config.wording import MAX_REASON_CHARACTERS
from sansgpu.data.batch import ExampleBatch
from sansgpu.kernels.roofline import peak_gemm_rate
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.execution import Execution
from sansgpu.machine.launch import quiet_profiler
from sansgpu.machine.memory import effective_batch
from sansgpu.machine.monitor import LoadMeter, peak_rss_bytes, process_age
from sansgpu.machine.torch_compile import ignore_cached_graphs, is_compiled
from sansgpu.models.modules import compile_blocks, set_matmul_precision
from sansgpu.planning.process import configure_process
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import Corpus, Task
from sansgpu.train.evaluate import evaluate, evaluate_batches, rank_sample
from sansgpu.train.optim import PROFILED_AS, Optimizer
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step
from sansgpu.train.writer import SnapshotWriter

MAX_TIMED_BATCHES = 40  # the time of an evaluation is extrapolated from at most this many batches
PROFILED_STEPS = 2
WARMUP_STEPS = 1  # untimed steps after the first one, which compiles

DATA_SECONDS = ("tokenizer_seconds", "data_seconds", "evaluation_seconds", "export_seconds")

PARTS = ("attention", "matmul", "loss", "optimizer", "other")
# The time of an event, including its children, counts for the first pattern that matches its name.
_MATMULS = r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|mkldnn.*linear|_Linear|_FrozenLinear|_Lora|_FeedForward"
_EVENTS = (
    ("optimizer", re.compile(re.escape(PROFILED_AS))),
    ("loss", re.compile(r"LinearCrossEntropy|LinearMixedLoss|TargetLogProbabilities")),
    ("attention", re.compile(r"[aA]ttention")),
    ("matmul", re.compile(_MATMULS)),
)

Measured = dict[str, Any]  # the measured values that the request asks for


@dataclass(frozen=True)
class MeasureRequest:
    """A measurement to make. In `config`, only the device may be `auto`."""

    config: Config
    steps: int
    example_tokens: int | None = None  # length of random examples; None: the maximum
    shared_tokens: int = 0  # of these, the tokens with which all examples begin
    with_data: bool = False  # also prepare the data without the cache, evaluate and save
    snapshots: bool = False  # also time snapshots; times that need data are reported as 0
    forward_only: bool = False
    profiled: bool = False


def measure_in_subprocess(request: MeasureRequest) -> Measured:
    """Runs `measure` in a new process, for separate memory and caches. Raises SansGPUError if it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, request).result()
        except BrokenProcessPool:
            raise SansGPUError(
                "the measuring process was killed, most likely because memory ran out; stop other programs or "
                "choose a smaller model."
            ) from None
        except SansGPUError:
            raise
        except Exception as error:  # anything that torch or its compiler may raise
            raise SansGPUError(
                f"the measurement failed ({' '.join(str(error).split())[:MAX_REASON_CHARACTERS]}); run the command "
                "with --debug to see where."
            ) from error


def measure(request: MeasureRequest) -> Measured:
    warnings: list[str] = []
    imported = process_age()
    with tempfile.TemporaryDirectory(prefix="sansgpu-bench-") as folder:
        if request.profiled:  # a run with nothing cached
            ignore_cached_graphs()
        execution, _ = configure_process(request.config, None, warnings.append)
        bench = _Bench(request, execution, Path(folder))
        result = bench.forward() if request.forward_only else bench.train()
    cache = cache_dir(request.config.data.cache_dir)
    gemm = peak_gemm_rate(cache, execution.precision, execution.device.type, execution.threads)
    return {**result, "import_seconds": imported, "gemm_flops_per_second": gemm, "warnings": warnings}


@dataclass
class _Stages:
    """Progress callback that records the start time of each stage of data preparation."""

    started: dict[str, float] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int, unit: str = "byte", /) -> None:
        self.started.setdefault(stage, time.perf_counter())


class _Bench:
    def __init__(self, request: MeasureRequest, execution: Execution, folder: Path) -> None:
        self._request, self._config, self._execution, self._folder = request, request.config, execution, folder
        self._task_class = task_of(self._config)
        self._is_compiled = is_compiled(self._config.training.compile, execution.kernels, execution.device.type)
        size = self._config.training.batch_size
        assert size != "auto"
        execution.micro_batch = size

    def forward(self) -> Measured:
        """Times forward passes of one random micro-batch."""
        start = time.perf_counter()
        objective = self._task_class.new_objective(self._config)
        built = time.perf_counter() - start
        objective.model.to(self._execution.device).eval()
        self._change_layers(objective.model)
        # The optimizer casts the weights to their training dtype.
        Optimizer(objective.model, self._config.training, self._execution.compute_dtype)
        batch = self._random_batch(self._execution.micro_batch).to(self._execution.device)
        seconds = []
        with torch.no_grad(), self._execution.autocast():
            for _ in range(1 + WARMUP_STEPS + self._request.steps):
                start = time.perf_counter()
                objective.loss(batch)
                self._execution.synchronize()
                seconds.append(time.perf_counter() - start)
        return {"step_seconds": seconds, "model_seconds": built, "peak_rss_bytes": peak_rss_bytes()}

    def _change_layers(self, model: torch.nn.Module) -> None:
        set_matmul_precision(model, self._execution.precision)
        if self._is_compiled:
            compile_blocks(model)

    def train(self) -> Measured:
        """Times training steps and, with data, everything before and after them."""
        result: Measured = {}
        start = time.perf_counter()
        if self._request.with_data:
            stages = _Stages()
            self._config, corpus = self._task_class.prepare(self._config, self._folder, stages)
            done = time.perf_counter()
            tokenizing = stages.started.get("tokenizing", done)
            result |= {"tokenizer_seconds": tokenizing - start, "data_seconds": done - tokenizing}
            start = time.perf_counter()
            task: Any = self._task_class(self._config, corpus, effective_batch(self._config.training))
        else:
            task = self._task_class.new_objective(self._config)
        result["model_seconds"] = time.perf_counter() - start
        self._change_layers(task.model)
        state = TrainState.create(task.model, self._config.training, self._execution)
        warmup = self._steps(task, state, 1 + WARMUP_STEPS)  # before LoadMeter, which would count compiler processes
        strain = LoadMeter()
        timed = self._steps(task, state, self._request.steps)
        result |= {**{key: warmup[key] + timed[key] for key in timed}, **strain.sample()}
        if self._request.with_data:
            result |= self._evaluation(task, corpus) | self._saving(state)
        elif self._request.snapshots:
            result |= dict.fromkeys(DATA_SECONDS, 0.0) | {"validation": {}} | self._saving(state)
        result["peak_rss_bytes"] = peak_rss_bytes()
        if self._request.profiled:
            parts = profile_step(lambda: self._step(task, state), PROFILED_STEPS)
            result["breakdown"] = parts
        if self._request.with_data:  # last, because it may merge an adapter, which ends training
            start = time.perf_counter()
            task.export(self._folder / "final")
            result["export_seconds"] = time.perf_counter() - start
        return result

    def _random_batch(self, size: int) -> ExampleBatch:
        batch = self._task_class.random_batch(self._config, size, self._request.example_tokens)
        return batch.with_shared_beginning(self._request.shared_tokens)

    def _step(self, task: Any, state: TrainState) -> Any:
        training, progress = self._config.training, state.progress
        if self._request.with_data:
            batch = task.batch(progress.step)
        else:
            batch = self._random_batch(effective_batch(training))
        result = train_step(state, task, batch, training.learning_rate / 10)
        progress.step += 1
        return result

    def _steps(self, task: Any, state: TrainState, steps: int) -> dict[str, list[Any]]:
        seconds, losses, tokens, computed = [], [], [], []
        for _ in range(steps):
            start = time.perf_counter()
            outcome = self._step(task, state)
            self._execution.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(outcome.loss_sum / outcome.targets)
            tokens.append(outcome.tokens)
            computed.append(outcome.computed_tokens)
        return {"step_seconds": seconds, "losses": losses, "tokens": tokens, "computed_tokens": computed}

    def _evaluation(self, task: Task, corpus: Corpus) -> Measured:
        batches = math.ceil(corpus.validation_tokens / (self._execution.micro_batch * corpus.example_tokens))
        limit = self._config.training.eval_batches
        batches = batches if limit is None else min(batches, limit)
        timed = min(batches, MAX_TIMED_BATCHES)
        evaluate(task.evaluator, self._execution, 1)  # compiles
        start = time.perf_counter()
        metrics = evaluate_batches(task.evaluator, self._execution, timed)
        seconds = (time.perf_counter() - start) * batches / timed
        start = time.perf_counter()
        ranked = rank_sample(task.evaluator, self._execution)
        seconds += time.perf_counter() - start
        return {"evaluation_seconds": seconds, "validation": {**(metrics or {}), **ranked}}

    def _saving(self, state: TrainState) -> Measured:
        """Writes two snapshots and times the second."""
        warnings: list[str] = []
        writer = SnapshotWriter(self._folder / "snapshots", 1, self._folder / "metrics.jsonl", warnings.append)
        weights, moments = state.weights(), state.optimizer.state_tensors()
        writer.reserve_copies(weights, moments)
        writer.submit(1, weights, moments, {}, None)
        writer.wait()
        start = time.perf_counter()
        writer.submit(2, weights, moments, {}, None)
        waited = time.perf_counter() - start
        writer.wait()
        written = time.perf_counter() - start
        return {"save_seconds": waited, "write_seconds": written}


def profile_step(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns the share of time per part of PARTS over `repeats` steps, measured with torch's profiler."""
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        wall = time.perf_counter() - start
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profiled.events():
        if event.cpu_parent is None:
            _add_part(event, seconds)
    shares = {part: spent / wall for part, spent in seconds.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def _add_part(event: Any, seconds: dict[str, float]) -> None:
    part = next((part for part, names in _EVENTS if names.search(event.name)), None)
    if part is not None:
        seconds[part] += event.cpu_time_total / 1e6
        return
    for child in event.cpu_children:
        _add_part(child, seconds)
