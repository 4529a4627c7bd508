"""The language model inside Gemma 3."""

from dataclasses import replace

from sansgpu.models.families import gemma2
from sansgpu.models.family import LOGIT_SOFTCAP, SLIDING_WINDOW, OlderRope, windows

FAMILY = replace(
    gemma2.FAMILY,
    title="Gemma 3",
    model_class="Gemma3ForCausalLM",
    fixed={"use_bidirectional_attention": False},
    gguf_name="gemma3",
    gguf_settings=SLIDING_WINDOW,
    gguf_optional=LOGIT_SOFTCAP,
    gguf_layers=windows(6),
    gguf_local_rope=True,
    gguf_local_theta=10_000.0,
    older_rope=OlderRope(local_theta="rope_local_base_freq"),
)
