"""Estimates what a run costs and chooses how it is executed."""
