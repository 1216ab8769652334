"""Models whose memories fetch blocks are saved and loaded with their banks, also where this project is not installed."""

import json
import shutil

import pytest
import torch
from models.fresh_process import run_python
from models.hierarchical_models import FOUR_TOKENS, IDS, KINDS, hierarchical_model
from models.hosting import logits
from tiny import prompt
from transformers import AutoModel, AutoModelForCausalLM

from midus_hf.banks.level_file import BankError
from midus_hf.models.fetching import folder_of_checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_with_its_bank_and_loaded(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path / "first", torch.float32)
    expected = logits(model, prompt(), memory_ids=IDS)
    model.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, prompt(), memory_ids=IDS), expected)
    loaded.save_pretrained(tmp_path / "saved")  # where it was loaded from
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(again.eval(), prompt(), memory_ids=IDS), expected)
    stack = AutoModel.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        hidden = stack(prompt(), memory_ids=IDS).last_hidden_state
        assert torch.equal(hidden, model.model(prompt(), memory_ids=IDS).last_hidden_state)
    stack.save_pretrained(tmp_path / "stack")
    assert (tmp_path / "stack" / "memory_bank" / kind / "bank.json").is_file()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert logits(half, prompt(), memory_ids=IDS).dtype == torch.bfloat16


def test_what_blocks_have_learnt_is_saved_with_the_model(tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path / "first", torch.float32, acting=False).train()
    bank = model.banks.train()["hier-ffn"]
    model(prompt(), labels=prompt(), memory_ids=IDS).loss.backward()
    bank.step(1e-1, (0.9, 0.95), 1e-8, 0.0)
    model.eval().save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    expected = logits(model, prompt(), memory_ids=IDS)
    assert torch.equal(logits(loaded, prompt(), memory_ids=IDS), expected)
    assert not torch.allclose(expected, logits(model, prompt()))
    assert loaded.banks.of("hier-ffn").written(1) == [1, 3] and loaded.banks.of("hier-ffn").written(3) == [13, 27]


def test_only_the_main_process_saves_banks(tmp_path):
    hierarchical_model("llama", "hier-kv", tmp_path / "first").save_pretrained(
        tmp_path / "saved", is_main_process=False
    )
    assert not (tmp_path / "saved" / "memory_bank").exists()


def test_a_model_in_a_subfolder_has_its_bank_there(tmp_path):
    model = hierarchical_model("llama", "hier-kv", tmp_path / "first", torch.float32)
    model.save_pretrained(tmp_path / "repository" / "inner")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="inner").eval()
    assert torch.equal(logits(loaded, prompt(), memory_ids=IDS), logits(model, prompt(), memory_ids=IDS))


@pytest.mark.parametrize("subfolder", [None, "inner"])
def test_of_a_model_on_the_hub_the_files_of_its_banks_are_downloaded(subfolder, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "midus_hf.models.fetching.snapshot_download",
        lambda name, **given: asked.update(given, name=name) or str(tmp_path),
    )
    options = {"revision": "v1", "subfolder": subfolder, "dtype": "auto", "token": None}
    folder = folder_of_checkpoint("somebody/model", {key: value for key, value in options.items() if value})
    prefix = f"{subfolder}/" if subfolder else ""
    assert asked == {"name": "somebody/model", "revision": "v1", "allow_patterns": [f"{prefix}memory_bank/**"]}
    assert folder == (tmp_path / subfolder if subfolder else tmp_path)


def test_a_model_without_its_bank_is_missed(tmp_path):
    hierarchical_model("llama", "hier-kv", tmp_path / "first").save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "memory_bank")
    with pytest.raises(BankError, match=r"there is no memory bank in .*hier-kv"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_a_folder_computes_generates_trains_and_is_saved_where_this_project_is_not_installed(tmp_path):
    families = {"llama": KINDS, "gemma3": "hier-kv", "qwen3": "hier-ffn"}
    for family, kind in families.items():
        model = hierarchical_model(family, kind, tmp_path / "first" / family, torch.float32)
        model.save_pretrained(tmp_path / family)
        generated = model.generate(prompt(6), memory_ids=IDS, **FOUR_TOKENS)
        torch.save((logits(model, prompt(), memory_ids=IDS), generated), tmp_path / f"{family}.pt")
    torch.save((prompt(), prompt(6), IDS), tmp_path / "inputs.pt")
    code = """
import json, sys
from transformers import AutoModelForCausalLM
tokens, short, ids = torch.load("inputs.pt")
found = {}
for family in ("llama", "gemma3", "qwen3"):
    logits, generated = torch.load(f"{family}.pt")
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True).eval()
    model.save_pretrained(f"{family}-again")
    again = AutoModelForCausalLM.from_pretrained(f"{family}-again", trust_remote_code=True).eval()
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        own, of_again = (one(tokens, memory_ids=ids, use_cache=False).logits for one in (model, again))
    same = [torch.equal(own, of_again), torch.allclose(own, logits, rtol=1e-4, atol=1e-5)]
    same.append(torch.equal(model.generate(short, memory_ids=ids, **settings), generated))
    model.train()(tokens, labels=tokens, memory_ids=ids).loss.backward()
    same.append(model.model.embed_tokens.weight.grad is not None)
    same.append(type(model).__module__.startswith("transformers_modules."))
    found[family] = same
assert not {"midus_hf", "upscalers"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps(found))
"""
    found = json.loads(run_python(code, tmp_path, package_present=False).splitlines()[-1])
    assert {family: set(same) for family, same in found.items()} == {family: {True} for family in families}
