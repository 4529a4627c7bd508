"""Classifies texts, or predicts a number for each."""
