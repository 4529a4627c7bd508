"""Trains encoders on texts and knowledge graphs."""
