"""Variants that are a function of a person's own: a real one that trains a tiny base, and what is refused."""

import pytest
import torch
from compare.made_results import comparison
from compare.small_comparison import STEPS, TOKENS_PER_STEP, Comparing, write_room
from transformers import AutoModelForCausalLM

from midus_hf.compare.findings import findings
from midus_hf.compare.making import taught_model
from midus_hf.compare.options import VariantOptions
from midus_hf.compare.report import planned
from midus_hf.compare.running import collect
from midus_hf.compare.runs import Run, check
from midus_hf.compare.variants import Variant

# Trains the embeddings alone with plain SGD, and leaves a model without a tokenizer.
TEACH = """
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def teach(base, corpus, output, seed, keys):
    torch.manual_seed(seed)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    ids = tokenizer(" ".join(path.read_text() for path in sorted(Path(corpus).iterdir())))["input_ids"]
    trained = model.get_input_embeddings().weight
    optimizer, tokens = torch.optim.SGD([trained], keys["learning_rate"]), 0
    for step in range(keys["max_steps"]):
        batch = torch.tensor(ids[step * 64 : step * 64 + 64]).view(2, 32)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        model.zero_grad()
        tokens += batch.numel()
    model.save_pretrained(output)
    return {"trained_parameters": trained.numel(), "tokens": tokens}
"""


def taught(folder, base="base"):
    """Let `teach` of `mine.py` in a folder make a model beside it, and return how many parameters and tokens it trained on."""
    variant = Variant("mine", None, {}, [{}], function=f"{folder / 'mine.py'}:teach")
    model = taught_model(variant, base, folder / "out", 0, {"corpus": "none"})
    return model.parameters, model.tokens


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = write_room(tmp_path_factory.mktemp("room"))
    (folder / "mine.py").write_text(TEACH)
    return folder


def test_a_function_s_file_may_define_dataclasses_and_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("TOKENS = 3\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nimport dataclasses, pathlib, beside\n"
        "@dataclasses.dataclass\nclass Counts:\n    tokens: int = beside.TOKENS\n"
        "def teach(base, corpus, output, seed, keys):\n    pathlib.Path(output).mkdir()\n"
        "    for name in ('config.json', 'tokenizer_config.json'):\n        pathlib.Path(output, name).write_text('{}')\n"
        "    return {'trained_parameters': 1, 'tokens': Counts().tokens}\n"
    )
    assert taught(tmp_path) == (1, 3)


def test_a_function_is_measured_as_the_other_variants_are(room, tmp_path):
    variants = {"mine": {"function": f"{room / 'mine.py'}:teach", "rates": [0.5]}, "full": {}}
    comparing = Comparing(room, tmp_path / "out", variants)
    check(comparing.comparison, comparing.variants)
    (record, _) = planned(comparing.comparison, comparing.variants)
    assert (record["method"], record["trained_parameters"]) == (f"{room / 'mine.py'}:teach", None)
    comparing.measure_base()
    mine, full = (comparing.measure_and_keep(run) for run in comparing.runs())
    weights = AutoModelForCausalLM.from_pretrained(room / "base").get_input_embeddings().weight
    assert mine.trained_parameters == weights.numel() and mine.tokens == full.tokens == STEPS * TOKENS_PER_STEP
    # Both start at the base, which the Trainer measures for both.
    assert mine.start.losses == full.start.losses and [point.step for point in mine.curve] == [0, STEPS]
    assert mine.losses["plants"] < mine.start.losses["plants"] and mine.rate == {"learning_rate": 0.5}
    taught = AutoModelForCausalLM.from_pretrained(comparing.folder(comparing.runs()[0]) / "trained")
    assert not torch.equal(taught.get_input_embeddings().weight, weights)
    base, results, missing = collect(comparing.comparison, comparing.variants)
    assert missing == 0 and {one.name for one in findings(comparing.comparison, base, results, {}).variants} == {
        "mine",
        "full",
    }


def test_adapters_that_a_function_leaves_are_merged(room, tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "mine.py").write_text(
        "from peft import LoraConfig, get_peft_model\n"
        "from transformers import AutoModelForCausalLM\n"
        "def teach(base, corpus, output, seed, keys):\n"
        "    model = AutoModelForCausalLM.from_pretrained(base)\n"
        "    config = LoraConfig(r=2, init_lora_weights=False, target_modules='all-linear', task_type='CAUSAL_LM')\n"
        "    get_peft_model(model, config).save_pretrained(output)\n"
        "    return {'trained_parameters': 1, 'tokens': 2}\n"
    )
    assert taught(tmp_path, str(room / "base")) == (1, 2)
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", room / "base"))
    assert not torch.equal(merged.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "variants.mine.function returned None; expected a mapping with the whole numbers trained_parameters and"),
        ("return {'tokens': 1}", "variants.mine.function returned {'tokens': 1}; expected a mapping"),
        ("return {'tokens': -1, 'trained_parameters': 1}", "variants.mine.function returned {'tokens': -1,"),
        (
            "return {'tokens': 1, 'trained_parameters': 1}",
            "variants.mine.function wrote no config.json to its output; expected a model, as save_pretrained writes it.",
        ),
    ],
)  # fmt: skip
def test_what_a_function_returns_and_leaves_is_checked(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(f"def teach(base, corpus, output, seed, keys):\n    {body}\n")
    with pytest.raises(ValueError) as refusal:
        taught(tmp_path)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def teach(:", "whose file cannot be read: "),
        ("def learn(): pass", "but the file defines learn; expected def teach(base, corpus, output, seed, keys)."),
        ("teach = 1", "but the file defines no function; expected def teach("),
        ("def teach(base, output): pass", "but the file defines teach; expected def teach(base, corpus, output, seed, keys)."),
    ],
    ids=["no Python", "another function", "no function", "other arguments"],
)  # fmt: skip
def test_a_file_without_the_function_is_refused_before_anything_runs(tmp_path, content, message):
    function = f"{tmp_path / 'mine.py'}:teach"
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ValueError) as refusal:
        VariantOptions(function=function)
    assert str(refusal.value).startswith(f"function is {function!r}, {message}")


def test_a_function_may_take_arguments_by_any_name(tmp_path):
    (tmp_path / "mine.py").write_text("def teach(base, *, output, **others): pass")
    assert VariantOptions(function=f"{tmp_path / 'mine.py'}:teach").function is not None


@pytest.mark.parametrize("function", ["mine.py", "absent.py:teach", "mine.txt:teach", "mine.py:a b"])
def test_a_function_that_is_not_there_is_refused_before_anything_runs(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "mine.txt"):
        (tmp_path / name).write_text("def teach(base, corpus, output, seed, keys): pass")
    with pytest.raises(ValueError) as refusal:
        VariantOptions(function=function)
    assert str(refusal.value).startswith(
        f"function is {function!r}; expected a file of Python and the name of a function in it, such as mine.py:teach."
    )


def test_a_changed_function_is_noticed(tmp_path):
    (tmp_path / "mine.py").write_text("def teach(**keys): pass")
    run = Run(Variant("mine", None, {"max_steps": 1}, [{}], function=f"{tmp_path / 'mine.py'}:teach"))
    before = run.request(comparison(["mine"]))["function"]
    (tmp_path / "mine.py").write_text("def teach(**keys): return 1")
    now = run.request(comparison(["mine"]))["function"]
    assert before["name"] == now["name"] == "teach" and before["sha256"] != now["sha256"]
