"""Mamba, whose layers all are selective scans."""

from sansgpu.models.family import Family, LayerTypes, Layout, Settings

# llama.cpp stores the rates of decay themselves, and transformers their logarithms.
RATES = Layout(lambda logs: -logs.exp(), lambda rates: (-rates).log())
PRECISE = (".ssm_conv1d.weight", ".ssm_a", ".ssm_d")  # llama.cpp's names
SQUEEZED = {".conv1d.weight": 1}  # (channels, 1, width)


def mixer_weights(mixer: str) -> dict[str, str]:
    """Returns `gguf_weights` of the Mamba layers that are modules with the name `mixer`."""
    return {f"{mixer}.A_log": "blk.{}.ssm_a", f"{mixer}.D": "blk.{}.ssm_d"}


def write_layers(settings: Settings) -> dict[str, int]:
    """Returns metadata that llama.cpp requires although they mean nothing to models without attention."""
    return {"{arch}.context_length": 2**20, "{arch}.feed_forward_length": 0, "{arch}.attention.head_count": 0}


def mixer_layout(name: str, settings: Settings) -> Layout | None:
    return RATES if name.endswith(".A_log") else None


_MIXER = "backbone.layers.{}.mixer"
FAMILY = Family(
    title="Mamba",
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    model_class="MambaForCausalLM",
    prefix="backbone.",
    modules={
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "head": "lm_head",
        "blocks.{}.norm": "backbone.layers.{}.norm",
        "blocks.{}.mixer.in": f"{_MIXER}.in_proj",
        "blocks.{}.mixer.convolution": f"{_MIXER}.conv1d",
        "blocks.{}.mixer.inputs": f"{_MIXER}.x_proj",
        "blocks.{}.mixer.steps": f"{_MIXER}.dt_proj",
        "blocks.{}.mixer.out": f"{_MIXER}.out_proj",
    },
    sizes={
        "d_model": ("hidden_size", "{arch}.embedding_length"),
        "n_layers": ("num_hidden_layers", "{arch}.block_count"),
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_rms_epsilon"),
    defaults=lambda settings: {"hidden_act": "silu", "tie_word_embeddings": True},
    fixed={"use_bias": False, "use_conv_bias": True, "expand": 2},
    rotary=False,
    gguf_activations=("silu",),
    gguf_settings={
        "conv_kernel": "{arch}.ssm.conv_kernel",
        "state_size": "{arch}.ssm.state_size",
        "intermediate_size": "{arch}.ssm.inner_size",
        "time_step_rank": "{arch}.ssm.time_step_rank",
    },
    gguf_layers=LayerTypes(write_layers, lambda value_of, layers: {}),
    gguf_weights=mixer_weights(_MIXER),
    gguf_layout=mixer_layout,
    gguf_squeezed=SQUEEZED,
    gguf_precise=PRECISE,
    # peft refuses an adapter on out_proj, and one on dt_proj would get no gradient.
    lora_excludes=("out_proj", "dt_proj"),
)
