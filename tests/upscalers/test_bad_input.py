"""What bad input gets: status 2, one line that names value, expectation and remedy, and nothing written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NATIVE_FAMILIES

from scripts.anatomy.tiny import tiny_model
from tests.upscalers.checkpoints import edit_config, read_tensors, save_base, tensor_files, write_tensors

Mutation = Callable[[Path], Any]
INDEX = "model.safetensors.index.json"


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Mutation:
    """Change one tensor, or remove it."""

    def mutate(base: Path) -> None:
        tensors = read_tensors(base)
        tensors[name] = change(tensors[name])
        write_tensors(base, {name: tensor for name, tensor in tensors.items() if tensor is not None})

    return mutate


def replace(name: str, text: str) -> Mutation:
    return lambda base: (base / name).write_text(text)


def remove(name: str) -> Mutation:
    return lambda base: (base / name).unlink()


def rename(name: str, other: str) -> Mutation:
    return lambda base: (base / name).rename(base / other)


def config(**changes: Any) -> Mutation:
    return lambda base: edit_config(base, **changes)


def another(family: str, **changes: Any) -> Mutation:
    """Put the base of another family or type in the place, with a changed config."""

    def mutate(base: Path) -> None:
        shutil.rmtree(base)
        save_base(base, family) if family in NATIVE_FAMILIES else tiny_model(family).save_pretrained(base)
        edit_config(base, **changes)

    return mutate


def sharded(then: Mutation) -> Mutation:
    def mutate(base: Path) -> None:
        shutil.rmtree(base)
        save_base(base, max_shard_size="30KB")
        then(base)

    return mutate


def edit_index(change: Callable[[dict], Any]) -> Mutation:
    def edit(base: Path) -> None:
        index = json.loads((base / INDEX).read_text())
        change(index["weight_map"])
        (base / INDEX).write_text(json.dumps(index))

    return sharded(edit)


REQUESTS = [
    (["--method", "midus-hmm"], r"method 'midus-hmm' is unknown. Did you mean midus-hml\? Expected one of: .*llama-pro, midus-hml"),
    (["--method", "lora"], "'lora' is unknown. Adapters are trained on the base itself: 'midus train"),
    (["--set", "m=8"], r"method midus-hml has no option 'm'\. Expected one of: k, query_norm, .*, n, output_projection"),
    (["--set", "query-norm=true", "--set", "query_norm=true"], "--set query_norm is given twice; expected each key once"),
    (["--set", "layers=[1]"], r"It is an option of the command: --placement\."),
    (["--set", "seed=1"], r"It is an option of the command: --seed\."),
    *((["--seed", seed], f"seed is {seed}; expected an integer from 0 to 9223372036854775807") for seed in ("-5", str(2**63))),
    (["--placement", "0,6"], r"placement is 0,6; .* from 0 to 5, counted in the upscaled model of 4 \+ 2 layers"),
    (["--num-new-layers", "3"], "num-new-layers is 3; placement distributed needs a divisor of the 4 base layers: 1, 2, 4. Choose"),
    (["--num-new-layers", "two"], r"Invalid value for '--num-new-layers': .* See 'upscale --help'"),
    (["--dtype", "fp16"], "dtype is 'fp16'; expected one of: auto, float32"),
    (["--max-shard-size", "big"], "max-shard-size is 'big'; expected a positive size such as 5GB"),
    (["--base", "/no/such/folder"], "'/no/such/folder' is neither a folder nor a hub id; expected one"),
    (["--base", "no-such-folder"], "'no-such-folder' is no local folder, and the Hub cannot be reached .or HF_HUB_OFFLINE"),
    (["--base", "a--b"], "'a--b' is no local folder and no hub id"),
    (["--base", __file__], r"test_bad_input\.py' is a file; expected a folder, .* Give the folder"),
    (["--private"], "private is given without push-to-hub; expected both. Pass --push-to-hub REPO"),
    (["--push-to-hub", "me/my/model"], "push-to-hub is 'me/my/model'; expected a repository such as me/model"),
]  # fmt: skip

BASES: dict[str, tuple[Mutation, str]] = {
    "no config": (remove("config.json"), "has no config.json; expected a Hugging Face checkpoint folder or a hub id"),
    "a GGUF file in a folder": (
        rename("config.json", "model.gguf"), r"has no config.json, but a GGUF file; .*gguf_file='model\.gguf', .*save_pretrained",
    ),
    "an adapter": (
        rename("config.json", "adapter_config.json"),
        "has no config.json, but a PEFT adapter .adapter_config.json.; .* Merge the adapter .*merge_and_unload",
    ),
    "an adapter in a base": (replace("adapter_config.json", "{}"), "holds a PEFT adapter .adapter_config.json.*Merge the adapter"),
    "config not JSON": (replace("config.json", "{"), "config.json is not JSON, or cannot be read .*Repair or download it again"),
    "config no object": (replace("config.json", "[1]"), "config.json holds a list; expected a JSON object"),
    "config nested without end": (replace("config.json", '{"a":' * 100_000), "config.json is not JSON"),
    "unknown family": (config(model_type="lama"), "'lama' is not among the .* expected one of these .* Do not rename the type"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers = 0; expected an integer from 1 to 10000"),
    "too many layers": (
        config(num_hidden_layers=6),
        r"lacks 18 tensors .*, model\.layers\.4\..* and 14 more\. .* correct config.json, which has num_hidden_layers = 6\.",
    ),
    "a gap in the layers": (
        lambda base: (
            edit_config(base, num_hidden_layers=3),
            write_tensors(base, {n: t for n, t in read_tensors(base).items() if ".layers.1." not in n}),
        ),
        r"the base lacks 9 tensors that its config requires, model\.layers\.1\.",
    ),
    "too few types of layers": (
        another("gemma3", layer_types=["full_attention"] * 3), r"config.json lists 3 layer_types; expected \d, .* Repair the base",
    ),
    "an unknown type of layer": (
        another("qwen3", layer_types=["full_attention", "linear_attention", "full_attention", "full_attention"]),
        "lists 'linear_attention' in layer_types; expected full_attention or sliding_attention in a qwen3 model",
    ),
    "a layer of another type that the model lacks": (
        another("qwen3_moe", mlp_only_layers=[0, 7]), "lists 7 in mlp_only_layers; expected layers from 0 to 3",
    ),
    "too few layers": (config(num_hidden_layers=3), r"the base holds model\.layers\.3\..*, but config.json has num_hidden_layers"),
    "wrong size": (config(intermediate_size=49), r"is \[48, 32\] in the base; expected \[49, 32\] by its config"),
    "config transformers refuses": (config(rms_norm_eps="small"), r"transformers cannot build the model .*rms_norm_eps.* Repair"),
    "scale not a number": (
        another("gemma3", query_pre_attn_scalar=-16), "transformers cannot run .*TypeError: .*complex.*Repair",
    ),
    "no weights": (remove("model.safetensors"), "holds no weights; expected model.safetensors or an index of shards"),
    "pickled weights": (
        rename("model.safetensors", "pytorch_model.bin"),
        r"holds pytorch_model\.bin; expected model\.safetensors .*AutoModelForCausalLM\.from_pretrained\('.*'\)\.save_pretrained",
    ),
    "cut weights": (
        lambda base: os.truncate(base / "model.safetensors", (base / "model.safetensors").stat().st_size - 1),
        "is not a valid safetensors file: .*it may be truncated. Download or save it",
    ),
    "missing tensor": (
        set_tensor("model.layers.2.mlp.up_proj.weight", lambda _: None),
        "lacks 1 tensors that its config requires, model.layers.2.mlp.up_proj.weight. Download or save it",
    ),
    **{
        f"weights in {stored}": (
            set_tensor("model.norm.weight", lambda tensor, dtype=dtype: tensor.to(dtype)),
            f"model.norm.weight .*is stored as {stored}; expected float32, .*Start from the unquantised",
        )
        for stored, dtype in (("I64", torch.int64), ("F8_E5M2", torch.float8_e5m2))
    },
    "a reward model": (
        lambda base: write_tensors(base, {**read_tensors(base), "score.weight": torch.ones(1, 32)}),
        "has score.weight, the head of a classifier, .*; expected a language model. Upscale the language model",
    ),
    "NaN": (
        set_tensor("model.norm.weight", lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("nan"))),
        "model.norm.weight holds NaN or infinite values; .* Repair the base, or pass",
    ),
    "index without map": (sharded(replace(INDEX, "{}")), "index.json is not a shard index .KeyError"),
    "index of noise": (
        sharded(lambda base: (base / INDEX).write_bytes(b"\x9c" * 3000)),
        "index.json is not a shard index .UnicodeDecodeError: .{0,150} Download or save it again",
    ),
    "missing shard": (
        sharded(lambda base: tensor_files(base)[1].unlink()),
        "index.json places .* in model-00002-of-.*, which is missing or does not hold it. Download or save the base again",
    ),
    "index names an absent tensor": (
        edit_index(lambda names: names.update({"model.extra": next(iter(names.values()))})),
        "index.json places model.extra in model-.*, which is missing or does not hold it.",
    ),
    "index points outside": (
        edit_index(lambda names: names.update({"lm_head.weight": "../other.safetensors"})),
        "index.json names the shard '../other.safetensors'; expected a .safetensors file in the same folder",
    ),
    "D no multiple of H": (
        lambda base: (shutil.rmtree(base), save_base(base, "qwen3", hidden_size=34)),
        "hidden_size is 34; expected a multiple of the 4 attention heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REQUESTS, ids=[" ".join(arguments) for arguments, _ in REQUESTS])
def test_wrong_request_is_refused(command, base, tmp_path, arguments, message, refused):
    usual = ("--base", base, "--method", "midus-hml", "--output", tmp_path / "out")
    refused(command(*usual, *arguments), message, [])


@pytest.mark.parametrize("case", BASES)
def test_unusable_base_is_refused(command, tmp_path, case, refused):
    mutate, message = BASES[case]
    base = save_base(tmp_path / "base")
    mutate(base)
    arguments = ("--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--set", "n=8", "--set", "k=2")
    refused(command(*arguments), message, ["base"])


def test_missing_arguments_are_asked_for(command, base, tmp_path, refused):
    options = {"--base": base, "--method": "midus-hml", "--output": tmp_path / "out"}
    for missing in options:
        arguments = [part for name, value in options.items() if name != missing for part in (name, value)]
        refused(command(*arguments), f"{missing.removeprefix('--')} is missing", [])
    (tmp_path / "file").write_text("x")
    outcome = command("--base", base, "--method", "midus-hml", "--output", tmp_path / "file" / "out")
    refused(outcome, "output .*out cannot be made: .*file is not a writable folder", ["file"])


def test_inspect_and_strip_refuse_other_models(command, base, tmp_path, refused):
    for verb, words in (("inspect", []), ("strip", ["--output", tmp_path / "out"])):
        refused(command(verb, base, *words), "was not made by upscale: .* no 'upscale' entry", [])
        refused(command(verb, tmp_path, *words), "has no config.json", [])


WIDTHS = [
    ("midus-pkm", [], {"hidden_size": 20, "head_dim": 8}, "hidden_size / num_attention_heads is 5; expected an even number"),
    ("midus-hml", [], {"hidden_size": 34, "head_dim": 8}, r"hidden size \(34\) is not a multiple of .* attention heads \(4\)"),
    ("midus-hml", ["--set", "inner_residual=true"], {"head_dim": 16}, "of width 32 to .* output of width 64; expected equal"),
    ("midus-linear", [], {"hidden_size": 20, "head_dim": 8}, None),
]  # fmt: skip


@pytest.mark.parametrize(("method", "words", "changes", "message"), WIDTHS)
def test_widths_that_do_not_fit_a_memory_are_refused(
    command, base, tmp_path, method, words, changes, message, refused
):
    edit_config(shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors")), **changes)
    outcome = command("--base", tmp_path / "base", "--method", method, "--dry-run", *words)
    if message is None:
        assert outcome.status == 0
    else:
        refused(outcome, message, ["base"])


def test_pickle_is_never_loaded(command, tmp_path):
    base, ran = save_base(tmp_path / "base"), tmp_path / "run"
    (base / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    assert command("--base", base, "--method", "llama-pro", "--output", tmp_path / "out").status == 0
    assert not ran.exists() and not (tmp_path / "out" / "pytorch_model.bin").exists()
