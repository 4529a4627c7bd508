"""Mamba, a state space model."""

from sansgpu.models.family import Family

# Mixers use the weights of these layers directly: peft refuses an adapter on out_proj, and one on dt_proj would get no
# gradient.
READ_DIRECTLY = ("out_proj", "dt_proj")
FAMILY = Family(
    title="Mamba", tiny={"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, read_directly=READ_DIRECTLY
)
