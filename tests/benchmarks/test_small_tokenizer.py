"""A small tokenizer is trained once, loses nothing, and ends texts with token 0."""

from transformers import AutoTokenizer

from benchmarks.small_tokenizer import small_tokenizer


def test_a_tokenizer_is_trained_once_and_loses_nothing(tmp_path):
    folder = small_tokenizer(tmp_path / "tokenizer", ["one two two two", "two three"], 260)
    made = (folder / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 260 and tokenizer.eos_token_id == 0
    text = "two, \n\n zwölf"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    small_tokenizer(folder, ["other words"], 259)
    assert (folder / "tokenizer.json").read_bytes() == made
