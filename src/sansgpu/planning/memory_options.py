"""Lists the ways to train a pretrained model that fit into a given memory (`sansgpu plan --memory`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sansgpu.config import PRESETS, ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.wording import truncate
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory
from sansgpu.models.formats.gguf_source import is_gguf
from sansgpu.models.huggingface.source import base_precision, pretrained_config
from sansgpu.planning.results import MemoryOption, MemoryOptions
from sansgpu.tasks.configuration import SCHEMA, load_config
from sansgpu.tasks.registry import task_of

CONTEXTS = (512, 1024, 2048, 4096)
ACCUMULATION = 16  # micro-batches of one example
MAX_MEMORY_BYTES = 1 << 60
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def memory_options(target: str, memory: str, context: int | None = None) -> MemoryOptions:
    """Returns the options for a model or for the one that a configuration names, at `context` or at usual lengths.

    Raises ConfigError.
    """
    available, config = parse_memory(memory), _config_of(target)
    methods = [("whole", "none", "auto"), *(("lora", "lora", precision) for precision in ("bf16", "int8", "int4"))]
    if is_gguf(str(config.model.name_or_path)):
        methods.insert(1, ("lora", "lora", "auto"))
    settings = pretrained_config(config.model).get_text_config()
    longest = getattr(settings, "max_position_embeddings", None) or CONTEXTS[-1]
    if context is not None and context > longest:
        raise ConfigError(f"--context is {context:,}, but {target} has a context of {longest:,} tokens; lower it.")
    options = [
        _option(config, method, adapter, precision, length, available)
        for method, adapter, precision in methods
        for length in (CONTEXTS if context is None else (context,))
        if length <= longest
    ]
    return {"model": str(config.model.name_or_path), "memory_bytes": available, "options": options}


def parse_memory(text: str) -> int:
    """Parses a memory size such as 8GB, 8G or 7.5GiB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if match is None or not float(match[1]) or (match[3] and not match[2]):
        raise ConfigError(f"--memory is {truncate(text)!r}; write a size such as 8GB or 7.5GiB.")
    power = list(_UNITS).index(match[2])
    size = float(match[1]) * (1024**power if match[3] else _UNITS[match[2]])
    if size > MAX_MEMORY_BYTES:
        raise ConfigError(f"--memory is {truncate(text)!r}, more than any machine has; write a size such as 8GB.")
    return int(size)


def _config_of(target: str) -> Config:
    path = Path(target)
    if target not in PRESETS and path.suffix not in _CONFIG_SUFFIXES:
        values = {"name_or_path": target}
        return SCHEMA.model_validate({"task": "sft", "model": values, "data": {"dataset_name": "-"}})
    config, _ = load_config(path, [])
    if config.model.name_or_path is None or not config.acts("model.adapter"):
        raise ConfigError(
            f"{target} does not fine-tune a pretrained model with an adapter; pass a model, or none for the presets."
        )
    return config


def _option(config: Config, method: str, adapter: str, precision: str, context: int, available: int) -> MemoryOption:
    """Estimates the memory at a context length, with gradient checkpointing if it fits only with that."""
    defaults = {"base_precision": "auto", "merge_adapter": None} if adapter == "none" else {}
    model = config.model.model_copy(update={**defaults, "adapter": adapter, "base_precision": precision})
    training = config.training.model_copy(update={"batch_size": 1, "gradient_accumulation_steps": ACCUMULATION})
    data = config.data.model_copy(update={"max_length": context})
    config = config.model_copy(update={"model": model, "training": training, "data": data})
    needed: list[tuple[bool, Memory]] = list(_memories(config, "fp32" if adapter == "none" else "bf16"))
    checkpointing, memory = next((pair for pair in needed if pair[1].fits(available)), needed[-1])
    return {
        "method": method,
        "base_precision": None if adapter == "none" else base_precision(model) or precision,
        "context": context,
        "needed_bytes": memory.least,
        "gradient_checkpointing": checkpointing,
        "fits": memory.fits(available),
    }


def _memories(config: Config, precision: str) -> Iterator[tuple[bool, Memory]]:
    """Yields the memory without and with gradient checkpointing."""
    execution = Execution(accumulation=ACCUMULATION, precision=precision, kernels="native")
    for checkpointing in (False, True):
        changed = config.with_values("model", gradient_checkpointing=checkpointing)
        yield checkpointing, task_of(changed).costs(changed).memory(execution)
