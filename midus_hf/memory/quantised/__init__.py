"""Tables of values whose rows are integers with a scale each: how they are made and how their rows are read."""
