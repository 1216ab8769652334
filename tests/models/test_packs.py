"""Packs: texts are read as if they stood in front, from their names on; and nothing else changes a bit."""

import pytest
import torch
from models.hosting import in_steps, logits
from models.pack_models import model_of_texts, pack_model
from tiny import NATIVE_FAMILIES, WINDOW, prompt, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from midus_hf.banks.level_file import BankError
from midus_hf.memories.packs.names import NameTable, Openings
from midus_hf.memories.packs.writing import name_table

# The name is one token; the text and what is asked fit into the windows of the families.
NAME, TEXT = 5, [7, 8, 9]


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_behind_a_name_the_model_computes_what_the_base_computes_behind_its_text(family, tmp_path):
    base, model = model_of_texts(family, tmp_path, torch.float32, {NAME: TEXT, 6: TEXT[:1]})
    asked = torch.tensor([[NAME, 40, 41, 42]])
    assert len(TEXT) + asked.shape[1] < WINDOW
    behind = logits(base, torch.cat([torch.tensor([TEXT]), asked], 1))[:, len(TEXT) :]
    torch.testing.assert_close(logits(model, asked), behind, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model, asked), logits(base, asked), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_up_to_a_name_every_bit_is_the_bases(family, dtype, tmp_path):
    base, model = model_of_texts(family, tmp_path, dtype, {NAME: TEXT})
    tokens = prompt().clamp(min=NAME + 1)
    assert torch.equal(logits(model, tokens), logits(base, tokens))
    tokens[0, 10] = NAME
    computed, expected = logits(model, tokens), logits(base, tokens)
    assert torch.equal(computed[0, :10], expected[0, :10])
    assert torch.equal(computed[1], expected[1])
    assert not torch.equal(computed[0, 10], expected[0, 10])


def test_a_long_pass_computes_what_short_steps_compute(tmp_path):
    model = pack_model("llama", tmp_path, torch.float64, max_position_embeddings=512)
    tokens = prompt(300)
    whole = logits(model, tokens)
    torch.testing.assert_close(in_steps(model, tokens, [100, 1, 99, 50, 50], DynamicCache(config=model.config)), whole)


def test_a_bias_raises_the_scores_of_packs_and_no_others(tmp_path):
    base, model = model_of_texts("llama", tmp_path, torch.float32, {NAME: TEXT})
    asked, cache = torch.tensor([[NAME, 40, 41, 42]]), DynamicCache(config=model.config)
    for layer in model.model.layers:
        layer.memories["packs"].options.score_bias = -1e9
    torch.testing.assert_close(logits(model, asked), logits(base, asked))
    for layer in model.model.layers:
        layer.memories["packs"].options.score_bias = 2.0
    torch.testing.assert_close(in_steps(model, asked, [1, 1, 1, 1], cache), logits(model, asked))


def test_a_bank_that_cannot_be_downloaded_is_refused(tmp_path, monkeypatch):
    model = pack_model("llama", tmp_path, torch.float64)
    monkeypatch.setattr("midus_hf.memories.packs.opening.folder_of_checkpoint", lambda name, arguments: None)
    with pytest.raises(
        BankError, match="the bank of packs of org/model is not at hand, without which no name would be known"
    ):
        model.model.services["packs"].after_loading("org/model", {})


def test_another_bank_is_read_where_another_one_is_opened(tmp_path):
    model = pack_model("llama", tmp_path / "one", torch.float64)
    tokens = torch.tensor([[3, 20, 22]])
    before = logits(model, tokens)
    model.save_pretrained(tmp_path / "copy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float64)
    assert torch.equal(logits(loaded, tokens), before)
    loaded.model.services["packs"].banks = {}
    base = tiny_model("llama", torch.float64)
    assert torch.equal(logits(loaded, tokens), logits(base, tokens))


def _entry_by_hand(ids, end, spellings):
    endings = (tuple(ids[first : end + 1]) for first in range(end + 1))
    return next((spellings[each] for each in endings if each in spellings), 0)


def test_the_longest_name_that_ends_at_a_token_is_found():
    generator = torch.Generator().manual_seed(3)
    spellings = {}
    for entry in range(1, 40):
        length = int(torch.randint(1, 5, (), generator=generator))
        spellings[tuple(torch.randint(0, 4, (length,), generator=generator).tolist())] = entry
    table = name_table(spellings, 4)
    ids = torch.randint(-1, 5, (3, 50), generator=generator)
    by_hand = [[_entry_by_hand(row, end, spellings) for end in range(50)] for row in ids.tolist()]
    assert table.entries(ids).tolist() == by_hand
    assert table.edges.diff().min() > 0


def test_a_name_ends_where_a_document_ends():
    table = name_table({(1, 2): 1, (2,): 2}, 4)
    document = torch.tensor([[0, 1, 1, 1]])
    assert table.entries(torch.tensor([[1, 2, 1, 2]]), document).tolist() == [[0, 2, 0, 1]]
    assert NameTable(*name_table({}, 4)).entries(torch.tensor([[1, 2]])).tolist() == [[0, 0]]


def test_the_latest_names_are_open_each_once_where_they_stood_first():
    openings = Openings(5)
    found, positions = torch.tensor([[0, 1, 2, 2, 1, 0, 3]]), torch.tensor([[0, 1, 2, 3, 40, 41, 42]])

    def told(opened):
        return [
            [(openings.entry(each), openings.position(each)) for each in token if each] for token in opened[0].tolist()
        ]

    first, second, again, third = (1, 1), (2, 2), (1, 40), (3, 42)
    expected = [[], [first], [second, first], [second, first], [again, second], [again, second], [third, again]]
    assert told(openings.of_tokens(found, positions, 2)) == expected
    before, document = (
        torch.tensor([[openings.number(4, 7), openings.number(5, 3)]]),
        torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
    )
    expected = [
        [(4, 7), (5, 3)],
        [first, (4, 7)],
        [second],
        [second],
        [again, second],
        [again, second],
        [third, again],
    ]
    assert told(openings.of_tokens(found, positions, 2, before, document)) == expected


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_a_pack_stands_at_its_distance_from_the_name_wherever_that_stands(family, tmp_path):
    base, model = model_of_texts(family, tmp_path, torch.float32, {NAME: TEXT[:2]}, distance=2)
    asked = torch.tensor([[NAME, 40, 41]])
    here, there = torch.tensor([[0, 1, 4, 5, 6]]), torch.tensor([[600, 601, 602]])
    whole, seen = torch.cat([torch.tensor([TEXT[:2]]), asked], 1), torch.ones(1, 5)
    with torch.no_grad():
        behind = base(whole, position_ids=here, attention_mask=seen).logits[:, 2:]
        torch.testing.assert_close(logits(model, asked), behind, rtol=1e-4, atol=1e-5)
        far = model(asked, position_ids=there, attention_mask=seen[:, :3], use_cache=False).logits
    torch.testing.assert_close(far, logits(model, asked), rtol=1e-3, atol=1e-4)
