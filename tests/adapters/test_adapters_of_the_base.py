"""`upscale adapter` writes an adapter of a base for the upscaled model, where it does what it does on the base, bit by bit."""

import json
import re
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from adapters.adapted_models import save_adapter
from peft import LoraConfig, PeftModel
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from tiny import prompt, save_tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from midus_hf.cli import upscale as cli
from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import file_digests
from tests.upscalers.methods import KINDS as REQUESTS
from tests.upscalers.test_any_type import PRESENT, methods_on_the_page, options_of
from upscalers.runs.adapter import write_adapter
from upscalers.runs.upscale import upscale

# Methods whose result computes what the base computes: dense, inserted, attached at each site.
METHODS = (
    *("llama-pro", "opt-deus", "midus-hml", "midus-pkm", "midus-linear"),
    *("moc", "ultramem-v2", "moda", "hier-ffn", "hier-kv", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn"),
)
ALL_LAYERS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Upscale a tiny base of a family or a type by a method, once; return the folders of the base and the result."""
    root = tmp_path_factory.mktemp("made")

    @cache
    def base_of(family: str) -> Path:
        if family in PRESENT:
            tiny_model(family).save_pretrained(root / family)
            return root / family
        return save_tiny_model(family, root / family)

    @cache
    def of(family: str, method: str) -> tuple[Path, Path]:
        output = root / f"{family.replace('-', '_')}_{method}"
        request = (
            REQUESTS[method] if family not in PRESENT else {"method": method, "options": options_of(family, method)}
        )
        upscale(base=base_of(family), output=output, verify=family in PRESENT, **request)
        return base_of(family), output

    return of


def load(folder, auto=AutoModelForCausalLM, **settings):
    """Load a model with the same random head for the same settings."""
    torch.manual_seed(4)
    return auto.from_pretrained(folder, **settings).eval()


@torch.no_grad()
def output_of(model) -> torch.Tensor:
    """Return what a model computes of token ids that every tiny model knows."""
    return model.eval()(prompt().remainder(96), use_cache=False)[0]


def check_moved(made_of, config, folder, recwarn, auto=AutoModelForCausalLM, **settings) -> Path:
    """Compare the base with an adapter and the upscaled model with the moved one; return the folder of the moved adapter."""
    (base, upscaled), adapter, moved = made_of, folder / "adapter", folder / "moved"
    save_adapter(load(base, auto, **settings), config, adapter)
    expected = output_of(PeftModel.from_pretrained(load(base, auto, **settings), adapter))
    before = file_digests(adapter)
    result = write_adapter(adapter, upscaled, moved)
    assert file_digests(adapter) == before
    recwarn.clear()
    adapted = PeftModel.from_pretrained(load(upscaled, auto, **settings), moved)
    assert not [each for each in recwarn if "adapter keys" in str(each.message) or "wrong" in str(each.message)]
    assert torch.equal(output_of(adapted), expected)
    assert not torch.equal(expected, output_of(load(base, auto, **settings)))
    new = adapted.config.upscale["new_layers"]
    assert not set(result["layers"]) & set(new)
    named = [name for name, _ in adapted.named_modules() if ".default" in name]
    assert not [name for name in named if any(f"layers.{layer}." in name for layer in new) or ".memor" in name]
    return moved


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_does_on_the_upscaled_model_what_it_does_on_the_base(family, method, made, tmp_path, recwarn):
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    check_moved(made(family, method), config, tmp_path, recwarn)


@pytest.mark.parametrize(
    "model_type",
    [each if each in ("mixtral", "phi3") else pytest.param(each, marks=pytest.mark.product) for each in PRESENT],
)
def test_an_adapter_finds_the_layers_of_types_that_no_table_describes(model_type, made, tmp_path, recwarn):
    """Use a method that inserts layers, or, if it does not take the type, a method that attaches memories."""
    methods = set(methods_on_the_page(model_type)) & {"midus-hml", "ultramem-v2"}
    assert methods
    for method in sorted(methods)[:1]:
        folders = made(model_type, method)
        names = {
            name.rpartition(".")[2] for name, part in load(folders[0]).named_modules() if type(part) is torch.nn.Linear
        }
        config = LoraConfig(r=2, target_modules=sorted(names - {"lm_head"}), task_type="CAUSAL_LM")
        check_moved(folders, config, tmp_path / method, recwarn)


def test_parameters_of_experts_have_adapters_in_the_layers_of_the_base_alone(made, tmp_path, recwarn):
    if "mixtral" not in PRESENT:
        pytest.skip("transformers has no such type")
    names = ["mlp.experts.down_proj", "experts.gate_up_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, rank_pattern={"experts.down_proj": 1})
    moved = check_moved(made("mixtral", "midus-hml"), config, tmp_path, recwarn)
    written = json.loads((moved / "adapter_config.json").read_text())
    assert "model.layers.2.mlp.experts.down_proj" in written["target_parameters"]
    assert set(written["rank_pattern"]) == {name for name in written["target_parameters"] if "down" in name}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*layers\.[13]\..*_proj"},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "3.mlp.down_proj"]},
        {"layers_to_transform": [0, 2]},
        {"layers_to_transform": 3, "layers_pattern": "layers"},
        {"exclude_modules": ["layers.1.mlp.down_proj"]},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 3, r".*\.3\..*": 1}, "alpha_pattern": {"down_proj": 16}},
        {"modules_to_save": ["input_layernorm", "lm_head"]},
        {"modules_to_save": ["model.layers.2.mlp"], "target_modules": ["q_proj"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": [3, 4, 5, 6, 7, 8, 9]},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "lora_only"},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_names_layers_in_the_config_names_them_in_the_upscaled_model(options, made, tmp_path, recwarn):
    config = LoraConfig(**{"r": 2, "target_modules": ALL_LAYERS, "task_type": "CAUSAL_LM", **options})
    moved = check_moved(made("llama", "llama-pro"), config, tmp_path, recwarn)
    written = peft.PeftConfig.from_pretrained(moved)
    assert written.layers_to_transform is None and written.exclude_modules is None
    assert written.base_model_name_or_path == str(made("llama", "llama-pro")[1])


@pytest.mark.parametrize(
    ("auto", "task", "settings"),
    [
        (AutoModelForSequenceClassification, "SEQ_CLS", {"num_labels": 2, "pad_token_id": 0}),
        (AutoModel, "FEATURE_EXTRACTION", {}),
        (AutoModel, None, {}),
    ],
)
def test_adapters_of_other_tasks_are_moved(auto, task, settings, made, tmp_path, recwarn):
    folders = made("llama", "midus-hml" if auto is AutoModel else "llama-pro")
    config = LoraConfig(r=2, target_modules=ALL_LAYERS, task_type=task)
    check_moved(folders, config, tmp_path, recwarn, auto, **settings)


@pytest.fixture
def adapter(made, tmp_path):
    """Save an adapter of LoRA for the tiny Llama."""
    save_adapter(load(made("llama", "midus-hml")[0]), LoraConfig(r=2, target_modules=ALL_LAYERS), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_command_says_what_was_written_and_copies_what_travels(adapter, made, tmp_path, capsys):
    (adapter / "tokenizer.json").write_text("{}")
    (adapter / "README.md").write_text("of the base")
    words = ["adapter", adapter, "--onto", made("llama", "midus-hml")[1], "--output", tmp_path / "out"]
    assert cli.main([*map(str, words), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["layers"], result["modules"], result["peft_type"]) == ([0, 2, 3, 5], 8, "LORA")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    words[-1] = tmp_path / "again"
    assert cli.main([*map(str, words)]) == 0
    assert "again: LORA adapter on 8 modules, in layers 0, 2, 3, 5 of " in capsys.readouterr().out.replace("\n", " ")


def with_config(**changes):
    return {"adapter_config.json": lambda data: json.dumps({**json.loads(data), **changes}).encode()}


def of_more_layers(data: bytes) -> bytes:
    return save({name.replace("layers.3.", "layers.7."): tensor for name, tensor in load_tensors(data).items()})


WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({WEIGHTS: None, "adapter_model.bin": b"a"}, r"expected some\. Pickled weights \(adapter_model\.bin\) are never loaded"),
        ({"adapter_config.json": None}, r"has no adapter_config\.json; expected the folder of a PEFT adapter"),
        ({WEIGHTS: save({})}, r"has no tensors in adapter_model\.safetensors; expected some"),
        ({WEIGHTS: lambda data: data[:-8]}, r"is not a valid safetensors file"),
        (with_config(peft_type="IA3"), r"peft_type = 'IA3'; expected 'LORA', as LoRA.* have\. Merge .* \(merge_and_unload\)"),
        (with_config(peft_type=None), r"has peft_type = None"),
        (with_config(layer_replication=[[0, 2], [1, 4]]), r"has layer_replication = \[\[0, 2\], \[1, 4\]\]; expected None"),
        ({WEIGHTS: of_more_layers}, r"was made for another base, .* is of layer 7, and the base has 4\. Give"),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_moved_is_refused_in_one_line(changes, message, adapter, made, refuse):
    for name, content in changes.items():
        path = adapter / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content(path.read_bytes()) if callable(content) else content)
    refuse([adapter, "--onto", made("llama", "midus-hml")[1]], message)


@pytest.fixture
def refuse(tmp_path, capsys):
    """Run the command, which must end with status 2 and one line, and leave nothing."""

    def run(words, message, output=None):
        words = ["adapter", *map(str, words), "--output", str(output or tmp_path / "out")]
        assert cli.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("upscale")
        assert re.search(message, err), err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]

    return run


def test_words_that_name_no_adapter_model_or_output_are_refused(adapter, made, tmp_path, refuse):
    base, upscaled = made("llama", "midus-hml")
    for folder, onto, output, message in (
        (adapter, base, None, r"was not made by upscale: .* Give an upscaled model"),
        (adapter, upscaled, adapter, r"output \S+ exists; expected a folder to make\. Choose another folder"),
        (adapter, upscaled, adapter / "inside", r"is inside the base"),
        (tmp_path / "absent", upscaled, None, r"is neither a folder nor a hub id; expected one of them"),
    ):
        refuse([folder, "--onto", onto], message, output)
