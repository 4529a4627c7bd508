"""Model file formats: safetensors, Hugging Face folders, GGUF, and Ollama's Modelfiles."""
