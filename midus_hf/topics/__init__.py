"""Topics of texts: documents, their windows and embeddings, trees of clusters, and the path of a text in a tree."""
