"""Laws of models over one table (cases.py): the start as the base, generation, saving, offloading.

Laws of gradients are in test_training.py, of compiled models in test_compile.py, of hooks and threads in test_hooks.py.
"""

import copy
import itertools
import shutil
import warnings

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from models.cases import CASES, CLOSE, GREEDY, chosen, chosen_in_turn
from models.hosting import by_full_passes, in_steps
from models.upscaled import upscaled_model
from pairs import by_default
from tiny import WINDOW, logits, prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import CACHE

each_case = pytest.mark.parametrize("case", chosen())
NEW = GREEDY["max_new_tokens"]
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}
BASES = [name for name, case in CASES.items() if case.is_base_at_first]
WAYS = list(itertools.product([torch.float32, torch.bfloat16], ["eager", "sdpa"]))


def rows_of(given, rows):
    return {name: of_rows[rows] for name, of_rows in given.items()}


def padded_on_the_left(rows):
    longest = max(row.shape[1] for row in rows)
    padded = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return padded, (padded != 0).long()


@pytest.mark.parametrize(("case", "way"), chosen_in_turn(WAYS, BASES), ids=str)
def test_new_model_has_the_logits_of_its_base(shared_model, native_family, case, way):
    dtype, attention = way
    attention = "eager" if native_family == "gemma2" else attention  # whose scores sdpa cannot cap
    base = tiny_model(native_family, dtype)
    model = shared_model(case, native_family, dtype, acting=False, attention=attention)
    base.set_attn_implementation(attention)
    tokens, given = prompt(), CASES[case].given()
    mask, expected = (torch.arange(tokens.shape[1]) >= torch.tensor([[5], [0]])).long(), logits(base, tokens)
    assert torch.equal(logits(model, tokens), expected)
    assert torch.equal(logits(model, tokens, **given), expected)
    padded = logits(base, tokens, attention_mask=mask)
    assert torch.equal(logits(model, tokens, attention_mask=mask, **given)[mask == 1], padded[mask == 1])
    with torch.no_grad():
        of_base, actual = (each(tokens, labels=tokens, logits_to_keep=0) for each in (base, model))
        embeddings = model.get_input_embeddings()(tokens)
        assert torch.equal(actual.loss, of_base.loss)
        assert torch.equal(model(tokens, logits_to_keep=3).logits, base(tokens, logits_to_keep=3).logits)
        ids = {"token_ids": tokens} if CASES[case].reads_ids else {}
        assert torch.equal(model(inputs_embeds=embeddings, **ids).logits, base(inputs_embeds=embeddings).logits)


@pytest.mark.parametrize(("case", "mode"), chosen_in_turn([torch.no_grad, torch.inference_mode], BASES))
def test_new_model_generates_what_its_base_does(shared_model, native_family, case, mode):
    """By steps whose memories are called directly, with what they keep and without."""
    base, model = tiny_model(native_family), shared_model(case, native_family, torch.float32, acting=False)
    given, (padded, mask) = CASES[case].given(), padded_on_the_left([prompt(WINDOW + 4, 1, 1), prompt(3, 1)])
    settings = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True, **GREEDY}
    for cache in ("dynamic", "static"):
        with mode():
            expected = base.generate(padded, **settings, cache_implementation=cache)
            actual = model.generate(padded, **settings, **given, cache_implementation=cache)
        assert all(map(torch.equal, actual.logits, expected.logits)), cache
    for made in (lambda config: StaticCache(config, max_cache_len=8), lambda config: DynamicCache(config=config)):
        with mode(), decode_cache(model):
            caches = made(base.config), made(model.config)
            for part in prompt(8).split((6, 1, 1), dim=1):
                of_base = base(part, **{CACHE: caches[0]}).logits
                assert torch.equal(model(part, **{CACHE: caches[1]}, **given).logits, of_base)


@each_case
def test_greedy_tokens_are_those_of_full_passes(read, native_family, case):
    """With any cache; embeddings may stand for the prompt, unless a memory reads ids."""
    (case, model, given), tokens = read(case), prompt(WINDOW + 3)
    of_base = logits(tiny_model(native_family, case.dtype), tokens)
    change = logits(model, tokens, **given) - of_base
    assert change.abs().max() > 0.02 * of_base.abs().max(), "the memories change nothing"
    expected = by_full_passes(model, tokens, NEW, **given)
    for cache in CACHES.values():
        assert torch.equal(model.generate(tokens, **GREEDY, **given, **cache), expected), cache
    embedded = model.get_input_embeddings()(tokens)
    for cache in () if case.reads_ids else ("dynamic", "static"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            continued = model.generate(inputs_embeds=embedded, **GREEDY, **given, **CACHES[cache])
        assert torch.equal(continued, expected[:, tokens.shape[1] :]), cache


@each_case
def test_conversation_continues_from_its_cache_and_in_parts(read, case):
    """At first an empty cache without a config."""
    _, model, given = read(case)
    first = model.generate(prompt(7), **GREEDY, **given, **{CACHE: DynamicCache()}, return_dict_in_generate=True)
    further = torch.cat([first.sequences, prompt(4, seed=6)], dim=1)
    # Else zeros among the tokens are taken for padding.
    settings = {**GREEDY, **given, "attention_mask": torch.ones_like(further)}
    expected = by_full_passes(model, further, NEW, **given)
    assert torch.equal(model.generate(further, **settings, **{CACHE: first[CACHE]}), expected)
    assert torch.equal(model.generate(further, **settings, prefill_chunk_size=3), expected)


STEPS = [[10, 5, *[1] * 9], [3, 1, 12, 1, 1, 6], [1] * 24]


@pytest.mark.parametrize(("case", "steps"), chosen_in_turn(STEPS), ids=str)
def test_sequence_in_steps_has_the_logits_of_one_pass(read, case, steps):
    (case, model, given), tokens = read(case), prompt(sum(steps))
    expected = logits(model, tokens, **given)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=32)):
        torch.testing.assert_close(in_steps(model, tokens, steps, cache, **given), expected, **CLOSE[case.dtype])


@each_case
def test_cache_is_copied_exchanged_and_cropped(shared_model, case):
    """In Llama, since no cache of a sliding window is cropped."""
    model, case, before, after = shared_model(case), CASES[case], prompt(9), prompt(5, seed=6)
    given, flipped = case.given(), rows_of(case.given(), [1, 0])

    def filled():
        cache = DynamicCache(config=model.config)
        in_steps(model, before, [7, 1, 1], cache, **given)
        return cache

    def check(cache, past, given):
        expected = logits(model, torch.cat([past, after], 1), **given)[:, past.shape[1] :]
        torch.testing.assert_close(in_steps(model, after, [2, 1, 1, 1], cache, **given), expected, **CLOSE[case.dtype])

    cache, exchanged, cropped = filled(), filled(), filled()
    check(copy.deepcopy(cache), before, given)
    check(cache, before, given)
    exchanged.reorder_cache(torch.tensor([1, 0]))
    check(exchanged, before.flip(0), flipped)
    if case.takes_back:
        in_steps(model, after.flip(0), [4, 1], cropped, **given)
        cropped.crop(-after.shape[1])
        check(cropped, before, given)


@each_case
def test_left_padded_batch_gives_the_tokens_of_its_rows(read, native_family, case):
    # In float64 the eager attention of Gemma-2 itself gives NaN for rows that are only padding.
    _, model, given = read(case, *[torch.float32] * (native_family == "gemma2"))
    rows = [prompt(length, batch=1, seed=length) for length in (WINDOW + 4, 5)]
    padded, mask = padded_on_the_left(rows)
    alone = [model.generate(row, **GREEDY, **rows_of(given, [number])) for number, row in enumerate(rows)]
    for cache in (CACHES["dynamic"], CACHES["static"]):
        together = model.generate(padded, attention_mask=mask, **GREEDY, **given, **cache)
        for row, tokens, expected in zip(rows, together, alone, strict=True):
            assert torch.equal(tokens[padded.shape[1] :], expected[0, row.shape[1] :])


@each_case
def test_beams_depend_neither_on_the_cache_nor_on_other_rows(read, case):
    (case, model, given), tokens = read(case), prompt(6)
    told = {"output_scores": True, "return_dict_in_generate": True}
    beams = {**GREEDY, **told, "num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(tokens, use_cache=False, **beams, **given)
    for cache in (CACHES["dynamic"], CACHES["static"]):
        actual = model.generate(tokens, **beams, **given, **cache)
        assert torch.equal(actual.sequences, expected.sequences)
        torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, **CLOSE[case.dtype])
    alone = model.generate(tokens[:1], **beams, **rows_of(given, [0]))
    assert torch.equal(alone.sequences, expected.sequences[:2])


ASSISTED = ["midus-hml", "packs", "token behind layers", "ultramem own", "depth default", "depth projected"]


@pytest.mark.parametrize("way", ["assistant", "lookup"])
@pytest.mark.parametrize("case", [*ASSISTED, "hier-ffn", "chunk"])
def test_assisted_decoding_gives_the_same_tokens_or_is_refused(shared_model, case, way):
    case, model, row = CASES[case], shared_model(case), prompt(4, batch=1).repeat(1, 2)
    by = {"prompt_lookup_num_tokens": 3} if way == "lookup" else {"assistant_model": tiny_model("llama", case.dtype)}
    if case.takes_back:
        expected = by_full_passes(model, row, NEW, **case.given(1))
        assert torch.equal(model.generate(row, **GREEDY, **case.given(1), **by), expected)
    else:
        with pytest.raises(ValueError, match="'chapters' routes by all tokens before, and cannot take tokens back"):
            model.generate(row, **GREEDY, **by)


@each_case
def test_documents_in_one_row_do_not_see_each_other(read, case):
    """Positions that begin again, without a mask, as collators for packed rows give them."""
    (case, model, _), lengths = read(case), (WINDOW + 5, 3, 2 * WINDOW, 1)
    documents = [prompt(length, 1, length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = logits(model, torch.cat(documents, dim=1), position_ids=positions, **case.given(1))
    apart = torch.cat([logits(model, document, **case.given(1)) for document in documents], dim=1)
    torch.testing.assert_close(packed, apart, **CLOSE[case.dtype])


@each_case
def test_padding_between_tokens_changes_no_logits(read, case):
    """In one pass, and in a second turn on the cache, within the window of sliding layers."""
    (case, model, given) = read(case)
    rows, second = [prompt(4, 1, 4), prompt(2, 1, 2)], prompt(4, 2, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1, 1]])
    tokens = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (0, 2))]), second * mask[:, 4:]
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    whole = {"attention_mask": mask, "position_ids": positions, **given}
    first = {"attention_mask": mask[:, :4], "position_ids": positions[:, :4], CACHE: cache, **given}
    later = {"attention_mask": mask, "position_ids": positions[:, 4:], CACHE: cache, **given}
    with torch.no_grad():
        outputs = [torch.cat([model(tokens[0], **first).logits, model(tokens[1], **later).logits], 1)]
    outputs.append(logits(model, torch.cat(tokens, 1), **whole))
    for number, real in enumerate(mask.bool()):
        alone = logits(model, torch.cat(tokens, 1)[number, real][None], **rows_of(given, [number]))[0]
        for output in outputs:
            torch.testing.assert_close(output[number, real], alone, **CLOSE[case.dtype])


@each_case
def test_branches_in_one_row_are_exact_or_refused(read, case):
    (case, model, given) = read(case)
    parts = [prompt(length, 1, length) for length in (3, 2, 2)]
    seen = torch.ones(7, 7).tril().bool()
    seen[5:, 3:5] = False
    mask = torch.zeros(1, 1, 7, 7, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    positions, given = torch.tensor([[0, 1, 2, 3, 4, 3, 4]]), rows_of(given, [0])
    row = {"attention_mask": mask, "position_ids": positions, **given}
    if {"state", "packs"} & model.model.services.keys():
        with pytest.raises(
            ValueError, match=r"hides from a token the one before it .* its own row, and padding as token_mask"
        ):
            logits(model, torch.cat(parts, 1), **row)
        return
    first, second = (logits(model, torch.cat([parts[0], part], 1), **given) for part in parts[1:])
    output = logits(model, torch.cat(parts, 1), **row)
    torch.testing.assert_close(output, torch.cat([first, second[:, 3:]], 1), **CLOSE[case.dtype])


@each_case
def test_later_tokens_change_no_earlier_logits(read, case):
    (case, model, given), tokens = read(case), prompt()
    changed = torch.cat([tokens[:, :WINDOW], prompt(2 * WINDOW, seed=9)], dim=1)
    before, after = (logits(model, each, **given) for each in (tokens, changed))
    torch.testing.assert_close(after[:, :WINDOW], before[:, :WINDOW], **CLOSE[case.dtype])
    if case.dtype == torch.float32:  # those that are inserted, which compute each token alike whatever follows it
        assert torch.equal(after[:, :WINDOW], before[:, :WINDOW])
    assert not torch.allclose(after[:, WINDOW:], before[:, WINDOW:], atol=1e-3)


@each_case
def test_attentions_are_those_of_the_sequence_in_every_layer(shared_model, native_family, case):
    model = shared_model(case, native_family, torch.float32, attention="eager")
    with torch.no_grad():
        attentions = model(prompt(), output_attentions=True, use_cache=False, **CASES[case].given()).attentions
    assert len(attentions) == model.config.num_hidden_layers
    shares_softmax = any(entry.options.attends for entry in model.config.memories().attached.values())
    for attention in attentions:
        assert attention.shape == (2, 4, 3 * WINDOW, 3 * WINDOW)
        if shares_softmax:  # with what a memory reads, which gets the rest
            assert attention.min() >= 0
            assert attention.sum(-1).max() <= 1 + 1e-5
        else:
            torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 3 * WINDOW))


@each_case
def test_saved_model_is_loaded_bit_for_bit(native_family, case, tmp_path):
    model, given = CASES[case].model(native_family, tmp_path / "first", torch.float32), CASES[case].given()
    with torch.no_grad():
        model.train()(prompt(6), **given)  # some memories keep statistics of training
    expected, buffers = logits(model.eval(), **given), dict(model.named_buffers())
    model.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "first", ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(logits(each, **given), expected) for each in (loaded, again))
    restored = dict(again.named_buffers())
    assert all(torch.equal(restored[name], value) for name, value in buffers.items() if not name.endswith("inv_freq"))


@pytest.mark.parametrize("case", ["chunk", "all fetched"])
def test_stack_is_saved_and_loaded_with_its_memories(shared_model, case, tmp_path):
    model, given = shared_model(case, "llama", torch.float32), CASES[case].given()
    model.save_pretrained(tmp_path / "saved")
    stack = AutoModel.from_pretrained(tmp_path / "saved")
    stack.save_pretrained(tmp_path / "stack")
    for each in (stack, AutoModel.from_pretrained(tmp_path / "stack")):
        with torch.no_grad():
            assert torch.equal(*(one(prompt(), **given).last_hidden_state for one in (each, model.model)))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert logits(half, **given).dtype == torch.bfloat16


def test_bank_is_saved_by_the_main_process_and_missed_if_absent(shared_model, tmp_path):
    model, given = shared_model("hier-kv", "llama", torch.float32), CASES["hier-kv"].given()
    inner = tmp_path / "in/inner"
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / BANKS_FOLDER).exists()
    model.save_pretrained(inner)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "in", subfolder="inner")
    assert torch.equal(logits(loaded, **given), logits(model, **given))
    shutil.rmtree(inner / BANKS_FOLDER)
    with pytest.raises(ValueError, match=r"there is no memory bank in .*hier-kv"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "in", subfolder="inner")


@pytest.mark.parametrize(("case", "layers"), chosen_in_turn(["odd", "all"]))
def test_offloaded_layers_give_the_same_output(read, case, layers, tmp_path):
    _, model, given = read(case, torch.float32)
    two_tokens = {**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2, **given}
    expected, generated = logits(model, prompt(), **given), model.generate(prompt(), **two_tokens)
    model.save_pretrained(tmp_path / "saved")
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    if "model.memory_tables" in places:
        places["model.memory_tables"] = "disk"
    for layer in range(len(model.model.layers)):
        places[f"model.layers.{layer}"] = "disk" if layers == "all" or layer % 2 else "cpu"
    places, offload = {**places, "lm_head": "cpu"}, tmp_path / "offload"
    on_disk = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map=places, offload_folder=offload)
    one_by_one = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    cpu_offload(one_by_one, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in one_by_one.parameters())
    for loaded in (on_disk, one_by_one):
        assert all(parameter.is_meta for parameter in loaded.model.layers[1].parameters())
        assert all(parameter.is_meta for name, parameter in loaded.named_parameters() if ".memory_tables." in name)
        assert torch.equal(logits(loaded, prompt(), **given), expected)
    decodes = on_disk if layers == "all" else one_by_one
    assert torch.equal(decodes.generate(prompt(), **two_tokens), generated)


@pytest.mark.parametrize("case", by_default(["midus-hml", "chunk", "all fetched"], CASES))
def test_automatic_device_map_never_splits_a_layer(read, case):
    _, model, _ = read(case, torch.float32)
    names, size = list(model._no_split_modules), sum(parameter.numel() * 4 for parameter in model.parameters())
    assert {type(layer).__name__ for layer in model.model.layers} <= {*names}
    for share in (0.7, 0.85):
        places = infer_auto_device_map(model, max_memory={"cpu": int(share * size)}, no_split_module_classes=names)
        assert {*places.values()} == {"cpu", "disk"}, share
        assert not [name for name in places if name.startswith("model.layers.") and name.count(".") > 2], share


@pytest.mark.filterwarnings("always:`past_key_values` is deprecated:FutureWarning")
def test_older_cache_name_warns_as_transformers_does(family):
    model, native, tokens = upscaled_model(family), tiny_model(family), prompt()
    for module in (native, model, model.model):
        cache = DynamicCache()
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            module(tokens, past_key_values=cache)
        told = [each for each in caught if str(each.message).startswith("`past_key_values` is deprecated")]
        assert len(told) == (CACHE == "cache")
        assert cache.get_seq_length() == tokens.shape[1]
    if CACHE == "cache":
        message = "deprecated, and ignored beside `cache`, as in Transformers. Use `cache`"
        with pytest.warns(FutureWarning, match=message):
            model(tokens, cache=DynamicCache(), past_key_values=cache)
