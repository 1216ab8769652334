"""What the memories of a model do: which slots they retrieve and how evenly, what a text loses without a chapter, and what
heads read of the depth."""
