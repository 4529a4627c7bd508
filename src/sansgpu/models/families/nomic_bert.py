from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(title="NomicBERT", is_encoder=True, tiny=TINY_MHA, gguf_name="nomic-bert")
