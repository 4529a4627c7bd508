"""Nemotron-H, which has state space and attention layers."""

from sansgpu.models.families import mamba
from sansgpu.models.family import Family

FAMILY = Family(read_directly=mamba.READ_DIRECTLY)
