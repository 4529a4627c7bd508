"""Reproducible benchmarks for the claims in the documentation: sansgpu and its peers on one machine."""
