"""Topics of texts: trees of clusters, the path of a text in a tree, embeddings, and the documents nearest to a text."""

from midus_hf.retrieval.answering import FetchingPipeline
from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.memory_retriever import MemoryRetriever
from midus_hf.retrieval.nearest_documents import NearestDocuments, cut_into_passages
from midus_hf.retrieval.tree_files import TreeOrigin

__all__ = [
    "ClusterTree",
    "FetchingPipeline",
    "MemoryRetriever",
    "NearestDocuments",
    "TextEmbedder",
    "TreeOrigin",
    "cut_into_passages",
]
