"""Write what a run leaves: its folder, checkpoints and model card, from which it goes on."""
