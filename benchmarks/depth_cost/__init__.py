"""Cost that attention to the depth adds to attention to the sequence, at the shapes of the paper."""
