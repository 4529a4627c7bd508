"""The events of a run: the sinks that receive them, JSON lines, and requests to a running loop."""
