"""How anything lands on the disk: whole or not at all, under locks, and in the place of nothing that a person put there."""
