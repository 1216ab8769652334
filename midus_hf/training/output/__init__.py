"""What a run writes: its folder, checkpoints, model card, and how it goes on from these."""
