"""Trains on preferences: chosen and rejected, or rated answers."""
