"""The section `training.distillation` of a configuration."""

from __future__ import annotations

from pydantic import Field, model_validator

from sansgpu.config.section import Section


class DistillationConfig(Section):
    """Learning from a teacher's predictions."""

    teacher: str | None = Field(
        None,
        description="folder written by `sansgpu distill`; the model trains on its texts and learns the teacher's "
        "predictions of each token",
    )
    weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="weight of the KL divergence from the teacher; 1 - weight is that of the usual loss",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="divisor of the log-probabilities of teacher and model in the KL divergence, which is multiplied "
        "by its square",
    )

    @model_validator(mode="after")
    def _only_with_a_teacher(self) -> DistillationConfig:
        for key in ("weight", "temperature"):
            if self.teacher is None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect without a teacher; set teacher to a folder, or remove it")
        return self
