"""`model`: what is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sansgpu.config.section import Section

USUAL_LEAVES = 3  # leaf slots per token assumed until the data is read
MOST_LEAVES = 64


class ModelConfig(Section):
    """What is trained: the shape of a decoder or of a graph encoder, or a model to go on from.

    `activation` chooses a decoder's layout: swiglu is Qwen3's, relu2 Apertus', the rest GPT-2's.
    """

    vocab_size: int | None = Field(
        None,
        ge=1,
        description="rows of the embedding; by default the tokenizer's size, padded to a multiple of 64",
    )
    d_model: int = Field(256, ge=1, description="width of the residual stream")
    n_heads: int = Field(4, ge=1, description="query heads; d_model must be divisible by it")
    n_kv_heads: int | None = Field(
        None,
        ge=1,
        description="key-value heads (swiglu, relu2 only); by default n_heads",
    )
    n_layers: int = Field(6, ge=1, description="transformer blocks")
    d_ff: int = Field(768, ge=1, description="width of the feed-forward layer")
    max_seq_len: int = Field(256, ge=2, description="longest context, in tokens")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on embeddings and residual branches")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on attention weights")
    activation: Literal["gelu", "relu", "swiglu", "relu2"] = Field(
        "swiglu",
        description="swiglu, relu2 (ReLU squared): RMSNorm, RoPE, QK-norm (Qwen3's and Apertus' layout); "
        "gelu, relu: LayerNorm, learned positions (GPT-2's); of graph encoders gelu or relu",
    )
    pre_norm: bool = Field(True, description="normalise before each branch; all layouts need true")
    tie_embeddings: bool = Field(True, description="one matrix for the embedding and the output head")
    rope_theta: float = Field(
        10_000.0,
        gt=0,
        description="base wavelength of the rotary positions (swiglu, relu2 only)",
    )
    leaves: int | None = Field(
        None,
        ge=0,
        le=MOST_LEAVES,
        description="leaf slots of a token: the most tokens a tail may have; by default as many as 99 % of the data's "
        "tails need; 0: text alone, without triples",
    )
    n_relations: int | None = Field(
        None, ge=1, description="rows of the relation tables; by default as many as the data has"
    )
    n_entities: int | None = Field(
        None,
        ge=0,
        description="rows of the entity table, of which one is predicted for a whole tail; by default as many as a "
        "knowledge graph has entities, and for other data 0: no table",
    )
    entity_rank: int = Field(64, ge=1, description="numbers in each entity's own vector")
    position: Literal["none", "learned", "sinusoidal"] = Field(
        "none", description="added to embeddings; none: order is known by the decay alone, as published"
    )
    slot_embedding: bool = Field(
        False,
        description="tell a tail's tokens apart by their slots; as published, the outer two look alike when masked",
    )
    decay: Literal["multiply_logits", "additive_log", "none"] = Field(
        "multiply_logits",
        description="of attention with distance in the graph: multiply_logits, as published, draws far logits to 0; "
        "additive_log takes weight from far nodes",
    )
    decay_base: float = Field(0.6, gt=0, lt=1, description="the decay is this to the power of GELU(sqrt(d + 1) - p)")
    fusion: Literal["hgat", "none"] = Field(
        "hgat", description="hgat: a triple's head is mixed into the embeddings of its tail by its relation"
    )
    relation_rank: int | None = Field(
        None, ge=1, description="rank of the relations' matrices; by default whole ones of d_model x d_model"
    )
    relation_dropout: float = Field(0.3, ge=0, lt=1, description="dropout on the relations' matrices and vectors")
    embedding_norm: bool = Field(False, description="normalise embeddings before the first block, as BERT does")
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward: less memory, slower")
    name_or_path: str | None = Field(
        None,
        description="the model to go on from: a Hugging Face folder, a GGUF file, or a name on the hub",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    adapter: Literal["none", "lora", "dora"] = Field(
        "none",
        description="none: train all weights; lora, dora: train low-rank matrices beside them, which stay as they are",
    )
    lora_rank: int = Field(16, ge=1, description="rank of an adapter's matrices")
    lora_alpha: float = Field(
        32.0,
        gt=0,
        description="an adapter's output is scaled by this over the rank",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on an adapter's input")
    lora_targets: list[str] | str = Field(
        "all-linear",
        description="names of the layers that get an adapter, as peft's target_modules",
    )
    merge_adapter: bool = Field(
        True,
        description="final/ is the whole model with the adapter merged in; false: the adapter alone, as peft loads it",
    )

    @property
    def modern(self) -> bool:
        """Whether it has RMSNorm, rotary positions and QK-norm: Qwen3's layout or Apertus'."""
        return self.activation in ("swiglu", "relu2")

    @property
    def leaf_slots(self) -> int:
        """Leaf slots of a token, before the data is known as many as it usually needs."""
        return USUAL_LEAVES if self.leaves is None else self.leaves

    @property
    def is_plain_bert(self) -> bool:
        """Whether it is a graph encoder that BERT's layout holds: text alone, normalised and with learned positions."""
        return self.leaves == 0 and self.decay == "none" and self.position == "learned" and self.embedding_norm

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads, each shared by n_heads / kv_heads query heads."""
        return self.n_kv_heads or self.n_heads

    @model_validator(mode="after")
    def _fits_together(self) -> ModelConfig:
        problems = []
        if self.d_model % self.n_heads:
            problems.append(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
        elif self.modern and self.head_dim % 2:
            problems.append(f"the head dim d_model / n_heads is {self.head_dim}, but rotary positions need an even one")
        if self.n_entities and self.d_model % 2:
            problems.append(f"d_model {self.d_model} is odd, but entity vectors need an even one")
        if self.n_heads % self.kv_heads:
            problems.append(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}")
        if not self.modern and self.kv_heads != self.n_heads:
            problems.append(
                f"n_kv_heads {self.kv_heads} needs activation swiglu or relu2: GPT-2's layout has no grouped queries"
            )
        if self.adapter == "none":
            keys = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "merge_adapter")
            given = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
            if given:
                problems.append(f"{given[0]} is of an adapter, but adapter is none; set adapter to lora or dora")
        if not self.pre_norm:
            problems.append("pre_norm false is not supported: no export layout has a post-norm block; set it true")
        if problems:
            raise ValueError("; ".join(problems))
        return self
