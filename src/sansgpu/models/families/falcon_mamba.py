from dataclasses import replace

from sansgpu.models.families import mamba

FAMILY = replace(mamba.FAMILY, title="Falcon-Mamba", gguf_name="mamba")
