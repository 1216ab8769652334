"""Analyses of a model with memories.

They show which slots are retrieved and how evenly, how the loss of a text grows without a chapter or an added part, how far
predictions moved, and what heads read of the depth.
"""
