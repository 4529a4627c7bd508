"""The section `model` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sansgpu.config.errors import ConfigError
from sansgpu.config.section import AUTO, CHANGEABLE, INPUT_PATH, Auto, Section
from sansgpu.config.wording import counted

BlockCount = Annotated[int, Field(ge=1, strict=True)]
BlockShare = Annotated[float, Field(gt=0, le=1, strict=True)]


class ModelConfig(Section):
    """The shape of a model to train from scratch, or a pretrained model to fine-tune."""

    section_name: ClassVar[str] = "model"

    vocab_size: int | None = Field(
        None,
        ge=1,
        description="rows of the embedding matrix. Default: the tokenizer's vocabulary size, rounded up to a multiple "
        "of 64",
    )
    d_model: int = Field(256, ge=1, description="hidden size (width of the residual stream)")
    n_heads: int = Field(4, ge=1, description="number of query heads; must divide d_model")
    n_layers: int = Field(6, ge=1, description="number of transformer blocks")
    d_ff: int = Field(768, ge=1, description="intermediate size of the feed-forward layer")
    max_seq_len: int = Field(256, ge=2, description="maximum context length in tokens")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on embeddings and residual branches")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout on attention weights")
    activation: Literal["gelu", "relu", "swiglu", "relu2"] = Field(
        "swiglu",
        description="activation of the feed-forward layer; qwen3, llama, qwen3_5_text: swiglu; apertus: relu2 (squared "
        "ReLU); gpt2, encoders: gelu or relu. Default: swiglu; apertus: relu2; gpt2, encoders: gelu",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="recompute activations in the backward pass, which saves memory and takes more time",
        json_schema_extra=CHANGEABLE,
    )
    name_or_path: str | None = Field(
        None,
        description="pretrained model to fine-tune: a Hugging Face folder, a GGUF file or a Hub name",
        json_schema_extra=CHANGEABLE | INPUT_PATH,
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the Hub")
    trust_remote_code: bool = Field(
        False, description="allow Python code that ships with the model to run", json_schema_extra=CHANGEABLE
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto",
        description="how token vectors are pooled to the vector of a text; mean: their average; cls: the first "
        "token's; last: the last token's; auto: as the Sentence Transformers model specifies, otherwise mean for "
        "encoders and last for decoders",
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
        json_schema_extra=CHANGEABLE,
    )
    trained_layers: BlockCount | BlockShare | Auto | None = Field(
        None,
        description="train only the last blocks, by number or as a share of all (0.5: the upper half), and what runs "
        "after them; with an adapter, only they get adapter matrices. Frozen blocks run without dropout. auto: in a "
        "run of at least 3 epochs, the upper half after freeze_after (by default 1); otherwise all layers. "
        "Default: all blocks and the embeddings",
    )
    freeze_after: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="with trained_layers: train all layers for this many epochs, and only then the last blocks alone. "
        "Default: 0",
    )
    keep_activations: bool | Literal["int8"] | None = Field(
        None,
        description="with trained_layers: compute what enters the first trained block once per example, and read it "
        "from the disk in every epoch; int8: store it in 8 bits per value, which takes less disk and changes losses "
        "slightly. Default: true if the run reads its data more than once",
        json_schema_extra=CHANGEABLE,
    )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := "; ".join(self.inconsistencies()):
            raise ValueError(found)
        return self

    def inconsistencies(self) -> Iterator[str]:
        """Yields a clause for each pair of values that cannot be combined."""
        if self.d_model % self.n_heads:
            yield f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}"
        yield from self._unused_adapter_keys()
        if self.keep_activations and self.trained_layers is None:
            yield "keep_activations has no effect without trained_layers; set trained_layers, or remove it"
        if self.freeze_after and self.trained_layers is None:
            yield "freeze_after has no effect without trained_layers; set trained_layers, or remove it"

    @property
    def freezes_at_start(self) -> bool:
        """Whether only the last layers are trained from the first step on."""
        return self.trained_layers not in (None, AUTO) and not self.freeze_after

    def trained_blocks(self, blocks: int) -> int:
        """Returns how many of a model's `blocks` are trained. Raises ConfigError if it has fewer than configured."""
        wanted = self.trained_layers
        if wanted is None or isinstance(wanted, str):
            return blocks
        if isinstance(wanted, float):
            return max(1, round(wanted * blocks))
        if wanted > blocks:
            raise ConfigError(
                f"model.trained_layers is {wanted}, but {self.name_or_path} has only {counted(blocks, 'block')}; set "
                "it to at most that number, or to a share such as 0.5."
            )
        return wanted

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
