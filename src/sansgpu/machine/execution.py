"""The record of how a run is executed: device, precision, kernels, threads, processes and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.probe import has_bf16_tensors, isa, mixed_precision, tensor_dtype

CPU = torch.device("cpu")
_Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _one_of(*names: str) -> AfterValidator:
    """Returns the check of a recorded name."""

    def check(value: str) -> str:
        if value not in names:
            raise PydanticCustomError("unknown_name", "Input should be {names}", {"names": " or ".join(names)})
        return value

    return AfterValidator(check)


_Precision = Annotated[str, _one_of("fp32", "bf16", "int16", "int8")]
_Compile = Annotated[str, _one_of("on", "off")]


@with_config(ConfigDict(extra="allow", strict=True))
class Environment(TypedDict):
    """Everything that bit-identical results depend on; recorded in every snapshot and compared on resume."""

    torch: str
    isa: str
    device: str
    threads: _Positive
    world_size: _Positive
    precision: _Precision
    compile: _Compile
    kernels: str
    micro_batch: _Positive


@dataclass
class Execution:
    """How each process computes its share of a step.

    It is decided once, before the first step. Training changes only `micro_batch`, when memory runs short, and
    `threads`, with `training.adapt_threads`.
    """

    micro_batch: int = 1
    accumulation: int = 1  # micro-batches of a step in each process
    precision: str = "fp32"  # the precision of matmuls: fp32, bf16, int16 or int8
    compile: str = "off"  # or on
    kernels: str = "torch"  # or native and the instruction set
    optimizer: str = "adamw"  # adamw | adam | sgd | muon
    # (examples, padded) -> tokens of the largest batch; None: all examples have the maximum length
    max_tokens: Callable[[int, bool], int] | None = None
    world_size: int = 1  # the size of `group`, or the processes of a run that is only planned
    threads: int = 1
    device: torch.device = CPU
    group: Group = SINGLE_PROCESS

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the operands of matmuls, and of saved activations."""
        return tensor_dtype(self.precision)

    @property
    def compute_dtype_name(self) -> str:
        """The name of `compute_dtype`: bf16 or fp32."""
        return "bf16" if has_bf16_tensors(self.precision) else "fp32"

    def autocast(self) -> torch.autocast:
        """Returns a context for mixed precision: matmuls of operands in the compute dtype, weights and sums in fp32."""
        return mixed_precision(self.device, self.precision)

    def synchronize(self) -> None:
        """Waits for the queued work of a GPU; returns immediately on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tokens(self, window: int, padded: bool = False) -> int:
        """Returns the tokens, with padding if `padded`, of the largest micro-batch of examples up to `window` long."""
        limit = self.micro_batch * window
        return limit if self.max_tokens is None else min(limit, self.max_tokens(self.micro_batch, padded))

    def environment(self) -> Environment:
        """Returns the part that snapshots record, with the version of torch and the instruction set."""
        return {
            "torch": str(torch.__version__),
            "isa": isa(),
            "device": self.device.type,
            "threads": self.threads,
            "world_size": self.world_size,
            "precision": self.precision,
            "compile": self.compile,
            "kernels": self.kernels,
            "micro_batch": self.micro_batch,
        }
