"""Reading documents from text files, JSON lines and Parquet, compressed or not, and from folders of them."""

from midus_hf.documents.document_error import DocumentError, first_line, import_datasets
from midus_hf.documents.document_reading import document_rows, iterate_documents, read_documents
from midus_hf.documents.file_rows import RowPlace, has_column, json_line_rows, parquet_rows, rows_of, text_of_row
from midus_hf.documents.file_text import codec_of, read_text
from midus_hf.documents.text_files import describe_files, endings, find_files, is_compressed, is_text_name, walk_files

__all__ = [
    "DocumentError",
    "RowPlace",
    "codec_of",
    "describe_files",
    "document_rows",
    "endings",
    "find_files",
    "first_line",
    "has_column",
    "import_datasets",
    "is_compressed",
    "is_text_name",
    "iterate_documents",
    "json_line_rows",
    "parquet_rows",
    "read_documents",
    "read_text",
    "rows_of",
    "text_of_row",
    "walk_files",
]
