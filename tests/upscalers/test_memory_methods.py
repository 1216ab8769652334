"""What single memory methods have of their own: layers, donors, remarks; `test_every_method` has what all share."""

import pytest
import torch

from tests.upscalers.checkpoints import (
    SMALL,
    config_of,
    edit_config,
    load,
    logits,
    read_tensors,
    record_of,
    same_bits,
    save_base,
    unverified,
    with_memory,
)
from tests.upscalers.dense.requests import tiny_config, upscaled_config
from tests.upscalers.methods import KINDS, SMALL_CHAPTERS, trained
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        *((quarter, [2, 6, 10, 14]) for quarter in (None, 0.25, 4)),
        *((one, [8]) for one in (0.01, 1)),
        (2, [4, 12]),
        ([0, 5, 15], [0, 5, 15]),
        ("all", list(range(16))),
        ("early:3", [0, 1, 2]),
        ("middle:4", [6, 7, 8, 9]),
        ("middle:3", [6, 7, 8]),
        ("late:3", [13, 14, 15]),
    ],
)
def test_a_quarter_of_the_layers_has_it_unless_others_are_named(layers, expected):
    options = {**SMALL_CHAPTERS, **({} if layers is None else {"layers": layers})}
    config = upscaled_config(tiny_config("llama", num_hidden_layers=16), "moc", options=options)
    (entry,) = config["memory"]
    assert entry["layers"] == expected and entry["type"] == entry["name"] == "chapters"
    assert {key: entry[key] for key in SMALL_CHAPTERS} == SMALL_CHAPTERS


def test_every_layer_but_inserted_blocks_reads_the_depth_or_skips_to_another(base, command, tmp_path):
    once = unverified(base, tmp_path / "once", placement="1,4")
    twice = unverified(once, tmp_path / "twice", method="moda", options={})
    below, entry = config_of(twice)["memory"]
    assert (below["layers"], entry["type"], entry["layers"]) == ([1, 4], "depth-attention", [0, 2, 3, 5])
    options = {"n": 8, "k": 4, "site": "skip", "span": 2}
    _, entry = config_of(unverified(once, tmp_path / "skips", method="ultramem-v2", options=options))["memory"]
    assert (entry["layers"], entry["into"]) == ([0, 2], [3, 5])
    done = command("--base", twice, "--method", "solar", "--output", tmp_path / "out")
    message = (
        "memory 'depth-attention' ties layers 0, 2, 3, 5 together, and the plan repeats some of them; expected each once. "
        "Choose a method that inserts layers."
    )
    assert done.status == 2 and message in done.err and not (tmp_path / "out").exists()


def test_tables_of_zeros_take_no_room_on_the_disk(base, tmp_path):
    """Of 6.3 MB per layer that hold values of zero, the file has holes."""
    options = {"n": 256, "k": 2, "value_width": 24, "pre_value_width": 0, "layers": 2}
    upscale(base=base, method="ultramem-v2", output=tmp_path / "out", options=options, verify=False)
    file = (tmp_path / "out" / "model.safetensors").stat()
    assert file.st_size > 12e6 and file.st_blocks * 512 < 2e6
    assert not any(
        value.any() for name, value in read_tensors(tmp_path / "out").items() if name.endswith("value_table")
    )


@pytest.mark.parametrize("kind", ["midus-hml", "midus-pkm", "midus-linear", "midus-hml, output projection"])
def test_a_block_holds_the_attention_and_norm_of_the_next_layer_as_far_as_it_needs_them(family, tmp_path, kind):
    base = save_base(tmp_path / "base", family, **({} if family == "qwen2" else {"attention_bias": True}))
    upscale(base=base, output=tmp_path / "out", placement="1,5", **KINDS[kind])
    old, new = read_tensors(base), read_tensors(tmp_path / "out")
    projects, norm = kind != "midus-hml", family.startswith("gemma") and kind != "midus-hml"
    wanted = {"self_attn.q_proj.weight", "input_layernorm.weight"}
    wanted |= {"self_attn.o_proj.weight"} if projects else set()
    wanted |= {"self_attn.o_proj.bias"} if projects and family != "qwen2" else set()
    wanted |= {"post_attention_layernorm.weight"} if norm else set()
    for index, donor in ((1, 1), (5, 3)):
        names = [name for name in new if name.startswith(f"model.layers.{index}.")]
        copied = {name.removeprefix(f"model.layers.{index}.") for name in names if ".memory." not in name}
        assert wanted <= copied and any("o_proj" in name for name in copied) == projects
        assert ("post_attention_layernorm.weight" in copied) == norm
        for name in copied:
            assert torch.equal(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])


def test_tensors_of_a_memory_start_as_the_class_says(tmp_path):
    base = save_base(tmp_path / "base", hidden_size=64, num_attention_heads=2)
    options = {"n": 16, "k": 2}
    upscale(base=base, method="midus-pkm", output=tmp_path / "out", options=options, placement="1,3")
    tensors = read_tensors(tmp_path / "out")
    first, second = ({n.rpartition("memory.")[2]: tensors[n] for n in tensors if f".{i}.memory." in n} for i in (1, 3))
    for zero in ("value_bank", "query_norm_bias", "query_mean"):
        assert not first[zero].any()
    for one in ("query_norm_weight", "query_variance"):
        assert torch.equal(first[one], torch.ones(2, 32))
    assert first["query_projection.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert 0.24 < first["row_keys"].abs().max() <= 0.25
    for random in ("query_projection.weight", "row_keys", "column_keys"):
        assert not torch.equal(first[random], second[random])


@pytest.mark.parametrize(("method", "family"), [("midus-pkm", "llama"), ("midus-linear", "gemma2")])
def test_where_the_neighbour_has_no_output_projection_the_attention_comes_from_further_off(
    family, shared_base, tmp_path, method
):
    with_memory(
        shared_base(family), tmp_path / "once", placement="0,3,6", verify=False
    )  # beside 1, between 2 and 4, beside 5
    output = tmp_path / "twice"
    upscale(base=tmp_path / "once", method=method, output=output, options=SMALL[method], placement="0,4,9")
    plan = config_of(output)["upscale"]["plan"]
    assert [plan[index]["sources"] for index in (0, 4, 9)] == [[1], [4], [5]]
    old, new = read_tensors(tmp_path / "once"), read_tensors(output)
    for index, donor in ((0, 1), (4, 4), (9, 5)):
        name = "self_attn.o_proj.weight"
        assert same_bits(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
    assert torch.equal(logits(shared_base(family)), logits(output))


def test_a_block_whose_neighbour_is_a_block_takes_the_attention_of_that_block(shared_base, tmp_path):
    with_memory(shared_base("gemma3"), tmp_path / "once", placement="0,5", verify=False)
    once = trained(tmp_path / "once", tmp_path / "trained")
    with_memory(once, tmp_path / "twice", placement="0,7", verify=False)
    old, new = read_tensors(once), read_tensors(tmp_path / "twice")
    for index, donor in ((0, 0), (7, 5)):
        prefix = f"model.layers.{index}."
        copied = [name.removeprefix(prefix) for name in new if name.startswith(prefix) and ".memory." not in name]
        assert copied and not any("o_proj" in name or "mlp" in name for name in copied)
        for name in copied:
            assert same_bits(new[prefix + name], old[f"model.layers.{donor}.{name}"])
    assert not new["model.layers.0.memory.value_bank"].any() and new["model.layers.1.memory.value_bank"].any()


def test_strip_inspect_and_methods_tell_of_a_memory(command, base, tmp_path):
    unverified(base, tmp_path / "out", method="moc", options=SMALL_CHAPTERS)
    stripped = command("strip", tmp_path / "out", "--output", tmp_path / "stripped")
    assert "took out memory chapters. Its weights are the base's" in " ".join(stripped.out.split())
    assert "took out memory chapters" in " ".join(command("inspect", tmp_path / "stripped").out.split())
    (method,) = command("methods", "moc", "--json").json()
    defaults = {option["name"]: option["default"] for option in method["options"]}
    assert (defaults["layers"], defaults["site"], defaults["routing"]) == (0.25, "behind-attention", "chunk")
    assert method["identity"] is True and "Mixture of Chapters" in method["paper"]["title"]


def test_a_base_without_any_output_projection_is_refused(base, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes(
        (unverified(base, tmp_path / "out", placement="0") / "config.json").read_bytes()
    )
    edit_config(bare, num_hidden_layers=1)  # that of the block alone
    with pytest.raises(
        RequestError, match=r"new layer 0 needs an attention with an output projection.*Choose midus-hml"
    ):
        upscale(base=bare, method="midus-pkm", placement="0", dry_run=True)


NOT_CAUSAL = "routing is 'sequence', so chapters are chosen by all tokens of a text, later ones included"
HEADING = "## Know before use"


def upscaled_with(command, base, output, routing: str):
    options = {**SMALL_CHAPTERS, "layers": [1], "routing": routing}
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    done = command("--base", base, "--method", "moc", "--output", output, "--no-verify", *words)
    assert done.status == 0, done.err
    return done


def test_a_model_that_looks_at_later_tokens_says_so_wherever_it_is_met_and_a_causal_one_does_not(
    command, base, tmp_path
):
    out = tmp_path / "out"
    planned = command("--base", base, "--method", "moc", "--dry-run", "--set", "preset=paper")
    assert planned.status == 0 and f"upscale: warning: {NOT_CAUSAL}" in planned.err
    assert f"upscale: warning: {NOT_CAUSAL}" in upscaled_with(command, base, out, "sequence").err
    assert f"{HEADING}\n\n- {NOT_CAUSAL}" in (out / "README.md").read_text()
    assert config_of(out)["upscale"]["causal"] is record_of(out)["causal"] is False
    load(out).save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").config.upscale["causal"] is False
    again = unverified(out, tmp_path / "again")
    assert config_of(again)["upscale"]["causal"] is False
    assert command("inspect", out, "--json").json()["causal"] is False
    assert "what a token gets depends on later tokens" in command("inspect", out).out
    for routing in ("chunk", "token"):
        out = tmp_path / routing
        assert "causal" not in upscaled_with(command, base, out, routing).err
        assert HEADING not in (out / "README.md").read_text()
        assert "causal" not in config_of(out)["upscale"]
        assert command("inspect", out, "--json").json()["causal"] is True
        assert "depends on later tokens" not in command("inspect", out).out


def test_the_concerns_of_every_method_stand_in_the_card(shared_base, tmp_path):
    upscale(base=shared_base("gemma2"), method="avg-deus", output=tmp_path / "out", placement="1", verify=False)
    (section,) = (tmp_path / "out" / "README.md").read_text().split(HEADING)[1:]
    concern = "sliding and full attention, whose rotary embeddings and windows may differ"
    assert concern in section.partition("\n## ")[0]
