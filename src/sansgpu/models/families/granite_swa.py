"""Granite with sliding windows and attention sinks."""

from sansgpu.models.families import granite
from sansgpu.models.family import Family

FAMILY = Family(
    title="Granite-SWA",
    tiny={**granite.FAMILY.tiny, "sliding_window": 32, "layer_rope_theta": [0, 10_000.0]},
)
