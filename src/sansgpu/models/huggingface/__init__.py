"""Support for transformers models: loading, faster layers, packing, LoRA and quantized weights."""
