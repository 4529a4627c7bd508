"""Support for transformers models: loading, faster layers, packing, LoRA, quantized weights and ONNX."""
