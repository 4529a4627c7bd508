"""Decoder architectures, the configuration keys of a decoder that is trained from scratch, and how they select one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from sansgpu.config.model import ModelConfig

ArchitectureName = Literal["gpt2", "llama", "qwen3", "apertus", "qwen3_5_text"]
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
    # Only every so many blocks have attention, and the others a gated delta net. In a model with fewer blocks, the last
    # one has attention.
    attention_interval: int = 1
    gated_attention: bool = False  # the outputs of attention are multiplied by a gate
    offset_norms: bool = False  # norms multiply by 1 + weight

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
_QWEN3_5 = replace(
    _QWEN3,
    name="qwen3_5_text",
    title="Qwen3.5",
    bias=("none",),
    attention_interval=4,
    gated_attention=True,
    offset_norms=True,
)
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
ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (_QWEN3, _LLAMA, _APERTUS, _QWEN3_5, _GPT2)}


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


CONVOLUTION_WIDTH = 4  # tokens that the convolution of a gated delta net reads, as in Qwen3.5
MIN_BIGRAM_WIDTH = 8  # d_model from which a model can be initialized from bigrams


class DecoderConfig(ModelConfig):
    """The shape of a decoder to train from scratch."""

    architecture: ArchitectureName | None = Field(
        None,
        description="decoder architecture: gpt2, llama, qwen3, apertus or qwen3_5_text, in which three of four blocks "
        "have a gated delta net instead of attention. Default: the first of qwen3, llama, apertus and gpt2 that "
        "supports the configured activation, norm, bias, positions and qk_norm",
    )
    n_kv_heads: int | None = Field(
        None,
        ge=1,
        description="number of key-value heads, for grouped-query attention (not for gpt2); in gated delta nets, "
        "number of heads of queries and keys. Default: n_heads",
    )
    norm: Literal["layernorm", "rmsnorm"] | None = Field(
        None, description="normalization; gpt2: layernorm; others: rmsnorm. Default: the architecture's"
    )
    bias: Literal["none", "attention", "all"] | None = Field(
        None,
        description="linear layers that have a bias; qwen3, apertus: none or attention; llama: none, attention or "
        "all; qwen3_5_text: none; gpt2: all. Default: none; gpt2: all",
    )
    positions: Literal["learned", "rope"] | None = Field(
        None,
        description="position embeddings; gpt2: learned; others: rope (rotary). Default: the architecture's",
    )
    qk_norm: bool | None = Field(
        None,
        description="apply RMSNorm to queries and keys of attention; qwen3, apertus, qwen3_5_text: true; llama, gpt2: "
        "false. Default: the architecture's",
    )
    pre_norm: bool = Field(True, description="normalize the inputs of attention and feed-forward layers; must be true")
    tie_embeddings: bool = Field(True, description="share the weights of the embedding and the output head")
    initialization: Literal["auto", "bigram", "random"] = Field(
        "auto",
        description="bigram: the weights are initialized so that the model predicts each token from the one before it "
        "as often as in the training text; random: all matrices start from small random numbers; auto: bigram if the "
        "text is long or has a teacher's predictions, is read at most twice, and the vocabulary has at least 1,024 "
        "tokens",
    )
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary position embeddings (not for gpt2)")

    @property
    def decoder(self) -> Architecture:
        """The architecture of a decoder with this configuration."""
        name = architecture_name(self._selection)
        assert name is not None  # guaranteed by `_fits_together`
        return ARCHITECTURES[name]

    @property
    def _selection(self) -> dict[str, Any]:
        return {"architecture": self.architecture, **{key: getattr(self, key) for key in SELECTING_KEYS}}

    @property
    def period(self) -> int:
        """The number of blocks after which their types repeat."""
        return min(self.decoder.attention_interval, self.n_layers)

    def attends(self, layer: int) -> bool:
        """Returns whether a block has attention; the others have a gated delta net."""
        return (layer + 1) % self.period == 0

    @property
    def has_states(self) -> bool:
        """Returns whether the decoder has blocks with a recurrent state instead of attention."""
        return self.period > 1

    def bigram_problem(self) -> str | None:
        """Describes why the weights cannot be initialized from bigrams, or returns None.

        If the embedding is also the output head, the last feed-forward layer maps one to the other, with one hidden
        unit per dimension, or two if it has no gate.
        """
        needed = self.d_model * (1 if self.activation == "swiglu" else 2) if self.tie_embeddings else 0
        key, least = ("d_ff", needed) if self.d_model >= MIN_BIGRAM_WIDTH else ("d_model", MIN_BIGRAM_WIDTH)
        if getattr(self, key) >= least:
            return None
        return f"initialization bigram needs a {key} of at least {least}, but it is {getattr(self, key)}"

    @property
    def biased(self) -> str:
        """Which linear layers of a decoder have a bias: none, attention or all."""
        return self.bias or self.decoder.bias[0]

    @property
    def kv_heads(self) -> int:
        """Key-value heads, each shared by n_heads / kv_heads query heads."""
        return self.n_kv_heads or self.n_heads

    @model_validator(mode="wrap")
    @classmethod
    def _default_activation(cls, values: Any, validate: ModelWrapValidatorHandler[DecoderConfig]) -> DecoderConfig:
        """Sets a missing activation to the default of the architecture that the other keys select."""
        if not isinstance(values, dict) or "activation" in values:
            return validate(values)
        selecting = {key: values[key] for key in ("architecture", *SELECTING_KEYS) if values.get(key) is not None}
        name = architecture_name(selecting) or architecture_name({"architecture": values.get("architecture")})
        default = {"activation": ARCHITECTURES[name].activation[0]} if selecting and name else {}
        config = validate({**values, **default})
        config.model_fields_set.discard("activation")  # so that assigning another key chooses it again
        return config

    def inconsistencies(self) -> Iterator[str]:
        if problem := architecture_problem(self._selection):
            yield problem
            return  # the other rules depend on the architecture
        yield from super().inconsistencies()
        if self.decoder.positions == "rope" and self.d_model % self.n_heads == 0 and self.head_dim % 2:
            yield (
                f"the head dimension d_model / n_heads is {self.head_dim}, but rotary position embeddings need an even "
                "number"
            )
        if self.n_heads % self.kv_heads:
            yield f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}"
        if not self.decoder.grouped_queries and self.kv_heads != self.n_heads:
            yield (
                f"n_kv_heads {self.kv_heads} requires activation swiglu or relu2, because {self.decoder.title} has no "
                "grouped-query attention"
            )
        if self.initialization == "bigram" and (problem := self.bigram_problem()):
            yield f"{problem}; set initialization to random"
        if not self.pre_norm:
            yield (
                "pre_norm false is not supported, because no export format supports post-norm blocks; set it to true"
            )
