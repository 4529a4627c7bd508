"""The instruction sets for which CMakeLists.txt compiles our kernels, and the choice of one at startup.

By default it is the best one that the processor supports. The environment variable SANSGPU_ISA selects a lower one, for
comparisons and tests.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from sansgpu.config import ConfigError

VARIABLE = "SANSGPU_ISA"


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set: its name, and the entries of torch.cpu.get_capabilities() that it needs."""

    name: str
    needs: tuple[str, ...] = ()
    bf16: bool = False  # it multiplies bf16 faster than fp32
    int8: bool = False  # our kernels multiply 8-bit integers faster than any other numbers


_AVX2 = ("avx2", "fma3", "bmi2", "f16c")
_AVX512 = ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl", "avx2", "fma3")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
X86 = (
    InstructionSet("portable"),
    InstructionSet("avx2", _AVX2),
    InstructionSet("avx_vnni", (*_AVX2, "avx_vnni"), int8=True),
    InstructionSet("avx512", _AVX512),
    InstructionSet("avx512_vnni", (*_AVX512, "avx512_vnni"), int8=True),
    InstructionSet("avx512_bf16", _AVX512_BF16, bf16=True, int8=True),
    InstructionSet("amx", (*_AVX512_BF16, "amx_tile", "amx_bf16"), bf16=True),
)
ARM = (
    InstructionSet("portable"),  # no NEON intrinsics, although every 64-bit ARM processor has NEON
    InstructionSet("neon", ("neon", "atomics")),  # compiled for ARMv8.2, whose atomic instructions ARMv8.0 lacks
    InstructionSet("neon_dotprod", ("neon", "atomics", "dot"), int8=True),
    InstructionSet("neon_bf16", ("neon", "atomics", "dot", "bf16"), bf16=True, int8=True),
)
OTHERS = (InstructionSet("portable"),)


def supported() -> tuple[InstructionSet, ...]:
    """Returns the instruction sets of this processor, the best one last."""
    machine = platform.machine().lower()
    family = X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else OTHERS
    capabilities = torch.cpu.get_capabilities()
    return tuple(s for s in family if all(capabilities.get(part) for part in s.needs))


def allowed() -> tuple[InstructionSet, ...]:
    """Returns the instruction sets of this processor, the best one last, or only the one that SANSGPU_ISA names.

    Raises ConfigError if the processor does not support that one.
    """
    sets = supported()
    wanted = os.environ.get(VARIABLE)
    named = tuple(s for s in sets if s.name == wanted)
    if wanted and not named:
        raise ConfigError(
            f"{VARIABLE} is {wanted}, which this processor does not support; "
            f"unset it or set it to one of {', '.join(s.name for s in sets)}."
        )
    return named or sets
