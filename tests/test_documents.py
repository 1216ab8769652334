"""Reading the text that is measured."""

import pytest

from midus_hf.evaluation.documents import read_documents


def test_a_file_is_one_document(tmp_path):
    (tmp_path / "a.utf8").write_text("one\n\ntwo ü\n", encoding="utf-8")
    assert read_documents(tmp_path / "a.utf8") == ["one\n\ntwo ü\n"]


def test_a_folder_is_its_text_files_in_order_of_their_paths(tmp_path):
    for name in ("b/z.txt", "a.md", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "code.py").write_text("not text")
    (tmp_path / ".hidden.txt").write_text("not shown")
    assert read_documents(tmp_path) == ["a.md", "b/z.txt", "c.txt"]


def test_json_lines_are_a_document_each(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert read_documents(tmp_path / "rows.jsonl") == ["one", "two"]


def test_documents_of_white_space_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_text("words")
    assert read_documents(tmp_path) == ["words"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert read_documents(tmp_path / "a.txt") == ["words"]


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"text is '.*absent', which does not exist; expected a text file or a folder"
    ):
        read_documents(tmp_path / "absent")


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text; expected \.txt, \.md, \.jsonl files in it"):
        read_documents(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"a\.txt is empty; expected text"):
        read_documents(tmp_path / "a.txt")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text \(byte 1\); convert it first"):
        read_documents(tmp_path / "latin.txt")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    with pytest.raises(ValueError, match="is not text: it holds a zero byte"):
        read_documents(tmp_path / "zero.txt")


@pytest.mark.parametrize("line", ["no json", '{"txt": "x"}', '{"text": 3}', '["text"]'])
def test_json_lines_without_text_are_refused(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is no JSON object with a string 'text'"):
        read_documents(tmp_path / "rows.jsonl")
