"""The main job on a real checkpoint: upscale, train, evaluate, report. Not part of the distribution."""
