"""The language model inside Qwen3-VL-MoE."""

from sansgpu.models.families import qwen3_moe
from sansgpu.models.family import Family

FAMILY = Family(older_settings=qwen3_moe.FAMILY.older_settings)
