"""Pretrains a small BERT on texts and fine-tunes it for extractive question answering on them."""

import json
from pathlib import Path

import sansgpu

CITIES = {"Paris": "France", "Rome": "Italy", "Madrid": "Spain", "Berlin": "Germany", "Vienna": "Austria"}
folder = Path("runs/qa-data")
folder.mkdir(parents=True, exist_ok=True)
texts = [f"{city} is the capital of {country} and its largest city." for city, country in CITIES.items()]
(folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 8))
paragraphs = []  # in the format of SQuAD
for text, (city, country) in zip(texts, CITIES.items(), strict=True):
    answer = {"text": city, "answer_start": text.index(city)}
    question = {"id": city, "question": f"What is the capital of {country}?", "answers": [answer]}
    paragraphs.append({"context": text, "qas": [question]})
squad = {"version": "1.1", "data": [{"title": "Capitals", "paragraphs": paragraphs}]}
(folder / "squad.json").write_text(json.dumps(squad))

short = {
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 30,
    "learning_rate": 0.002,
    "report_to": "none",
}
bert = {"leaves": 0, "decay": "none", "position_embedding": "learned", "embedding_norm": True}  # BERT's architecture
pretrained = sansgpu.fit(
    {
        "task": "graph",
        "model": {**bert, "d_model": 64, "n_heads": 2, "n_layers": 2, "d_ff": 128, "max_seq_len": 64},
        "training": short,
        "data": {"dataset_name": str(folder / "texts.jsonl"), "vocab_size": 400, "validation_split": 0.2},
    },
    "runs/qa-bert",
)
run = sansgpu.fit(
    {
        "task": "qa",
        "model": {"name_or_path": str(pretrained.folder / "final")},
        "training": short,
        "data": {
            "dataset_name": str(folder / "squad.json"),
            "validation_name": str(folder / "squad.json"),
            "max_length": 64,
            "doc_stride": 16,
        },
    },
    "runs/qa",
)
print(run)
print("answers:", (run.folder / "predictions.json").read_text())
