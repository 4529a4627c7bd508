"""Processes of one run: how they find each other, their collectives, and what these cost."""
