"""Fast CPU kernels, each with a plain reference implementation that tests compare it to."""
