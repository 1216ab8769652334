"""Packs: texts are read as if they stood in front, from their names on; no other bit changes."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from accelerate import init_empty_weights
from models.hosting import host_of, in_steps
from models.pack_models import chat_tokenizer, pack_model, tiny_tokenizer
from models.upscaled import upscaled_model
from tiny import NATIVE_FAMILIES, WINDOW, logits, prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.packs.glossary import Entry
from midus_hf.models import FAMILIES

TOKENIZER = tiny_tokenizer()


def ids(text):
    return torch.tensor([TOKENIZER(text)["input_ids"]])


# One name is one token, after a space; text and what is asked fit into the windows of the families.
ENTRIES = [Entry(("q",), "(3)"), Entry(("gold", "Au"), "Shiny.")]
IN_FRONT, TEXT, ASKED = ids("\n"), ids(ENTRIES[0].text), ids(" q: a")
AS_IF_IN_FRONT = {"score_bias": 0.0, "distance": 0}


def both(family, dtype=torch.float32, entries=ENTRIES, **options):
    """A base, and its host with a glossary, by default read as if its texts stood in front."""
    return tiny_model(family, dtype), pack_model(family, dtype, entries, options={**AS_IF_IN_FRONT, **options})


def seen_behind(base, text, asked, first=0, distance=0, before=IN_FRONT):
    """Mask, ids and positions of tokens after a text, from one on; only the text sees `before`."""
    front, length, count = before.shape[1], text.shape[1], asked.shape[1]
    seen = torch.ones(front + length + count, front + length + count).tril().bool()
    seen[front + length :, :front] = False
    seen[front + length : front + length + first, : front + length] = False
    mask = torch.zeros(seen.shape, dtype=base.dtype).masked_fill(~seen, torch.finfo(base.dtype).min)[None, None]
    begins = front + length + distance
    positions = torch.cat([torch.arange(front + length) + first, torch.arange(begins, begins + count)])[None]
    return mask, torch.cat([before, text, asked], 1), positions


def behind_text(base, text, asked, first=0, **places):
    """What a base computes of tokens after a text, from one of them on."""
    mask, tokens, positions = seen_behind(base, text, asked, first, **places)
    return logits(base, tokens, attention_mask=mask, position_ids=positions)[:, -asked.shape[1] :]


@pytest.mark.parametrize("distance", [0, 2])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_logits_after_a_name_are_those_after_its_text(family, distance):
    """As far from the text, wherever the name stands."""
    base, model = both(family, distance=distance)
    count, computed, behind = ASKED.shape[1], logits(model, ASKED), behind_text(base, TEXT, ASKED, distance=distance)
    assert IN_FRONT.shape[1] + TEXT.shape[1] + count < WINDOW
    torch.testing.assert_close(computed, behind, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(computed, logits(base, ASKED), atol=1e-3)
    positions = torch.arange(600, 600 + count)[None]
    far = logits(model, ASKED, position_ids=positions, attention_mask=torch.ones(1, count))
    torch.testing.assert_close(far, computed, rtol=1e-3, atol=1e-4)


def test_attentions_are_weights_over_packs_and_sequence():
    base, model = both("llama")
    for each in (base, model):
        each.set_attn_implementation("eager")
    mask, tokens, positions = seen_behind(base, TEXT, ASKED)
    with torch.no_grad():
        expected = base(tokens, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
        computed = model(ASKED, output_attentions=True).attentions
        as_ever = model(ids("So ax is"), output_attentions=True).attentions
        of_base = base(ids("So ax is"), output_attentions=True).attentions
    count = ASKED.shape[1]
    for weights, whole in zip(computed, expected, strict=True):
        torch.testing.assert_close(weights, whole[:, :, -count:, -count:], rtol=1e-4, atol=1e-5)
        assert weights.sum(-1).max() < 1
    assert all(map(torch.equal, as_ever, of_base)), "no pack is read"


def test_text_is_read_from_the_last_token_of_its_name():
    base, model = both("llama")
    text, asked, last = ids(ENTRIES[1].text), ids("So gold is"), ids("So gold").shape[1] - 1
    torch.testing.assert_close(logits(model, asked), behind_text(base, text, asked, first=last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_tokens_up_to_a_name_have_the_bits_of_the_base(family, dtype):
    base, model = both(family, dtype)
    tokens, last = torch.cat([ids("So (Au) is it"), ids("So (ax) is it")]), ids("So (Au").shape[1] - 1
    computed, expected = logits(model, tokens), logits(base, tokens)
    assert torch.equal(computed[0, :last], expected[0, :last])
    assert torch.equal(computed[1], expected[1])
    assert not torch.equal(computed[0, last], expected[0, last])


def test_long_pass_computes_what_short_steps_compute():
    model, tokens = pack_model("llama", torch.float64, max_position_embeddings=512), prompt(300)
    whole = logits(model, tokens)
    torch.testing.assert_close(in_steps(model, tokens, [100, 1, 99, 50, 50], DynamicCache(config=model.config)), whole)


def test_bias_raises_the_scores_of_packs_and_no_others():
    base, model = both("llama", score_bias=-1e9)
    torch.testing.assert_close(logits(model, ASKED), logits(base, ASKED))
    model = both("llama", score_bias=2.0)[1]
    cache = DynamicCache(config=model.config)
    torch.testing.assert_close(in_steps(model, ASKED, [1] * ASKED.shape[1], cache), logits(model, ASKED))
    assert not torch.allclose(logits(model, ASKED), logits(both("llama")[1], ASKED), atol=1e-3)


def test_linked_entries_are_read_where_there_is_room():
    naming = Entry(("q",), "of gold")

    def computed(*others, **options):
        return logits(pack_model("llama", torch.float32, [naming, *others], options=options), ASKED)

    assert not torch.allclose(computed(ENTRIES[1]), computed(), atol=1e-4)
    for without in ({"links": False}, {"open": 1}):
        assert torch.equal(computed(ENTRIES[1], **without), computed())


def test_entries_open_together_are_read_as_one_text():
    base, entries = tiny_model("llama", torch.float32), [Entry(("q",), "(3) W"), Entry(("W",), "Shiny.")]
    model = pack_model("llama", torch.float32, entries, options=AS_IF_IN_FRONT)
    joined = behind_text(base, ids("(3) W\nShiny."), ASKED)
    torch.testing.assert_close(logits(model, ASKED), joined, rtol=1e-4, atol=1e-5)
    model.glossary.remove("W")
    torch.testing.assert_close(logits(model, ASKED), behind_text(base, ids("(3) W"), ASKED), rtol=1e-4, atol=1e-5)


def test_chat_text_is_read_in_a_user_turn_before_the_words():
    base, tokenizer = tiny_model("llama", torch.float32), chat_tokenizer()
    options = {**AS_IF_IN_FRONT, "score_bias": 3.0, "chat_score_bias": 0.0}
    model = pack_model("llama", torch.float32, ENTRIES, options=options, tokenizer=tokenizer)
    asked, first = ids("(Q) Is gold\nit?\n(A) So\n(Q) And\nit?\n(A)"), ids("(Q) Is gold").shape[1] - 1
    of_base = behind_text(base, ids("Shiny.\nIs"), asked, first, before=ids("(Q) "))
    torch.testing.assert_close(logits(model, asked)[:, first:], of_base[:, first:], rtol=1e-4, atol=1e-5)
    cache = DynamicCache(config=model.config)
    in_parts = in_steps(model, asked, [2, 9, *[1] * (asked.shape[1] - 11)], cache)
    torch.testing.assert_close(in_parts, logits(model, asked), rtol=1e-4, atol=1e-5)


def test_conversation_survives_exchanged_and_cropped_rows():
    """Packs that belong to a question are made again from the ids before, which the cache keeps."""
    model = pack_model("llama", torch.float32, ENTRIES, tokenizer=chat_tokenizer())
    asked = torch.cat([ids("(Q) Is it gold\n(A) So"), ids("(Q) Or is gold\n(A) No")])
    later = torch.cat([ids("\n(Q) And?\n" + "(A) " * 30)] * 2)
    expected, length = logits(model, torch.cat([asked, later], 1)), asked.shape[1]
    cache = DynamicCache(config=model.config)
    in_steps(model, torch.cat([asked, later[:, :-9]], 1), [length, *[1] * (later.shape[1] - 9)], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.layers[-1].shared.clear()
    cache.crop(-9)
    rest = in_steps(model, later[:, -18:], [3, *[1] * 15], cache)
    torch.testing.assert_close(rest, expected.flip(0)[:, -18:], rtol=1e-4, atol=1e-5)


def test_layers_without_packs_compute_as_the_base():
    base, model = both("llama")
    alone = pack_model("llama", torch.float32, ENTRIES, layers=[0], options=AS_IF_IN_FRONT)
    whole = logits(model, ASKED)
    with without_memories(model.model.layers, ["packs"]):
        assert torch.equal(logits(model, ASKED), logits(base, ASKED))
    with without_memories(model.model.layers[1:], ["packs"]):
        torch.testing.assert_close(logits(model, ASKED), logits(alone, ASKED))
    assert torch.equal(logits(model, ASKED), whole)


def test_texts_are_read_up_to_their_most_tokens():
    cut = pack_model("llama", torch.float32, [Entry(("q",), "(3)")], options={"max_tokens": 2})
    short = pack_model("llama", torch.float32, [Entry(("q",), "(3")])
    assert torch.equal(logits(cut, ASKED), logits(short, ASKED))


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(ASKED, labels=ASKED, use_cache=False).loss.backward()
    optimizer.step()


def through_bfloat16(model):
    model.to(torch.bfloat16)
    logits(model, ASKED)
    model.to(torch.float32)


def fresh(model):
    made = FAMILIES["llama"](copy.deepcopy(model.config)).to(model.dtype).eval()
    made.load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():  # which a cast rounds
        made.get_buffer(name).copy_(buffer)
    made.model.services["glossary"].glossary = pack_model("llama", torch.float32, model.glossary).glossary
    return made


@pytest.mark.parametrize("change", [stepped, through_bfloat16])
def test_packs_are_those_of_the_weights_as_they_are(change):
    _, model = both("llama")
    before = logits(model, ASKED)
    change(model)
    assert torch.equal(logits(model, ASKED), logits(fresh(model), ASKED))
    assert not torch.equal(logits(model, ASKED), before)


def test_packs_are_those_of_the_adapters_that_are_on():
    peft = pytest.importorskip("peft")
    _, model = both("llama")
    before, adapted = logits(model, ASKED), peft.LoraConfig(target_modules=["k_proj", "v_proj"])
    adapted.init_lora_weights = False
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, adapted)
    on, other = logits(wrapped, ASKED), peft.get_peft_model(both("llama")[1], adapted)
    peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(wrapped))
    assert torch.equal(logits(other, ASKED), on)
    assert not torch.allclose(on, before, atol=1e-3)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped, ASKED), before)
    assert torch.equal(logits(wrapped, ASKED), on)
    merged = wrapped.merge_and_unload()
    assert torch.equal(logits(merged, ASKED), logits(fresh(merged), ASKED))
    torch.testing.assert_close(logits(merged, ASKED), on, rtol=1e-4, atol=1e-5)


def test_changed_entries_hold_from_the_next_pass_on():
    base, model = both("llama")
    for_each = {name: ids(f"So {name} is") for name in ("gold", "q", "lead")}
    before = {name: logits(model, tokens) for name, tokens in for_each.items()}
    assert torch.equal(before["lead"], logits(base, for_each["lead"]))
    with patch.object(model.glossary, "tokens_of", lambda *_: {}):  # removed during a pass
        assert torch.equal(logits(model, for_each["gold"]), logits(base, for_each["gold"]))
    model.glossary.add(["lead", "Pb"], "Grey.")
    of_lead = logits(model, for_each["lead"])
    assert torch.equal(of_lead, logits(both("llama", entries=[Entry(("lead",), "Grey.")])[1], for_each["lead"]))
    assert not torch.equal(of_lead, before["lead"])
    assert len(model.glossary) == 3
    model.glossary.replace("Lead", "Soft.")
    assert not torch.equal(logits(model, for_each["lead"]), of_lead)
    assert model.glossary.remove("LEAD") == [Entry(("lead", "Pb"), "Soft.")]
    model.glossary.remove("gold")
    for name in ("gold", "lead"):
        assert torch.equal(logits(model, for_each[name]), logits(base, for_each[name]))
    assert torch.equal(logits(model, for_each["q"]), before["q"])


def test_open_pack_stays_until_another_name_comes():
    parts, lead = [ids("So gold is"), ids(" of"), ids(" lead.")], Entry(("lead",), "Grey, with a text.")

    def computed(entries, *changes):
        model, cache, read = both("llama", entries=entries)[1], DynamicCache(config=tiny_model("llama").config), []
        for part, change in zip(parts, changes, strict=True):
            change(model.glossary)
            with torch.no_grad():
                read.append(model(part, **{CACHE: cache}).logits)
        return torch.cat(read, 1)

    keep, remove = lambda _: None, lambda glossary: glossary.remove("gold")
    # Also of a sequence that began when there was no entry.
    begun_without = computed([], keep, keep, lambda glossary: glossary.add("lead", lead.text))
    torch.testing.assert_close(begun_without, computed([lead], keep, keep, keep))
    late, early = computed([*ENTRIES, lead], keep, keep, remove), computed([*ENTRIES, lead], keep, remove, keep)
    torch.testing.assert_close(late, early)
    whole, begun = computed([*ENTRIES, lead], keep, keep, keep), parts[0].shape[1] + parts[1].shape[1]
    torch.testing.assert_close(whole[:, :begun], late[:, :begun])
    assert not torch.allclose(whole, late)
    assert not torch.allclose(computed([lead], keep, keep, keep), late)


def test_threads_read_while_another_changes_entries():
    base, model = both("llama")
    of_q, of_gold, greedy = ids(" q: a"), ids("So gold is"), {"max_new_tokens": 6, "do_sample": False}
    expected, right = model.generate(of_q, **greedy), [logits(each, of_gold) for each in (model, base)]
    done = threading.Event()

    def reads():
        while not done.is_set():
            assert torch.equal(model.generate(of_q, **greedy), expected)
            now = logits(model, of_gold)
            assert any(torch.equal(now, each) for each in right)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(reads) for _ in range(2)]
        for number in range(100):
            model.glossary.add(f"name {number}", "of gold")
            model.glossary.remove("gold")
            model.glossary.add(["gold", "Au"], ENTRIES[1].text)
            model.glossary.remove(f"name {number}")
        done.set()
    assert [reader.result() for reader in readers] == [None, None]


def test_glossary_is_saved_and_copied_with_its_model(tmp_path):
    _, model = both("llama")
    model.glossary.add("lead", "Grey.", exact=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    copies = copy.deepcopy(again), pickle.loads(pickle.dumps(again))
    again.glossary.remove("lead")
    for copied in copies:
        assert [*copied.glossary] == [*ENTRIES, Entry(("lead",), "Grey.", True)]
        assert torch.equal(logits(copied, ids("So lead is")), logits(model, ids("So lead is")))


def test_models_without_one_whole_glossary_are_refused(tmp_path, monkeypatch):
    for model in (upscaled_model("llama"), pack_model("llama", torch.float32)):
        if "glossary" in model.model.services:
            model.model.services["glossary"].glossary = None
        with pytest.raises(ValueError, match="this model has no glossary; expected one with packs"):
            _ = model.glossary
    base = tiny_model("llama")
    assert torch.equal(logits(model, prompt()), logits(base, prompt()))
    monkeypatch.setattr("midus_hf.memories.hosting.service.folder_of_checkpoint", lambda *_: None)
    with pytest.raises(ValueError, match="the glossary of this model is not at hand"):
        model.model.services["glossary"].after_loading("org/model", {})
    entries = {"type": "packs", "layers": [0]}, {"type": "packs", "name": "packs-2", "layers": [1]}
    with pytest.raises(ValueError, match="'packs', 'packs-2' are packs; expected one"):
        host_of(base, *entries)
    model = pack_model("llama", torch.float32, ENTRIES)
    next(model.parameters()).ds_id = 1
    with pytest.raises(ValueError, match=r"embed_tokens.weight is sharded, .* expected unsharded"):
        logits(model, ASKED)


def test_model_made_without_a_folder_warns_once(tmp_path, recwarn):
    _, model = both("llama")
    model.save_pretrained(tmp_path)
    recwarn.clear()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16", device_map="cpu")
    copies = [copy.deepcopy(loaded), pickle.loads(pickle.dumps(again))]
    for empty in (torch.device("meta"), init_empty_weights()):
        with empty:
            AutoModelForCausalLM.from_config(model.config)
    assert all(len(each.glossary) == 2 for each in copies)
    assert not [each for each in recwarn if "glossary" in str(each.message)]
    state, config = model.state_dict(), model.config
    for make in (
        lambda: AutoModelForCausalLM.from_config(config),
        lambda: AutoModel.from_config(config),
        lambda: type(model)(config),
        lambda: type(model).from_pretrained(None, config=config, state_dict=state),
    ):
        with pytest.warns(UserWarning, match="this model has packs and is made without a folder") as caught:
            make().eval()(ids("gold"))
        assert len([each for each in caught if "glossary" in str(each.message)]) == 1
