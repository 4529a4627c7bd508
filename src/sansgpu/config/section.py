"""The base class of the sections of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from sansgpu.config.plain_data import InvalidDataError, require_plain


class Section(BaseModel):
    """An immutable section without unknown keys. Integers fit into 64 bits and strings can be encoded as UTF-8."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="after")
    def _plain(self) -> Any:
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, (str, int, list)):
                try:
                    require_plain({key: value})
                except InvalidDataError as error:
                    raise ValueError(str(error)) from None
        return self
