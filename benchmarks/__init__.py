"""Reproducible benchmarks for the claims in the documentation, which compare sansgpu with its peers on one machine."""
