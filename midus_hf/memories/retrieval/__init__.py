"""Code shared by memories that retrieve slots."""
