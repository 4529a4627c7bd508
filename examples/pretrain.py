"""Trains a small decoder on a folder of documents and continues a prompt with it."""

import sansgpu
from sansgpu.config import Config, DataConfig, ModelConfig, TrainingConfig

config = Config(
    model=ModelConfig(d_model=64, n_heads=2, n_layers=2, d_ff=192, max_seq_len=64),
    training=TrainingConfig(batch_size=4, gradient_accumulation_steps=2, max_steps=40, warmup_steps=5),
    data=DataConfig(dataset_name="docs", vocab_size=512),  # a file, a folder of documents or a Hub dataset
)
config.training.seed = 7  # values can also be assigned

run = sansgpu.fit(config, "runs/pretrain")
print(run)
print(run.generate("A run is", max_new_tokens=20, seed=1))
