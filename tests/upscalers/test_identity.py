"""Upscaled models compute what their bases compute, bit for bit, also in a process that never saw them made."""

import json

import pytest
import torch
from pairs import in_turn, wanted_by_tests
from processes.warm import run_warm
from tiny import WINDOW, prompt

from tests.upscalers.checkpoints import (
    SMALL,
    SMALL_MEMORY,
    VARIANTS,
    base_for,
    load,
    logits,
    read_tensors,
    save_base,
    variants,
)
from upscalers.runs.upscale import upscale

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLACEMENTS = ("distributed", "top-heavy", "bottom-heavy")

COMPARE = """
import functools, json, sys
import torch
from transformers import AutoModelForCausalLM
import midus_hf

torch.set_num_threads(1)
tokens = torch.tensor(json.loads(sys.argv[1]))

@functools.cache
def computed(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        values = model(tokens).logits
    text = model.generate(tokens, max_new_tokens=10, do_sample=False, use_cache=True)
    assert text.shape[1] == tokens.shape[1] + 10
    return str(model.dtype).removeprefix("torch."), values, text

for case, base, upscaled in json.load(open(sys.argv[2])):
    base_dtype, base_logits, base_text = computed(base)
    dtype, new_logits, new_text = computed(upscaled)
    print(json.dumps([case, [base_dtype, dtype], torch.equal(base_logits, new_logits), torch.equal(base_text, new_text)]))
"""


CASES = [
    *in_turn(PLACEMENTS, ["bfloat16", "float16"]),
    *in_turn(VARIANTS, ["float32", "bfloat16"]),
]
"""Placement or memory, and dtype, beside placements in float32."""


@pytest.fixture(scope="module")
def compared(request, tmp_path_factory) -> dict[str, list]:
    """For each case the dtypes of base and upscaled model, and whether logits and greedy tokens are equal.

    All of them in one process that never saw the models made, since starting it takes longest.
    """
    folder = tmp_path_factory.mktemp("identity")
    placed = [(family, placement, "float32") for family, placement in wanted_by_tests(request, "family", "placement")]
    pairs, bases = [], {}
    for family, case, dtype in [*placed, *wanted_by_tests(request, "family", "case", "dtype")]:
        changes = base_for(case)
        key = (family, dtype, *changes)
        if key not in bases:
            bases[key] = save_base(folder / f"base-{len(bases)}", family, DTYPES[dtype], **changes)
        method, options = VARIANTS.get(case, ("midus-hml", {}))
        output, placement = folder / f"upscaled-{len(pairs)}", case if case in PLACEMENTS else None
        options = {**SMALL[method], **options}
        report = upscale(
            base=bases[key], method=method, output=output, options=options, placement=placement, verify=False
        )
        assert (report.identity.checked, report.identity.max_abs_diff) == ("blocks", 0.0)
        pairs.append((f"{family} {dtype} {case}", str(bases[key]), str(output)))
    (folder / "pairs.json").write_text(json.dumps(pairs))
    assert prompt().shape[1] > WINDOW
    result = run_warm(COMPARE, json.dumps(prompt().tolist()), folder / "pairs.json")
    assert result.returncode == 0, result.stderr
    return {case: findings for case, *findings in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_at_every_placement_logits_and_greedy_tokens_equal_the_bases_in_a_fresh_process(family, placement, compared):
    assert compared[f"{family} float32 {placement}"] == [["float32", "float32"], True, True]


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_logits_and_greedy_tokens_equal_the_bases_in_a_fresh_process(family, case, dtype, compared):
    """Of every memory and option, too."""
    assert compared[f"{family} {dtype} {case}"] == [[dtype, dtype], True, True]


@pytest.mark.parametrize("method", SMALL)
def test_verification_finds_no_difference(family, shared_base, tmp_path, method):
    report = upscale(base=shared_base(family), method=method, output=tmp_path / "out", options=SMALL[method])
    assert (report.identity.checked, report.identity.max_abs_diff) == ("logits", 0.0)
    assert torch.equal(logits(shared_base(family)), logits(tmp_path / "out"))


def test_blocks_in_front_of_and_behind_all_layers_change_nothing(family, shared_base, tmp_path):
    base = shared_base(family)
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options=SMALL_MEMORY, placement="0,1,4,7,8,9")
    assert torch.equal(logits(base), logits(tmp_path / "out"))


def test_a_new_block_holds_the_attention_and_norm_of_the_next_layer_and_zero_values(family, shared_base, tmp_path):
    base = shared_base(family)
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options=SMALL_MEMORY, placement="1,5")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    for index, donor in ((1, 1), (5, 3)):
        block = {name: new[name] for name in new if name.startswith(f"model.layers.{index}.")}
        copied = {name.removeprefix(f"model.layers.{index}.") for name in block if ".memory." not in name}
        assert {"self_attn.q_proj.weight", "input_layernorm.weight"} <= copied
        for name in copied:
            assert torch.equal(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
        memory = {name.rpartition(".")[2]: tensor for name, tensor in block.items() if ".memory." in name}
        assert not memory.pop("value_bank").any()
        assert all((tensor != 0).float().mean() > 0.99 for tensor in memory.values())
    assert not torch.equal(new["model.layers.1.memory.row_keys"], new["model.layers.5.memory.row_keys"])


@pytest.mark.parametrize("variant", ["pkm", "linear", "hml, output projection"])
def test_a_block_that_keeps_the_output_projection_holds_it_and_the_norm_behind_it(family, tmp_path, variant):
    base = save_base(tmp_path / "base", family, **({} if family == "qwen2" else {"attention_bias": True}))
    method, options = variants(family)[variant]
    upscale(base=base, method=method, output=tmp_path / "out", options=options, placement="1,5")
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    wanted = {"self_attn.o_proj.weight", "input_layernorm.weight"}
    wanted |= {"self_attn.o_proj.bias"} if family != "qwen2" else set()
    wanted |= {"post_attention_layernorm.weight"} if family.startswith("gemma") else set()
    for index, donor in ((1, 1), (5, 3)):
        names = [name for name in new if name.startswith(f"model.layers.{index}.")]
        copied = {name.removeprefix(f"model.layers.{index}.") for name in names if ".memory." not in name}
        assert wanted <= copied
        assert ("post_attention_layernorm.weight" in copied) == family.startswith("gemma")
        for name in copied:
            assert torch.equal(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])


def test_tensors_of_a_memory_start_as_the_class_says(tmp_path):
    base = save_base(tmp_path / "base", hidden_size=64, num_attention_heads=2)
    options = {"n": 16, "k": 2, "gate": "token"}
    upscale(base=base, method="midus-pkm", output=tmp_path / "out", options=options, placement="1,3")
    tensors = read_tensors(tmp_path / "out")
    first, second = ({n.rpartition("memory.")[2]: tensors[n] for n in tensors if f".{i}.memory." in n} for i in (1, 3))
    for zero in ("value_bank", "query_norm_bias", "query_mean", "gate_weight", "gate_bias"):
        assert not first[zero].any()
    for one in ("query_norm_weight", "query_variance"):
        assert torch.equal(first[one], torch.ones(2, 32))
    assert first["query_projection.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert 0.24 < first["row_keys"].abs().max() <= 0.25
    for random in ("query_projection.weight", "row_keys", "column_keys"):
        assert not torch.equal(first[random], second[random])


@pytest.mark.parametrize("method", SMALL)
def test_blocks_are_there_and_change_the_model_once_their_values_do(family, shared_base, tmp_path, method):
    upscale(base=shared_base(family), method=method, output=tmp_path / "out", options=SMALL[method])
    model = load(tmp_path / "out")
    with torch.no_grad():
        before = model(prompt()).logits
        model.model.layers[1].memory.value_bank.normal_(generator=torch.Generator().manual_seed(0))
        assert not torch.allclose(before, model(prompt()).logits, atol=1e-3)
