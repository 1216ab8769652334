"""What memories that retrieve slots have in common."""
