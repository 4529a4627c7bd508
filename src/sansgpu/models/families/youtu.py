from sansgpu.models.family import TINY_LATENT, Family

FAMILY = Family(title="Youtu", tiny=TINY_LATENT)
