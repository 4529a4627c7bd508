"""Decoder architectures, and how configuration keys select one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

ArchitectureName = Literal["gpt2", "llama", "qwen3", "apertus"]
SELECTING_KEYS = ("activation", "norm", "bias", "positions", "qk_norm")  # keys of the `model` section


@dataclass(frozen=True)
class Architecture:
    """Properties of a decoder, named like the configuration keys. Tuples list the allowed values, the default first."""

    name: ArchitectureName  # model_type of config.json
    title: str
    activation: tuple[str, ...]
    norm: str
    norm_eps: float
    bias: tuple[str, ...]  # linear layers with a bias
    positions: str
    qk_norm: bool
    grouped_queries: bool  # supports fewer key-value heads than query heads (grouped-query attention)
    zero_init: bool  # the last matrix of each residual branch starts at zero; False: scaled by depth, as in GPT-2

    def conflicts(self, model: Mapping[str, Any]) -> list[str]:
        """Returns the keys of a `model` section whose values this architecture does not support."""
        return [key for key in SELECTING_KEYS if model.get(key) is not None and model[key] not in self.values(key)]

    def values(self, key: str) -> tuple[Any, ...]:
        own = getattr(self, key)
        return own if isinstance(own, tuple) else (own,)


_QWEN3 = Architecture(
    name="qwen3",
    title="Qwen3",
    activation=("swiglu",),
    norm="rmsnorm",
    norm_eps=1e-6,
    bias=("none", "attention"),
    positions="rope",
    qk_norm=True,
    grouped_queries=True,
    zero_init=True,
)
_LLAMA = replace(_QWEN3, name="llama", title="Llama", bias=("none", "attention", "all"), qk_norm=False)
_APERTUS = replace(_QWEN3, name="apertus", title="Apertus", activation=("relu2",))
_GPT2 = Architecture(
    name="gpt2",
    title="GPT-2",
    activation=("gelu", "relu"),
    norm="layernorm",
    norm_eps=1e-5,
    bias=("all",),
    positions="learned",
    qk_norm=False,
    grouped_queries=False,
    zero_init=False,
)
# The default is the first architecture in this order that supports all values of a configuration.
ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (_QWEN3, _LLAMA, _APERTUS, _GPT2)}


def architecture_name(model: Mapping[str, Any]) -> str | None:
    """Returns the architecture that a `model` section names, or that its other keys select; None if none matches."""
    names = (name for name in ARCHITECTURES if model.get("architecture") in (None, name))
    return next((name for name in names if not ARCHITECTURES[name].conflicts(model)), None)


def architecture_problem(model: Mapping[str, Any]) -> str | None:
    """Returns a clause about a key of a `model` section that its architecture does not support, or None."""
    if architecture_name(model) is not None:
        return None
    name = model.get("architecture") or architecture_name({"activation": model["activation"]})
    own = ARCHITECTURES[str(name)]
    key = own.conflicts(model)[0]
    other = architecture_name({**model, "architecture": None})
    return (
        f"architecture {name} requires {key} {' or '.join(map(_shown, own.values(key)))}, but it is "
        f"{_shown(model[key])}; change {key}" + (f", or set architecture to {other}" if other else "")
    )


def _shown(value: Any) -> str:
    return str(value).lower()  # true and false as in YAML
