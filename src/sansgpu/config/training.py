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
    model_validator,
)

from sansgpu.config.errors import ConfigError
from sansgpu.config.learning_rate import MUON
from sansgpu.config.parse import normal_time
from sansgpu.config.section import AUTO, CHANGES_LOSS, FIXED, Auto, Section, unsearchable

ONE_DEVICE = unsearchable("all trials use the same task and device")
FIXED_LENGTH = unsearchable("all trials must have the same length")  # only num_epochs may be searched
SET_BY_SEARCH = unsearchable("the search sets it for every trial")
NOT_LEARNED = unsearchable("it does not affect what the model learns")

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16", "int16", "int8"]


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

    device: Device = Field(
        "auto",
        description="device to train on; auto: a GPU if available, otherwise the CPU",
        json_schema_extra=ONE_DEVICE,
    )
    force_cpu: bool = Field(False, description="train on the CPU regardless of `device`", json_schema_extra=ONE_DEVICE)
    batch_size: PositiveInt | Auto = Field(
        AUTO,
        description="examples per micro-batch; auto: the largest size that fits in memory and still increases "
        "throughput",
    )
    gradient_accumulation_steps: int = Field(
        16, ge=1, description="micro-batches per optimizer step; with batch_size auto: examples per optimizer step"
    )
    learning_rate: float = Field(
        MUON,
        gt=0,
        description="peak learning rate. Default in training from scratch: muon: 0.004 * min(1, sqrt(256 / d_model)); "
        "adamw, adam: 0.001 * sqrt(256 / d_model); sgd: 100 times that of adamw. Default in fine-tuning: "
        "depends on the task and, in most tasks, on the width of the model; sgd: 100 times that",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="ratio of the final to the peak learning rate")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="weight decay of the hidden matrices; muon, adamw: decoupled; adam, sgd: added to the gradient, "
        "as in PyTorch. Default for adam and sgd: 0",
    )
    beta1: float = Field(
        0.9, ge=0, lt=1, description="decay rate of the first moment in AdamW and Adam; momentum in SGD"
    )
    beta2: float = Field(0.98, ge=0, lt=1, description="decay rate of the second moment in AdamW and Adam")
    muon_momentum_start: float = Field(
        0.85, ge=0, lt=1, description="Muon's momentum in the first step; it becomes 0.95 within 2,000 steps"
    )
    muon_embedding_rate: float = Field(
        3.0,
        gt=0,
        description="learning rate of the weights that AdamW updates beside Muon (embeddings, output head, norms and "
        "biases), relative to the learning rate of the matrices",
    )
    num_epochs: Annotated[float, AfterValidator(_whole_as_integer)] | None = Field(
        None,
        gt=0,
        le=MAX_NUM_EPOCHS,
        description="maximum passes over the training split. Default: 1 if no other limit is set; in fine-tuning with "
        "only a time limit, the usual number of the task (3, static embeddings 10)",
    )
    max_steps: int | None = Field(
        None,
        ge=1,
        description="maximum optimizer steps; of several limits, the first one reached ends the run",
        json_schema_extra=FIXED_LENGTH,
    )
    max_tokens: int | None = Field(
        None, ge=1, description="maximum training tokens (prediction targets)", json_schema_extra=FIXED_LENGTH
    )
    max_hours: float | None = Field(
        None,
        gt=0,
        le=MAX_HOURS,
        description="maximum hours from start to saved model, not counting interruptions; the learning rate schedule "
        "is fitted to them",
        json_schema_extra=FIXED_LENGTH,
    )
    until: Annotated[str | None, BeforeValidator(_time_limit)] = Field(
        None,
        description="deadline, e.g. 07:00, 7AM or 2030-01-31T07:00; the learning rate schedule is fitted to it",
        json_schema_extra=FIXED_LENGTH,
    )
    lr_scheduler: Literal["cosine", "linear", "polynomial", "constant", "wsd"] = Field(
        "wsd",
        description="learning rate schedule; wsd (warmup-stable-decay): constant, then a linear decay over the last "
        "`decay_ratio` of the steps; polynomial: linear decay to the power of `lr_power`",
    )
    decay_ratio: float = Field(
        0.5, gt=0, le=1, description="fraction of the steps in which wsd decays the learning rate"
    )
    lr_power: float = Field(1.0, gt=0, description="exponent of the polynomial decay")
    warmup_steps: int = Field(10, ge=0, description="steps of linear learning rate warmup")
    warmup_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="fraction of the steps with linear learning rate warmup, instead of `warmup_steps`",
    )
    optimizer: Literal["auto", "muon", "adamw", "adam", "sgd"] = Field(
        "auto",
        description="muon: Muon for the hidden matrices, AdamW for all other weights; auto: muon if it takes less "
        "than a tenth of the step time, otherwise adamw",
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of the weights that the optimizer updates; fp32: fp32 master weights and bf16 copies "
        "for matrix products; bf16: only bf16 weights, updated with stochastic rounding, which saves 4 bytes per "
        "weight",
    )
    optimizer_state: Literal["fp32", "8bit"] = Field(
        "fp32",
        description="precision of AdamW's two moments; fp32: 8 bytes per weight; 8bit: blockwise quantization, 2 "
        "bytes per weight",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this global norm; 0: no clipping")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="probability mass taken from each target and spread over all classes or tokens"
    )
    z_loss: float = Field(0.0, ge=0, description="loss weight of log(sum(exp(logits)))^2, which keeps logits small")
    precision: Precision = Field(
        "auto",
        description="precision of matrix products; int16: 16-bit integers in block floating point, only with sansgpu's "
        "kernels; int8: 8-bit integers, only with sansgpu's kernels; auto: the fastest of fp32, bf16 (int16 on a "
        "processor without instructions for it) and, without a pretrained model, int8 on a processor with instructions "
        "for it",
    )
    use_amp: bool | None = Field(None, description="true: same as precision auto; false: same as precision fp32")
    compile: Switch = Field(
        "auto",
        description="use torch.compile for transformer blocks without C++ kernels (on a GPU, or with kernels torch); "
        "auto: in long runs",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="native: sansgpu's C++ kernels; torch: PyTorch operators; auto: native if there are kernels for "
        "this processor",
    )
    threads: PositiveInt | Auto = Field(
        AUTO,
        description="compute threads per process; auto: OMP_NUM_THREADS if set, otherwise the process's share of the "
        "physical cores",
        json_schema_extra=NOT_LEARNED,
    )
    adapt_threads: bool = Field(
        False,
        description="use fewer threads while other programs use the cores; results are then no longer bit-reproducible",
    )
    seed: int = Field(
        42, ge=0, description="random seed, which determines everything random in the run", json_schema_extra=FIXED
    )
    save_steps: int = Field(
        250,
        ge=0,
        description="steps between snapshots (checkpoints); 0: save only the best and the last",
        json_schema_extra=SET_BY_SEARCH,
    )
    eval_steps: int = Field(
        100, ge=0, description="steps between evaluations; 0: evaluate only at the end", json_schema_extra=SET_BY_SEARCH
    )
    eval_on_start: bool = Field(False, description="also evaluate before the first step, as a baseline")
    eval_batches: int | None = Field(
        None, ge=1, description="maximum number of batches per evaluation. Default: all", json_schema_extra=CHANGES_LOSS
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        description="end the run when this many evaluations in a row have not lowered the validation loss; the final "
        "model is then that of the best snapshot. Default: never",
        json_schema_extra=SET_BY_SEARCH,
    )
    load_best_model_at_end: bool = Field(
        False,
        description="the final model is that of the snapshot with the lowest validation loss, not of the last step",
        json_schema_extra=SET_BY_SEARCH,
    )
    logging_steps: int = Field(10, ge=1, description="steps between logged step events")
    keep_last: int = Field(
        3,
        ge=1,
        description="number of newest snapshots to keep, in addition to the best",
        json_schema_extra=SET_BY_SEARCH,
    )
    sample_tokens: int = Field(
        0,
        ge=0,
        description="tokens of the text sample generated at every evaluation; 0: no sample",
        json_schema_extra=NOT_LEARNED,
    )
    sample_prompt: str = Field("", description="prompt of the text samples", json_schema_extra=NOT_LEARNED)
    sample_temperature: float = Field(
        0.8,
        ge=0,
        description="temperature of the text samples; 0: always choose the most likely token",
        json_schema_extra=NOT_LEARNED,
    )
    dataloader_num_workers: int = Field(
        1, ge=0, description="number of threads that prefetch batches; 0: prepare each batch when its step needs it"
    )
    dataloader_prefetch_factor: int | None = Field(
        None, ge=1, description="number of batches that each worker prefetches. Default: 2"
    )
    dataloader_pin_memory: bool = Field(False, description="pin memory for faster copies to a GPU")
    world_size: PositiveInt | None = Field(
        None,
        description="expected number of processes; if the launcher starts a different number, a warning is printed",
    )
    distributed_backend: Literal["gloo", "nccl", "mpi", "ccl"] = Field(
        "gloo",
        description="torch.distributed backend, which the installed torch must support; nccl: on a CPU, gloo is used "
        "instead",
    )
    network_interface: str | None = Field(
        None,
        description="network interface that the hosts use to connect to each other, e.g. eth0. Default: the one with "
        "the route to the host of rank 0",
    )
    timeout_seconds: TimeoutSeconds = Field(
        300.0,
        description="timeout of collectives, i.e. seconds that a process waits for the other processes of the run",
    )
    gradient_reduction: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="data type of gradients in the all-reduce; bf16: half the network traffic, but every process "
        "rounds its gradients",
    )
    sharding: Literal["none", "optimizer", "full"] = Field(
        "none",
        description="what is sharded over the processes; none: nothing, every process holds all of it; optimizer: "
        "fp32 weights and optimizer states; full: also the weights of the transformer blocks, which are gathered "
        "while they are used",
    )
    sync_every: int = Field(
        1,
        ge=1,
        description="steps between synchronizations of the processes, for slow networks; 1: gradients are reduced in "
        "every step; N: each process takes N steps by itself, then changes of the weights are averaged (DiLoCo)",
    )
    report_to: Annotated[list[Literal["tensorboard", "wandb", "trackio", "mlflow"]], BeforeValidator(_as_list)] = Field(
        ["tensorboard"],
        description="loggers in addition to metrics.jsonl: tensorboard, wandb, trackio, mlflow or none",
        json_schema_extra=SET_BY_SEARCH,
    )
    logging_dir: str | None = Field(
        None,
        description="folder for TensorBoard logs. Default: a folder in the run folder",
        json_schema_extra=SET_BY_SEARCH,
    )
    checkpoint_dir: str | None = Field(
        None, description="folder for snapshots. Default: a folder in the run folder", json_schema_extra=SET_BY_SEARCH
    )

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
            raise ValueError(
                f"adapt_threads requires threads auto, but threads is {self.threads}; change one of the two"
            )
        if self.use_amp is False and self.precision not in ("auto", "fp32"):
            raise ValueError(
                f"use_amp false means precision fp32, but precision is {self.precision}; remove one of the two"
            )
        if self.use_amp is False:
            self.__dict__["precision"] = "fp32"  # and config.yaml says so
        if self.use_amp and self.precision == "fp32":
            raise ValueError("use_amp true means mixed precision, but precision is fp32; remove one of the two")
        if self.master_weights == "bf16" and self.precision not in ("auto", "bf16"):
            raise ValueError(
                f"master_weights bf16 requires precision bf16, but precision is {self.precision}; change one of the two"
            )
        narrow = next((k for k in ("master_weights", "optimizer_state") if getattr(self, k) != "fp32"), None)
        local = f"sync_every {self.sync_every}" if self.sync_every > 1 else ""
        if narrow and (local or self.sharding == "full"):
            raise ValueError(f"{local or 'sharding full'} supports only fp32 weights and moments; set {narrow} to fp32")
        if local and self.sharding != "none":
            raise ValueError(f"{local} needs all weights in every process; set sharding to none, or sync_every to 1")
        if narrow and self.optimizer != "adamw":
            raise ValueError(f"{narrow} {getattr(self, narrow)} is only supported by AdamW; set optimizer to adamw")
        for key in ("early_stopping_patience", "load_best_model_at_end"):
            if getattr(self, key) and not self.eval_steps:
                raise ValueError(f"{key} compares evaluations during the run, but eval_steps is 0; set eval_steps")
        if not (self.max_steps or self.max_tokens or self.time_limited or self.num_epochs):
            self.__dict__["num_epochs"] = 1  # so that `range(config.num_epochs)` works
        return self

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
            reason = "this build of torch supports only CPUs" if torch.version.cuda is None else "torch finds no GPU"
            raise ConfigError(f"device is cuda, but {reason}; set device to auto or cpu.")
        return torch.device("cpu")


def unused_settings(values: dict[str, Any]) -> list[str]:
    """Returns a note for every key in a configuration's values that another key makes ineffective."""
    training = values.get("training") or {}
    if training.get("dataloader_num_workers") == 0 and training.get("dataloader_prefetch_factor") is not None:
        return [
            "training.dataloader_prefetch_factor has no effect, because training.dataloader_num_workers is 0; remove "
            "it."
        ]
    return []


def require_hours(hours: float) -> None:
    """Raises ConfigError if --hours is not a valid time limit of a run or a search."""
    if not 0 < hours <= MAX_HOURS:
        raise ConfigError(
            f"--hours is {hours:g}, but must be positive and at most {MAX_HOURS:,.0f}; set it to a time budget, e.g. "
            "0.5 or 8."
        )
