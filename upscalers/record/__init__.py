"""What is written down of an upscaling: provenance, card, report."""
