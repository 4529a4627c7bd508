"""Benchmarks a configuration and writes report.md, report.html, optimized.yaml and start.sh."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import cast

import torch

from sansgpu.config import ConfigError, SansGPUError, change_config, save_config
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted, duration
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import OutputFolder
from sansgpu.machine.measurements import flops_utilization
from sansgpu.planning.forecast import Forecast, projections, roofline_of, step_limits
from sansgpu.planning.measure import Measured, MeasureRequest, measure_in_subprocess
from sansgpu.planning.resolve import ResolveOptions, resolve_run
from sansgpu.planning.results import BenchResult, ForwardPass, ForwardResult, GpuComparison, Variation
from sansgpu.planning.suggestions import (
    HARMLESS_COSTS,
    WHAT_IF_STEPS,
    affordable,
    asked_changes,
    built_in_changes,
    learning_advice,
    time_variations,
)
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.train.run import TrainingRun
from sansgpu.train.run_folders import require_plain_name, with_absolute_paths
from sansgpu.views.bench import is_measurable, write_report

PROJECTED_STEPS = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
MIN_SPEEDUP = 1.03  # smaller speedups are noise
MAX_STEP_RATIO = 1.15  # slowest step / median step; above it, something disturbed the measurement
MIN_BUSY_CORES = 0.15  # report other programs if they use more cores than this
GPU_MFU = 0.4  # assumed model FLOPs utilization of an efficient training program


@dataclass(frozen=True)
class BenchRequest:
    """Arguments of the bench command."""

    config_file: Path | None
    overrides: tuple[str, ...]
    output_dir: Path
    steps: int = 20
    from_step: int = 0
    targets: tuple[int, ...] = ()  # numbers of steps to project; empty: PROJECTED_STEPS
    start: datetime | None = None  # when the projections start; None: now
    what_if: bool | None = None  # time the built-in variations; None: as many as WHAT_IF_SECONDS allows
    vary: tuple[str, ...] = ()  # `key=value,value`: more variations to time
    forward_only: bool = False
    gpu_flops_per_second: float | None = None


def bench(request: BenchRequest, progress: ReportProgress, warn: Warn) -> BenchResult | ForwardResult:
    """Measures and writes the files. Raises ConfigError, or SansGPUError if a measurement failed."""
    require_plain_name(request.output_dir)
    config, notes = load_config(request.config_file, request.overrides)
    for note in notes:
        warn(note)
    if request.forward_only:
        config = task_of(config).with_vocabulary(config)
    else:
        OutputFolder(request.output_dir, "bench").require()
    asked = asked_changes(config, request.vary)
    options = ResolveOptions(data="unread" if request.forward_only else "wanted")
    run = resolve_run(config, progress, warn, options)
    chosen = _with_choices(config, run)
    if request.forward_only:
        return _forward_only(run, chosen, request, progress)
    progress(f"timing {counted(request.steps, 'step')} with a cold cache", 0, 0)
    measured = measure_in_subprocess(_first_request(chosen, run, request))
    progress("timing the same configuration with a warm cache", 0, 0)
    start = time.perf_counter()
    baseline = measure_in_subprocess(MeasureRequest(chosen, WHAT_IF_STEPS, run.usual_tokens, run.shared_tokens))
    seconds = time.perf_counter() - start
    result = _summary(run, measured, baseline, request, progress)
    if run.corpus is None:
        result["warnings"].append(
            "the data could not be read, so the projections do not include reading it, evaluations and the export"
        )
    usual = [] if request.what_if is False else built_in_changes(chosen)
    changes = asked + (usual if request.what_if else affordable(usual, seconds))
    if left_out := len(asked) + len(usual) - len(changes):
        warn(
            f"{left_out} of {counted(len(usual), 'standard variation')} will be skipped, because each takes about "
            f"{duration(seconds)}; --what-if measures all of them, --no-what-if none."
        )
    result["what_if"] = time_variations(chosen, run, baseline, changes, seconds, progress) if changes else []
    result["gpu"] = _gpu(chosen, run, result, request, progress)
    optimized, result["optimized"] = _optimized(chosen, result["what_if"])
    progress("writing the report", 0, 0)
    _write_files(result, optimized, request)
    return result


def _first_request(chosen: Config, run: TrainingRun, request: BenchRequest) -> MeasureRequest:
    """Returns the request to measure the run itself, or its steps on random tokens if its data could not be read."""
    if run.corpus is not None:
        return MeasureRequest(chosen, request.steps, with_data=True, profiled=True)
    return MeasureRequest(chosen, request.steps, run.usual_tokens, run.shared_tokens, snapshots=True, profiled=True)


def _with_choices(config: Config, run: TrainingRun) -> Config:
    execution = run.execution
    settings = [
        f"training.batch_size={execution.micro_batch}",
        f"training.gradient_accumulation_steps={execution.accumulation}",
        f"training.precision={execution.precision}",
        "training.use_amp=null",
        f"training.compile='{execution.compile}'",
        f"training.threads={execution.threads}",
        f"training.optimizer={execution.optimizer}",
    ]
    resolved = run.config.model.model_dump()  # includes what depends on the data, e.g. vocab_size
    configured = config.model.model_dump()
    settings += [f"model.{key}={value}" for key, value in resolved.items() if value != configured[key]]
    return change_config(config, settings)


def _summary(
    run: TrainingRun, measured: Measured, baseline: Measured, request: BenchRequest, progress: ReportProgress
) -> BenchResult:
    seconds = measured["step_seconds"][-request.steps :]
    middle, tokens = median(seconds), round(mean(measured["tokens"][-request.steps :]))
    needed = run.costs.work(mean(measured["computed_tokens"][-request.steps :])).needed
    gemm = _gemm_rate(run, measured, needed / middle)
    compiling = max(0.0, measured["step_seconds"][0] - middle)
    cold, warm = _forecasts(measured, baseline, middle)
    config = run.config
    training, limits = config.training, step_limits(run, roofline_of(run, progress))
    environment = run.execution_facts()
    keep = (
        "own_cores", "other_cores", "stolen_cores", "frequency_hz", "temperature_celsius", "throttled", "losses",
        "evaluation_seconds", "save_seconds", "write_seconds", "export_seconds", "import_seconds", "warnings",
        "validation",
    )  # fmt: skip
    resumed = (request.from_step + n for n in PROJECTED_STEPS[:4])
    usual = {*PROJECTED_STEPS, *(resumed if request.from_step else ())}
    targets = sorted(set(request.targets) or usual)
    result = {
        "name": request.config_file.stem if request.config_file else "default",
        **{k: v for k, v in run.facts().items() if k not in ("total_steps", "max_hours", "until")},
        **{k: environment[k] for k in ("precision", "threads", "compile", "kernels", "isa")},
        "tokens_per_step": tokens,
        "task": config.task,
        "padded": not config.settings.varying_length and tokens < run.tokens_per_step,
        "step_seconds": {"median": middle, "min": min(seconds), "max": max(seconds)},
        "all_step_seconds": seconds,
        "tokens_per_second": tokens / middle,
        "steps_per_second": 1 / middle,
        "flops_per_second": needed / middle,
        "flops_per_step": needed,
        "mfu": flops_utilization(needed / middle, gemm),
        "gemm_flops_per_second": gemm,
        "peak_rss_bytes": measured["peak_rss_bytes"],
        "build_seconds": {
            "data": measured["data_seconds"],
            "tokenizer": measured["tokenizer_seconds"],
            "model": measured["model_seconds"],
            "compile": compiling,
        },
        "breakdown": measured["breakdown"],
        "limits": {part: seconds / middle for part, seconds in limits.items()},
        **{key: measured[key] for key in keep},
        "seconds_per_million_tokens": 1e6 * middle / tokens,
        "disturbances": _disturbances(measured, seconds),
        "from_step": request.from_step,
        "start": request.start.isoformat(timespec="minutes") if request.start else None,
        "startup_seconds": {"from zero": cold.startup_seconds, "from a snapshot": warm.startup_seconds},
        "projections": projections(targets, request.from_step, cold, warm, training, request.start),
        "advice": learning_advice(config, measured["validation"], len(measured["step_seconds"])),
    }
    return cast(BenchResult, result)


def _forecasts(measured: Measured, baseline: Measured, step: float) -> tuple[Forecast, Forecast]:
    """Returns forecasts of a new run and of a resumed run, which finds data and compiled graphs in the cache."""
    start = measured["import_seconds"] + measured["model_seconds"]
    end = measured["write_seconds"] + measured["export_seconds"]
    built = measured["data_seconds"] + measured["tokenizer_seconds"]
    first = max(0.0, measured["step_seconds"][0] - step)
    warm_first = min(first, max(0.0, baseline["step_seconds"][0] - step))
    cold = Forecast(start + built + first, step, measured["evaluation_seconds"], measured["save_seconds"], end)
    return cold, replace(cold, startup_seconds=start + warm_first)


def _disturbances(measured: Measured, seconds: list[float]) -> list[str]:
    found = []
    ratio = max(seconds) / median(seconds)
    uneven = f"the slowest step took {ratio:.2f} times the median"
    if measured["throttled"]:
        found.append(f"the CPU was throttled for heat {measured['throttled']} times")
    if measured["stolen_cores"] > MIN_BUSY_CORES:
        found.append(
            f"the host of this virtual machine gave {measured['stolen_cores']:.1f} of its cores to other machines"
        )
    if measured["other_cores"] > MIN_BUSY_CORES:
        found.append(f"other programs kept {measured['other_cores']:.1f} cores busy")
    if ratio > MAX_STEP_RATIO:
        found.append(uneven if found else f"{uneven} for an unknown reason")
    return found


def _gpu(
    chosen: Config, run: TrainingRun, result: BenchResult, request: BenchRequest, progress: ReportProgress
) -> GpuComparison | None:
    tokens, needed = run.tokens_per_step, result["flops_per_step"]
    if torch.cuda.is_available() and run.execution.device.type == "cpu":
        progress("timing the GPU", 0, 0)
        settings = ("device=cuda", "force_cpu=false", "training.compile='off'", "training.precision=bf16")
        try:
            measured = measure_in_subprocess(
                MeasureRequest(change_config(chosen, settings), WHAT_IF_STEPS, run.usual_tokens, run.shared_tokens)
            )
        except SansGPUError as error:
            result["warnings"].append(f"the GPU was not measured: {error}")
            return None
        seconds, estimate = median(measured["step_seconds"][-WHAT_IF_STEPS:]), False
        name = torch.cuda.get_device_name()
    elif request.gpu_flops_per_second:
        seconds, estimate = needed / (request.gpu_flops_per_second * GPU_MFU), True
        name = f"A GPU with {request.gpu_flops_per_second / 1e12:g} TFLOP/s at an MFU of {GPU_MFU:.0%}"
    else:
        return None
    return {
        "name": name,
        "estimate": estimate,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "times_faster": result["step_seconds"]["median"] / seconds,
    }


def _optimized(chosen: Config, rows: Sequence[Variation]) -> tuple[Config, list[str]]:
    """Returns the configuration with the fastest variation that does not change what the model learns."""
    best = max(
        (
            row
            for row in rows[1:]
            if row.get("speedup", 0) > MIN_SPEEDUP and is_measurable(row) and row["gives_up"] in HARMLESS_COSTS
        ),
        key=lambda row: row["speedup"],
        default=None,
    )
    settings = best["set"] if best else []
    return change_config(chosen, settings), settings


def _write_files(result: BenchResult, optimized: Config, request: BenchRequest) -> None:
    folder = request.output_dir
    with write_failures_as(ConfigError, folder, "--output-dir"), OutputFolder(folder, "bench").replace() as new:
        save_config(with_absolute_paths(optimized), new / "optimized.yaml")
        start = new / "start.sh"
        run = f"runs/{result['name']}-optimized"
        start.write_text(
            "#!/bin/sh\n# Trains with optimized.yaml and passes its arguments on to `sansgpu train`.\nset -eu\n"
            'here=$(CDPATH= cd "$(dirname "$0")" && pwd)\n'
            f'exec {shlex.quote(sys.executable)} -m sansgpu train "$here/optimized.yaml" '
            f'--output-dir {shlex.quote(run)} "$@"\n',
            encoding="utf-8",
        )
        start.chmod(0o755)
        reports = write_report(result, new)
    result["files"] = [str(folder / name) for name in (*reports, "optimized.yaml", "start.sh")]


def _gemm_rate(run: TrainingRun, measured: Measured, reached: float) -> float:
    known: float = measured["gemm_flops_per_second"]
    return known if reached <= known else run.peak_gemm_rate(again=True)


def _forward_only(run: TrainingRun, chosen: Config, request: BenchRequest, progress: ReportProgress) -> ForwardResult:
    """Times forward passes at the run's micro-batch and at batch size 1."""
    rows: list[ForwardPass] = []
    task, window = task_of(chosen), chosen.window
    for size in sorted({1, run.execution.micro_batch}):
        progress(f"timing forward passes of {size} x {window} tokens", 0, 0)
        one = change_config(chosen, (f"training.batch_size={size}",))
        measured = measure_in_subprocess(MeasureRequest(one, request.steps, forward_only=True))
        seconds = median(measured["step_seconds"][-request.steps :])
        flops = task.costs(chosen).work(size * window).needed / 3  # forward is a third of a step's FLOPs
        gemm = _gemm_rate(run, measured, flops / seconds)
        rows.append(
            {
                "batch_size": size,
                "window": window,
                "seconds": seconds,
                "tokens_per_second": size * window / seconds,
                "flops_per_second": flops / seconds,
                "mfu": flops_utilization(flops / seconds, gemm),
                "peak_rss_bytes": measured["peak_rss_bytes"],
                "model_seconds": measured["model_seconds"],
            }
        )
    return {"parameters": sum(task.costs(chosen).parameters().values()), "forward": rows}
