"""The method vocabulary: logits of the base's tokens keep their bits, rows of new tokens alone train, strip gives the base."""

import copy
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from composite import composite_model
from pairs import by_default
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny import NATIVE_FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training.tiny_run import tiny_config
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from midus_hf.models.view import ModelView
from midus_hf.training import parameter_groups, set_trainable
from midus_hf.training.adapters import add_adapters, lora_config
from midus_hf.training.optim.rates import Rates
from midus_hf.training.parallel import prepare_sharing
from midus_hf.training.run import run_training
from scripts.anatomy.tiny import tiny_model
from scripts.anatomy.token_tables import tables_read
from tests.upscalers.checkpoints import config_of, file_digests, load, read_tensors, same_tensors, save_base
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SPECIALS = ["<unk>", "<pad>", "<bos>", "<eos>"]
LETTERS = [*SPECIALS, "Ġ", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789,."]
SIZE = len(LETTERS)
STARTS = {"<|tool|>": "abc", "wxyz": "no", "of a": "of a"}
NEW = range(SIZE, SIZE + len(STARTS))


def save_letters(folder, letters=LETTERS):
    """Save a tokenizer of letters, of a kind that the tokenizer class of every base reads."""
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@pytest.fixture
def spoken(tmp_path):
    """Save a base with a tokenizer, and a file of tokens; its rows behind those of letters stand for no token."""

    def base(family="llama", size=SIZE, dtype=torch.float32, **changes):
        folder = save_base(tmp_path / "base", family, dtype, vocab_size=size, **changes)
        save_letters(folder)
        (tmp_path / "tokens.json").write_text(json.dumps(STARTS))
        return folder

    return base


def with_tokens(base, output, tokens=None, **request):
    options = {"tokens": str(tokens or base.parent / "tokens.json")}
    return upscale(base=base, method="vocabulary", output=output, options=options, **request)


def aligned(folder):
    """Return a model whose weights lie as torch lays them: at other addresses a product may round otherwise."""
    model = load(folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


ONCE = [("llama", False, 48, torch.float32), ("gemma3", True, 44, torch.bfloat16), ("qwen2", True, 46, torch.float32)]
ALL = [
    (family, tied, size, dtype)
    for family in NATIVE_FAMILIES
    for tied in (True, False)
    for size in (44, 46, 48)
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("family", "tied", "size", "dtype"), by_default(ONCE, ALL))
def test_logits_of_the_bases_tokens_keep_their_bits_and_strip_gives_the_base(
    family, tied, size, dtype, spoken, tmp_path
):
    """The three new ids lie behind the embedding, in rows that stand for no token, and in both."""
    base, out = spoken(family, size, dtype, tie_word_embeddings=tied), tmp_path / "out"
    before = file_digests(base)
    report = with_tokens(base, out)
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits of the base's tokens", 0.0)
    assert file_digests(base) == before and config_of(out)["vocab_size"] == max(size, NEW.stop)
    assert config_of(out)["model_type"] == config_of(base)["model_type"]
    old, new = aligned(base), aligned(out)
    # Of a size that is no multiple of 4, in float32, a short pass may round the last few otherwise.
    lengths = (1, 3, 24) if dtype is torch.bfloat16 or size % 4 == 0 else (24,)
    for tokens in (
        torch.randint(0, SIZE, (2, length), generator=torch.Generator().manual_seed(1)) for length in lengths
    ):
        with torch.no_grad():
            first, second = old(tokens).logits, new(tokens).logits
        kept = [each for each in range(size) if each not in NEW]
        assert torch.equal(first[..., kept], second[..., kept]) and second.shape[-1] == max(size, NEW.stop)
    for before, after in zip(*map(rows_of, (old, new)), strict=True):
        pieces = AutoTokenizer.from_pretrained(base)(list(STARTS.values())).input_ids
        means = torch.stack([before[ids].float().mean(0).to(dtype) for ids in pieces])
        assert torch.equal(after[NEW.start : NEW.stop], means)
    inspected = inspect_checkpoint(out)["parameters"]
    assert (
        inspected == {"total": new.num_parameters(), "new": report.parameters.new}
        and report.parameters.total == inspected["total"]
    )
    assert report.parameters.new == report.parameters.trainable == 3 * 32 * (1 if tied else 2)
    read = AutoTokenizer.from_pretrained(out)
    assert read("a wxyz,<|tool|>").input_ids == [6, 4, NEW[1], LETTERS.index(","), NEW[0]]
    result = strip(out, tmp_path / "stripped")
    assert (result["base_confirmed"], result["removed_tokens"]) == (True, 3)
    assert file_digests(tmp_path / "stripped", ("upscale.json",)) == file_digests(base)


def rows_of(model):
    """The embedding and the head, as far as it has rows of its own."""
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return weights[:1] if weights[0] is weights[1] else weights


def trained_steps(model, steps=3):
    """Train by AdamW with weight decay, with recomputation, on texts with new tokens."""
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(parameter_groups(model.train(), Rates(learning_rate=0.1, weight_decay=0.5)))
    for step in range(steps):
        tokens = torch.randint(0, NEW.stop, (2, 12), generator=torch.Generator().manual_seed(step))
        tokens[:, : len(NEW)] = torch.tensor(NEW)
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
def test_rows_of_new_tokens_alone_train(tied, copied, spoken, tmp_path):
    base = spoken("qwen3", 46, tie_word_embeddings=tied)
    with_tokens(base, tmp_path / "out")
    model = load(tmp_path / "out")
    report = set_trainable(model)
    own = 3 * 32 * (1 if tied else 2)
    assert report.parameters == own and f"{own} of " in str(report) and "in the rows of 3 new tokens" in str(report)
    model = copy.deepcopy(model) if copied else model
    before = copy.deepcopy(model.state_dict())
    trained_steps(model)
    names = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    for name, tensor in model.state_dict().items():
        if name in names or (tied and name == "lm_head.weight"):
            changed = (tensor != before[name]).any(1).nonzero().flatten().tolist()
            assert changed == list(NEW)
        else:
            assert torch.equal(tensor, before[name])
    model.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "trained")
    assert strip(tmp_path / "trained", tmp_path / "stripped")["base_confirmed"] is True
    assert same_tensors(tmp_path / "stripped", base)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "stripped").get_vocab()
        == AutoTokenizer.from_pretrained(base).get_vocab()
    )
    set_trainable(model, "all")
    trained_steps(model, 1)
    assert (model.get_input_embeddings().weight != before["model.embed_tokens.weight"]).any(1)[1:].all()


@pytest.mark.parametrize("tied", [True, False])
def test_beside_adapters_peft_trains_the_rows(tied, spoken, tmp_path):
    with_tokens(spoken("llama", tie_word_embeddings=tied), tmp_path / "out")
    model = load(tmp_path / "out")
    before = [rows.clone() for rows in rows_of(model)]
    adapted = get_peft_model(model, lora_config(model, r=2))
    trained_steps(adapted)
    merged = adapted.merge_and_unload()
    assert [
        (after != rows).any(1).nonzero().flatten().tolist()
        for after, rows in zip(rows_of(merged), before, strict=True)
    ] == [list(NEW)] * len(before)


@pytest.mark.parametrize("keys", [{}, {"bf16": True, "optim": "adafactor"}, {"adapters": {"r": 2}}], ids=str)
def test_midus_train_trains_them_and_strip_gives_the_base(keys, spoken, tmp_path, capsys):
    base, out = spoken(size=48, dtype=torch.bfloat16 if "bf16" in keys else torch.float32), tmp_path / "out"
    with_tokens(base, out)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a wxyz of a <|tool|> " * 60)
    run = tiny_config(out, tmp_path / "texts", tmp_path / "trained", max_steps=3, weight_decay=0.5, **keys)
    run_training(run)
    told = "all new parameters" if "adapters" in keys else "in the rows of 3 new tokens"
    assert told in capsys.readouterr().out
    before, after = read_tensors(out), read_tensors(tmp_path / "trained")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert {*(before[name] != after[name]).any(1).nonzero().flatten().tolist()} == {*NEW}
    assert strip(tmp_path / "trained", tmp_path / "stripped")["base_confirmed"] is ("adapters" not in keys)
    assert same_tensors(tmp_path / "stripped", base) is ("adapters" not in keys)


@pytest.mark.parametrize("sharing", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharing_of_parameters_is_refused(sharing, spoken, tmp_path):
    with_tokens(spoken(), tmp_path / "out")
    model = load(tmp_path / "out")
    set_trainable(model)
    trainer = SimpleNamespace(**{"is_fsdp_enabled": False, "is_deepspeed_enabled": False, sharing: True}, model=model)
    with pytest.raises(
        ValueError, match="what trains is rows of new tokens, which FSDP and DeepSpeed cannot tell from others"
    ):
        prepare_sharing(trainer)


def test_a_vocabulary_that_lost_rows_of_the_base_is_refused(spoken, tmp_path):
    with_tokens(spoken(), tmp_path / "out")
    model = load(tmp_path / "out")
    for size, is_base in ((60, True), (SIZE - 1, None)):
        model.resize_token_embeddings(size)
        model.save_pretrained(tmp_path / str(size))
        if is_base:  # more rows change nothing of the base's
            assert strip(tmp_path / str(size), tmp_path / "stripped")["base_confirmed"] is True
            continue
        with pytest.raises(
            ValueError, match="the vocabulary was resized to 43 tokens since it was upscaled, fewer than the"
        ):
            strip(tmp_path / str(size), tmp_path / "shorter")


def test_it_stacks_below_and_above_memory_and_on_itself(spoken, tmp_path):
    base = spoken(size=46)
    names = ["first", "memory", "second"]
    with_tokens(base, tmp_path / "first")
    upscale(base=tmp_path / "first", method="midus-hml", output=tmp_path / "memory", options={"n": 8, "k": 2})
    (tmp_path / "more.txt").write_text("xyz\n789\n")
    report = with_tokens(tmp_path / "memory", tmp_path / "second", tmp_path / "more.txt")
    assert report.identity.max_abs_diff == 0.0 and report.model_type == "midus_llama"
    for above, below in zip(names[::-1], [*names[-2::-1], "base"], strict=True):
        result = strip(tmp_path / above, tmp_path / f"{above} stripped")
        assert result["base_confirmed"] is True and same_tensors(tmp_path / f"{above} stripped", tmp_path / below)
        assert config_of(tmp_path / f"{above} stripped") == config_of(tmp_path / below)


def test_a_language_model_within_a_composite_one(tmp_path):
    composite_model("llava").save_pretrained(tmp_path / "base")
    save_letters(tmp_path / "base")
    (tmp_path / "tokens.txt").write_text("wxyz\n")
    assert with_tokens(tmp_path / "base", tmp_path / "out", tmp_path / "tokens.txt").identity.max_abs_diff == 0.0
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is True
    assert file_digests(tmp_path / "stripped", ("upscale.json",)) == file_digests(tmp_path / "base")


@pytest.mark.parametrize(
    ("key", "size"),
    [("pad_token_id", 48), ("eos_token_id", 46), ("eos_token_id", SIZE)],
    ids=["a row for all", "rows for some", "behind the rows"],
)
def test_ids_that_the_config_uses_keep_their_rows(key, size, spoken, tmp_path):
    base = spoken(size=size)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**config, key: SIZE}, indent=2) + "\n")
    before = read_tensors(base)
    assert with_tokens(base, tmp_path / "out").identity.max_abs_diff == 0.0
    tokenizer, after = AutoTokenizer.from_pretrained(tmp_path / "out"), read_tensors(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids([*STARTS]) == [each + 1 for each in NEW]
    assert config_of(tmp_path / "out")["vocab_size"] == 48 and config_of(tmp_path / "out")["upscale"]["new_rows"] == [
        45,
        48,
    ]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        kept = before[name][: SIZE + 1] if size > SIZE else torch.cat([before[name], before[name][:1]])
        assert torch.equal(after[name][: SIZE + 1], kept)
    (tmp_path / "more.txt").write_text("xyz\n")
    with_tokens(tmp_path / "out", tmp_path / "second", tmp_path / "more.txt")
    assert strip(tmp_path / "second", tmp_path / "first again")["base_confirmed"] is True
    assert same_tensors(tmp_path / "first again", tmp_path / "out")
    for result in ("out", "first again"):
        assert strip(tmp_path / result, tmp_path / f"{result} stripped")["base_confirmed"] is True
        assert same_tensors(tmp_path / f"{result} stripped", base)
        stripped = AutoTokenizer.from_pretrained(tmp_path / f"{result} stripped")
        assert stripped.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    assert file_digests(tmp_path / "out stripped", ("upscale.json",)) == file_digests(base)


PER_LAYER = "model.embed_tokens_per_layer.weight"


@pytest.mark.parametrize(("size", "per_layer"), [(SIZE, SIZE), (48, 48), (48, SIZE)])
def test_a_table_per_layer_has_rows_for_new_tokens_and_trains_them(size, per_layer, spoken, tmp_path):
    base = spoken()
    shutil.rmtree(base)
    tiny_model("gemma4_text", vocab_size=size, vocab_size_per_layer_input=per_layer).save_pretrained(base)
    save_letters(base)
    with_tokens(base, tmp_path / "out")
    before, model, config = read_tensors(base), load(tmp_path / "out"), config_of(tmp_path / "out")
    assert config["vocab_size"] == max(size, NEW.stop) and config["vocab_size_per_layer_input"] == max(
        per_layer, NEW.stop
    )
    pieces = AutoTokenizer.from_pretrained(base)(list(STARTS.values())).input_ids
    for name in ("model.embed_tokens.weight", PER_LAYER):
        means = torch.stack([before[name][ids].mean(0) for ids in pieces])
        assert torch.equal(model.state_dict()[name][NEW.start : NEW.stop], means)
    trained = copy.deepcopy(model)
    set_trainable(trained)
    trained_steps(trained)
    adapted = get_peft_model(copy.deepcopy(model), lora_config(model, r=2))
    trained_steps(adapted)
    for after in (trained, adapted.merge_and_unload()):
        for name in ("model.embed_tokens.weight", PER_LAYER):
            moved = (after.state_dict()[name] != model.state_dict()[name]).any(1).nonzero().flatten().tolist()
            assert moved == list(NEW)
    trained.resize_token_embeddings(60)
    trained.save_pretrained(tmp_path / "trained")
    for result in ("out", "trained"):
        assert strip(tmp_path / result, tmp_path / f"{result} stripped")["base_confirmed"] is True
        assert same_tensors(tmp_path / f"{result} stripped", base)
        assert config_of(tmp_path / f"{result} stripped") == config_of(base)


def test_tables_of_layers_that_predict_further_tokens_grow(spoken, tmp_path):
    base = spoken()
    shutil.rmtree(base)
    tiny_model("glm4_moe", vocab_size=SIZE).save_pretrained(base)
    save_letters(base)
    held = load_file(base / "model.safetensors")
    names = {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    norm = {"model.layers.4.enorm.weight": torch.ones(32)}
    save_file(
        held | norm | {name: held[like] * 2 for name, like in names.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with_tokens(base, tmp_path / "out")
    before, after = read_tensors(base), read_tensors(tmp_path / "out")
    pieces = AutoTokenizer.from_pretrained(base)(list(STARTS.values())).input_ids
    for name in (*names, *names.values()):
        means = torch.stack([before[name][ids].mean(0) for ids in pieces])
        assert torch.equal(after[name], torch.cat([before[name], means]))
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is True
    assert same_tensors(tmp_path / "stripped", base)


def test_tables_with_rows_for_other_things_are_refused(spoken, tmp_path):
    base = spoken()
    shutil.rmtree(base)
    tiny_model("moshi", vocab_size=SIZE).save_pretrained(base)
    save_letters(base)
    with pytest.raises(
        ValueError,
        match=r"embed_tokens.weight is \[45, 32\] in the base, with vocab_size = 44; expected a row of weights for each",
    ):
        with_tokens(base, tmp_path / "out")


def test_what_a_proven_type_reads_by_ids_is_what_is_written_down():
    for model_type in MAIN_TYPES:
        assert (
            tables_read(model_type)
            == model_type_of(model_type).tables
            == (("vocab_size",), ("model.embed_tokens.weight",))
        )


def test_what_does_not_learn_is_said(spoken, tmp_path, capfd):
    with_tokens(spoken(), tmp_path / "out")
    (tmp_path / "texts").mkdir()
    line = "the training data has none of the new tokens, whose rows learn from texts with them"
    rows = "the rows of 3 new tokens stay, which adapters.layers: base trains"
    for text, keys, told in (
        ("a of a, a ", {}, ()),
        ("not of them ", {}, (line,)),
        ("a of a, a ", {"adapters": {"r": 2, "layers": "all"}}, (rows,)),
    ):
        (tmp_path / "texts" / "a.txt").write_text(text * 60)
        run_training(tiny_config(tmp_path / "out", tmp_path / "texts", tmp_path / "trained", max_steps=1, **keys))
        said = "".join(capfd.readouterr())
        assert [each for each in (line, rows) if each in said] == [*told]
        shutil.rmtree(tmp_path / "trained")


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_tables_of_which_rows_train_are_refused(tied, spoken, tmp_path):
    with_tokens(spoken(tie_word_embeddings=tied), tmp_path / "out")
    for name, path in (("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
        targets = ["q_proj", name]
        for adapt in (
            lambda model, targets=targets: add_adapters(ModelView(model), {"target_modules": targets}),
            lambda model, targets=targets: lora_config(model, target_modules=targets),
        ):
            with pytest.raises(
                ValueError, match=f"adapters.target_modules has {path}, whose rows of new tokens train"
            ):
                adapt(load(tmp_path / "out"))


def test_tokens_of_another_tokenizer_and_special_ones(spoken, tmp_path):
    base = spoken()
    save_letters(tmp_path / "other", [*SPECIALS, "a", "Z", "Ġof", "<|x|>", "Ã"])
    report = with_tokens(base, tmp_path / "out", tmp_path / "other", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert report.parameters.new == 2 * 2 * 32 and tokenizer.convert_ids_to_tokens([*NEW][:2]) == [" of", "<|x|>"]
    options = {"tokens": str(tmp_path / "tokens.json"), "special": True}
    upscale(base=base, method="vocabulary", output=tmp_path / "special", options=options, verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "special")
    assert tokenizer.decode([6, NEW[0]], skip_special_tokens=True) == "a"


def test_what_was_taken_is_said(spoken, tmp_path, command):
    base = spoken(size=46)
    (tmp_path / "tokens.txt").write_text("Zeta\nof a\n")
    request = ("--base", base, "--method", "vocabulary", "--set", f"tokens={tmp_path / 'tokens.txt'}")
    done = command(*request, "--output", tmp_path / "out")
    for line in (
        "2 new tokens, with the ids 44 to 45, 2 of them in rows of the base that stand for no token",
        "tokens with pieces that the base does not know (<unk>): 'Zeta'",
        "logits of the base's tokens: largest difference 0 (base and result in float32), but for the logits of new tokens",
    ):
        assert line in " ".join((done.err + done.out).split())
    assert "warning" not in done.err  # the size stays
    told = command("strip", tmp_path / "out", "--output", tmp_path / "stripped")
    assert "took out 2 tokens. Its weights are the base's, byte for byte." in " ".join(told.out.split())
    assert "tokenizer.json is written anew" not in told.err
    (tmp_path / "tokens.txt").write_text("Zeta\nof a\na\nq q\n")
    done = command(*request, "--dry-run", "--json")
    assert "that the base's tokenizer has, and that are not added: 'a'" in done.err
    assert "the base has 46 tokens, no multiple of 4: in float32 on a CPU" in done.err
    assert done.json()["parameters"]["new"] == 3 * 2 * 32
    (tmp_path / "tokens.txt").write_text("Zeta\nof a\nq q\n")
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    for weights in base.glob("*.safetensors"):
        weights.unlink()
    done = command(*request, "--dry-run", "--json")
    assert (
        "the base has no tokenizer here: all tokens are taken for new" in done.err
        and done.json()["parameters"]["new"] == 192
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "t.txt",
            "ab\n\ncd\n",
            "t.txt has empty tokens, or white space around them: line 2; expected a token in each",
        ),
        ("t.txt", "ab\n cd\n", "white space around them: line 2"),
        ("t.txt", "ab\ncd\nab\n", "t.txt has tokens more than once: 'ab'; expected each once"),
        ("t.json", '{"ab": "a", "ab": "b"}', "t.json has tokens more than once: 'ab'; expected each once"),
        ("t.json", '["ab", 3]', "t.json has no list of tokens, and no mapping of tokens to texts"),
        ("t.json", "[]", "t.json has no list of tokens, and no mapping of tokens to texts"),
        ("t.json", "{", "t.json', which cannot be read: Expecting property name"),
        (
            "t.txt",
            "a\n<bos>\n",
            "t.txt has no token that the base's tokenizer lacks; tokens of .*t.txt that the base's tokenizer has, and that are "
            "not added: 'a', '<bos>'; expected",
        ),
        ("t.json", '{"ab": ""}', "the token 'ab' would start from '', of which the base's tokenizer makes the ids"),
        ("nowhere", None, "tokens is '.*nowhere', whose tokenizer cannot be loaded"),
    ],
)
def test_tokens_that_are_refused(name, text, message, spoken, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        with_tokens(spoken(), tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_bases_and_requests_that_are_refused(spoken, tmp_path):
    base = spoken()
    again = partial(with_tokens, base, tmp_path / "out")
    with pytest.raises(ValueError, match="num-new-layers is 2, but vocabulary adds no layer"):
        again(num_new_layers=2)
    with pytest.raises(ValueError, match="tokens is missing; expected a file of new tokens"):
        upscale(base=base, method="vocabulary", output=tmp_path / "out")
    with pytest.raises(ValueError, match="has no token that the base's tokenizer lacks"):
        again(base)
    upscale(
        base=base, method="engram", output=tmp_path / "engram", options={"rows": 199, "width": 16, "hash_heads": 4}
    )
    with pytest.raises(ValueError, match="the base has engram, which reads texts as its tokenizer cuts them now"):
        with_tokens(tmp_path / "engram", tmp_path / "out", tmp_path / "tokens.json")
    save_letters(base, [*LETTERS, "A", "B"])
    with pytest.raises(ValueError, match="gives new tokens the ids 46, 47, 48, and the base embeds 44"):
        again()
    shutil.rmtree(tmp_path / "base")
    save_base(base, vocab_size=SIZE)
    with pytest.raises(ValueError, match="has no tokenizer, to which tokens are added"):
        again()
