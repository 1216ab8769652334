"""What the memories of a model do with a text: which slots they retrieve, and how evenly."""
