"""Glossaries: rows that are entries, files, and entries that are added, removed and replaced by any form of a name."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.pack_models import tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from midus_hf.anatomy.record import iter_recorded_options
from midus_hf.memories.packs.glossary import Entry, Glossary, entry_of, joined, read_glossary, write_glossary
from midus_hf.memories.packs.names import find_names
from midus_hf.memories.packs.opening import OpeningTracker, readings_of
from midus_hf.memories.packs.options import PacksOptions

IRON = Entry(("Iron ore", "Fe"), "A metal.")
WRONG_ROWS = [
    ({"name": " ", "text": "x"}, "the name ' '; expected a name, or a list of names. Write one"),
    ({"name": [], "text": "x"}, "the name []; expected a name"),
    ({"name": ["a", 3], "text": "x"}, "the name ['a', 3]; expected a name"),
    ({"name": "a"}, "the text None; expected what is to be known of 'a'. Write it"),
    ({"name": "a", "text": "x", "exact": "true"}, "exact = 'true'; expected true or false"),
    ({"name": "a; b", "text": "x"}, "'a; b'; did you mean several names? Expected a list"),
    ({"name": '["a", "b"]', "text": "x"}, "did you mean several names?"),
    ({"name": "a\x00b", "text": "x"}, "the name 'a\\x00b', which no text can have; expected characters that"),
    ({"name": "\u200b", "text": "x"}, "which no text can have"),
    ({"name": "a\udc80b", "text": "x"}, "which no text can have"),
    (
        {"name": "a", "text": "x\ud800"},
        "'x\\ud800', with an unpaired surrogate; expected whole characters. Write it again",
    ),
]


@pytest.mark.parametrize(("row", "message"), WRONG_ROWS, ids=str)
def test_wrong_rows_are_refused(row, message):
    with pytest.raises(ValueError) as refused:
        entry_of(row, "row 1")
    assert message in str(refused.value)


def test_entry_has_each_name_once_as_given():
    assert entry_of({"name": " a b ", "text": " x "}, "row 1") == Entry(("a b",), " x ")
    assert entry_of({"name": ["a", "b", "a"], "text": "x", "exact": True}, "row 1") == Entry(("a", "b"), "x", True)


def rows_of(*entries):
    return [(f"row {number}", entry) for number, entry in enumerate(entries, 1)]


def test_rows_with_the_same_names_are_joined():
    again = Entry(("Fe", "Iron ore"), "Heavy.")
    entries, repeated = joined(rows_of(IRON, again, IRON))
    assert entries == {"row 1": IRON._replace(text="A metal.\nHeavy.")}
    assert repeated == 1


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (IRON, Entry(("iron ore",), "A rock."), "iron ore"),
        (Entry(("Apple",), "A fruit."), Entry(("Apple",), "A firm.", True), "Apple"),
        (Entry(("Apple",), "A fruit."), Entry(("Mac", "APPLE"), "A firm."), "APPLE"),
        (Entry(("a_b c",), "A table."), Entry(("a-b_c",), "A queue."), "a-b_c"),
    ],
    ids=str,
)
def test_name_of_two_entries_is_refused(first, second, name):
    with pytest.raises(ValueError, match=f"row 2 has the name {name!r}, .* of row 1; expected names that find one"):
        joined(rows_of(first, second))
    with pytest.raises(ValueError, match=f"row 2 has the name {first.names[0]!r}"):
        joined(rows_of(second, first))
    glossary = Glossary(tiny_tokenizer(), [first])
    with pytest.raises(ValueError, match=f"the name {name!r}, which finds the entry {first.names[0]!r}"):
        glossary.add(second.names, second.text, exact=second.exact)
    assert [*glossary] == [first]


def test_exact_names_in_other_case_are_two_entries():
    cased = [Entry(("Mercury",), "A planet.", True), Entry(("mercury",), "A metal.", True), Entry(("He",), "A gas.")]
    assert [*joined(rows_of(*cased, Entry(("HE",), "Explosive.")))[0].values()][:3] == cased
    separated = [Entry(("a_b",), "A table.", True), Entry(("a-b",), "A queue.", True)]
    assert [*joined(rows_of(*separated))[0].values()] == separated


def test_one_entry_may_have_equal_names():
    entry = Entry(("Iron ore", "iron ore", "IRON ORE"), "A metal.")
    glossary = Glossary(tiny_tokenizer(), joined(rows_of(entry))[0].values())
    assert {found.entry for found in find_names(glossary.index, "In IRON ORE.")} == {1}
    glossary.remove("iron ore")
    assert not glossary.index.by_folded


def test_glossary_file_reads_as_written(tmp_path):
    entries = [IRON, Entry(("Café",), "Line.\nAnother\u2028one.", True)]
    write_glossary(tmp_path, entries)
    assert read_glossary(tmp_path) == entries
    first = (tmp_path / "glossary.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert first == '{"name": ["Iron ore", "Fe"], "text": "A metal."}'
    row = '{"name": "a b", "text": "x"}'  # as written by hand
    (tmp_path / "glossary.jsonl").write_text(f"\ufeff{row}\r\n\n  \n", encoding="utf-8")
    assert read_glossary(tmp_path) == [Entry(("a b",), "x")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no glossary.jsonl in .*; expected one next to the weights"),
        ('{"name": "a", "text": "x"}\n{', r"line 2 of .*glossary.jsonl is no JSON \(.*\); expected a name and a text"),
        ("[1]\n", r"line 1 of .* is \[1\]; expected a name and a text. Copy the file again."),
        ('{"name": "a", "text": ""}\n', r"line 1 of .*glossary.jsonl has the text ''"),
    ],
)
def test_other_files_are_refused_as_glossary(content, message, tmp_path):
    if content is not None:
        (tmp_path / "glossary.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_glossary(tmp_path)


def test_entries_change_by_any_form_of_a_name():
    glossary = Glossary(tiny_tokenizer(), [IRON])
    glossary.add(["New York", "Big Apple"], "A city.")
    glossary.replace("New\u00a0 York", "A large city.")
    assert [*glossary] == [IRON, Entry(("New York", "Big Apple"), "A large city.")]
    assert glossary.remove("iron  ore", "Fe") == [IRON]
    assert len(glossary) == 1
    assert [found.entry for found in find_names(glossary.index, "Fe, Iron ore and the Big Apple")] == [3]


def test_name_removes_all_entries_it_finds():
    """A file that was written by hand may have several."""
    entries = [Entry(("Merlin",), "A cache."), Entry(("Merlin", "Old bird"), "A bird.", True), IRON]
    glossary = Glossary(tiny_tokenizer(), entries)
    with pytest.raises(ValueError, match="names of 2 entries, 'Merlin', 'Merlin'; expected names of one"):
        glossary.replace("Merlin", "x")
    assert glossary.remove("Merlin") == entries[:2]
    assert [*glossary] == [IRON]
    assert not glossary.opened(glossary.spelling.ids("The Merlin is an Old bird."))


REPLACED = {
    "a new name first": ({"names": ["Ferrum", "IRON ORE"]}, Entry(("Iron ore", "Fe", "Ferrum"), "Heavy.")),
    "exact": ({"names": ["IRON ORE", "Fe"], "exact": True}, Entry(("Iron ore", "Fe", "IRON ORE"), "Heavy.", True)),
    "neither": ({"names": ["Fe", "iron ore"]}, Entry(("Iron ore", "Fe"), "Heavy.")),
}


@pytest.mark.parametrize("case", REPLACED)
def test_row_replaces_all_of_an_entry(case):
    row, expected = REPLACED[case]
    glossary = Glossary(tiny_tokenizer(), [IRON])
    glossary.replace(**row, text="Heavy.")
    assert [*glossary] == [expected]
    glossary.replace("Fe", "Light.")
    assert [*glossary] == [expected._replace(text="Light.")]


def test_wrong_row_changes_nothing():
    glossary = Glossary(tiny_tokenizer(), [IRON, Entry(("York",), "A city.")])
    before = [*glossary]

    def replace(*names):
        rows = [(f"row {at}", {"name": name, "text": str(at)}) for at, name in enumerate(names, 1)]
        glossary.change(rows, replaces=True)

    for names, message in (
        (["Fe", ["York", "Iron ore"]], "row 2 has names of 2 entries, 'York', 'Iron ore'; expected names of one"),
        (["Fe", ["York", "Lead"], ["Fe", "lead"]], "row 3 has the name 'Iron ore', which would also find"),
        (["Fe", "zinc"], "no entry has the name 'zinc'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(*names)
        assert [*glossary] == before, names
    replace("Fe", "Iron ore")
    assert [*glossary] == [before[1], IRON._replace(text="1\n2")]


@pytest.mark.parametrize("change", [lambda each: each.add("a b", "x" * 9), lambda each: each.replace("Fe", "x" * 9)])
def test_text_longer_than_what_is_read_warns(change):
    glossary = Glossary(tiny_tokenizer(), [IRON], options=PacksOptions(max_tokens=8))
    with pytest.warns(UserWarning, match="^entries longer than 8 tokens, whose rest is not read: 1$"):
        change(glossary)


def test_new_names_end_the_record_of_protected_texts():
    glossary = Glossary(tiny_tokenizer(), [IRON])
    within = {"method": "packs", "options": {"protect": "texts.jsonl"}}
    recorded = {"method": "moc", "options": {}, "base_config": {"upscale": within}}
    glossary.recorded = [*iter_recorded_options(recorded, "packs")]
    with warnings.catch_warnings(action="error"):
        glossary.replace(["Fe", "iron ore"], "x", exact=True)
        glossary.remove("Iron ore")
    assert within["options"] == {"protect": "texts.jsonl"}
    with pytest.warns(UserWarning, match=r"\(texts.jsonl\) are not checked against the new names; the model no"):
        glossary.add("a b", "x")
    assert within["options"] == {"protect": None}
    with warnings.catch_warnings(action="error"):
        glossary.add("c d", "x")


WRONG_CHANGES = [
    ("add", "iron ore", "x", "'iron ore', which finds the entry 'Iron ore'; expected a new name. Replace"),
    ("add", "a;b", "x", "the new entry has the name 'a;b'; did you mean several names?"),
    ("add", "Łódź", "x", "the name 'Łódź', which the model's tokens do not spell"),
    ("add", "a b", "ö" * 99, f"the text '{'ö' * 60}...', which the model's tokens do not spell"),
    ("add", ["a b", "Q"], "x", "or frequent words, which almost every text has: 'Q'; expected"),
    ("replace", ["Fe", "Q"], "x", "frequent words, which almost every text has: 'Q'"),
    ("add", "a <S> b", "x", "finds the special token '<s>', which is not text to the model; expected"),
    ("add", "a b", "of <s>", "the text 'of <s>', in which the tokenizer finds the special token"),
    ("remove", "fe", None, "no entry has the name 'fe'; did you mean 'Iron ore'?"),
    ("replace", "zinc", "x", "no entry has the name 'zinc'; expected a name of the glossary."),
    ("replace", "Fe", " ", "the text ' '; expected what is to be known of 'Fe'"),
]


@pytest.mark.parametrize(("change", "names", "text", "message"), WRONG_CHANGES)
def test_refused_changes_change_nothing(change, names, text, message):
    glossary = Glossary(tiny_tokenizer(), [IRON])
    with pytest.raises(ValueError) as refused:
        getattr(glossary, change)(names, *([] if text is None else [text]))
    assert message in str(refused.value)
    assert [*glossary] == [IRON]
    assert [found.entry for found in find_names(glossary.index, "Fe")] == [1]


def test_named_and_linked_entries_are_in_text_order():
    entries = [IRON, Entry(("York",), "Near Iron ore."), Entry(("New York",), "Of York, New York and Fe, Iron ore.")]
    glossary = Glossary(tiny_tokenizer(), entries)

    def named(text):
        return glossary.named(glossary.spelling.ids(text))

    assert named("New York, iron ore, York, Fe") == [3, 1, 2]
    assert named("New Yorkers York") == [2]
    assert named("") == []
    assert [glossary.linked(number) for number in (1, 2, 3)] == [(), (1,), (2, 1)]
    glossary.remove("Fe")
    assert [glossary.linked(number) for number in (1, 2, 3)] == [(), (), (2,)]


def test_names_with_an_s_are_found_unless_taken():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" Leads"])
    glossary = Glossary(tokenizer, [Entry(("Lead",), "x"), Entry(("Old bird",), "x"), Entry(("old_b_c",), "x")])

    def ids(text):
        return glossary.spelling.ids(text)

    assert glossary.named(ids("leads of old-birds and old b c")) == [2, 3]
    forms = {"Old-birds": 2, "old birds": 2, "old b c": 3}
    assert glossary.forms(ids("Old-birds, old birds, OLD BIRD, leads, old b c")) == forms
    assert not glossary.opened(ids("of leads is"))[1:]
    glossary.add("Old birds", "y")
    assert glossary.named(ids("old-birds")) == [4]
    assert glossary.forms(ids("old-birds old birds")) == {"old-birds": 4}
    glossary.remove("old_birds")
    assert glossary.named(ids("old birds")) == [2]
    assert glossary.remove("OLD BIRDS") == [Entry(("Old bird",), "x")]


def test_open_at_end_needs_the_glossary_of_a_model():
    with pytest.raises(ValueError, match=r"of no model, .*; expected model.glossary after from_pretrained"):
        Glossary(tiny_tokenizer(), [IRON]).open_at_end([1])


def test_similar_names_are_suggested():
    glossary = Glossary(tiny_tokenizer(), [IRON, Entry(("New York",), "A city.")])
    assert glossary.suggest_names("Where is Nev York?") == ["New York"]
    assert glossary.suggest_names("What is it?") == []


NAMES = ["Ann", "19", "lead", "New York", "York", "C++", "gate-way", "京"]
PARTS = [*NAMES, "Annapolis", "1970", "leads", "lead\u0301", "New Yorkers", "apolis", "70", "s", "New", "\n", " ", " "]
PARTS += [".", "(", "the"]


def _trained(pattern, metaspace=False):
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=metaspace))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.Sequence([split, bytes_])
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.decoder = spaces if metaspace else decoders.ByteLevel()
    every = [f"<0x{number:02X}>" for number in range(256)] if metaspace else []
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    sizes = {"vocab_size": 340, "special_tokens": ["<unk>", *every], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**sizes, show_progress=False)
    tokenizer.train_from_iterator([" ".join(PARTS), "(Ann) lead, New York."] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


# As GPT-2, Llama 3 and Llama 2 split text before they merge bytes or characters.
TOKENIZERS = {
    "words": _trained(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"),
    "words with a sign, three digits": _trained(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"),
    "metaspace": _trained("", metaspace=True),
    "characters": tiny_tokenizer(),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_opened_entries_are_those_a_pass_reads(kind, parts):
    """So a text that opens nothing keeps its logits; the entry of a name whose word goes on in a later token is open up to there."""
    tokenizer = TOKENIZERS[kind]
    glossary = Glossary(tokenizer, [Entry((name,), "x") for name in NAMES])
    ids = tokenizer("".join(parts))["input_ids"]
    readings, _ = readings_of(OpeningTracker(glossary, PacksOptions()), ids, range(len(ids)), None)
    opened = glossary.opened(ids)
    assert [at for at, _ in opened][:1] == [each.start for each in readings][:1]
    assert {entry for _, entry in opened} >= {*glossary.named(ids)}


def test_begun_word_opens_an_entry():
    glossary = Glossary(tiny_tokenizer(), [Entry(("Ann",), "x"), Entry(("York",), "x")])
    assert glossary.opened(glossary.spelling.ids("Annapolis, of York")) == [(2, 1), (16, 2)]
    assert not find_names(glossary.index, "Annapolis")
    assert not glossary.opened(glossary.spelling.ids("An napolis"))
