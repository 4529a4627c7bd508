"""The learning rate and the number of steps as pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sansgpu.config.schema import Config
from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import count, counted, duration
from sansgpu.data.order import step_limits
from sansgpu.train.snapshots import Progress

MAX_WARMUP_DIVISOR = 10  # the warm-up of a time-limited run takes at most total_steps / this
# Beyond, repeated text teaches little (arXiv 2305.16264), and models with more weights than tokens overfit.
MAX_EPOCHS = 4
AUTO_FREEZE_EPOCHS = 3  # in shorter runs, model.trained_layers auto trains all layers throughout
MAX_EVALUATION_RATIO = 0.1  # warn about an evaluation that takes longer than this share of all training steps,
MIN_EVALUATION_SECONDS = 10.0  # unless it is shorter than this
SHORT_EVALUATION_RATIO = 0.02  # the same share for the shorter evaluation that is suggested
UNKNOWN_STEPS = 1 << 40  # total steps of a time-limited run before any step was timed


@dataclass(frozen=True)
class StepPhases:
    """The work of the steps of a run whose lower layers stop learning. The unit is a step in which all layers learn."""

    freeze_step: int = UNKNOWN_STEPS  # number of steps in which all layers learn
    later_work: float = 1.0  # work of each step after them
    freezing_work: float = 0.0  # work between them and the next step: computing the outputs of the frozen layers

    def step_work(self, step: int) -> float:
        """Returns the work of the step after the first `step` ones."""
        return self.later_work if step >= self.freeze_step else 1.0

    def work(self, done: int, more: int) -> float:
        """Returns the work of the `more` steps after the first `done` ones, and between them."""
        before = min(max(0, self.freeze_step - done), more)
        between = self.freezing_work if done <= self.freeze_step < done + more else 0.0
        return before + (more - before) * self.later_work + between


ONE_PHASE = StepPhases()


def freeze_step(epochs: float, steps_per_epoch: int, sync_every: int) -> int:
    """Returns the number of steps in which all layers learn, if the lower ones stop learning after `epochs`.

    It is a multiple of `sync_every`, because otherwise the ranks' weights differ.
    """
    steps = math.ceil(round(epochs * steps_per_epoch, 6))  # rounded, because 0.1 * 30 is slightly above 3
    return max(1, -(-steps // sync_every)) * sync_every


def freezing_problem(after: float, first: int, total_steps: int) -> str | None:
    """Describes a run that ends before layers stop learning, after `first` steps."""
    if total_steps > first:
        return None
    return (
        f"all layers are trained throughout, because model.freeze_after {after:g} is reached after "
        f"{counted(first, 'step')}, and the run ends after {counted(total_steps, 'step')}; lower model.freeze_after."
    )


def learning_rate(training: TrainingConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of `step` in [0, total_steps): linear warm-up, then `training.lr_scheduler`."""
    peak, low, warmup = training.learning_rate, training.min_lr_ratio, warmup_steps(training, total_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup)
    match training.lr_scheduler:
        case "constant":
            return peak
        case "linear":
            height = 1 - progress
        case "polynomial":  # the same as transformers' get_polynomial_decay_schedule_with_warmup
            height = max(0.0, 1 - progress) ** training.lr_power
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case "wsd":  # warm-up, stable, decay (arXiv 2405.18392)
            left = (total_steps - step) / max(1.0, training.decay_ratio * total_steps)
            height = min(1.0, left)
    return peak * (low + (1 - low) * max(0.0, height))


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Returns the number of warm-up steps.

    `training.warmup_steps` count at most a tenth of a time-limited run.
    """
    if training.warmup_ratio is not None:
        return math.ceil(training.warmup_ratio * total_steps)
    limit = total_steps // MAX_WARMUP_DIVISOR if training.time_limited else training.warmup_steps
    return min(training.warmup_steps, limit)


def warmup_problem(training: TrainingConfig, total_steps: int) -> str | None:
    """Describes a warm-up that is longer than the run, so that the learning rate never reaches its peak."""
    warmup = warmup_steps(training, total_steps)
    if warmup <= total_steps:
        return None
    return (
        f"training.warmup_steps is {warmup}, but the run ends after {counted(total_steps, 'step')}, when the learning "
        f"rate has reached only {total_steps / (warmup + 1):.0%} of training.learning_rate; set warmup_steps to "
        f"{total_steps // MAX_WARMUP_DIVISOR}."
    )


def usual_epochs(config: Config) -> int | None:
    """Returns how often a fine-tuning task usually reads its data.

    Returns None for training from scratch, and for tasks that learn from new answers in every epoch.
    """
    if config.settings.generates:
        return None
    task = config.tasks.tasks.get(config.task)
    purpose = config.settings.purpose or (task.purpose if task else None)
    return purpose.epochs if purpose is not None and purpose.model is not None else None


def default_epochs(config: Config) -> int | None:
    """Returns the maximum epochs of a run that only its time limits, or None if there is no such maximum.

    A fine-tuned model that reads its data more often learns them by heart.
    """
    training = config.training
    if not training.time_limited or training.num_epochs or training.max_steps or training.max_tokens:
        return None
    return usual_epochs(config)


def stops_early(training: TrainingConfig, progress: Progress) -> bool:
    """Returns whether `training.early_stopping_patience` evaluations in a row have not lowered the loss."""
    patience = training.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def ends_with_best(training: TrainingConfig, progress: Progress) -> bool:
    """Returns whether the final model of a run that ends now is the best snapshot's, not the last step's."""
    return training.load_best_model_at_end or stops_early(training, progress)


def repetition_problem(epochs: float, tokens: int, parameters: int) -> str | None:
    """Describes a training from scratch that repeats its text so often that the model will overfit.

    Allows twice MAX_EPOCHS, because the number of epochs of a time-limited run is an estimate.
    """
    if epochs <= 2 * MAX_EPOCHS or parameters <= tokens:
        return None
    return (
        f"this run would read its text {epochs:.0f} times, and the model has {count(parameters)} parameters for "
        f"{count(tokens)} tokens: after about {MAX_EPOCHS} epochs it learns the text by heart, and the validation loss "
        f"rises; set training.num_epochs to {MAX_EPOCHS}, or use more text."
    )


def evaluation_problem(
    training: TrainingConfig, steps: float, evaluation: float, step_seconds: float, batches: float
) -> str | None:
    """Describes an evaluation on `batches` micro-batches that is long compared to the `steps` steps of the run.

    `evaluation` is its duration in steps.
    """
    ratio, seconds = evaluation / steps, evaluation * step_seconds
    if ratio <= MAX_EVALUATION_RATIO or seconds < MIN_EVALUATION_SECONDS:
        return None
    fewer = max(1, int(batches * SHORT_EVALUATION_RATIO * steps / evaluation))
    remedy = (
        "set a lower training.eval_batches"
        if training.eval_batches is not None and training.eval_batches <= fewer
        else f"set training.eval_batches to {fewer}, which evaluates on as many micro-batches"
    )
    return (
        f"an evaluation takes about {duration(seconds)}, which is {ratio:.0%} of the time of all training steps; "
        f"{remedy}, or lower data.validation_split."
    )


def total_steps(training: TrainingConfig, steps_per_epoch: int, tokens_per_epoch: int) -> int:
    """Returns the steps until the first of num_epochs, max_steps and max_tokens is reached.

    Without these limits, returns UNKNOWN_STEPS for a time-limited run and otherwise one epoch.
    """
    limits = step_limits(training, steps_per_epoch, tokens_per_epoch)
    return max(1, math.ceil(min(limits, default=UNKNOWN_STEPS if training.time_limited else steps_per_epoch)))


def automatic_layers(epochs: float, freeze_after: float | None = None) -> dict[str, float | None]:
    """Returns the keys of `model` that stand for trained_layers auto in a run of `epochs` epochs.

    `freeze_after` is the configured value.
    """
    if round(epochs, 6) >= AUTO_FREEZE_EPOCHS:
        return {"trained_layers": 0.5, "freeze_after": 1.0 if freeze_after is None else freeze_after}
    return {"trained_layers": None, "freeze_after": None, "keep_activations": None}
