"""Schemas of metrics.jsonl and environment.json.

Every reader of a run's folder validates with these models. Missing and unknown fields are accepted, for compatibility
with older and newer versions. A field of the wrong type is rejected.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeAliasType

from sansgpu.files.reading import field_flaw

MAX_NUMBER = 1e100  # so that sums and products of a few numbers stay finite

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Amount = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Finite = Annotated[float, Field(allow_inf_nan=False)]  # unbounded, because perplexity may be huge
_Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Plain = TypeAliasType("Plain", "bool | _Integer | Finite | str | list[Plain] | dict[str, Plain] | None")


class _ExtensibleFields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Plain]


class _Event(_ExtensibleFields):
    event: str
    step: Count | None = None
    time: str | None = None
    elapsed_seconds: Amount | None = None
    seconds: Amount | None = None


class _StartEvent(_Event):
    task: str | None = None
    output_dir: str | None = None
    resumed_from: str | None = None
    parameters: Count | None = None
    trained_parameters: Count | None = None
    optimizer: str | None = None
    learning_rate: Amount | None = None
    micro_batch: Count | None = None
    gradient_accumulation_steps: Count | None = None
    world_size: Count | None = None
    window: Count | None = None
    tokens_per_step: Count | None = None
    total_steps: Count | None = None
    total_epochs: Amount | None = None
    expected_steps: Count | None = None
    max_hours: Amount | None = None
    until: str | None = None
    train_tokens: Count | None = None
    split: str | None = None
    cleaning: list[str] | None = None
    vocab_size: Count | None = None
    device: str | None = None
    isa: str | None = None
    precision: str | None = None
    threads: Count | None = None
    compile: str | None = None
    kernels: str | None = None
    gemm_flops_per_second: Amount | None = None


class _System(_ExtensibleFields):
    """Resource usage: numbers, null if unavailable, and a list with the load of each core."""

    __pydantic_extra__: dict[str, Number | None]  # type: ignore[assignment]
    core_percent: list[Number] | None = None


class _StepEvent(_Event):
    step: Count
    loss: Number
    lr: Amount | None = None
    grad_norm: Amount | None = None
    tokens: Count | None = None
    tokens_per_second: Amount | None = None
    step_seconds: Amount | None = None
    mfu: Amount | None = None
    threads: Count | None = None
    gemm_flops_per_second: Amount | None = None
    rss_bytes: Amount | None = None
    cpu_percent: Amount | None = None
    eta_seconds: Amount | None = None
    total_steps: Count | None = None
    phase_seconds: dict[str, Amount] | None = None
    system: _System | None = None


class _EvaluationEvent(_Event):
    step: Count
    loss: Number | None  # null if not finite
    epoch: Number | None = None
    sample: str | None = None
    bits_per_byte: Number | None = None
    perplexity: Finite | None = None


class _SnapshotEvent(_Event):
    step: Count
    path: str


class _WarningEvent(_Event):
    message: str
    cause: str | None = None


class _EndEvent(_Event):
    step: Count
    reason: str
    snapshot: str | None = None
    final_step: Count | None = None


_EVENTS: dict[str, type[_Event]] = {
    "start": _StartEvent,
    "step": _StepEvent,
    "eval": _EvaluationEvent,
    "snapshot": _SnapshotEvent,
    "warning": _WarningEvent,
    "end": _EndEvent,
}


class RecordedEnvironment(_ExtensibleFields):
    """The contents of environment.json."""

    sansgpu: str | None = None
    python: str | None = None
    packages: dict[str, str | None] | None = None
    processor: str | None = None
    cores: Count | None = None
    memory_bytes: Count | None = None
    torch: str | None = None
    isa: str | None = None
    device: str | None = None
    threads: Count | None = None
    world_size: Count | None = None
    precision: str | None = None
    compile: str | None = None
    kernels: str | None = None
    micro_batch: Count | None = None


def event_flaw(event: object) -> str | None:
    """Returns a clause naming the first invalid field of an event, or None."""
    name = event.get("event") if isinstance(event, dict) else None
    return field_flaw(_EVENTS.get(name, _Event) if isinstance(name, str) else _Event, event)
