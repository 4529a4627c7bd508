"""Variations of a configuration that `bench` times."""

from __future__ import annotations

from sansgpu.config import Config
from sansgpu.machine.compilation import missing_compiler
from sansgpu.machine.memory import micro_batch_choices
from sansgpu.machine.probe import has_native_bf16

COMPILE_COST = "half a minute at the start"
HARMLESS_COSTS = ("nothing", "memory", COMPILE_COST)  # costs that do not change what the model learns


def variations(chosen: Config) -> list[tuple[str, tuple[str, ...], str]]:
    """Returns (name, settings, cost) of each variation, all with the same tokens per step."""
    model, training, window = chosen.model, chosen.training, chosen.window
    size, accumulation, threads = training.batch_size, training.gradient_accumulation_steps, training.threads
    assert size != "auto"
    assert threads != "auto"
    found: list[tuple[str, tuple[str, ...], str]] = []
    for part, word in ((2, "half"), (4, "a quarter of")):
        settings = (f"data.max_length={window // part}", f"training.batch_size={size * part}")
        found.append((f"{word} the sequence length", settings, f"context: {window // part} tokens"))
    found.append(("half the layers", (f"model.n_layers={max(1, model.n_layers // 2)}",), "parameters"))
    narrow = [f"model.{key}={getattr(model, key) // 2}" for key in ("d_model", "d_ff", "n_heads")]
    narrow += [f"model.n_kv_heads={model.kv_heads // 2}"] if model.n_kv_heads else []
    found.append(("half the width", tuple(narrow), "parameters"))
    other = "fp32" if training.precision == "bf16" else "bf16"
    note = "nothing" if other == "fp32" else "digits of products"
    if other == "fp32" or has_native_bf16():
        found.append((f"{other} products", (f"training.precision={other}",), note))
    rows = size * accumulation
    largest = micro_batch_choices(
        training.model_copy(update={"batch_size": "auto", "gradient_accumulation_steps": rows}), window
    )[-1]
    others = {"half the micro-batch": size // 2 if size % 2 == 0 else 0}
    others |= {"twice the micro-batch": size * 2 if accumulation % 2 == 0 else 0}
    others |= {f"a micro-batch of {largest}": largest if largest > 2 * size else 0}
    for name, rows_each in others.items():
        if rows_each:
            settings = (f"training.batch_size={rows_each}", f"training.gradient_accumulation_steps={rows // rows_each}")
            found.append((name, settings, "memory" if rows_each > size else "nothing"))
    if threads > 1:
        found.append(("half the threads", (f"training.threads={threads // 2}",), "nothing"))
    if training.compile == "on":
        found.append(("not compiled", ("training.compile='off'",), "nothing"))
    elif missing_compiler() is None:
        found.append(("compiled", ("training.compile='on'",), COMPILE_COST))
    return found
