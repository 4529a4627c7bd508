"""Static embeddings: one vector per token, and the mean of its tokens' vectors for a text."""
