"""Clustering a corpus into a tree of topics: windows, their embeddings, hierarchical k-means, and a report of the result."""
