"""Model file formats: safetensors, Hugging Face folders, GGUF and ONNX."""
