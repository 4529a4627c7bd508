from sansgpu.models.family import TINY_GQA, Family

FAMILY = Family(title="Phi-3.5-MoE", tiny={**TINY_GQA, "num_local_experts": 4})
