"""The results of planning and of benchmarks, as JSON."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from sansgpu.config.wording import count, counted


class MemoryChange(TypedDict):
    """Settings that make a run fit into memory."""

    set: list[str]
    cost: str
    memory: int


class PlanCandidate(TypedDict):
    """A model size that was compared for a time budget."""

    parameters: int
    d_model: int
    n_layers: int
    tokens_per_second: float
    tokens: float
    epochs: float
    behind: float  # expected loss relative to the best candidate's, minus 1


class ClusterPoint(TypedDict):
    """The run on a number of nodes."""

    nodes: int
    step_seconds: float
    tokens_per_second: float
    speed_up: float
    efficiency: float
    total_steps: int
    total_seconds: float
    node_hours: float
    cost: float | None
    fits: bool


class GrownBatch(TypedDict):
    """Speed with a batch that grows with the number of nodes, i.e. with the same work per node (weak scaling)."""

    tokens_per_step: int
    tokens_per_second: float
    efficiency: float


class CriticalBatch(TypedDict):
    """The batch size up to which larger batches save steps; None for tasks other than pretraining."""

    critical_batch_tokens: float | None
    critical_batch_loss: float | None
    critical_batch_nodes: int | None


class ClusterPlan(ClusterPoint, CriticalBatch):
    """The run on the requested nodes, and its strong scaling."""

    network_bits_per_second: float
    latency_seconds: float
    gloo_bytes_per_second: float
    gloo_hop_seconds: float
    gradient_bytes: int  # with sync_every > 1: bytes of changes and moments, once in `sync_every` steps
    sync_every: int
    compute_seconds: float
    communication_seconds: float
    overlapped_seconds: float
    collectives_seconds: float
    finish: str
    memory_bytes: dict[str, int]
    most_nodes: int
    pays: float
    pays_until: int
    fastest_nodes: int
    grown_batch: GrownBatch
    curve: list[dict[str, Any]]  # a ClusterPoint each; values are None for more nodes than a step has examples


class RunPlan(TypedDict):
    """The result of `sansgpu plan --json` for one configuration. Unknown speeds and durations are None."""

    parameters: int
    parameters_by_part: dict[str, int]
    memory_bytes: dict[str, int]
    available_bytes: int
    machine_bytes: int
    fits: bool
    batch_size: int
    gradient_accumulation_steps: int
    window: int
    precision: str
    base_precision: str | None  # the frozen base of an adapter: bf16, fp32, int8, int4 or the formats of a GGUF file
    compile: str
    kernels: str
    optimizer: str
    learning_rate: float
    threads: int
    gradient_checkpointing: bool
    tokens_per_step: int
    train_tokens: int | None
    kept_bytes: int  # outputs of frozen layers on the disk of the cache
    tokens_per_second: float | None
    seconds_per_million_tokens: float | None
    step_seconds: float | None
    freeze_step: int | None  # number of steps after which layers stop learning
    later_step_seconds: float | None  # after these
    machine_share: float | None
    total_steps: int | None
    limit_steps: int | None  # steps that num_epochs, max_steps or max_tokens allow; a time limit may allow fewer
    total_tokens: int | None
    epochs: float | None
    total_seconds: float | None
    finish: str | None
    changes: NotRequired[list[MemoryChange]]
    cluster: NotRequired[ClusterPlan]


class ProposedPlan(RunPlan):
    """The plan of a proposed run, which was written to `file`."""

    candidates: list[PlanCandidate]
    file: str


def length_text(plan: RunPlan | ProposedPlan) -> str:
    """Describes a run's known length in steps, tokens and epochs."""
    assert plan["total_steps"] is not None
    assert plan["total_tokens"] is not None
    epochs = f", {plan['epochs']:.2g} epochs" if plan["epochs"] else ""
    total, limit = plan["total_steps"], plan["limit_steps"]
    cut = limit is not None and total < limit
    steps = f"about {total:,} of {limit:,} steps, as many as the time allows" if cut else counted(total, "step")
    return f"{steps}, {count(plan['total_tokens'])} tokens{epochs}"


class StepSeconds(TypedDict):
    """The durations of the timed steps."""

    median: float
    min: float
    max: float


class Projection(TypedDict):
    """The time to train for a number of steps, from zero and from a snapshot."""

    steps: int
    seconds: float
    done: str
    seconds_from_snapshot: NotRequired[float]
    done_from_snapshot: NotRequired[str]


class Variation(TypedDict):
    """A changed configuration, with its measurement or the problem that prevented one."""

    name: str
    set: list[str]
    gives_up: str
    problem: NotRequired[str]
    parameters: NotRequired[int]
    step_seconds: NotRequired[float]  # median
    all_step_seconds: NotRequired[list[float]]
    tokens_per_second: NotRequired[float]
    peak_rss_bytes: NotRequired[int]
    speedup: NotRequired[float]  # by the medians
    speedup_range: NotRequired[list[float]]  # slowest step / fastest of the given configuration, and the reverse


class GpuComparison(TypedDict):
    """A GPU's time for the benchmarked step, measured or estimated from its FLOP/s."""

    name: str
    estimate: bool
    step_seconds: float
    tokens_per_second: float
    times_faster: float


class BenchResult(TypedDict):
    """The result of `sansgpu bench --json`. It also has facts of the run, its environment and the machine's load."""

    name: str
    task: str
    padded: bool
    window: int
    micro_batch: int
    gradient_accumulation_steps: int
    tokens_per_step: int
    step_seconds: StepSeconds
    all_step_seconds: list[float]
    tokens_per_second: float
    steps_per_second: float
    seconds_per_million_tokens: float
    flops_per_second: float
    flops_per_step: float
    gemm_flops_per_second: float
    mfu: float | None  # None if the model exceeds the measured GEMM rate
    peak_rss_bytes: int
    build_seconds: dict[str, float]
    startup_seconds: dict[str, float]
    breakdown: dict[str, float]  # share of a step by part
    limits: dict[str, float]  # lower bound of each part's time at peak hardware rates / measured step time
    disturbances: list[str]
    warnings: list[str]
    validation: dict[str, float]  # the task's metrics after the measured steps; empty without data
    advice: list[str]
    from_step: int
    start: str | None  # when the projections start; None: at the end of the benchmark
    projections: list[Projection]
    what_if: list[Variation]
    gpu: GpuComparison | None
    optimized: list[str]
    files: list[str]


class ForwardPass(TypedDict):
    """The measured forward passes of one batch size."""

    batch_size: int
    window: int
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None  # None if the model exceeds the measured GEMM rate
    peak_rss_bytes: int
    model_seconds: float


class ForwardResult(TypedDict):
    """The result of `sansgpu bench --forward-only --json`."""

    parameters: int
    forward: list[ForwardPass]


class MemoryOption(TypedDict):
    """A way to train a model at a context length, with micro-batches of one example."""

    method: str  # whole | lora
    base_precision: str | None
    context: int
    needed_bytes: int
    gradient_checkpointing: bool
    fits: bool


class MemoryOptions(TypedDict):
    """The ways to train a model that fit into `memory_bytes`."""

    model: str
    memory_bytes: int
    options: list[MemoryOption]


class ProcessorSpeed(TypedDict):
    """The estimated speed of a preset on a kind of processor."""

    processor: str
    cores: int
    precision: str
    gemm_flops_per_second: float
    tokens_per_second: float
    optimal_seconds: float  # time to train on `optimal_tokens`


class PresetRow(TypedDict):
    """A preset's memory, in the precision that needs more, and its speeds."""

    preset: str
    parameters: int
    batch_size: int
    gradient_accumulation_steps: int
    window: int
    tokens_per_step: int
    memory_bytes: dict[str, int]
    least_memory_bytes: int
    recommended_memory_bytes: int
    available_bytes: int
    fits: bool
    optimal_tokens: int
    speeds: list[ProcessorSpeed]


class FittingPreset(TypedDict):
    """Memory and time of a preset, with the largest usual micro-batch that fits, or else the smallest one."""

    preset: str
    parameters: int
    context: int
    batch_size: int
    gradient_checkpointing: bool
    needed_bytes: int
    fits: bool
    tokens_per_second: float
    optimal_tokens: int
    optimal_seconds: float  # time to train on `optimal_tokens`
    tokens: int | None  # training tokens in the given time; None without one


class FittingPresets(TypedDict):
    """What can be trained from scratch in `memory_bytes` and `seconds` on this machine."""

    memory_bytes: int
    seconds: float | None
    processor: str
    presets: list[FittingPreset]
