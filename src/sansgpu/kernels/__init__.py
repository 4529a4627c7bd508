"""What makes a step fast, each beside the plain code it is held to."""
