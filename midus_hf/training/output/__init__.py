"""Write the output of a run: its folder, checkpoints and model card, from which the run can resume."""
