"""Fine-tunes a model with LoRA and writes the adapter for peft. Usage: lora.py [FOLDER or name on the Hub]."""

import sys

import sansgpu

base = sys.argv[1] if len(sys.argv) > 1 else "runs/pretrain/final"  # written by pretrain.py
run = sansgpu.fit(
    {
        "task": "sft",
        "model": {"name_or_path": base, "adapter": "lora", "lora_rank": 8, "merge_adapter": False},
        "training": {
            "batch_size": 4,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.01,
            "max_steps": 30,
            "report_to": "none",
        },
        "data": {
            "dataset_name": "examples/conversations.jsonl",
            "chat_template": "simple",  # only for models without a chat template
            "max_length": 64,
            "validation_split": 0.1,
        },
    },
    "runs/lora",
)
print(run)
print(f"peft loads the adapter with AutoPeftModelForCausalLM.from_pretrained('{run.folder}/final')")
