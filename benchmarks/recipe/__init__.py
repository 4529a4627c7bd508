"""How good a model becomes in a given time or number of steps."""
