"""What happened, to whom it may concern: files, terminal, TensorBoard. A failing sink never stops training."""
