"""Reads datasets and builds batches. A batch is a pure function of the seed and the step."""
