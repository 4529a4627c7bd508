"""Times of day and dates that a user writes."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from sansgpu.config.plain_data import truncate

_CLOCKS = "%H:%M", "%I%p", "%I:%M%p"  # 18:00, 6PM, 6:00PM


def normal_time(text: str) -> str:
    """Returns a time of day such as 18:00, 6PM or 6:30 pm as HH:MM, or a date with a time as local ISO 8601.

    Raises ValueError with a clause for the user.
    """
    for form in _CLOCKS:
        with suppress(ValueError):
            return datetime.strptime("".join(text.split()), form).strftime("%H:%M")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{truncate(text)} is not a time; write 18:00, 6PM or 2030-01-31T18:00") from None
    return (moment.astimezone().replace(tzinfo=None) if moment.tzinfo else moment).isoformat()
