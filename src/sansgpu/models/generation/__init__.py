"""Text generation: the key-value cache, sampling, and the loop over many sequences."""
