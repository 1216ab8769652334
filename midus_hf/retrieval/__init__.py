"""Which topics a text is about: trees of clusters, the path of a text in one, and the embeddings that paths are found by."""

from midus_hf.retrieval.answering import FetchingPipeline
from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.memory_retriever import MemoryRetriever
from midus_hf.retrieval.tree_files import TreeOrigin

__all__ = ["ClusterTree", "FetchingPipeline", "MemoryRetriever", "TextEmbedder", "TreeOrigin"]
