"""What a person asks for: options, sizes, errors, progress."""
