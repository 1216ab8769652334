"""Which tokens of a text read the packs of its names, in one pass and in steps."""

import pytest
from evaluation.byte_models import byte_tokenizer

from midus_hf.memories.packs.glossary import Entry, Glossary
from midus_hf.memories.packs.opening import OpeningTracker, RowState, readings_of
from midus_hf.memories.packs.options import PacksOptions


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("- iron: 26\n- gold", "n: 26"),
        ("iron: 26\niron is", "n: 26n is"),
        ("iron\nIts number is 26.\nNext", "n\nIts number is 26."),
        ("iron\n\n- 26\nNext", "n\n\n- 26"),
        ("iron?<eos>\n<bos>x\nIt is a metal.\nNext", "n?<eos>\n<bos>x\nIt is a metal."),
        ("iron" + "." * 20 + "\nNext\nx", "n" + "." * 20 + "\nNext"),
    ],
    ids=["a list", "a name again", "a name as a heading", "a blank line", "a chat template", "a line of dots"],
)
def test_a_pack_is_open_to_the_end_of_the_line_in_which_something_follows_its_name(text, read):
    tokenizer = byte_tokenizer()
    glossary, options = Glossary(tokenizer, [Entry(("iron",), "a metal")]), PacksOptions()
    ids = tokenizer(text)["input_ids"]
    readings, _ = readings_of(OpeningTracker(glossary, options), ids, range(len(ids)), None)
    whole = [at for each in readings for at in range(each.start, each.stop)]
    steps, before = [], RowState()
    for at, token in enumerate(ids):
        row = OpeningTracker(glossary, options, before)
        row.read_before(ids[max(0, at - glossary.lookback_tokens) : at], at)
        row.read(token, at)
        steps += [at] if row.pack() else []
        before = row.state
    assert tokenizer.decode([ids[at] for at in whole]) == read and steps == whole
