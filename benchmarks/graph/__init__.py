"""Graph encoders."""
