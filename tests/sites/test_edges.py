"""What is rare at a site: arguments of the model itself, other dtypes and devices, odd bases, plans that break a skip."""

import pytest
import torch
from models.cases import CASES as MODELS
from sites.cases import CASES
from sites.toys import Toy
from tiny import prompt

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import read_memories
from midus_hf.memories.hosting.inputs import CarriedKey, MemoryInputs
from midus_hf.memories.options import SharedTables
from midus_hf.memories.registry import MEMORY_TYPES
from midus_hf.memories.tables import DeclaredModule
from tests.upscalers.checkpoints import read_tensors, save_base, write_tensors
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


@torch.no_grad()
def test_an_argument_that_the_model_takes_as_well_reaches_both(toy_model, monkeypatch):
    plain, mask, seen, honest = toy_model(CASES["beside-ffn"], "llama"), torch.ones_like(prompt()), [], Toy.forward
    mask[0, :4] = 0
    expected = plain(prompt(), attention_mask=mask).logits
    assert not torch.equal(expected, plain(prompt()).logits)

    def forward(self, hidden_states, *, attention_mask=None, **rest):
        seen.append(attention_mask)
        return honest(self, hidden_states, **rest)

    monkeypatch.setattr(Toy, "forward", forward)
    monkeypatch.setattr(Toy, "forward_arguments", ("attention_mask",))
    model = type(plain)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(prompt(), attention_mask=mask).logits, expected)
    assert len(seen) == 4 and all(torch.equal(passed, mask) for passed in seen)


@pytest.mark.parametrize("case", ["beside-ffn", "behind-layer", "skip"])
def test_the_stream_keeps_its_dtype_whatever_a_memory_computes_in(case, toy_model, monkeypatch):
    honest = Toy.forward
    monkeypatch.setattr(Toy, "forward", lambda self, *args, **inputs: honest(self, *args, **inputs).float())
    model = toy_model(CASES[case], "llama", torch.bfloat16)
    with torch.no_grad():
        assert model(prompt()).logits.dtype == torch.bfloat16


def test_what_a_pass_brings_follows_to_another_device_and_still_carries():
    tables = {("toy", 1): {"up": torch.ones(3)}}
    inputs = MemoryInputs({"tables": tables}, {"toy_scale": torch.ones(2), "word": "x"})
    moved = inputs.to("meta", non_blocking=True)
    arguments = moved.arguments_for(Toy, "toy", 1)
    assert arguments["toy_scale"].is_meta and arguments["tables"]["up"].is_meta
    keys = [CarriedKey("toy", 0), CarriedKey("toy", 0, "key")]
    moved.carried.update(zip(keys, [torch.ones(1), None], strict=True))
    (output, key) = (inputs.carried[key] for key in keys)
    assert torch.equal(output, torch.ones(1)) and key is None


def test_a_plan_that_repeats_the_layer_behind_which_a_memory_adds_is_refused(tmp_path):
    base = save_base(tmp_path / "base", "llama")
    options = {"site": "skip", "layers": [0], "span": 2}
    upscale(base=base, method="toy", output=tmp_path / "toy", options=options, verify=False)
    with pytest.raises(RequestError, match="memory 'toy' adds behind layer 2, which the plan repeats"):
        upscale(base=tmp_path / "toy", method="solar", output=tmp_path / "out", verify=False)


def test_linear_layers_may_be_declared_as_values():
    module = DeclaredModule({"map.weight": DeclaredTensor((2, 3), "value", ZEROS)})
    assert module.declared_tensor("map.weight") is module.map.weight and module.names_of("value") == ["map.weight"]


def test_a_base_that_is_stripped_has_its_own_dtype_though_most_bytes_were_those_of_the_memory(tmp_path):
    base = save_base(tmp_path / "base", "llama", dtype=torch.bfloat16)
    upscale(base=base, method="toy", output=tmp_path / "out", options={"rank": 2000}, verify=False)
    tensors = read_tensors(tmp_path / "out")
    wide = {name: tensor.float() if ".memories." in name else tensor for name, tensor in tensors.items()}
    write_tensors(tmp_path / "out", wide)
    stripped = strip(tmp_path / "out", tmp_path / "stripped")
    assert stripped["base_confirmed"]
    assert (tmp_path / "stripped" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_embeddings_need_the_ids_beside_them(tmp_path):
    model = MODELS["ngram"].model("llama", tmp_path)
    embeddings = model.get_input_embeddings()(prompt())
    with torch.no_grad():
        expected = model(prompt()).logits
        assert torch.equal(model(inputs_embeds=embeddings, token_ids=prompt()).logits, expected)
        with pytest.raises(
            ValueError, match="inputs_embeds is passed alone, and a memory of this model reads input_ids"
        ):
            model(inputs_embeds=embeddings)


def test_a_memory_knows_which_of_its_layers_it_is_in(toy_model):
    model = toy_model(CASES["behind-attention"], "llama").get_decoder()
    assert [model.layers[layer].memories["toy"].index for layer in (1, 3)] == [0, 1]


def test_a_layer_that_reads_two_shared_tables_is_refused(monkeypatch):
    sizes = ModelSizes(hidden_size=8, num_heads=2, num_layers=3)
    tables = (SharedTables((0, 1), {}), SharedTables((1, 2), {}))
    monkeypatch.setattr(MEMORY_TYPES["toy"], "tables", lambda self, sizes, layers: tables)
    with pytest.raises(
        ValueError, match=r"layer 1 reads two shared tables of memory 'toy'; expected at most one\. Declare"
    ):
        read_memories([{"type": "toy", "layers": [0, 1, 2]}], sizes)
