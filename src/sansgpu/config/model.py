"""The section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from sansgpu.config.architectures import (
    ARCHITECTURES,
    SELECTING_KEYS,
    Architecture,
    ArchitectureName,
    architecture_name,
    architecture_problem,
)
from sansgpu.config.section import Section

DEFAULT_LEAVES = 3  # leaf slots per token assumed until the data is read
MAX_LEAVES = 64
MAX_EMBEDDING_DIM = 65_536  # larger than the vectors of any encoder
MIN_BIGRAM_WIDTH = 8  # d_model from which a model can be initialized from bigrams
# Bigrams help if the text has many tokens per token of the vocabulary and is read for the first time. With fewer, most
# pairs occur only once or twice; in later epochs the model relies on pairs that other texts do not have. Pairs of
# characters are learned in a few steps anyway. The bounds are between runs that gained and runs that lost; see
# docs/lab-notes.md.
MIN_BIGRAM_TEXT, MIN_BIGRAM_VOCABULARY = 200, 1024
MAX_BIGRAM_EPOCHS = 2


class ModelConfig(Section):
    """The shape of a decoder or graph encoder to train from scratch, or a pretrained model to fine-tune."""

    section_name: ClassVar[str] = "model"

    architecture: ArchitectureName | None = Field(
        None,
        description="decoder architecture: gpt2, llama, qwen3 or apertus. Default: the first of qwen3, llama, apertus "
        "and gpt2 that supports the configured activation, norm, bias, positions and qk_norm",
    )
    vocab_size: int | None = Field(
        None,
        ge=1,
        description="rows of the embedding matrix. Default: the tokenizer's vocabulary size, rounded up to a multiple "
        "of 64",
    )
    d_model: int = Field(256, ge=1, description="hidden size (width of the residual stream)")
    n_heads: int = Field(4, ge=1, description="number of query heads; must divide d_model")
    n_kv_heads: int | None = Field(
        None,
        ge=1,
        description="number of key-value heads, for grouped-query attention (not for gpt2). Default: n_heads",
    )
    n_layers: int = Field(6, ge=1, description="number of transformer blocks")
    d_ff: int = Field(768, ge=1, description="intermediate size of the feed-forward layer")
    max_seq_len: int = Field(256, ge=2, description="maximum context length in tokens")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on embeddings and residual branches")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on attention weights")
    activation: Literal["gelu", "relu", "swiglu", "relu2"] = Field(
        "swiglu",
        description="activation of the feed-forward layer; qwen3, llama: swiglu; apertus: relu2 (squared ReLU); gpt2, "
        "graph encoders: gelu or relu. Default: swiglu; apertus: relu2; gpt2, graph encoders: gelu",
    )
    norm: Literal["layernorm", "rmsnorm"] | None = Field(
        None, description="normalization; gpt2: layernorm; qwen3, llama, apertus: rmsnorm. Default: the architecture's"
    )
    bias: Literal["none", "attention", "all"] | None = Field(
        None,
        description="linear layers that have a bias; qwen3, apertus: none or attention; llama: none, attention or "
        "all; gpt2: all. Default: none; gpt2: all",
    )
    positions: Literal["learned", "rope"] | None = Field(
        None,
        description="position embeddings; gpt2: learned; qwen3, llama, apertus: rope (rotary). Default: the "
        "architecture's",
    )
    qk_norm: bool | None = Field(
        None,
        description="apply RMSNorm to queries and keys; qwen3, apertus: true; llama, gpt2: false. Default: the "
        "architecture's",
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
    leaves: int | None = Field(
        None,
        ge=0,
        le=MAX_LEAVES,
        description="leaf slots per text token, each for one token of a triple's tail; 0: train on text without "
        "triples. Default: enough for 99% of the tails in the data",
    )
    n_relations: int | None = Field(
        None, ge=1, description="number of relation embeddings. Default: the number of relations in the data"
    )
    n_entities: int | None = Field(
        None,
        ge=0,
        description="number of entity embeddings, which serve to predict a tail as a whole; 0: predict tails token by "
        "token. Default: the number of entities in a knowledge graph, 0 for documents",
    )
    entity_rank: int = Field(64, ge=1, description="dimension of the entity embeddings")
    position: Literal["none", "learned", "sinusoidal"] = Field(
        "none",
        description="position embedding; none: only the attention decay encodes the order of tokens, as in the paper "
        "(GraphMERT)",
    )
    slot_embedding: bool = Field(
        False,
        description="add an embedding of the leaf slot's number. Without it, as in the paper, the masked first and "
        "last tokens of a tail look the same to the model",
    )
    decay: Literal["multiply_logits", "additive_log", "none"] = Field(
        "multiply_logits",
        description="how attention decays with distance in the graph; multiply_logits: multiply the attention logits "
        "by the decay, as in the paper; additive_log: add the log of the decay to the logits, which lowers the "
        "attention to distant nodes",
    )
    decay_base: float = Field(
        0.6,
        gt=0,
        lt=1,
        description="base of the decay at distance d, decay_base ** GELU(sqrt(d + 1) - p), where p is learned",
    )
    fusion: Literal["hgat", "none"] = Field(
        "hgat",
        description="hgat: fuse the embeddings of a triple's head and relation into those of its tail, as in the paper",
    )
    relation_rank: int | None = Field(
        None,
        ge=1,
        description="rank of the relation matrices, for a low-rank factorization. Default: full d_model x d_model "
        "matrices",
    )
    relation_dropout: float = Field(0.3, ge=0, lt=1, description="dropout on relation matrices and vectors")
    embedding_norm: bool = Field(False, description="normalize embeddings before the first block, as BERT does")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass, which saves memory and takes more time"
    )
    name_or_path: str | None = Field(
        None, description="pretrained model to fine-tune: a Hugging Face folder, a GGUF file or a Hub name"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the Hub")
    trust_remote_code: bool = Field(False, description="allow Python code that ships with the model to run")
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto",
        description="how token vectors are pooled to the vector of a text; mean: their average; cls: the first "
        "token's; last: the last token's; auto: as the Sentence Transformers model specifies, otherwise mean for "
        "encoders and last for decoders",
    )
    embedding_dim: int | None = Field(
        None,
        ge=1,
        le=MAX_EMBEDDING_DIM,
        description="dimensions of static embeddings. Default: 256, or fewer if the vectors of the encoder that is "
        "distilled have fewer; for a static model that is trained further, its own",
    )
    sif_coefficient: float = Field(
        3e-4,
        ge=0,
        lt=1,
        description="weighting of tokens when an encoder is distilled to static embeddings; the vector of a token with "
        "probability p, estimated from its rank in the vocabulary by Zipf's law, is multiplied by sif_coefficient / "
        "(sif_coefficient + p) (smooth inverse frequency); 0: no weighting",
    )
    adapter: Literal["none", "lora", "dora", "continue"] = Field(
        "none",
        description="none: train all weights; lora, dora: freeze the weights and train low-rank adapter matrices; "
        "continue: name_or_path is a folder or Hub name of a peft LoRA or DoRA adapter, which is trained further",
    )
    lora_rank: int = Field(16, ge=1, description="rank of the adapter matrices")
    lora_alpha: float = Field(
        32.0, gt=0, description="scale of the adapter, whose output is multiplied by lora_alpha / lora_rank"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter input")
    lora_targets: list[str] | str = Field(
        "all-linear",
        description="names of the layers that get an adapter, as in peft's target_modules; all-linear: every linear "
        "layer except the experts of a mixture of experts",
    )
    base_precision: Literal["auto", "bf16", "int8", "int4"] = Field(
        "auto",
        description="precision of the frozen base weights under an adapter; int8, int4: quantize the weight matrices; "
        "auto: as in the model's files, including the quantization of a GGUF file",
    )
    merge_adapter: bool | None = Field(
        None,
        description="true: export final/ as the full model with the adapter merged; false: export only the adapter, "
        "for peft. Default: true, or false if the base is quantized",
    )

    @property
    def decoder(self) -> Architecture:
        """The architecture of a decoder with this configuration."""
        name = architecture_name(self._selection)
        assert name is not None  # guaranteed by `_fits_together`
        return ARCHITECTURES[name]

    @property
    def _selection(self) -> dict[str, Any]:
        return {"architecture": self.architecture, **{key: getattr(self, key) for key in SELECTING_KEYS}}

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
    def leaf_slots(self) -> int:
        """Leaf slots per token, or a default before the data is known."""
        return DEFAULT_LEAVES if self.leaves is None else self.leaves

    @property
    def is_plain_bert(self) -> bool:
        """Returns True if a graph encoder is exactly BERT: text only, embedding norm and learned positions."""
        return self.leaves == 0 and self.decay == "none" and self.position == "learned" and self.embedding_norm

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads, each shared by n_heads / kv_heads query heads."""
        return self.n_kv_heads or self.n_heads

    @model_validator(mode="wrap")
    @classmethod
    def _default_activation(cls, values: Any, validate: ModelWrapValidatorHandler[ModelConfig]) -> ModelConfig:
        """Sets a missing activation to the default of the architecture that the other keys select."""
        if not isinstance(values, dict) or "activation" in values:
            return validate(values)
        selecting = {key: values[key] for key in ("architecture", *SELECTING_KEYS) if values.get(key) is not None}
        name = architecture_name(selecting) or architecture_name({"architecture": values.get("architecture")})
        default = {"activation": ARCHITECTURES[name].activation[0]} if selecting and name else {}
        config = validate({**values, **default})
        config.model_fields_set.discard("activation")  # so that assigning another key chooses it again
        return config

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        problems = []
        if problem := architecture_problem(self._selection):
            raise ValueError(problem)
        if self.d_model % self.n_heads:
            problems.append(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
        elif self.decoder.positions == "rope" and self.head_dim % 2:
            problems.append(
                f"the head dimension d_model / n_heads is {self.head_dim}, but rotary position embeddings need an even "
                "number"
            )
        if self.n_entities and self.d_model % 2:
            problems.append(f"d_model {self.d_model} is odd, but entity embeddings need an even number")
        if self.n_heads % self.kv_heads:
            problems.append(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}")
        if not self.decoder.grouped_queries and self.kv_heads != self.n_heads:
            problems.append(
                f"n_kv_heads {self.kv_heads} requires activation swiglu or relu2, because {self.decoder.title} has no "
                "grouped-query attention"
            )
        problems += self._unused_adapter_keys()
        if self.initialization == "bigram" and (problem := self.bigram_problem()):
            problems.append(f"{problem}; set initialization to random")
        if not self.pre_norm:
            problems.append(
                "pre_norm false is not supported, because no export format supports post-norm blocks; set it to true"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _unused_adapter_keys(self) -> Iterator[str]:
        """Yields a clause if a key of adapters is set that has no effect."""
        if self.adapter not in ("none", "continue"):
            return
        shape = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
        keys = (*shape, "base_precision", "merge_adapter") if self.adapter == "none" else shape
        changed = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
        if changed and self.adapter == "none":
            yield f"{changed[0]} has no effect with adapter none; set adapter to lora or dora, or remove {changed[0]}"
        elif changed:
            yield f"{changed[0]} has no effect with adapter continue, because the adapter has its own; remove it"
