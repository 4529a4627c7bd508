"""The one schema: every key, its type, its default and its meaning. Help, docs and errors come from here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sansgpu.config.by_task import FINE_TUNING, PRETRAIN, as_values, default_of, tasks_with, with_defaults

if TYPE_CHECKING:
    import torch

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


def _switch(value: object) -> object:
    """YAML 1.1 reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _listed(value: object) -> object:
    return ([] if value in ("none", "") else [value]) if isinstance(value, str) else value


def _clock(value: object) -> object:
    """A time of day or a date with one. YAML 1.1 reads a bare 17:30 as a number of base 60, and dates as dates."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 24 * 60:
        value = f"{value // 60:02d}:{value % 60:02d}"
    if isinstance(value, datetime):
        value = value.isoformat()
    if isinstance(value, str):
        try:
            return datetime.strptime(value, "%H:%M").strftime("%H:%M")
        except ValueError:
            pass
        try:
            moment = datetime.fromisoformat(value)
            return (moment.astimezone().replace(tzinfo=None) if moment.tzinfo else moment).isoformat()
        except ValueError:
            raise ValueError(f"{value} is no time; write 07:00 or 2030-01-31T07:00") from None
    return value


PositiveInt = Annotated[int, Field(ge=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class ModelConfig(_Section):
    """What is trained: a decoder's shape, or a model to go on from.

    `activation` chooses the layout: swiglu is Qwen3's, relu2 Apertus', the rest GPT-2's.
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
        "gelu, relu: LayerNorm, learned positions (GPT-2's)",
    )
    pre_norm: bool = Field(True, description="normalise before each branch; all layouts need true")
    tie_embeddings: bool = Field(True, description="one matrix for the embedding and the output head")
    rope_theta: float = Field(
        10_000.0,
        gt=0,
        description="base wavelength of the rotary positions (swiglu, relu2 only)",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward: less memory, slower")
    name_or_path: str | None = Field(
        None,
        description="the model to fine-tune: a Hugging Face folder, or a name on the hub",
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


class TrainingConfig(_Section):
    """How the weights change, for how long, and what is said and saved on the way."""

    device: Device = Field("auto", description="auto: a GPU where there is one, else the CPU")
    force_cpu: bool = Field(False, description="train on the CPU whatever `device` says")
    batch_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="examples of one micro-batch; auto: the largest that fits and helps"
    )
    gradient_accumulation_steps: int = Field(
        16, ge=1, description="micro-batches of one step; with batch_size auto, the examples of one step"
    )
    learning_rate: float = Field(0.004, gt=0, description="peak learning rate")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="final learning rate over the peak")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; on hidden matrices only")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay")
    beta2: float = Field(0.98, ge=0, lt=1, description="AdamW's second-moment decay")
    num_epochs: float | None = Field(None, gt=0, description="passes over the training part (1 if no limit is given)")
    max_steps: int | None = Field(None, ge=1, description="optimizer updates; the first limit reached ends the run")
    max_tokens: int | None = Field(None, ge=1, description="target tokens")
    max_hours: float | None = Field(
        None,
        gt=0,
        description="hours from start to saved model, interruptions not counted; the schedule is laid over them",
    )
    until: Annotated[str | None, BeforeValidator(_clock)] = Field(
        None, description="when the run is to be over: 07:00, or 2030-01-31T07:00; the schedule is laid to end there"
    )
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "wsd", description="wsd: warm-up, stable, then a linear decay over the last `decay_ratio` of the steps"
    )
    decay_ratio: float = Field(0.5, gt=0, le=1, description="share of the steps in which wsd decays")
    warmup_steps: int = Field(50, ge=0, description="steps of linear warm-up")
    window_warmup_ratio: float = Field(
        0.4,
        ge=0,
        lt=1,
        description="share of the steps in which windows are cut into pieces of 32, then 64, 128, ... tokens",
    )
    optimizer: Literal["auto", "muon", "adamw"] = Field(
        "auto",
        description="muon: Muon on hidden matrices, AdamW on the rest; adamw: AdamW on all; auto: muon where it costs "
        "less than a tenth of the step",
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="fp32: weights are updated in fp32 beside the bf16 copies that products read; bf16: these alone, "
        "updated with stochastic rounding, which takes 4 bytes a weight less",
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        "fp32", description="AdamW's two moments: 8 bytes a weight in fp32, 2 in blocks of 8-bit numbers"
    )
    max_grad_norm: float = Field(1.0, ge=0, description="clip the global gradient norm to this; 0: do not clip")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each target spread over the vocabulary",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="times log(sum(exp(logits)))^2, which keeps logits from drifting",
    )
    precision: Precision = Field("auto", description="auto: bf16 where this device computes it natively and faster")
    use_amp: bool | None = Field(None, description="true: precision auto; false: precision fp32")
    compile: Switch = Field("auto", description="torch.compile of the blocks; auto: where the run is long enough")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="native: C++ compiled here once; auto: native where that works, else plain torch"
    )
    threads: PositiveInt | Literal["auto"] = Field(
        "auto", description="compute threads; auto: the physical cores available"
    )
    seed: int = Field(42, ge=0, description="the only source of randomness")
    save_steps: int = Field(250, ge=0, description="steps between snapshots; 0: only the best and the last")
    eval_steps: int = Field(100, ge=0, description="steps between evaluations; 0: none but the final one")
    eval_batches: int | None = Field(None, ge=1, description="evaluate on this many batches; by default on all")
    logging_steps: int = Field(10, ge=1, description="steps between step events")
    keep_last: int = Field(3, ge=1, description="snapshots to keep, besides the best")
    sample_tokens: int = Field(
        0,
        ge=0,
        description="tokens of a sample written with every evaluation; 0: none",
    )
    sample_prompt: str = Field("", description="what a sample continues")
    dataloader_num_workers: int = Field(1, ge=0, description="threads preparing batches; 0: the training thread does")
    dataloader_prefetch_factor: int | None = Field(None, ge=1, description="batches each worker keeps ready (2)")
    dataloader_pin_memory: bool = Field(False, description="page-lock batches for a faster copy to a GPU")
    distributed_backend: Literal["gloo", "nccl", "mpi", "ccl"] = Field(
        "gloo", description="torch.distributed backend; refused where torch lacks it"
    )
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(_listed)] = Field(
        ["tensorboard"], description="besides metrics.jsonl: tensorboard, wandb, or none"
    )
    logging_dir: str | None = Field(None, description="TensorBoard folder; by default in the run's folder")
    checkpoint_dir: str | None = Field(None, description="snapshot folder; by default in the run's folder")

    @model_validator(mode="before")
    @classmethod
    def _drop_prefetch_without_workers(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("dataloader_num_workers") == 0:
            return {key: value for key, value in values.items() if key != "dataloader_prefetch_factor"}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.use_amp is False and self.precision == "bf16":
            raise ValueError("use_amp false means fp32, but precision says bf16; give one of the two")
        if self.master_weights == "bf16" and self.wanted_precision == "fp32":
            raise ValueError("master_weights bf16 needs bf16 products, but precision is fp32; change one of the two")
        narrow = next((k for k in ("master_weights", "optimizer_state") if getattr(self, k) != "fp32"), None)
        if narrow and self.optimizer != "adamw":
            raise ValueError(f"{narrow} {getattr(self, narrow)} is AdamW's; set optimizer to adamw")
        return self

    @property
    def wanted_precision(self) -> Precision:
        """`precision` with `use_amp` taken into account."""
        return "fp32" if self.use_amp is False else self.precision

    @property
    def time_limited(self) -> bool:
        """Whether an amount of time or a time of day ends the run."""
        return self.max_hours is not None or self.until is not None

    @property
    def prefetch(self) -> int:
        """Batches to keep ready: workers x prefetch factor."""
        return self.dataloader_num_workers * (self.dataloader_prefetch_factor or 2)

    def get_effective_device(self) -> torch.device:
        """The device this machine will train on."""
        import torch  # the only question here that needs torch, so only who asks it pays for the import

        wants_gpu = not self.force_cpu and self.device != "cpu"
        return torch.device("cuda" if wants_gpu and torch.cuda.is_available() else "cpu")


class DataConfig(_Section):
    """What is learned from, and how it becomes tokens and windows."""

    dataset_name: str = Field(
        "python-stdlib", description="a Hugging Face dataset, a local file or folder, or `python-stdlib`"
    )
    dataset_config: str | None = Field(None, description="configuration of a Hugging Face dataset")
    validation_name: str | None = Field(None, description="another source for validation, in the same forms")
    text_column: str | None = Field(
        None,
        description="column of the text; by default `text`, `content` or the only one",
    )
    tokenizer: str = Field("bpe", description="bpe, char, a tokenizer.json, or a Hugging Face tokenizer")
    vocab_size: int = Field(8192, ge=257, description="size a bpe tokenizer is trained to")
    tokenizer_sample_mb: int = Field(32, ge=1, description="megabytes of text a tokenizer is trained on")
    max_length: int | None = Field(
        None, ge=2, description="window in tokens, by default model.max_seq_len; of sft and qa the longest example"
    )
    pack_sequences: bool = Field(
        True, description="several documents or examples one behind the other, which do not see each other; no padding"
    )
    long_rows: Literal["truncate", "drop"] = Field(
        "truncate",
        description="of a row longer than max_length, keep the end, or leave it out",
    )
    chat_template: str | None = Field(None, description="file with a Jinja chat template, in place of the model's own")
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail",
        description="fail: name the first row that cannot be learned from; skip: leave such rows out, counted",
    )
    doc_stride: int = Field(128, ge=0, description="tokens that two windows of a long context share")
    n_best_size: int = Field(20, ge=1, description="answers that are weighed against each other")
    max_answer_length: int = Field(30, ge=1, description="tokens of the longest answer")
    null_answers: bool | None = Field(
        None, description="whether a question may have no answer; by default whether the training part has such"
    )
    null_score_diff_threshold: float = Field(
        0.0,
        description="a question has no answer where that scores higher than the best answer by more than this",
    )
    preprocessing_num_workers: int = Field(2, ge=1, description="threads that tokenize")
    cache_dir: str | None = Field(None, description="where tokens are kept; by default ~/.cache/sansgpu")
    validation_split: float = Field(
        0.01, gt=0, lt=1, description="share of the tokens held out where the data has no validation part"
    )


class Config(_Section):
    """One run. `device` and `force_cpu` may also stand at the top level of a file."""

    task: Literal["pretrain", "sft", "qa"] = Field(
        "pretrain",
        description="pretrain: a decoder from scratch; sft: a model's answers in conversations; "
        "qa: answers that stand in a text",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="before")
    @classmethod
    def _device_at_the_top(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        top = {key: values[key] for key in ("device", "force_cpu") if key in values}
        rest = {key: value for key, value in values.items() if key not in top}
        training = as_values(rest.get("training"))
        if top and isinstance(rest.get("training", {}), (dict, TrainingConfig)):
            clash = [key for key in top if training.get(key, top[key]) != top[key]]
            if clash:
                raise ValueError(f"{clash[0]} stands twice, at the top and in training, with different values")
            rest["training"] = {**training, **top}
        return with_defaults(str(rest.get("task", PRETRAIN)), rest)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if problems := list(self._misplaced()):
            raise ValueError("; ".join(problems))
        if self.task in FINE_TUNING:
            if self.model.name_or_path is None:
                raise ValueError(f"task {self.task} goes on from a model; set model.name_or_path")
            if self.data.dataset_name == DataConfig.model_fields["dataset_name"].default:
                raise ValueError(f"task {self.task} needs rows to learn from; set data.dataset_name")
        elif self.window > self.model.max_seq_len:
            raise ValueError(
                f"data.max_length {self.window} is longer than model.max_seq_len {self.model.max_seq_len}; "
                "lower the one or raise the other"
            )
        return self

    def _misplaced(self) -> Iterator[str]:
        """A sentence for every key that would not act."""
        for name in ("model", "training", "data"):
            section = getattr(self, name)
            for key, field in type(section).model_fields.items():
                tasks = tasks_with(f"{name}.{key}")
                if self.task not in tasks and getattr(section, key) != default_of(self.task, name, key, field.default):
                    known = " and ".join(tasks)
                    yield f"{name}.{key} is for task {known}, and does nothing in {self.task}; leave it out"

    @property
    def device(self) -> Device:
        """The device asked for."""
        return self.training.device

    @property
    def window(self) -> int:
        """Tokens of one training example."""
        return self.data.max_length or self.model.max_seq_len
