from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(title="Jina Embeddings v3", is_encoder=True, tiny=TINY_MHA)
