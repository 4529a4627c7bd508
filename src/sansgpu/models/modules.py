"""Helpers for modules: allocating and casting weights, and finding and compiling repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sansgpu.kernels.linear import Linear
from sansgpu.kernels.matmul import Integer, integer_of

INIT_STD = 0.02  # standard deviation of initial weights, as in GPT-2, BERT and Qwen
MAX_GRAPHS = 64  # torch.compile's recompile limit (default 8); each micro-batch size that is tried needs a graph


class Table(nn.Embedding):
    """nn.Embedding without initialization on the meta device, which would import torch's compiler and take 1 s."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def materialize_empty(model: nn.Module) -> None:
    """Allocates uninitialized weights for a model on the meta device, like `to_empty` but without importing sympy."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))


def narrow_matrices(model: nn.Module, layers: type[nn.Module] = nn.Module) -> None:
    """Converts the matrices of a model's `layers` to bf16 in place, as autocast would in each pass; for inference."""
    for module in model.modules():
        if isinstance(module, layers):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def narrowed_matrices(model: nn.Module) -> Iterator[None]:
    """Context in which the matrices of a model are in bf16, as in training with bf16 precision."""
    wide = [(parameter, parameter.data) for parameter in model.parameters()]
    narrow_matrices(model)
    try:
        yield
    finally:
        for parameter, data in wide:
            parameter.data = data


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks of a model in order: its ModuleList with the most parameters.

    In a transformers model, it is one with as many modules as the config has layers, so that the blocks of an image
    encoder are not returned.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    depth = getattr(text, "num_hidden_layers", None)
    lists: list[Any] = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())
    ]
    sizes = {id(blocks): sum(p.numel() for p in blocks.parameters()) for blocks in lists}
    return list(max(lists, key=lambda blocks: (len(blocks) == depth, sizes[id(blocks)]), default=[]))


def set_matmul_precision(model: nn.Module, precision: str) -> None:
    """Sets whether the linear layers and the loss of a model multiply integers: if `precision` is int16 or int8."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.integer = integer_of(precision)


def integer_of_model(model: nn.Module) -> Integer | None:
    """Returns the integers that a model multiplies, as `set_matmul_precision` has set, or None."""
    return next((module.integer for module in model.modules() if isinstance(module, Linear)), None)


def compile_blocks(model: nn.Module) -> None:
    """Compiles each repeated block of a model; the blocks share their graphs. Embedding and head stay eager.

    Compiles only `forward`, so that hooks, which run in `__call__`, stay outside the graph. Tells torch that the CPU's
    vector instructions work: otherwise torch compiles a test program for each instruction set first, which takes a
    third of the compile time.
    """
    import torch._dynamo.config  # takes two seconds to import
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    best = "AVX512" if torch.cpu.get_capabilities().get("avx512_f") else "AVX2"
    if torch._inductor.config.cpp.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == best:
        torch._inductor.config.cpp.vec_isa_ok = True
    for block in blocks_of(model):
        if getattr(block, "attends", True):  # compiling would unroll a gated delta net's loop over tokens
            block.forward = torch.compile(block.forward)
