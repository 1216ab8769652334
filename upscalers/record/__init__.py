"""Records of an upscaling: provenance, model card, report."""
