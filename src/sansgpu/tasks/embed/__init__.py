"""Text embeddings: vectors that are similar for texts of similar meaning."""
