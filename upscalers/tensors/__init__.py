"""The making of tensors: recipes, solvers, and the writer that streams tensors."""
