from sansgpu.models.family import TINY_LATENT, Family

FAMILY = Family(title="MiniCPM3", tiny=TINY_LATENT)
