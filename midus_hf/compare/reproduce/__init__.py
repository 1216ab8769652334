"""Tables of papers as comparisons: a row is an arm, and the paper's number stands beside ours."""
