"""The section `training` of a configuration."""

from __future__ import annotations

from datetime import datetime
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    StrictBool,
    model_validator,
)

from sansgpu.config.errors import ConfigError
from sansgpu.config.losses import DistillationConfig, PreferenceConfig
from sansgpu.config.parse import normal_time
from sansgpu.config.section import AUTO, Auto, Section

# Peak rates of the optimizers at this width. Measured at widths from 64 to 512, see docs/lab-notes.md; that of AdamW is
# 6e-4 at GPT-3's smallest width, 768, as published (arXiv 2005.14165, table 2.1).
WIDTH, MUON, ADAMW = 256, 0.004, 0.001
SGD_RATIO = 100  # learning rate of SGD with momentum / that of AdamW; its steps with clipped gradients are smaller


def default_learning_rate(optimizer: str, width: float, own: float | None = None) -> float:
    """Returns the default peak learning rate for `training.optimizer` and `model.d_model`.

    `own` is the default of a fine-tuning task, for AdamW. Muon's updates are as large as AdamW's, but below a width of
    256 a higher rate does not help. Until the optimizer `auto` is resolved, it gets Muon's rate.
    """
    scale = (WIDTH / width) ** 0.5
    adamw = ADAMW * scale if own is None else own
    rates = {"adamw": adamw, "adam": adamw, "sgd": SGD_RATIO * adamw}
    return float(f"{rates.get(optimizer, MUON * min(1.0, scale) if own is None else own):.2g}")


Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]


def _switch(value: object) -> object:
    """YAML 1.1 reads a bare `on` or `off` as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _as_list(value: object) -> object:
    return ([] if value in ("none", "") else [value]) if isinstance(value, str) else value


def _time_limit(value: object) -> object:
    """Normalizes a time of day, or a date with a time."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, datetime):
        value = value.isoformat()
    return normal_time(value) if isinstance(value, str) else value


def _whole_as_integer(value: float) -> float:
    """Returns whole numbers as integers, so that `range(config.num_epochs)` works."""
    return int(value) if value.is_integer() and value <= MAX_EXACT_FLOAT else value


MAX_EXACT_FLOAT = 2.0**53  # all smaller whole numbers are floats without rounding
MAX_NUM_EPOCHS = 1e9  # keeps the number of steps within 64 bits for any dataset
MAX_HOURS = 1e6  # 114 years; dates after the year 9999 cannot be written
MAX_TIMEOUT_SECONDS = 1e6  # 11 days; the system's calls wait for at most 2^31 milliseconds

PositiveInt = Annotated[int, Field(ge=1)]
TimeoutSeconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_SECONDS)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class TrainingConfig(Section):
    """Optimization, length, numerics, parallelism, evaluation, snapshots and logging of a run."""

    section_name: ClassVar[str] = "training"

    device: Device = Field("auto", description="auto: a GPU if available, otherwise the CPU")
    force_cpu: bool = Field(False, description="train on the CPU regardless of `device`")
    batch_size: PositiveInt | Auto = Field(
        AUTO, description="examples per micro-batch; auto: the largest that fits and still raises throughput"
    )
    gradient_accumulation_steps: int = Field(
        16, ge=1, description="micro-batches per step; with batch_size auto, examples per step"
    )
    learning_rate: float = Field(
        MUON,
        gt=0,
        description="peak learning rate. Default for models trained from scratch: muon: 0.004, above d_model 256 times "
        "sqrt(256 / d_model); adamw, adam: 0.001 times sqrt(256 / d_model); sgd: 100 times that of adamw. Default for "
        "fine-tuning: 1e-6 to 2e-4, by task and adapter; sgd: 100 times that",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="ratio of the final learning rate to the peak")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="weight decay of hidden matrices; muon, adamw: decoupled; adam, sgd: added to the gradient, as in "
        "torch. Default for adam and sgd: 0",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment of AdamW and Adam; momentum of SGD")
    beta2: float = Field(0.98, ge=0, lt=1, description="decay of the second moment of AdamW and Adam")
    num_epochs: Annotated[float, AfterValidator(_whole_as_integer)] | None = Field(
        None, gt=0, le=MAX_NUM_EPOCHS, description="passes over the training split (1 if no limit is set)"
    )
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; the first limit reached ends the run")
    max_tokens: int | None = Field(None, ge=1, description="training tokens (prediction targets)")
    max_hours: float | None = Field(
        None,
        gt=0,
        le=MAX_HOURS,
        description="hours from start to saved model, without interruptions; the learning rate schedule spans them",
    )
    until: Annotated[str | None, BeforeValidator(_time_limit)] = Field(
        None, description="deadline, e.g. 07:00, 7AM or 2030-01-31T07:00; the learning rate schedule ends there"
    )
    lr_scheduler: Literal["cosine", "linear", "polynomial", "constant", "wsd"] = Field(
        "wsd",
        description="wsd: warmup, stable, then linear decay over the last `decay_ratio` of the steps; polynomial: "
        "linear decay to the power `lr_power`",
    )
    decay_ratio: float = Field(0.5, gt=0, le=1, description="fraction of steps in which wsd decays")
    lr_power: float = Field(1.0, gt=0, description="exponent of polynomial decay")
    warmup_steps: int = Field(50, ge=0, description="linear warmup steps")
    window_warmup_ratio: float = Field(
        0.4,
        ge=0,
        lt=1,
        description="fraction of steps in which windows are split into pieces of 32, then 64, 128, ... tokens",
    )
    optimizer: Literal["auto", "muon", "adamw", "adam", "sgd"] = Field(
        "auto",
        description="muon: Muon on hidden matrices, AdamW on the rest; adamw, adam, sgd: on all weights; auto: "
        "muon if it takes less than a tenth of the step, otherwise adamw",
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="fp32: keep fp32 master weights and bf16 copies for matrix products; bf16: keep only the bf16 "
        "weights and update them with stochastic rounding, which saves 4 bytes per weight",
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        "fp32",
        description="AdamW's two moments; fp32: 8 bytes per weight; 8bit: blockwise quantized, 2 bytes per weight",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="maximum global gradient norm; 0: do not clip")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="probability mass of each target spread over the vocabulary"
    )
    z_loss: float = Field(
        0.0, ge=0, description="weight of log(sum(exp(logits)))^2 in the loss, which keeps logits from drifting"
    )
    mlm_weight: float = Field(1.0, ge=0, description="loss weight of masked text tokens")
    mnm_weight: float = Field(1.0, ge=0, description="loss weight of masked leaves")
    mnm_ramp_steps: int = Field(0, ge=0, description="steps in which mnm_weight increases from 0 to its value")
    mnm_reduction: Literal["separate", "pooled"] = Field(
        "separate",
        description="separate: add the mean loss over tokens and the mean loss over leaves; pooled: one mean over both",
    )
    entity_weight: float = Field(
        1.0, ge=0, description="loss weight of predicting a triple's tail among all entities of a knowledge graph"
    )
    sbo_weight: float = Field(
        0.0,
        ge=0,
        description="loss weight of the span boundary objective, which predicts masked spans from the tokens around "
        "them; 0: no such head",
    )
    embedding_loss: Literal["auto", "ranking", "cosine", "triplet"] = Field(
        "auto",
        description="ranking: find a text's positive among all positives and negatives of the step; cosine: squared "
        "error of cosine similarities to scores; triplet: keep a negative farther away than the positive; auto: cosine "
        "for rows with scores, otherwise ranking",
    )
    matryoshka_dims: list[PositiveInt] | None = Field(
        None,
        min_length=1,
        description="add up the loss over vectors that are cut to these lengths, so that shortened vectors work, too",
    )
    few_shot: StrictBool = Field(
        False,
        description="learn labels from a few examples of each, as SetFit does: train the model until the vectors of "
        "examples with the same label are similar, then fit a classifier to the vectors",
    )
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig, description="the loss of task preference")
    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="learning from a teacher's predictions"
    )
    precision: Precision = Field(
        "auto", description="auto: bf16 if the device supports it natively and computes it faster"
    )
    use_amp: bool | None = Field(None, description="true: precision auto; false: precision fp32")
    compile: Switch = Field(
        "auto",
        description="torch.compile blocks that our kernels do not compute (GPU; kernels: torch); auto: in long runs",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="native: C++ kernels; torch: PyTorch operators; auto: native where this processor has kernels",
    )
    threads: PositiveInt | Auto = Field(
        AUTO,
        description="compute threads per process; auto: OMP_NUM_THREADS, otherwise its share of the physical cores",
    )
    adapt_threads: bool = Field(
        False,
        description="use fewer threads while other programs use the cores; results are then not reproducible in their "
        "last bits",
    )
    seed: int = Field(42, ge=0, description="random seed; the only source of randomness")
    save_steps: int = Field(250, ge=0, description="steps between snapshots; 0: save only the best and the last")
    eval_steps: int = Field(100, ge=0, description="steps between evaluations; 0: only a final one")
    eval_on_start: bool = Field(False, description="also evaluate before the first step, to see what training improves")
    eval_batches: int | None = Field(None, ge=1, description="number of batches to evaluate on. Default: all")
    logging_steps: int = Field(10, ge=1, description="steps between logged step events")
    keep_last: int = Field(3, ge=1, description="number of latest snapshots to keep, in addition to the best")
    sample_tokens: int = Field(0, ge=0, description="tokens to generate at every evaluation; 0: no sample")
    sample_prompt: str = Field("", description="prompt of the generated samples")
    sample_temperature: float = Field(0.8, ge=0, description="temperature of the samples; 0: most likely tokens")
    dataloader_num_workers: int = Field(
        1, ge=0, description="threads that prepare batches ahead; 0: prepare each batch when its step needs it"
    )
    dataloader_prefetch_factor: int | None = Field(
        None, ge=1, description="batches that each worker prefetches. Default: 2"
    )
    dataloader_pin_memory: bool = Field(False, description="use page-locked memory for faster copies to a GPU")
    world_size: PositiveInt | None = Field(
        None, description="expected number of processes; a warning says if the launcher started another number"
    )
    distributed_backend: Literal["gloo", "nccl", "mpi", "ccl"] = Field(
        "gloo", description="torch.distributed backend, which the installed torch must support; nccl: gloo on a CPU"
    )
    network_interface: str | None = Field(
        None,
        description="network interface that other hosts connect to, e.g. eth0. Default: the one with the route to the "
        "first host",
    )
    timeout_seconds: TimeoutSeconds = Field(
        300.0, description="timeout of the processes of a run when they wait for each other"
    )
    gradient_reduction: Literal["fp32", "bf16"] = Field(
        "fp32", description="data type of gradients in the all-reduce; bf16: half the bytes, one rounding per process"
    )
    sharding: Literal["none", "optimizer", "full"] = Field(
        "none",
        description="sharding over processes; none: replicate everything; optimizer: shard the fp32 weights and the "
        "moments; full: also shard the matrices of the blocks and gather them only while they are used",
    )
    report_to: Annotated[list[Literal["tensorboard", "wandb"]], BeforeValidator(_as_list)] = Field(
        ["tensorboard"], description="loggers in addition to metrics.jsonl: tensorboard, wandb or none"
    )
    logging_dir: str | None = Field(None, description="TensorBoard folder. Default: in the run's folder")
    checkpoint_dir: str | None = Field(None, description="snapshot folder. Default: in the run's folder")

    @model_validator(mode="before")
    @classmethod
    def _drop_prefetch_without_workers(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("dataloader_num_workers") == 0:
            return {key: value for key, value in values.items() if key != "dataloader_prefetch_factor"}
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _default_weight_decay(cls, values: Any, validate: ModelWrapValidatorHandler[TrainingConfig]) -> TrainingConfig:
        """Sets a missing weight decay to 0 for optimizers that add it to the gradient, as torch does."""
        if not isinstance(values, dict) or "weight_decay" in values or values.get("optimizer") not in ("adam", "sgd"):
            return validate(values)
        config = validate({**values, "weight_decay": 0.0})
        config.model_fields_set.discard("weight_decay")  # so that assigning the optimizer chooses it again
        return config

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.lr_power != 1 and self.lr_scheduler != "polynomial":
            raise ValueError(f"lr_power has no effect with lr_scheduler {self.lr_scheduler}; set it to polynomial")
        if self.adapt_threads and self.threads != "auto":
            raise ValueError(f"adapt_threads needs threads auto, but threads is {self.threads}; change one of the two")
        if self.use_amp is False and self.precision == "bf16":
            raise ValueError("use_amp false means fp32, but precision is bf16; remove one of the two")
        if self.use_amp and self.precision == "fp32":
            raise ValueError("use_amp true means mixed precision, but precision is fp32; remove one of the two")
        if self.master_weights == "bf16" and self.wanted_precision == "fp32":
            raise ValueError("master_weights bf16 needs precision bf16, but precision is fp32; change one of the two")
        narrow = next((k for k in ("master_weights", "optimizer_state") if getattr(self, k) != "fp32"), None)
        if self.sharding == "full" and narrow:
            raise ValueError(f"sharding full supports only fp32 weights and moments; set {narrow} to fp32")
        if narrow and self.optimizer != "adamw":
            raise ValueError(f"{narrow} {getattr(self, narrow)} is only supported by AdamW; set optimizer to adamw")
        return self

    @property
    def wanted_precision(self) -> Precision:
        """`precision` with `use_amp` taken into account."""
        return "fp32" if self.use_amp is False else self.precision

    @property
    def time_limited(self) -> bool:
        """Returns True if max_hours or until limits the run."""
        return self.max_hours is not None or self.until is not None

    @property
    def prefetch(self) -> int:
        """Batches to keep ready: workers x prefetch factor."""
        return self.dataloader_num_workers * (self.dataloader_prefetch_factor or 2)

    def get_effective_device(self) -> Any:
        """Returns the torch.device to train on. Raises ConfigError if a GPU is requested but not available."""
        torch = import_module("torch")  # takes seconds, and only this method needs it
        if self.force_cpu or self.device == "cpu":
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda")
        if self.device == "cuda":
            reason = "this is a CPU build of torch" if torch.version.cuda is None else "torch finds no GPU"
            raise ConfigError(f"device is cuda, but {reason}; set device to auto.")
        return torch.device("cpu")


def unused_settings(values: dict[str, Any]) -> list[str]:
    """Returns a note for every key in a configuration's values that another key makes ineffective."""
    training = values.get("training") or {}
    if training.get("dataloader_num_workers") == 0 and training.get("dataloader_prefetch_factor") is not None:
        return ["training.dataloader_prefetch_factor is ignored, because training.dataloader_num_workers is 0."]
    return []


def require_hours(hours: float) -> None:
    """Raises ConfigError if --hours is not a valid time limit of a run or a search."""
    if not 0 < hours <= MAX_HOURS:
        raise ConfigError(
            f"--hours is {hours:g}, but must be positive and at most {MAX_HOURS:,.0f}; give a time budget, e.g. 0.5 "
            "or 8."
        )
