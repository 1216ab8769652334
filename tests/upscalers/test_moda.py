"""The method moda: the base computes the same with it, `strip` gives the base back, it stacks with others, misfits are refused."""

import json

import pytest
import torch
from models.fresh_process import run_python
from pairs import in_turn
from tiny import prompt, save_tiny_model

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memory.depth_attention import DepthAttention
from tests.upscalers.checkpoints import SMALL_MEMORY, load, logits, read_tensors, same_tensors
from upscalers.request.errors import VerificationError
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale
from upscalers.tensors.recipes import Fill

KINDS = {
    "default": {},
    "reused": {"joining": "interpolated", "attention_slots": "reused"},
    "attention": {"joining": "interpolated", "attention_slots": "reused", "ffn_slots": False},
    "bias": {"bias": True},
    "projected": {"attention_slots": "projected", "bias": True},
    "released": {"joining": "interpolated", "attention_slots": "reused", "rope": "released"},
    "last": {"attention_slots": "projected", "slots": 3},
    "some": {"layers": [0, 2, 3]},
}


def act(model):
    """Give every gate and every projection of values numbers that show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for memory in model.modules():
            if isinstance(memory, DepthAttention):
                for name in memory.names_it_acts_through():
                    memory.declared_tensor(name).normal_(0, 0.4)
                for name in memory.names_of("gate"):
                    memory.declared_tensor(name).uniform_(0.2, 1.2)
    return model


def trained(folder, output):
    """The model of a folder with depth that acts, saved as training saves it."""
    act(load(folder)).save_pretrained(output)
    return output


def same_files(left, right):
    return all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in ("config.json", "model.safetensors")
    )


@pytest.mark.parametrize(("kind", "dtype"), in_turn(KINDS, [torch.float32, torch.bfloat16]), ids=str)
def test_logits_are_those_of_the_base_and_strip_gives_it_back(native_family, kind, dtype, tmp_path):
    base = save_tiny_model(native_family, tmp_path / "base", dtype)
    report = upscale(base=base, method="moda", output=tmp_path / "out", options=KINDS[kind])
    assert report.identity.checked == "logits" and report.identity.max_abs_diff == 0.0
    assert report.num_layers == 4
    assert torch.equal(logits(tmp_path / "out"), logits(base))
    told = strip(tmp_path / "out", tmp_path / "stripped")
    assert told["base_confirmed"] is True and told["removed_memories"] == ["depth-attention"]
    assert same_files(tmp_path / "stripped", base)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_saved_loaded_and_still_comes_off(native_family, kind, shared_base, tmp_path):
    base = shared_base(native_family)
    report = upscale(base=base, method="moda", output=tmp_path / "out", options=KINDS[kind], verify=False)
    assert report.identity.checked == "blocks" and report.identity.max_abs_diff == 0.0
    model = act(load(tmp_path / "out"))
    with torch.no_grad():
        expected = model(prompt()).logits
    model.save_pretrained(tmp_path / "trained")
    assert not torch.allclose(expected, logits(base), atol=1e-3)
    assert torch.equal(logits(tmp_path / "trained"), expected)
    strip(tmp_path / "trained", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", base)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["default", "reused"])
def test_either_check_would_find_what_should_start_at_zero_and_does_not(kind, verify, base, tmp_path, monkeypatch):
    monkeypatch.setattr("upscalers.methods.memory_methods.initialised", lambda tensor, *_: Fill(tensor.shape, 0.1))
    with pytest.raises(VerificationError, match="expected"):
        upscale(base=base, method="moda", output=tmp_path / "out", options=KINDS[kind], verify=verify)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        (True, "differ"),
        (
            False,
            "new memory 'depth-attention' of layer 0 gives later layers ffn_value other than zero; expected zero until",
        ),
    ],
)
def test_either_check_would_find_values_that_are_added_and_do_not_start_at_zero(
    verify, message, base, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "upscalers.methods.memory_methods.initialised",
        lambda tensor, *_: Fill(tensor.shape, 0.1 if tensor.role == "projection" else 0.0),
    )
    with pytest.raises(VerificationError, match=message):
        upscale(base=base, method="moda", output=tmp_path / "out", verify=verify)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (
            "default",
            {0: {"ffn_key.weight", "ffn_value.weight"}, 1: {"depth_gate", "ffn_key.weight", "ffn_value.weight"}},
        ),
        ("attention", {0: set(), 1: {"depth_gate"}}),
        ("some", {0: {"ffn_key.weight", "ffn_value.weight"}, 1: set()}),
        (
            "bias",
            {0: {f"ffn_{part}{end}" for part in ("key", "value") for end in (".weight", "_bias")}},
        ),
        (
            "projected",
            {
                0: {
                    f"{source}_{part}{end}"
                    for source in ("attention", "ffn")
                    for part in ("key", "value")
                    for end in (".weight", "_bias")
                }
            },
        ),
    ],
)
def test_tensors_have_their_names_and_nothing_is_stored_that_nothing_reads(kind, found, base, tmp_path):
    upscale(base=base, method="moda", output=tmp_path / "out", options=KINDS[kind], verify=False)
    tensors = read_tensors(tmp_path / "out")
    for layer, names in {**found, 3: {"depth_gate"}}.items():
        prefix = f"model.layers.{layer}.memories.depth-attention."
        assert {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)} == names
    new = {name: tensor for name, tensor in tensors.items() if ".memories." in name}
    told = inspect_checkpoint(tmp_path / "out")
    assert told["parameters"]["new"] == sum(tensor.numel() for tensor in new.values())
    for name, tensor in new.items():
        shape = (4,) if name.endswith("depth_gate") else (16,) if name.endswith("bias") else (16, 32)
        assert tensor.shape == shape and tensor.any().item() == name.endswith("_key.weight")


def test_the_config_says_what_the_memory_is(base, tmp_path):
    upscale(base=base, method="moda", output=tmp_path / "out", options=KINDS["last"], verify=False)
    (entry,) = json.loads((tmp_path / "out" / "config.json").read_text())["memory"]
    assert entry == {
        "type": "depth-attention",
        "name": "depth-attention",
        "site": "inside-attention",
        "joining": "added",
        "attention_slots": "projected",
        "ffn_slots": True,
        "bias": False,
        "rope": "same",
        "slots": 3,
        "layers": [0, 1, 2, 3],
    }


BELOW_OR_ABOVE = {
    "midus-hml": SMALL_MEMORY,
    "llama-pro": {},
    "ultramem-v2": {"n": 8, "k": 4},
    "hier-kv": {"sizes": [3, 0, 2], "branching": 3},
    "moc": {},
}


@pytest.mark.parametrize(("second", "kind"), in_turn(BELOW_OR_ABOVE, ["default", "released", "last"]))
def test_a_trained_one_keeps_acting_below_another_method_and_comes_back(second, kind, family, shared_base, tmp_path):
    base = shared_base(family)
    upscale(base=base, method="moda", output=tmp_path / "new", options=KINDS[kind], verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    assert not torch.allclose(logits(once), logits(base), atol=1e-3)
    report = upscale(base=once, method=second, output=tmp_path / "twice", options=BELOW_OR_ABOVE[second])
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(once))
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    assert same_files(tmp_path / "stripped", once)
    strip(tmp_path / "stripped", tmp_path / "bare")
    assert same_tensors(tmp_path / "bare", base)


@pytest.mark.parametrize("first", BELOW_OR_ABOVE)
def test_it_goes_on_top_of_another_method_and_comes_off(first, family, shared_base, tmp_path):
    options = BELOW_OR_ABOVE[first]
    upscale(base=shared_base(family), method=first, output=tmp_path / "once", options=options, verify=False)
    report = upscale(base=tmp_path / "once", method="moda", output=tmp_path / "twice")
    assert report.identity.max_abs_diff == 0.0
    assert torch.equal(logits(tmp_path / "twice"), logits(tmp_path / "once"))
    entry = json.loads((tmp_path / "twice" / "config.json").read_text())["memory"][-1]
    layers = [0, 2, 3, 5] if first == "midus-hml" else list(range(report.num_layers))
    assert entry["type"] == "depth-attention" and entry["layers"] == layers
    assert strip(tmp_path / "twice", tmp_path / "stripped")["base_confirmed"] is True
    assert same_files(tmp_path / "stripped", tmp_path / "once")
    assert (tmp_path / "stripped" / BANKS_FOLDER).exists() == (first == "hier-kv")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("solar", ()),
        ("slices", ("slices=[{layers: [0, 3]}, {layers: [1, 4]}]",)),
        ("slices", ("slices=[{layers: [1, 4]}]",)),
        ("slices", ("slices=[{layers: [2, 4]}, {layers: [0, 2]}]",)),
    ],
    ids=["solar", "repeats", "leaves-out", "reorders"],
)
def test_a_plan_that_repeats_leaves_out_or_reorders_its_layers_is_refused(method, options, base, command, tmp_path):
    upscale(base=base, method="moda", output=tmp_path / "once", verify=False)
    words = [word for option in options for word in ("--set", option)]
    done = command("--base", tmp_path / "once", "--method", method, "--output", tmp_path / "out", *words)
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert (
        "memory 'depth-attention' ties layers 0, 1, 2, 3 together, and the plan repeats or leaves out some of them; expected "
        "each once. Choose a method that inserts layers." in done.err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slots=4", "slots is 4; expected 3 or fewer, which is what the last of 4 layers can read, or 0 for all of them."),
        ("slots=7 attention_slots=projected", "slots is 7; expected 6 or fewer, which is what the last of 4 layers can read, or 0"),
        ("slots=3 layers=[1,3]", "slots is 3; expected 1 or fewer, which is what the last of 2 layers can read, or 0"),
        ("slots=-1", "slots is -1; expected 0 or more."),
        ("layers=[2]", "layers is [2]; expected two or more, for a layer reads what another in front of it wrote."),
        ("layers=1", "layers is 1, which chooses layer 2 alone; expected two or more, for a layer reads what another in front of"),
        ("layers=late:1", "layers is 'late:1', which chooses layer 3 alone; expected two or more, for a layer reads"),
        ("layers=[2,4]", "layers is [2, 4]; expected all, a number from 1 to 4, a share such as 0.25, early:N, middle:N or"),
        ("joining=joint", "joining is 'joint', with which the new slots change what the base computes; expected added or"),
        ("joining=mixed", "joining is 'mixed'; expected one of: added, interpolated, joint"),
        (
            "attention_slots=reused",
            "attention_slots is 'reused' and joining is 'added', which adds values of earlier layers that are not zero to what the "
            "base computes; expected attention_slots none or projected, or joining interpolated.",
        ),
        (
            "attention_slots=none ffn_slots=false",
            "attention_slots is 'none' and ffn_slots is false; expected one of them, for there is nothing to read.",
        ),
        ("attention_slots=own", "attention_slots is 'own'; expected one of: reused, projected, none"),
        ("rope=none", "rope is 'none'; expected one of: same, released"),
        ("keep=last", "moda has no option 'keep'"),
        ("depth_weight=mixed", "moda has no option 'depth_weight'"),
        ("site=beside-ffn", "site is 'beside-ffn'; expected one of: inside-attention."),
        ("span=1", "moda has no option 'span'"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit_are_refused(words, message, base, command, tmp_path):
    options = [word for pair in words.split() for word in ("--set", pair)]
    for way in (("--output", tmp_path / "out"), ("--dry-run",)):
        done = command("--base", base, "--method", "moda", *way, *options)
        assert done.status == 2 and len(done.err.strip().splitlines()) == 1
        assert message in done.err and not (tmp_path / "out").exists()


def test_a_second_one_in_the_same_layers_is_refused_and_in_others_is_not(base, command, tmp_path):
    options = {"layers": [0, 1]}
    upscale(base=base, method="moda", output=tmp_path / "new", options=options, verify=False)
    once = trained(tmp_path / "new", tmp_path / "once")
    done = command("--base", once, "--method", "moda", "--output", tmp_path / "out")
    assert done.status == 2 and len(done.err.strip().splitlines()) == 1
    assert "memories 'depth-attention' and 'depth-attention-2' both attend in the place of layer 0's own" in done.err
    upscale(base=once, method="moda", output=tmp_path / "out", options={"layers": [2, 3]})
    assert torch.equal(logits(tmp_path / "out"), logits(once))
    both = logits(trained(tmp_path / "out", tmp_path / "both"))
    assert not torch.allclose(both, logits(once), atol=1e-3)


def test_a_folder_computes_generates_and_is_saved_where_this_project_is_not_installed(tmp_path):
    """Its code comes along, whatever the options need of it."""
    kinds = {"olmo2": "last", "gemma3": "released"}
    for family, kind in kinds.items():
        base = save_tiny_model(family, tmp_path / f"base-{family}")
        upscale(base=base, method="moda", output=tmp_path / family, options=KINDS[kind], verify=False)
        torch.save(logits(trained(tmp_path / family, tmp_path / f"{family}-trained")), tmp_path / f"{family}.pt")
    torch.save(prompt(), tmp_path / "prompt.pt")
    code = """
import sys
from transformers import AutoModelForCausalLM
tokens = torch.load("prompt.pt")
for family in ("olmo2", "gemma3"):
    base = AutoModelForCausalLM.from_pretrained(f"base-{family}").eval()
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True).eval()
    trained = AutoModelForCausalLM.from_pretrained(f"{family}-trained", trust_remote_code=True)
    trained.save_pretrained(f"{family}-again")
    acting = AutoModelForCausalLM.from_pretrained(f"{family}-again", trust_remote_code=True).eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        same = torch.equal(model(tokens).logits, base(tokens).logits)
        same = same and torch.allclose(acting(tokens).logits, torch.load(f"{family}.pt"), rtol=1e-4, atol=1e-5)
    same = same and torch.equal(model.generate(tokens, **settings), base.generate(tokens, **settings))
    acting.generate(tokens, **settings)
    acting.train()(tokens, labels=tokens).loss.backward()
    print(same, all(parameter.grad is not None for parameter in acting.parameters()))
    print(type(acting).__module__.startswith("transformers_modules."))
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
"""
    assert run_python(code, tmp_path, package_present=False).split() == ["True", "True", "True"] * 2


def test_the_method_takes_every_family_that_hosts_memory(command):
    (described,) = command("methods", "moda", "--json").json()
    assert described["identity"] is True and described["placement"] is None and "2603.15619" in str(described["paper"])
    assert {option["name"] for option in described["options"]} == {
        *("joining", "attention_slots", "ffn_slots", "bias", "rope", "slots", "layers", "site")
    }
