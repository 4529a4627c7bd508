"""Event sinks (files, terminal, TensorBoard), reports and result tables. A failing sink never stops training."""
