from sansgpu.models.families import qwen3_5_text
from sansgpu.models.family import Family

FAMILY = Family(title="OLMo Hybrid", tiny={**qwen3_5_text.TINY_DELTA_NET, "linear_num_key_heads": 4})
