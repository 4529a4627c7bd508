from sansgpu.models.family import Family

FAMILY = Family(
    title="Mamba",
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    # peft refuses an adapter on out_proj, and one on dt_proj would get no gradient.
    lora_excludes=("out_proj", "dt_proj"),
)
