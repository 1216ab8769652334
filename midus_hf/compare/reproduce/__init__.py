"""Tables of papers as comparisons: each row is a variant, and the paper's numbers stand beside ours."""
