"""Qwen3-VL-MoE, the part that reads and writes text."""

from sansgpu.models.families import qwen3_moe
from sansgpu.models.family import Family

FAMILY = Family(older_settings=qwen3_moe.FAMILY.older_settings)
