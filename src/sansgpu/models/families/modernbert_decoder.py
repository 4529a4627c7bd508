"""The decoders that were trained like ModernBERT, such as Ettin's."""

from dataclasses import replace

from sansgpu.models.families import modernbert

FAMILY = replace(
    modernbert.FAMILY,
    title="ModernBERT decoder",
    model_type="modernbert-decoder",
    is_encoder=False,
    tiny={**modernbert.FAMILY.tiny, "bos_token_id": 0},
    gguf_name=None,
)
