"""What the machine has: processors and free memory."""
