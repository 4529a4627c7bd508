from sansgpu.models.family import TINY_CONTEXT, Family, PreTokenizer

SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FAMILY = Family(
    title="GPT-2",
    tiny={"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": TINY_CONTEXT},
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
        "blocks.{}.feed_forward_norm": "transformer.h.{}.ln_2",
        "blocks.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.o": "transformer.h.{}.attn.c_proj",
        "blocks.{}.feed_forward.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.feed_forward.down": "transformer.h.{}.mlp.c_proj",
    },
    transposed=("c_attn", "c_proj", "c_fc"),
    sizes={
        "d_model": ("n_embd", "{arch}.embedding_length"),
        "n_heads": ("n_head", "{arch}.attention.head_count"),
        "n_layers": ("n_layer", "{arch}.block_count"),
        "d_ff": ("n_inner", "{arch}.feed_forward_length"),
        "max_seq_len": ("n_positions", "{arch}.context_length"),
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_epsilon"),
    activation_key="activation_function",
    activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"},
    defaults=lambda settings: {
        "n_inner": 4 * settings["n_embd"],
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    gguf_activations=("gelu_new", "gelu_pytorch_tanh"),
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    dropouts={"embd_pdrop": "dropout", "resid_pdrop": "dropout", "attn_pdrop": "attention_dropout"},
    rotary=False,
    gguf_precise=("position_embd.weight",),
    pre_tokenizers={"gpt-2": PreTokenizer((SPLIT,))},
)
