"""Topics of texts: windows and embeddings of documents, trees of clusters, and paths of texts."""
