"""Trains TransformerLM in a plain torch loop: called with labels, it returns loss and logits like transformers."""

from pathlib import Path

import torch

from sansgpu.config import ModelConfig
from sansgpu.models import TransformerLM
from sansgpu.models.formats.decoder_folder import export_model
from sansgpu.models.generation.generate import generate
from sansgpu.models.generation.sampling import Sampling
from sansgpu.tokenizer import BPETokenizer

WINDOW, ROWS, STEPS = 64, 8, 40
texts = [path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md"))]
tokenizer = BPETokenizer.train(texts, 512)
tokens = torch.tensor(tokenizer.encode("\n".join(texts)))

model = TransformerLM(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=64, n_layers=2, n_heads=2, d_ff=192), seed=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
draw = torch.Generator().manual_seed(1)
for step in range(1, STEPS + 1):
    starts = torch.randint(len(tokens) - WINDOW, (ROWS,), generator=draw)
    input_ids = torch.stack([tokens[start : start + WINDOW] for start in starts])
    output = model(input_ids, labels=input_ids)  # labels are shifted inside; -100 is ignored
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: loss {output.loss.item():.3f}")

print("".join(generate(model, tokenizer, "A run is", 20, Sampling(seed=1))))
export_model(model, tokenizer, Path("runs/own-loop"))  # AutoModelForCausalLM loads this folder
