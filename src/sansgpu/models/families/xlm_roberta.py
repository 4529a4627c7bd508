from dataclasses import replace

from sansgpu.models.families import roberta

FAMILY = replace(roberta.FAMILY, title="XLM-RoBERTa", model_type="xlm-roberta")
