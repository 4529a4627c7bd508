"""What this machine is and can do. The only room that reads the environment."""
