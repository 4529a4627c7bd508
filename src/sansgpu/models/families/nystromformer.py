from sansgpu.models.family import TINY_MHA, Family

FAMILY = Family(
    title="Nyströmformer",
    is_encoder=True,
    tiny={**TINY_MHA, "num_landmarks": 64, "segment_means_seq_len": 64},
)
