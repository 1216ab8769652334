"""Scripts of the documentation run as they are printed, on a tiny model, and leave the base as it was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from training.tiny_run import NEW_LAYERS, document, save_upscaled
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, default_data_collator

from midus_hf.cli.upscale import main as upscale
from tests.docs.snippets import take

DOCS = Path(__file__).parents[2] / "docs"
# What the pages call the upscaled model.
MODEL = "smollm2-135m-hml"


# A page, and a piece of a block of Python on the page, for each script that runs here.
PIECES = {
    "peft": ("trainer.md", "get_peft_model"),
    "moved adapter": ("peft.md", "PeftModel"),
    "sft": ("sft.md", "finetune"),
}
SCRIPTS = {name: take(f"docs/{page}", "python", having=piece) for name, (page, piece) in PIECES.items()}


def script(name: str) -> str:
    """Return a script of the pages."""
    (block,) = SCRIPTS[name]
    return block.text


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with what the scripts read, which they are run in."""
    save_upscaled("llama", tmp_path).rename(tmp_path / MODEL)
    rows = [{"prompt": document(8, seed), "completion": " " + document(8, seed + 99)} for seed in range(16)]
    (tmp_path / "instructions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, **names: Any) -> dict:
    """Run a script of the pages with the names that it takes as defined, and give what is defined then."""
    defined = {"__name__": "__main__", **names}
    exec(compile(script(name), name, "exec"), defined)
    return defined


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()


def is_new(name: str) -> bool:
    return any(f"layers.{layer}." in name for layer in NEW_LAYERS)


def check_rates(defined: dict) -> None:
    """Keys and values kept the maximum rate, and all else took the schedule's."""
    logged = [event for event in defined["trainer"].state.log_history if "learning_rate" in event]
    assert len(logged) > 1
    groups = {group["name"]: group["lr"] for group in defined["trainer"].optimizer.param_groups}
    assert groups["keys"] == groups["values"] == defined["arguments"].learning_rate
    assert len({event["learning_rate"] for event in logged}) > 1


def test_the_script_for_fine_tuning_trains_new_layers_and_saves_them(folder):
    config = folder / MODEL / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**values, "max_position_embeddings": 2048}), encoding="utf-8")
    result = run("sft")["result"]
    assert result.steps == 4
    before, after = weights(MODEL), weights("tuned")
    assert {is_new(name) for name in before if not torch.equal(before[name], after[name])} == {True}


def test_adapters_and_new_layers_are_trained_saved_and_merged(folder):
    rows = [AutoTokenizer.from_pretrained(MODEL)(document(16, seed))["input_ids"] for seed in range(16)]
    check_rates(
        run(
            "peft",
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
            arguments=TrainingArguments(
                "runs", max_steps=4, learning_rate=1e-2, logging_steps=1, use_cpu=True, save_strategy="no"
            ),
            dataset=[{"input_ids": row, "labels": row} for row in rows],
            collator=default_data_collator,
        )
    )
    before, merged = weights(MODEL), weights("merged")
    assert before.keys() == merged.keys()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, merged[name])}
    assert {f"model.layers.{layer}.memory.value_bank" for layer in NEW_LAYERS} <= moved
    assert "model.layers.0.mlp.up_proj.weight" in moved and "model.embed_tokens.weight" not in moved
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), "adapter")
    for name, tensor in again.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, merged[name])


def test_an_adapter_of_the_base_is_written_for_the_upscaled_model_as_the_page_says(folder):
    base = AutoModelForCausalLM.from_pretrained("base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained("ADAPTER")
    (line,) = [line for line in (DOCS / "peft.md").read_text().splitlines() if line.startswith("upscale adapter")]
    assert upscale(line.split()[1:]) == 0
    prompt, defined = torch.tensor([[5, 7, 9]]), {}
    exec(script("moved adapter"), defined)
    with torch.no_grad():
        assert torch.equal(defined["model"].eval()(prompt).logits, adapted(prompt).logits)


def test_scripts_do_not_write_over_one_another():
    written = re.compile(
        r'(?:TrainingArguments|SFTConfig)\(\s*"([^"]+)"|save_pretrained\("([^"]+)"\)|output="([^"]+)"'
    )
    owners: dict[str, str] = {}
    for name in SCRIPTS:
        for groups in written.findall(script(name)):
            (folder,) = filter(None, groups)
            assert owners.setdefault(folder, name) == name or folder == "runs", f"{name} writes {folder}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short(name):
    lines = [line for line in script(name).splitlines() if line.strip()]
    assert len(lines) <= 32


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("methods/*.md")), DOCS.parent / "README.md"],
    ids=lambda page: page.stem,
)
def test_pages_say_what_works_in_the_clone_alone(page):
    """Look at every page but that of benchmarks, which quotes commands of this repository throughout."""
    if page.stem == "benchmarks":
        return
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    shell = "".join(block for language, block in blocks if language in ("sh", "console"))
    if re.search(r"(configs|scripts)/|python -m (material|demo|benchmarks)", shell):
        assert "root of the clone" in text


def test_what_the_first_page_installs_is_what_it_uses():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    extras = set(re.search(r"-e '\.\[([\w,]+)\]'", text).group(1).split(","))
    use = text.partition("## Use")[2].partition("## Methods")[0]
    needed = {
        "midus train": "train",
        "midus sft": "train",
        "midus eval": "eval",
        "midus cluster": "clusters",
        "midus look": "look",
    }
    assert {extra for word, extra in needed.items() if word in use} == extras
