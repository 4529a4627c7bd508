"""Pretrains a decoder from scratch."""
