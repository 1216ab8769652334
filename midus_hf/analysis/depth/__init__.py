"""What heads read of the depth."""
