"""What the memories of a model do: which slots they retrieve and how evenly, what a text loses without a chapter or
without what was added, how far predictions moved, and what heads read of the depth."""
