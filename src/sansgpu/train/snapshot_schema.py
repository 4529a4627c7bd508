"""Schemas of a snapshot's state.json and MANIFEST.json. Additional fields are allowed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sansgpu.events.schema import Count, Plain

# A saved loss may be NaN, which Python's JSON can express.
_Loss = Annotated[float, Field(allow_inf_nan=True)]


class _SnapshotFields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _ProgressFields(_SnapshotFields):
    step: Count
    tokens: Count
    total_steps: Count | None = None
    best_loss: _Loss | None = None
    best_step: Count | None = None
    logged_loss: float = 0.0
    logged_targets: Count = 0
    logged_sums: dict[str, float] = {}


class _EnvironmentFields(_SnapshotFields):
    torch: str
    isa: str
    device: str
    threads: Annotated[int, Field(ge=1, le=2**31 - 1)]
    world_size: Annotated[int, Field(ge=1, le=2**31 - 1)]
    precision: str
    compile: str
    kernels: str
    micro_batch: Annotated[int, Field(ge=1, le=2**31 - 1)]


class _MetricsFields(_SnapshotFields):
    __pydantic_extra__: dict[str, _Loss | Plain]
    loss: _Loss | None = None


class SnapshotState(_SnapshotFields):
    """The content of state.json."""

    progress: _ProgressFields
    metrics: _MetricsFields | None
    environment: _EnvironmentFields
    data: str


class SnapshotManifest(_SnapshotFields):
    """The content of MANIFEST.json, with the hexadecimal SHA-256 of each file."""

    step: Count
    files: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]
