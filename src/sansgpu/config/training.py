"""`training`: how weights change."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sansgpu.config.plain import cut
from sansgpu.config.section import Section

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
            raise ValueError(f"{cut(value)} is no time; write 07:00 or 2030-01-31T07:00") from None
    return value


PositiveInt = Annotated[int, Field(ge=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class TrainingConfig(Section):
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
    mlm_weight: float = Field(1.0, ge=0, description="of the masked tokens of the text in the loss")
    mnm_weight: float = Field(1.0, ge=0, description="of the masked leaves in the loss")
    mnm_ramp_steps: int = Field(0, ge=0, description="steps in which mnm_weight grows from 0 to its value")
    mnm_reduction: Literal["separate", "pooled"] = Field(
        "separate", description="separate: the mean over tokens and the mean over leaves are added; pooled: one mean"
    )
    entity_weight: float = Field(
        1.0, ge=0, description="of predicting, out of all entities, the tail of a knowledge graph's triple"
    )
    sbo_weight: float = Field(
        0.0, ge=0, description="of predicting masked spans from the tokens around them; 0: no such head"
    )
    precision: Precision = Field("auto", description="auto: bf16 where this device computes it natively and faster")
    use_amp: bool | None = Field(None, description="true: precision auto; false: precision fp32")
    compile: Switch = Field("auto", description="torch.compile of the blocks; auto: where the run is long enough")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="native: C++ compiled here once; auto: native where that works, else plain torch"
    )
    threads: PositiveInt | Literal["auto"] = Field(
        "auto", description="compute threads of a process; auto: OMP_NUM_THREADS, else its share of the physical cores"
    )
    adapt_threads: bool = Field(
        False,
        description="use fewer threads while other programs use the cores; the result then depends on when they did, "
        "in its last bits",
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
    network_interface: str | None = Field(
        None, description="what other hosts reach this one through, as eth0; by default the way to the first host"
    )
    timeout_seconds: float = Field(
        300.0, gt=0, description="how long the processes of a run wait for one that does not come"
    )
    gradient_reduction: Literal["fp32", "bf16"] = Field(
        "fp32", description="how gradients travel between processes; bf16: half the bytes, rounded once a process"
    )
    sharding: Literal["none", "optimizer", "full"] = Field(
        "none",
        description="over several processes; none: each has everything; optimizer: each has the fp32 weights and "
        "moments of its part; full: besides, the blocks' matrices are put together only while they are used",
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
        if self.adapt_threads and self.threads != "auto":
            raise ValueError(f"adapt_threads changes the threads, but threads is {self.threads}; set it to auto")
        if self.use_amp is False and self.precision == "bf16":
            raise ValueError("use_amp false means fp32, but precision says bf16; give one of the two")
        if self.master_weights == "bf16" and self.wanted_precision == "fp32":
            raise ValueError("master_weights bf16 needs bf16 products, but precision is fp32; change one of the two")
        narrow = next((k for k in ("master_weights", "optimizer_state") if getattr(self, k) != "fp32"), None)
        if self.sharding == "full" and narrow:
            raise ValueError(f"sharding full keeps fp32 weights and moments; leave {narrow} at fp32")
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
