"""Training with several processes or hosts."""
