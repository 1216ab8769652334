"""Read documents from a file or a folder."""

import json
from pathlib import Path

_SUFFIXES_IN_FOLDER = (".txt", ".md", ".jsonl")


def read_documents(path: str | Path) -> list[str]:
    """Read text to be measured.

    Args:
        path: A text file, which is one document; a file of JSON lines (`.jsonl`), each a document in the field `text`;
            or a folder, whose `.txt`, `.md` and `.jsonl` files, those of its subfolders included, are read in the
            order of their paths.

    Returns:
        The documents that hold anything but white space; at least one.

    Raises:
        ValueError: If the path does not exist, holds no document, or is not UTF-8 text.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix in _SUFFIXES_IN_FOLDER and not file.name.startswith(".") and file.is_file()
        )
        if not files:
            raise ValueError(f"{path} holds no text; expected {', '.join(_SUFFIXES_IN_FOLDER)} files in it.")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"text is {str(path)!r}, which does not exist; expected a text file or a folder of them.")
    documents = [document for file in files for document in _read_file(file) if document.strip()]
    if not documents:
        raise ValueError(f"{path} is empty; expected text.")
    return documents


def _read_file(path: Path) -> list[str]:
    text = _read_text(path)
    return _json_lines(path, text) if path.suffix == ".jsonl" else [text]


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if "\0" in text:
        raise ValueError(f"{path} is not text: it holds a zero byte.")
    return text


def _json_lines(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f"{path} line {number} is no JSON object with a string 'text'.")
            documents.append(row["text"])
    return documents
