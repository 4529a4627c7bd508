"""Fine-tuning of pretrained models: speed, memory and quality beside the libraries that do the same."""
