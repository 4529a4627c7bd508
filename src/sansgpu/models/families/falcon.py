from sansgpu.models.family import Family

FAMILY = Family(title="Falcon", tiny={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
