"""Files of models: safetensors, Hugging Face folders, GGUF and ONNX."""
