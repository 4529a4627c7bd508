from sansgpu.models.family import Family, renamed

FAMILY = Family(older_settings=renamed(bos_index="bos_token_id", eos_index="eos_token_id", pad_index="pad_token_id"))
