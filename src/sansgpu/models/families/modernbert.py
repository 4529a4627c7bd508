from sansgpu.models.family import TINY_MHA, Family, OlderRope, Settings


def _older_settings(settings: Settings) -> Settings:
    types = settings.get("layer_types")
    if not isinstance(types, list):
        return {}
    full = (layer for layer, one in enumerate(types) if layer and one == "full_attention")
    return {"global_attn_every_n_layers": next(full, len(types))}


FAMILY = Family(
    title="ModernBERT",
    is_encoder=True,
    tiny={**TINY_MHA, "local_attention": 32, "global_attn_every_n_layers": 2},
    gguf_name="modern-bert",
    older_rope=OlderRope("global_rope_theta", "local_rope_theta"),
    older_settings=_older_settings,
)
