"""How tensors are made: recipes, solvers, and the writer that streams them."""
