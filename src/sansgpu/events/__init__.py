"""What happened in a run: events, the sinks that receive them, JSON lines, and requests to a running loop."""
