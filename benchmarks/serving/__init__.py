"""The use of trained models: generated texts, vectors, evaluations and servers."""
