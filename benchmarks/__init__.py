"""Reproducible benchmarks for the claims in the README: sansgpu and its peers on one machine."""
