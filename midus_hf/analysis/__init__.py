"""What the memories of a model do: which slots they retrieve and how evenly, and what a text loses without a chapter."""
