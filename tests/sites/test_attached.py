"""Memories attached to layers of a base, and inserted ones: what trains, what is stacked on them, and what a pass brings to them."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from models.cases import CASES
from models.gradients import train_steps
from peft import PeftModel, get_peft_model
from tiny import logits, prompt, tiny_model

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.memories.hosting.parts import CarriedKey, MemoryInputs
from midus_hf.memories.hosting.service import Tables
from midus_hf.memories.midus.layer import MidusHmlMemory
from midus_hf.memories.module import DeclaredModule, tensor_names
from midus_hf.memories.ultramem_v2.layer import UltraMemV2Memory
from midus_hf.training.adapters import lora_config
from midus_hf.training.keys import Rates
from midus_hf.training.optim import parameter_groups, set_trainable
from tests.upscalers.checkpoints import SMALL_MEMORY, save_base, with_memory, write_tensors
from tests.upscalers.contents import config_of, load, read_tensors, same_tensors
from tests.upscalers.contents import logits as checkpoint_logits
from tests.upscalers.methods import KINDS, trained
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# Of models of four layers: tables that layers share, a memory across layers, and blocks.
LAYERS = {"ultramem-v2, ring": [0, 1, 2, 3], "ultramem-v2, skip": [0, 1], "midus-hml": [1, 4]}
ATTACHED = [kind for kind in LAYERS if kind.startswith("ultramem")]
each_kind = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(scope="module")
def made(shared_base, tmp_path_factory):
    """Upscale the tiny Llama, once, and let what is new act: a folder with both."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp("made")
        upscale(base=shared_base("llama"), output=folder / "born", verify=False, **KINDS[kind])
        trained(folder / "born", folder / "once")
        return folder

    return make


def names_that_train(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@each_kind
def test_new_parameters_train_alone_and_with_adapters(kind, made, tmp_path):
    start, blocks = load(made(kind) / "born"), tuple(f"model.layers.{layer}." for layer in LAYERS[kind])
    report, untrained = set_trainable(start, "auto"), logits(start)
    new = {
        name
        for name, _ in start.named_parameters()
        if ".memor" in name or (kind == "midus-hml" and name.startswith(blocks))
    }
    assert names_that_train(start) == new
    assert report.parameters == sum(start.get_parameter(name).numel() for name in new)

    model = get_peft_model(start, lora_config(start, r=2))
    assert torch.equal(logits(model), untrained)
    trains, saved = names_that_train(model), ".modules_to_save.default"
    whole = {name.removeprefix("base_model.model.") for name in trains if "lora_" not in name}
    assert {name.replace(saved, "") for name in whole} == new
    assert all(saved in name for name in whole)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_steps(model, 3, parameter_groups(model, Rates(learning_rate=1e-2)))
    assert {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])} == trains
    actual = logits(model)
    assert not torch.allclose(actual, untrained, atol=1e-3)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(load(made(kind) / "born"), tmp_path)), actual)
    torch.testing.assert_close(logits(model.merge_and_unload()), actual, rtol=1e-4, atol=1e-5)  # rounds once more


@each_kind
def test_trained_memory_moves_with_its_layers(kind, made, tmp_path):
    once, placement, moved = made(kind) / "once", [1, 4], [0, 2, 3, 5]
    if kind == "midus-hml":
        placement, moved = [3, 7], [0, 1, 2, 4, 5, 6]
    with_memory(once, tmp_path / "twice", verify=False, placement=",".join(map(str, placement)))
    assert torch.equal(checkpoint_logits(tmp_path / "twice"), checkpoint_logits(once))
    before, after = (config_of(folder)["memory"][0] for folder in (once, tmp_path / "twice"))
    for key in ("layers", "into") if kind.endswith("skip") else ("layers",):
        assert after[key] == [moved[layer] for layer in before[key]]
    assert set_trainable(load(tmp_path / "twice")).layers == placement


@pytest.mark.parametrize("kind", ATTACHED)
def test_same_memory_twice_trains_and_strips_the_second(kind, made, shared_base, tmp_path):
    once = made(kind) / "once"
    report = upscale(base=once, output=tmp_path / "twice", **KINDS[kind])
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(checkpoint_logits(tmp_path / "twice"), checkpoint_logits(once))
    names = [entry["name"] for entry in config_of(tmp_path / "twice")["memory"]]
    assert names == ["ultramem", "ultramem-2"]
    model = load(tmp_path / "twice")
    set_trainable(model)
    second = {name for name, _ in model.named_parameters() if ".ultramem-2." in name}
    assert names_that_train(model) == second != set()
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stripped" / name).read_bytes() == (once / name).read_bytes()
    assert strip(tmp_path / "stripped", tmp_path / "bare")["base_confirmed"] is True
    assert same_tensors(tmp_path / "bare", shared_base("llama"))


SOLAR_ORDER = [0, 1, 2, 1, 2, 3]


def test_solar_repeats_a_memory_with_its_layers(made, tmp_path):
    once, solar = made("moc, own") / "once", tmp_path / "solar"
    upscale(base=once, method="solar", output=solar)
    (entry,) = config_of(once)["memory"]
    layers = [index for index, source in enumerate(SOLAR_ORDER) if source in entry["layers"]]
    assert config_of(solar)["memory"] == [{**entry, "layers": layers}]
    assert len(layers) > len(entry["layers"])
    before, after = load(once).model.layers, load(solar).model.layers
    for index, source in enumerate(SOLAR_ORDER):
        state, expected = after[index].state_dict(), before[source].state_dict()
        assert state.keys() == expected.keys(), index
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items()), index


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "ultramem-v2, ring",
            {},
            "memory 'ultramem' ties layers 0, 1, 2, 3 together, and the plan repeats some of them",
        ),
        ("ultramem-v2, skip", {}, "memory 'ultramem' ties layers 0, 1 together, and the plan repeats some of them"),
        ("ultramem-v2, skip", {"layers": [0]}, "memory 'ultramem' adds after layer 2, which the plan repeats"),
        ("hier-ffn", {}, "memory 'hier-ffn' ties layers .* together, and the plan repeats some of them"),
    ],
)
def test_tied_layers_are_not_repeated(kind, options, message, shared_base, tmp_path):
    request = {**KINDS[kind], "options": {**KINDS[kind]["options"], **options}}
    upscale(base=shared_base("llama"), output=tmp_path / "once", verify=False, **request)
    with pytest.raises(ValueError, match=message):
        upscale(base=tmp_path / "once", method="solar", output=tmp_path / "solar")
    assert not (tmp_path / "solar").exists()


def test_stripped_base_keeps_its_dtype(tmp_path):
    base = save_base(tmp_path / "base", "llama", dtype=torch.bfloat16)
    with_memory(base, tmp_path / "out", options={**SMALL_MEMORY, "n": 128}, verify=False)
    tensors = read_tensors(tmp_path / "out")
    wide = {name: tensor.float() if ".memory." in name else tensor for name, tensor in tensors.items()}
    write_tensors(tmp_path / "out", wide)
    assert strip(tmp_path / "out", tmp_path / "stripped")["base_confirmed"]
    assert (tmp_path / "stripped" / "config.json").read_bytes() == (base / "config.json").read_bytes()


GREEDY = {"max_new_tokens": 6, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
MASK = torch.ones_like(prompt())
MASK[0, :5] = 0
PADDED = {"input_ids": prompt().masked_fill(MASK == 0, 0), "attention_mask": MASK}


@pytest.mark.parametrize(("case", "layer_class"), [("ultramem own", UltraMemV2Memory), ("midus-hml", MidusHmlMemory)])
def test_memory_argument_reaches_passes_and_beams(case, layer_class, tmp_path, monkeypatch):
    honest = layer_class.forward

    def scaled(self, read, *residual, scale=None, **inputs):
        output, before = honest(self, read, *residual, **inputs), sum(residual)
        return output if scale is None else before + scale.to(output.dtype)[:, None, None] * (output - before)

    monkeypatch.setattr(layer_class, "forward", scaled)
    monkeypatch.setattr(layer_class, "forward_arguments", ("scale",))
    base, model = tiny_model("llama"), CASES[case].model("llama", tmp_path, torch.float32)
    with torch.no_grad():
        output = model(prompt(), scale=torch.zeros(2)).logits
    assert torch.equal(output, logits(base))
    assert not torch.equal(logits(model), output)
    scales = torch.tensor([0.5, -2.0])
    together = model.generate(**PADDED, **BEAMS, scale=scales)
    for row, returned in enumerate(together.sequences.chunk(2)):
        # A row of the batch alone, padding included, so that nothing but the batch differs.
        inputs = {name: value[row : row + 1] for name, value in PADDED.items()}
        assert torch.equal(returned, model.generate(**inputs, **BEAMS, scale=scales[row : row + 1]).sequences)
    assert not torch.equal(together.scores[-1], model.generate(**PADDED, **BEAMS).scores[-1])
    with pytest.raises(ValueError, match=r"model_kwargs.* are not used by the model: \['scal'\]"):
        model.generate(prompt(), **GREEDY, scal=scales, scale=scales)


@torch.no_grad()
def test_argument_of_model_and_memory_reaches_both(tmp_path, monkeypatch):
    make, seen, honest = CASES["ultramem own"].model, [], UltraMemV2Memory.forward
    expected = make("llama", tmp_path)(prompt(), attention_mask=MASK).logits

    def forward(self, hidden_states, *, attention_mask=None, **rest):
        seen.append(attention_mask)
        return honest(self, hidden_states, **rest)

    monkeypatch.setattr(UltraMemV2Memory, "forward", forward)
    monkeypatch.setattr(UltraMemV2Memory, "forward_arguments", ("attention_mask",))
    model = make("llama", tmp_path)
    assert not torch.equal(expected, model(prompt()).logits)
    seen.clear()
    assert torch.equal(model(prompt(), attention_mask=MASK).logits, expected)
    assert [torch.equal(passed, MASK) for passed in seen] == [True, True]


@pytest.mark.parametrize("case", ["ultramem own", "token behind layers", "ultramem skip"])
def test_stream_keeps_its_dtype(case, tmp_path, monkeypatch):
    model = CASES[case].model("llama", tmp_path, torch.bfloat16)
    layer_class = next(
        type(memory) for layer in model.model.layers for memory in getattr(layer, "memories", {}).values()
    )
    honest = layer_class.forward
    monkeypatch.setattr(layer_class, "forward", lambda self, *args, **inputs: honest(self, *args, **inputs).float())
    with torch.no_grad():
        assert model(prompt()).logits.dtype == torch.bfloat16


def test_memory_inputs_move_to_another_device():
    memory_class = SimpleNamespace(forward_arguments=("scale",), services=(Tables,))
    tables = {("own", 1): {"up": torch.ones(3)}}
    inputs = MemoryInputs({"tables": tables}, {"scale": torch.ones(2), "word": "x"})
    moved = inputs.to("meta", non_blocking=True)
    arguments = moved.arguments_for(memory_class, "own", 1)
    assert arguments["scale"].is_meta
    assert arguments["tables"]["up"].is_meta
    keys = [CarriedKey("own", 0), CarriedKey("own", 0, "key")]
    moved.carried.update(zip(keys, [torch.ones(1), None], strict=True))
    (output, key) = (inputs.carried[key] for key in keys)
    assert torch.equal(output, torch.ones(1))
    assert key is None


def test_linear_layers_may_be_declared_as_values():
    module = DeclaredModule({"map.weight": DeclaredTensor((2, 3), "value", ZEROS)})
    assert module.declared_tensor("map.weight") is module.map.weight
    assert tensor_names(module, "value") == ["map.weight"]


def test_embeddings_need_the_ids_beside_them(tmp_path):
    model = CASES["ngram"].model("llama", tmp_path)
    with pytest.raises(ValueError, match="inputs_embeds is passed alone, and a memory of this model reads input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(prompt()))
