from sansgpu.models.families import modernbert
from sansgpu.models.family import Family

FAMILY = Family(
    model_type="modernbert-decoder",
    older_rope=modernbert.FAMILY.older_rope,
    older_settings=modernbert.FAMILY.older_settings,
)
