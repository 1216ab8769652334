"""The `memory` list of a config: what an entry means, and what is refused, alike for planning and for models."""

import json
import re
from typing import Any

import pytest
import torch
from config.reading import SIZES, read_entry
from tiny import FAMILIES, save_tiny_model

from midus_hf.memories.midus.options import MidusHmlOptions
from midus_hf.memories.registry import MEMORY_TYPES, memory_type, read_memories
from midus_hf.models import FAMILIES as HOSTS
from upscalers.checkpoint.base_checkpoint import open_base


def test_entry_is_read():
    entry = read_entry({"type": "midus-hml", "layers": [1, 4], "n": 8, "k": 2})
    assert entry.options == MidusHmlOptions(n=8, k=2)
    assert (entry.options.type, entry.site, entry.layers) == ("midus-hml", "inserted", (1, 4))
    assert read_memories(None, SIZES).entries == read_memories([], SIZES).entries == ()
    assert len(read_memories([depth(0, 2, name="a"), depth(1, 3, name="b")], SIZES).entries) == 2
    assert read_entry({"type": "midus-hml", "layers": [1], "value_bits": None}).options == MidusHmlOptions()


@pytest.mark.parametrize("name", MEMORY_TYPES)
def test_written_entry_is_read_back(name):
    entry = read_entry({"type": name, "layers": [1, 4]})
    assert read_entry(json.loads(json.dumps(entry.to_dict()))) == entry


BLOCK = {"type": "midus-hml", "site": "inserted", "layers": [1]}
IN_A_BLOCK = "memory 'ultramem' is attached to layer 1, which was inserted for a memory"
NO_NAME = "expected words joined by hyphens, and no word of a torch"
AFTER = "a layer to add after"
OF_LEVELS = "expected a size for each level of the tree, 0 or more, and not all of them 0, such as [256, 64, 16, 0]."
OTHER = "levels, and 'hier-ffn' by one of branching 3 and 2 levels; expected one tree, by whose nodes a text fetches from both."


def tables(*layers: int, **changes: Any) -> dict[str, Any]:
    return {"type": "ultramem-v2", "layers": list(layers), **changes}


def depth(*layers: int, **changes: Any) -> dict[str, Any]:
    return {"type": "moda", "layers": list(layers), **changes}


def fetched(kind: str = "hier-ffn", **changes: Any) -> dict[str, Any]:
    return {"type": kind, "layers": [0, 2], "sizes": [2, 1], "branching": 3, **changes}


WRONG = [
    (["midus-hml"], r"memory entry is 'midus-hml'; expected a mapping such as \{'type': 'midus-hml', 'layers': \[1\]\}"),
    ([{"layers": [1]}], "memory type is None; expected one of: engram, hier-ffn, "),
    ([{"type": "head-wise", "layers": [1]}], "memory type is 'head-wise'; .* Do not rename a type"),
    ([{"type": ["midus-hml"], "layers": [1]}], r"memory type is \['midus-hml'\]; expected one of"),
    ([{"type": "midus-hml"}], "type 'midus-hml' has no 'layers'; expected the indices of the layers that hold it"),
    ([{"type": "midus-hml", "layers": [1], "sub_keys": 4}], r"'midus-hml' has no option 'sub_keys'\. Expected one of: k, query_norm"),
    ([{"type": "midus-hml", "layers": [1], "value_bits": 8}], "'midus-hml' has value_bits = 8: its values are integers, .* Load the"),
    ([{"type": "moc", "layers": [1], "bank_bits": 4}], "type 'moc' has bank_bits = 4: its values are integers"),
    ([{"type": "midus-hml", "layers": [1], "site": "beside"}], "'midus-hml' has site = 'beside'; expected one of: inserted"),
    ([{"type": "midus-hml", "layers": 1}], "layers is 1; expected a list of layer indices"),
    ([{"type": "midus-hml", "layers": [True]}], r"layers is \[True\]; expected a list of layer indices"),
    ([{"type": "midus-hml", "layers": [4, 1]}], r"layers is \[4, 1\]; expected ascending indices, each once"),
    ([{"type": "midus-hml", "layers": [6]}], "'midus-hml' names layer 6; expected 0 <= layer < 6"),
    ([BLOCK, {"type": "midus-linear", "layers": [1]}], "layer 1 holds two inserted memories; expected at most one"),
    ([{"type": "midus-hml", "layers": [1], "n": 8, "k": 9}], r"k is 9; expected 1 <= k <= n = 8\. Lower k or raise n"),
    ([{"type": "midus-pkm", "layers": [1], "output_projection": True}], "has no option 'output_projection'"),
    ([{"type": "midus-linear", "layers": [1], "slots": 3}], r"k is 4; expected 1 <= k <= slots = 3\. Lower k or raise slots"),
    ([BLOCK, tables(0, 1)], IN_A_BLOCK),
    ([tables(1), BLOCK], IN_A_BLOCK),
    ([BLOCK, tables(0, site="skip", into=[1])], IN_A_BLOCK),
    ([tables(0), tables(0)], "two memories have the name 'ultramem'; expected a separate name for each"),
    ([tables(0, 1, site="skip", into=[2])], rf"'ultramem-v2' reads at layers \[0, 1\] and adds after \[2\]; .* {AFTER}"),
    ([tables(1, 2, site="skip", into=[2, 1])], rf"adds after \[2, 1\]; .* {AFTER}, at or after it"),
    ([tables(0, site="skip")], f"'ultramem-v2' has no 'into'; expected {AFTER}"),
    ([tables(0, site="inside-ffn")], "'ultramem-v2' has site = 'inside-ffn'; expected one of: beside-ffn"),
    ([{**BLOCK, "name": "blocks"}], r"memory entry of type 'midus-hml' has no option 'name'\."),
    *(([tables(0, **{key: 1})], rf"memory entry of type 'ultramem-v2' has no option '{key}'\.") for key in ("into", "span")),
    *(
        ([tables(0, name=name)], re.escape(f"'ultramem-v2' has name = {name!r}; {NO_NAME}"))
        for name in ("a.b", "a--b", "", 5, "keys", "type", "forward")
    ),
    ([depth(0, 1, attention_slots="none", ffn_slots=False)], "expected one of them, for there is nothing to read"),
    ([depth(2)], r"layers is \[2\]; expected two or more, for a layer reads what another in front of it wrote"),
    ([depth(0, 2, name="a"), depth(2, 3, name="b")], "'a' and 'b' both attend in the place of layer 2's own attention"),
    *(([fetched(sizes=sizes)], re.escape(f"sizes is {sizes}; {OF_LEVELS}")) for sizes in ([], [0, 0], [4, -1])),
    *(
        ([fetched(), fetched("hier-kv", **{key: value})], f"memory 'hier-kv' fetches blocks by a tree of branching {tree} {OTHER}")
        for key, value, tree in (("branching", 4, "4 and 2"), ("sizes", [2, 1, 0], "3 and 3"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("memory", "message"), WRONG, ids=str)
def test_wrong_memory_list_is_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        read_memories(memory, SIZES)


@pytest.mark.parametrize("memory", [[{"type": "midus-linear", "layers": [1], "slotz": 9}], [BLOCK] * 2], ids=str)
def test_planning_and_models_give_the_same_refusal(memory, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "midus_llama", "memory": memory}))
    with pytest.raises(ValueError) as by_planning:
        open_base(folder)
    fields = {key: value for key, value in FAMILIES["llama"].config().to_dict().items() if key != "model_type"}
    with pytest.raises(ValueError) as by_model, torch.device("meta"):
        HOSTS["llama"].config_class(**fields, memory=memory)
    assert str(by_planning.value) == str(by_model.value)


def test_entries_with_earlier_types_are_read():
    earlier = {
        "chapters": "moc", "depth-attention": "moda", "headwise": "midus-hml", "linear": "midus-linear", "ngram": "engram",
        "product-key": "midus-pkm", "ultramem": "ultramem-v2",
    }  # fmt: skip
    for before, now in earlier.items():
        assert memory_type(before) is memory_type(now) is MEMORY_TYPES[now]
    config = HOSTS["llama"].config_class(
        num_hidden_layers=2, memory=[{"type": "chapters", "layers": [1], "name": "kept"}]
    )
    assert config.memory == [{"type": "moc", "layers": [1], "name": "kept"}]
    assert list(config.memories().attached) == ["kept"]
    unnamed = HOSTS["llama"].config_class(num_hidden_layers=2, memory=[{"type": "ngram", "layers": [1]}])
    assert list(unnamed.memories().attached) == ["ngram"]  # as its tensors are called
