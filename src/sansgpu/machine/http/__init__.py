"""Web servers on this machine: who may connect, how many connections are open, and how a server ends."""
