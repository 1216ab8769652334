"""Names of entries are found in the characters that tokens spell, however tokens split them."""

import itertools
import random
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from models.pack_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from midus_hf.memories.packs.glossary import may_be_same, spells
from midus_hf.memories.packs.names import NameIndex, TokenSpelling, name_of, names_in, spelled
from midus_hf.memories.packs.opening import OpeningTracker, RowState, readings_of, state_of, states_tensor
from midus_hf.memories.packs.options import PacksOptions
from midus_hf.sources.characters import is_invisible


def bytes_of(pieces):
    return [piece if piece is None or isinstance(piece, bytes) else piece.encode() for piece in pieces]


class Pieces:
    """A glossary of names, those in lists exact, whose tokens are numbers of pieces."""

    def __init__(self, names, pieces=(), links=None):
        given_names = ((name, False) if isinstance(name, str) else (*name, True) for name in names)
        self.index = NameIndex((name_of(number, *name) for number, name in enumerate(given_names, 1)), {"leads"})
        self.pieces, self.links = bytes_of(pieces), links or {}
        self.spelling, self.chat_marks, self.lookback_tokens = self, None, self.index.lookback_tokens

    def piece(self, token):
        return None if token < 0 else self.pieces[token]

    def written(self, token):
        return self.piece(token) or b""

    def linked(self, number):
        return self.links.get(number, ())


def open_at_end(names, pieces, **options):
    """The entries of names that the last token reads, the latest named first."""
    glossary = Pieces(names, pieces)
    row = OpeningTracker(glossary, PacksOptions(**{"open": 9, **options}))
    for token in range(len(pieces)):
        row.read(token, token)
    pack = row.pack()
    return [] if pack is None else [*reversed(pack[0].entries)]


# Names, the pieces of a text, and the entries that are open behind it, the latest named first.
FOUND = {
    "behind a quote, in front of a sign": (["sodium", "Acme Inc."], ["('sodium'", ", Acme Inc.,"], [2, 1]),
    "not within words": (["gold", "carbon"], ["Goldfinger", " marigold Carboni", "ferous"], []),
    "not within numbers": (["42", "Unit 1"], ["1942 4200", " Unit 1", "2 is"], []),
    "behind a line": (["gold"], ["_gold gold_"], []),
    "a name at the end of a longer one": (["cache", "Merlin cache"], ["the Merlin", " cache", " is"], [2]),
    "a longer name of words": (["New York", "New York City"], ["New York", " Ci", "ty"], [2]),
    "a longer name that does not come": (["New York", "New York C"], ["New York", " C", "ity"], [1]),
    "within a longer one that is none": (["York", "New York"], ["York or New York", "ers"], [1]),
    "again within a word": (["gold", "tin", "zinc"], ["zinc tin gold gold", "en"], [1, 2, 3]),
    "overlapping": (["a b c", "c d e"], ["a b c", " d e"], [2, 1]),
    "in another case": (["sodium"], ["SODIUM Sodi", "um"], [1]),
    "short ones keep their case": (["He", "Na"], ["he HE Na"], [2]),
    "a capital within": (["NaCl", "iPhone"], ["nacl NACL iPhone"], [2]),
    "exact": ([["Mercury"], "Venus"], ["mercury venus"], [2]),
    "exact beside any": ([["Mercury"], "mercury"], ["Mercury"], [2, 1]),
    "letters of other scripts": (["Müll", "ключ"], ["Müller «КЛЮЧ»."], [2]),
    "a combining mark goes on": (["Cafe"], ["Cafe", "\u0301"], []),
    "composed": ([unicodedata.normalize("NFD", "Café")], ["CAFÉ"], [1]),
    "sharp s": (["Straße"], ["STRASSE"], [1]),
    "zero width space": (["New York"], ["\u200bNew\u200b Yo\u200brk"], [1]),
    "soft hyphen": (["gateway"], ["gate\u00adway"], [1]),
    "variation selectors": (["\u2764\ufe0f line", "\u845b\u57ce"], ["\u2764 line", " \u845b\U000e0100\u57ce"], [2, 1]),
    "apostrophe": (["O'Reilly"], ["O\u2019Reilly"], [1]),
    "a line break": (["New York"], ["New", "\r\n", "York"], [1]),
    "a character over tokens": (["Café"], [b"Caf\xc3", b"\xa9"], [1]),
    "a broken character": (["Café"], [b"Caf\xc3", b"\xc3", b"\xa9"], []),
    "Han": (["北京"], ["我在北京大学"], [1]),
    "Kana": (["さくら", "カス"], ["このさくらは ガス"], [1]),
    "not a part of a Kana": (["ハ"], ["バ", "ナナ"], []),
    "Thai": (["ไทย"], ["ประเทศไทยมี"], [1]),
    "not without its vowel": (["ก"], ["ก", "ิ"], []),
    "special tokens break a name": (["New York", "York"], ["New", None, " York"], [2]),
    "nothing but signs": (["C++", "->", "a b"], ["C", "++", "a->b"], [2, 1]),
    "Latin before a particle": (["Merlin", "Unit 1"], ["Merlin", "은 Unit 1", "에서"], [2, 1]),
    "Hangul before a particle": (["게이트웨이"], ["새 게이트", "웨이", "는 어느"], [1]),
    "Hangul within a word": (["이터"], ["데이터", "는"], []),
    "a part of a syllable": (["가"], ["간 ", "\u1100\u1161", "\u11ab"], []),
    "Hangul before letters alone": (["게이트웨이"], ["게이트웨이", "ㅠㅠ"], [1]),
    "where the script changes": (["Linux", "ключ"], ["Linux", "ом newключ", "ами"], [1]),
    "where the script changes behind a mark": (["Café"], ["Cafe\u0301", "ом"], [1]),
    "before a letter of several scripts": (["Hawai"], ["Hawai", "\u02bbi"], []),
    "other separators": (["billing_sync_v2", "New York"], ["Billing", " sync", "-v2, new_", "york"], [2, 1]),
    "separators at edges": (["-a", "b_"], ["- a b -", "a"], [1]),
    "two separators": (["a_b", "New York"], ["a__b a_-b a_ b New- York"], []),
    "a part of separated words": (["billing", "sync_v2"], ["billing_", "sync_v2"], []),
    "exact separators": ([["foo_bar"], ["foo-bar"]], ["foo-", "bar foo bar"], [2]),
    "an s": (["Harrow", "Old bird", "café"], ["whats harrow", "s port, OLD BIRDS Café", "s"], [3, 2, 1]),
    "an s in its case": (["iPhone", "NaCl"], ["nacls iPhones"], [1]),
    "an s and more": (["Harrow"], ["harrow", "s", "mith harrowss"], []),
    "an s behind a short name, a digit or an s": (["Ann", "Unit 12", "Mars"], ["anns unit 12s marss"], []),
    "an s behind an exact name": ([["Harrow"], "ключ"], ["Harrows ключs"], [2]),
    "an s in a frequent word": (["Lead", "Old lead"], ["leads old leads"], [2]),
}


@pytest.mark.parametrize("case", FOUND)
def test_open_names_at_the_end_of_a_text(case):
    names, pieces, expected = FOUND[case]
    assert open_at_end(names, pieces) == expected


@pytest.mark.parametrize("case", [case for case, (_, pieces, _) in FOUND.items() if None not in pieces])
def test_no_splitting_into_tokens_changes_what_is_open(case):
    names, pieces, expected = FOUND[case]
    text = b"".join(bytes_of(pieces))
    for at in range(1, len(text)):
        assert open_at_end(names, [text[:at], text[at:]]) == expected, at
    assert open_at_end(names, [text[at : at + 1] for at in range(len(text))]) == expected


def test_name_closes_where_its_word_goes_on():
    does = [*names_in(Pieces(["gold", "Unit 1"]).index, bytes_of(["the go", "ld", "en", " Unit ", "1", ".", "2"]))]
    assert [[found.entry for found in token.opens] for token in does] == [[], [1], [], [], [2], [], []]
    assert [[found.entry for found in token.closes] for token in does] == [[], [], [1], [], [], [], []]


# Few characters, so that names stand in one another, and edges of all kinds.
LETTERS = "ab é-_s\u0301\u00ad京A가\u11abж"
NAMES = "a,ab,a b,b,b a,é,ab é,京,a京,-a,b-,aab A,京 b,가,ж,aab é,a가,b_é".split(",")


@st.composite
def split_texts(draw):
    """The bytes of a text, split at some places, and a sentence in front so that chunks are longer than what names reach."""
    text = draw(st.text(LETTERS, min_size=1, max_size=40)).encode()
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    bounds = [0, *places, len(text)]
    return [piece for first, end in itertools.pairwise(bounds) if (piece := text[first:end])]


@given(split_texts(), st.integers(1, 4))
@example(["a", b"\xe4", b"\xba", b"\xac", "a京"], 3)
def test_open_names_depend_only_on_characters(pieces, most):
    # Behind a full stop nothing is provisional.
    pieces = bytes_of(pieces)
    whole = open_at_end(NAMES, [b"".join(pieces) + b" ."], open=most)
    assert open_at_end(NAMES, [*pieces, b" ", b"."], open=most) == whole


def test_selectors_marks_and_tags_are_invisible():
    assert all(map(is_invisible, "\u200d\u2060\u00ad\ufeff\u200f\u2066\u034f\u180b\ufe0e\U000e0041\U000e0100\u3164"))
    assert not any(map(is_invisible, "a \u0301\u00a0\u5e02\u20ac"))


def chunks_of(glossary, options, tokens, chunks):
    """Readings and openings of tokens that pass in chunks, of which each knows what the service keeps."""
    readings, behind, done = [], [], 0
    for size in [*chunks, *[1] * len(tokens)]:
        part = tokens[done : done + size]
        if not part:
            break
        before = state_of(states_tensor([[behind[-1]]], options)[0, -1]) if behind else RowState()
        row = OpeningTracker(glossary, options, before)
        first = max(0, done - glossary.lookback_tokens)
        row.read_before(tokens[first:done], range(first, done))
        read, opened = readings_of(row, part, range(done, done + len(part)), None)
        readings += [
            (token + done, each.pack, each.position) for each in read for token in range(each.start, each.stop)
        ]
        behind += opened
        done += len(part)
    return readings, behind


@given(split_texts(), st.lists(st.integers(1, 30), max_size=9), st.integers(1, 3))
def test_chunks_open_what_one_pass_opens(pieces, sizes, most):
    pieces = [*pieces * 3]
    glossary, options = Pieces(NAMES, pieces), PacksOptions(open=most)
    tokens = [*range(len(pieces))]
    whole = chunks_of(glossary, options, tokens, [len(tokens)])
    assert chunks_of(glossary, options, tokens, sizes) == whole
    assert chunks_of(glossary, options, tokens, [1] * len(tokens)) == whole


@pytest.mark.parametrize(
    ("linked", "options", "expected"),
    [
        ({}, {}, ((2, 3), 2)),
        ({3: (1,)}, {"open": 3}, ((1, 2, 3), 2)),
        ({3: (4,), 2: (5,)}, {"open": 4}, ((1, 2, 3, 4), 2)),
        ({3: (4,), 2: (5,)}, {"open": 5}, ((1, 2, 5, 3, 4), 2)),
        ({3: (4,)}, {"open": 4, "links": False}, ((1, 2, 3), 2)),
    ],
)
def test_open_entries_are_read_in_naming_order(linked, options, expected):
    """Linked ones stand after the entry that links to them, and are left out before those that are named."""
    pieces = ["gold ", "tin ", "zinc ", *["and "] * 5]
    row = OpeningTracker(Pieces(["gold", "tin", "zinc", "lead", "iron"], pieces, linked), PacksOptions(**options))
    for token in range(len(pieces)):
        row.read(token, token)
    key, place = row.pack()
    assert (key.entries, place) == expected
    assert not key.in_chat
    assert not key.words


WRITTEN = st.text(LETTERS, min_size=1, max_size=6).filter(lambda text: spelled(text)[0])


@given(WRITTEN, WRITTEN, st.tuples(st.booleans(), st.booleans()))
def test_names_that_find_one_text_may_be_the_same(one, other, exact):
    names = [name_of(0, one, exact[0]), name_of(1, other, exact[1])]
    for text in (one, other):
        tables = [NameIndex([name]) for name in names]
        found = [bool(table.entries_of(text)) for table in tables]
        for table, is_found in zip(tables, found, strict=True):
            (token,) = names_in(table, [text.encode()])
            assert is_found == any(each.written == spelled(text)[1] for each in token.opens)
        assert not all(found) or may_be_same(*names)


@given(st.lists(st.sampled_from(["ab", "b", "é", "京", "가a"]), min_size=1, max_size=4), st.data())
def test_separators_within_names_are_equal(words, data):
    one = st.sampled_from(["-", "_", " ", "\u00a0", "\u2011"])
    separators = st.lists(one, min_size=len(words), max_size=len(words))
    name, text = ("".join(map("".join, zip(words, data.draw(separators), strict=True)))[:-1] for _ in range(2))
    assert open_at_end([name], [f"({text})"]) == [1]


def test_pack_stays_at_a_name_that_soon_repeats():
    pieces = ["gold ", *["and "] * 30, "gold ", *["and "] * 40, "gold "]
    row = OpeningTracker(Pieces(["gold"], pieces), PacksOptions())
    places = []
    for token in range(len(pieces)):
        row.read(token, token)
        places.append(row.pack()[1])
    assert sorted({*places}) == [0, 72]
    assert places.index(72) == 72


@pytest.mark.parametrize("order", itertools.permutations(["Harrow", "Harrows", "harrow-s"]), ids="-".join)
def test_name_hides_the_same_form_of_another(order):
    names = [name_of(at, name) for at, name in enumerate(order)]
    harrow, harrows = order.index("Harrow"), order.index("Harrows")
    assert NameIndex(names, ()).entries_of("harrows") == [harrows]
    assert not NameIndex().entries_of("harrows")
    assert NameIndex(names[:harrows] + names[harrows + 1 :], ()).entries_of("HARROWS") == [harrow]


def test_spelled_name_is_what_is_compared():
    assert spelled("  \uff2eew\u00a0\n Yor\u200bk ") == ("new york", "New York")
    assert spelled("ﬁ²\u2019\u2011") == ("fi2'-", "fi2'-")


def _fast(model, decoder=None, **parts):
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


_META = {"<unk>": 0, "▁New": 1, "▁York": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5, "s": 6}
_FUSE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
_PIECES = WordPiece({"<unk>": 0, "new": 1, "##s": 2}, unk_token="<unk>")
SPELT = {
    "metaspace": (_fast(BPE(_META, [], byte_fallback=True), _FUSE), [b" New", b" York", b"\xc3", b"\xa9", b" ", b"s"]),
    "word pieces": (_fast(_PIECES, decoders.WordPiece()), [b" new", b"s"]),
    "words": (_fast(WordLevel({"<unk>": 0, "new": 1, "york": 2}, "<unk>")), [b" new", b" york"]),
    "bytes": (tiny_tokenizer(), None),
}


@pytest.mark.parametrize("kind", SPELT)
def test_token_pieces_spell_the_text(kind):
    tokenizer, expected = SPELT[kind]
    spelling = TokenSpelling(tokenizer)
    if expected is not None:
        assert [spelling.piece(token) for token in range(len(tokenizer))] == [None, *expected]
    else:
        assert b"".join(map(spelling.piece, spelling.ids("Aé ü b\n"))).decode() == "Aé ü b\n"
    assert spelling.piece(len(tokenizer)) is None
    assert spelling.piece(-1) is None
    tokenizer.add_tokens(["<extra> é"])
    assert TokenSpelling(tokenizer).piece(len(tokenizer) - 1) == "<extra> é".encode()


def test_names_that_tokens_do_not_spell():
    bert = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    pieces = WordPiece({"<unk>": 0, "new": 1, "york": 2, "'": 3}, unk_token="<unk>")
    lower = _fast(pieces, decoders.WordPiece(), **bert)

    def is_spelled(tokenizer, text):
        spelling = TokenSpelling(tokenizer)
        return spells(spelling, spelling.ids_of([text], special_tokens=False)[0], text)

    assert [is_spelled(lower, text) for text in ("New  York", "Newark", "New'York")] == [True, False, False]
    assert is_spelled(tiny_tokenizer(), "é\u00e9 ü")
    assert not is_spelled(tiny_tokenizer(), "ö")


def test_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"is a Slow, .*; expected one with tokenizer.json. Convert it"):
        TokenSpelling(type("Slow", (), {"is_fast": False})())


def test_texts_end_where_something_may_follow():
    tokenizer = tiny_tokenizer()
    assert TokenSpelling(tokenizer).ids("a") == tokenizer("a")["input_ids"]
    frame = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = frame
    begin, letter = TokenSpelling(tokenizer).ids("a")
    assert begin == 1
    assert letter != 2


def test_exchanged_index_is_that_of_the_other_names():
    choice = random.Random(0)
    names = [name_of(number, "".join(choice.choices("abcs -", k=3)) + "x") for number in range(60)]
    index = NameIndex(names, {"abx"})
    for first in range(100, 2000, 100):
        removed = {*choice.sample(names, 20)}
        added = [name_of(first + number, "".join(choice.choices("abcs -", k=3)) + "s") for number in range(20)]
        kept = [name for name in names if name not in removed]
        index = index.exchanged(removed, added)
        names = [*kept, *added]
        expected = NameIndex(names, {"abx"})
        assert index.by_folded == expected.by_folded, first
        assert index._forms == expected._forms, first
        assert index._ordered == expected._ordered, first
        assert index.lookback_tokens == expected.lookback_tokens, first
