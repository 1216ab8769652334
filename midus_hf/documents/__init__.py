"""Reading documents from text files, JSON lines and Parquet, compressed or not, and from folders of them."""

from midus_hf.documents.document_reading import (
    RowPlace,
    document_rows,
    has_column,
    iterate_documents,
    json_line_rows,
    parquet_rows,
    read_documents,
    rows_of,
    text_of_row,
)
from midus_hf.documents.text_files import (
    DocumentError,
    codec_of,
    describe_files,
    endings,
    find_files,
    first_line,
    import_datasets,
    is_compressed,
    is_text_name,
    read_text,
    walk_files,
)

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
