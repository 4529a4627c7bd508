"""The value `auto` of a number that is chosen when a run starts."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn, cast

import yaml
from pydantic import AfterValidator


class _Automatic(str):
    """The string `auto`. Arithmetic with it raises TypeError; a plain string would be repeated, as in `"auto" * 8`."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "this value of the configuration is auto and becomes a number only when the run starts; "
            "assign a number before computing with it, e.g. config.training.batch_size = 8"
        )

    __index__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse


AUTO = cast(Literal["auto"], _Automatic("auto"))
yaml.SafeDumper.add_representer(_Automatic, yaml.SafeDumper.represent_str)
Auto = Annotated[Literal["auto"], AfterValidator(lambda _: AUTO)]
