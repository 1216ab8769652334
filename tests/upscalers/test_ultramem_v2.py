"""The method ultramem-v2: the base computes the same with it, all of it trains, `strip` gives the base back, misfits are refused."""

import json

import pytest
import torch
from models.fresh_process import run_python
from pairs import in_turn
from tiny import prompt, save_tiny_model

from tests.upscalers.checkpoints import SMALL_MEMORY, load, logits, read_tensors
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

SMALL = {"n": 8, "k": 4}
KINDS = {
    "own": {},
    "zero-projection": {"zero": "projection"},
    "ring": {"share": "ring:4"},
    "noring": {"share": "noring:2", "layers": [0, 1, 3]},
    "block": {"share": "block:2"},
    "expanded": {"key_pairs": 2, "projections": "per-block"},
    "heads": {"heads": 2, "rank": 3, "activation": "gelu", "side_k": 5},
    "no-pre-values": {"pre_value_width": 0},
    "skip": {"site": "skip", "span": 2},
    "memory-plus": {"preset": "memory-plus", "n": 8, "k": 3, "key_width": 4},
    "losses": {"balance_coef": 0.1, "penalty_coef": 0.1, "penalty_margin": 0.0},
}


@pytest.mark.parametrize(("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]), ids=str)
def test_logits_are_those_of_the_base_and_strip_gives_it_back(native_family, kind, dtype, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base", dtype)
    report = upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options={**SMALL, **KINDS[kind]})
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_after_three_steps_every_new_tensor_has_moved(native_family, kind, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base", torch.float32)
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options={**SMALL, **KINDS[kind]}, verify=False)
    model, native = load(tmp_path / "out").train(), dict(load(base).named_parameters())
    before = {name: value.clone() for name, value in model.named_parameters() if name not in native}
    optimizer = torch.optim.AdamW([value for name, value in model.named_parameters() if name in before], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(prompt(), labels=prompt()).loss.backward()
        optimizer.step()
    assert before
    still = [name for name, value in model.named_parameters() if name in before and torch.equal(value, before[name])]
    assert not still


@pytest.mark.parametrize(
    ("share", "told"),
    [
        ("block:2", "a layer has 11 keys a side and reads 121 of the 128 rows of its tables: 14 rows are stored that no layer"),
        ("noring:3", "a layer has 13 keys a side and reads 169 of the 192 rows of its tables: 23 rows are stored that no layer"),
        ("ring:3", None),
        ("block:4", None),
    ],
)  # fmt: skip
def test_rows_that_no_layer_reads_are_told_before_anything_is_written(share, told, base, command):
    options = [word for pair in ("n=8", "k=4", f"share={share}") for word in ("--set", pair)]
    done = command("--base", base, "--method", "ultramem-v2", "--dry-run", *options)
    assert done.status == 0
    assert (
        done.err == ""
        if told is None
        else f"upscale: warning: share is '{share}', so {told} reads. Choose" in done.err
    )


@pytest.mark.parametrize("kind", ["own", "ring", "expanded", "memory-plus"])
def test_what_is_made_block_by_block_is_checked_too(kind, base, tmp_path):
    options = {**SMALL, **KINDS[kind]}
    report = upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    assert report.identity.checked == "blocks" and report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "out"), logits(base))


@pytest.mark.parametrize(
    ("options", "of_layer", "of_model"),
    [
        ({}, {"value_table": [64, 6], "pre_value_table": [64, 2], "row_keys": [1, 1, 8, 2, 16]}, {}),
        (
            {"share": "all"},
            {"column_keys": [1, 1, 8, 2, 16]},
            {"0.value_table": [64, 6], "0.pre_value_table": [64, 2]},
        ),
        (
            {"share": "ring:4"},
            {"row_keys": [1, 1, 16, 2, 16]},
            {"0.value_table": [256, 6], "0.pre_value_table": [256, 2]},
        ),
        (
            {"share": "block:2", "pre_value_width": 0},
            {"row_keys": [1, 1, 11, 2, 16]},
            {"0.value_table": [128, 6], "1.value_table": [128, 6]},
        ),
        (
            {"key_pairs": 2, "projections": "per-block"},
            {"core": [1, 2, 2, 2, 2], "value_projection.weight": [32, 24], "value_table": [64, 6]},
            {},
        ),
    ],
    ids=["own", "all", "ring", "block", "expanded"],
)
def test_tensors_have_their_names(options, of_layer, of_model, base, tmp_path):
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options={**SMALL, **options}, verify=False)
    tensors = {name: list(value.shape) for name, value in read_tensors(tmp_path / "out").items()}
    prefix = "model.layers.1.memories.ultramem."
    found = {name.removeprefix(prefix): shape for name, shape in tensors.items() if name.startswith(prefix)}
    assert {name: found[name] for name in of_layer} == of_layer
    tables = "model.memory_tables.ultramem."
    assert {name.removeprefix(tables): shape for name, shape in tensors.items() if name.startswith(tables)} == of_model
    assert ("value_table" in found) == (not of_model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "n=40000 share=ring:4",
            "n is 40000, key_pairs 1 and share 'ring:4', which make 6,400,000,000 slots; expected at most",
        ),
        (
            "key_pairs=3000 n=64",
            "n is 64, key_pairs 3000 and share 'none', which make 36,864,000,000 slots; expected at most",
        ),
        ("rank=17", "rank is 17, more than the 16 features of a key; expected fewer. Lower rank."),
        ("share=ring:5", "share is 'ring:5', but 4 layers have the memory; expected a group of at most as many."),
        (
            "share=block:3",
            "share is 'block:3', which does not divide the 4 layers that have the memory; expected a divisor.",
        ),
        ("share=rings:2", "share is 'rings:2'; expected none, all, noring:G, ring:G or block:G, such as ring:4."),
        (
            "value_width=1/3",
            "value_width is 1/3 of hidden_size = 32, which is 10.6667; expected a whole number from 1 to the hidden",
        ),
        ("value_width=0", "value_width is 0; expected 1 or more."),
        ("pre_value_width=-1", "pre_value_width is -1; expected 0 or more."),
        ("key_width=wide", "key_width is 'wide'; expected a number, or a fraction of the hidden size such as 3/16."),
        (
            "value_width=2/1",
            "value_width is 2/1 of hidden_size = 32, which is 64; expected a whole number from 1 to the hidden",
        ),
        (
            "k=100 side_k=4",
            "k is 100; expected at most 16, the pairs of 4 rows and 4 columns that the first stage keeps.",
        ),
        ("side_k=9 n=8", "side_k is 9; expected 1 <= side_k <= 8, the keys of a set, or null."),
        ("heads=0", "heads is 0; expected 1 or more."),
        ("scoring=sum", "scoring is 'sum', which has no core, with rank 2 and key_pairs 1; expected 1 for both."),
        (
            "scoring=sum rank=1 n=8 k=9",
            "scoring is 'sum', which keeps k keys of each side, with k 9 and side_k null; expected k of at most 8,",
        ),
        (
            "scoring=sum rank=1 n=8 k=4 side_k=3",
            "scoring is 'sum', which keeps k keys of each side, with k 4 and side_k 3; expected k of at most 8,",
        ),
        (
            "zero=none",
            "zero is 'none', with which the new memory changes what the base computes; expected values or projection.",
        ),
        ("balance_coef=-1", "balance_coef is -1.0; expected 0 or more."),
        (
            "rank=1 penalty_coef=0.1",
            "penalty_coef is 0.1 with rank 1, whose cores have one singular value; expected 0, since there are no smaller singular "
            "values that could cost something. Leave penalty_coef out, or set scoring: tucker and rank: 2.",
        ),
        (
            "scoring=sum rank=1 penalty_coef=0.1",
            "penalty_coef is 0.1 with scoring 'sum', which has no core; expected 0, since there are no smaller singular values",
        ),
        ("site=behind-layer", "site is 'behind-layer'; expected one of: beside-ffn, skip."),
    ],
)
def test_requests_that_do_not_fit_are_refused(command, base, tmp_path, words, message):
    options = [word for pair in words.split() for word in ("--set", pair)]
    done = command("--base", base, "--method", "ultramem-v2", "--output", tmp_path / "out", *options)
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert message in done.err and not (tmp_path / "out").exists()


def test_tables_of_zeros_take_no_room_on_the_disk(base, tmp_path):
    """Of 6.3 MB per layer that hold values of zero, the file has holes."""
    options = {"n": 256, "k": 2, "value_width": 24, "pre_value_width": 0, "layers": 2}
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    file = (tmp_path / "out" / "model.safetensors").stat()
    assert file.st_size > 12e6 and file.st_blocks * 512 < 2e6
    assert not any(
        value.any() for name, value in read_tensors(tmp_path / "out").items() if name.endswith("value_table")
    )


def test_a_model_from_a_config_trains_from_scratch_without_zeros(base, tmp_path):
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=SMALL, verify=False)
    config = load(tmp_path / "out").config
    config.memory = [{**config.memory[0], "zero": "none"}]
    model = type(load(tmp_path / "out"))(config)
    memory = model.get_decoder().layers[0].memories["ultramem"]
    assert memory.value_table.abs().min() > 0 and memory.value_projection.weight.abs().min() > 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["memory"][0]["zero"] == "values"


def test_a_folder_computes_generates_and_is_saved_where_this_project_is_not_installed(tmp_path):
    """Its code comes along, whatever the options need of it."""
    kinds = {"qwen3": {"share": "ring:2", "key_pairs": 2, **KINDS["losses"]}, "gemma3": KINDS["memory-plus"]}
    for family, options in kinds.items():
        base = save_tiny_model(family, tmp_path / f"base-{family}")
        upscale(base=base, method="ultramem-v2", output=tmp_path / family, options={**SMALL, **options}, verify=False)
    code = """
import sys
from transformers import AutoModelForCausalLM
tokens = torch.arange(3, 12)[None]
for family in ("qwen3", "gemma3"):
    base = AutoModelForCausalLM.from_pretrained(f"base-{family}").eval()
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True).eval()
    model.save_pretrained(f"{family}-again")
    again = AutoModelForCausalLM.from_pretrained(f"{family}-again", trust_remote_code=True).eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        same = all(torch.equal(one(tokens).logits, base(tokens).logits) for one in (model, again))
    same = same and torch.equal(model.generate(tokens, **settings), base.generate(tokens, **settings))
    model.train()(tokens, labels=tokens).loss.backward()
    print(same, type(model).__module__.startswith("transformers_modules."))
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
"""
    assert run_python(code, tmp_path, package_present=False).split() == ["True", "True"] * 2


SECOND = {"midus-hml": SMALL_MEMORY, "llama-pro": {}, "ultramem-v2": {**SMALL, "layers": [0, 2]}}


@pytest.mark.parametrize(("kind", "second"), in_turn(["own", "ring", "skip"], SECOND))
def test_a_trained_one_keeps_acting_below_another_method_and_comes_back(kind, second, family, shared_base, tmp_path):
    base = shared_base(family)
    upscale(base=base, method="ultramem-v2", output=tmp_path / "new", options={**SMALL, **KINDS[kind]}, verify=False)
    model = load(tmp_path / "new")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("value_table"):
                value.normal_()
    model.save_pretrained(tmp_path / "once")
    assert not torch.equal(logits(tmp_path / "once"), logits(base))
    report = upscale(base=tmp_path / "once", method=second, output=tmp_path / "twice", options=SECOND[second])
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(tmp_path / "once"))
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
