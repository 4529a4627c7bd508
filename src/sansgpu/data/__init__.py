"""Text -> batches. A batch is a pure function of the seed and the step."""
