"""Bases from the hub: which revision, and which of its files."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import constants, hf_hub_download
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.upscalers.checkpoints import REQUEST, read_tensors, recipe_of, record_of, same_tensors, save_base
from tests.upscalers.hub_server import Repository, files_of
from upscalers.runs import upscale as run
from upscalers.runs.upscale import upscale

OF_THE_MODEL = (
    "tekken.json", "tokenizer.model.v3", "chat_template.jinja", "tool_use.jinja", "preprocessor_config.json",
    "SYSTEM_PROMPT.txt", "LICENSE.txt", "USE_POLICY.md", "additional_chat_templates/rag.jinja",
)  # fmt: skip
SECOND_COPIES = (
    "consolidated.safetensors", "consolidated.safetensors.index.json", "consolidated.00.pth", "pytorch_model.bin",
    "original/consolidated.00.pth", "original/tokenizer.model", "model.fp16.safetensors",
    "model-00009-of-00009.safetensors", "onnx/tokenizer.json", "params.json", "model-q4.gguf",
)  # fmt: skip


@pytest.fixture
def bases(tmp_path):
    """Two bases that differ in every weight."""
    folders = (save_base(tmp_path / "old"), save_base(tmp_path / "new", initializer_range=0.5))
    assert not same_tensors(*folders)
    return folders


@pytest.fixture
def two_revisions(hub, bases):
    """A repository whose main branch has moved on since its tag v1."""
    old, new = map(files_of, bases)
    hub.repositories["org/base"] = Repository(files=new, tags={"v1": old})
    return hub.repositories["org/base"]


def base_tensors(folder) -> dict[str, bytes]:
    """What every upscaled model has from its base as it was."""
    return {name: t.numpy().tobytes() for name, t in read_tensors(folder).items() if "layers" not in name}


@pytest.mark.parametrize("revision", ["v1", "COMMIT"])
def test_a_revision_is_taken_recorded_and_pinned_by_the_recipe(two_revisions, bases, command, tmp_path, revision):
    commit, _ = two_revisions.at("v1")
    done = command("--base", f"org/base@{revision.replace('COMMIT', commit)}", *REQUEST)
    assert done.status == 0, done.err
    assert base_tensors(tmp_path / "out") == base_tensors(bases[0])
    record, recipe = record_of(tmp_path / "out"), tmp_path / "recipe.yaml"
    assert (record["base"]["name"], record["base"]["revision"]) == ("org/base", commit)
    recipe.write_text(recipe_of(tmp_path / "out"))
    assert yaml.safe_load(recipe.read_text())["base"] == f"org/base@{commit}"
    del two_revisions.tags["v1"]
    two_revisions.tags["another"] = files_of(bases[0])  # the commit is still there, the tag is not
    assert command("--config", recipe, "--output", "again", "--no-verify").status == 0
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    # What was made from it is found by a revision as well.
    two_revisions.tags["up"] = files_of(tmp_path / "out")
    assert command("inspect", "org/base@up", "--json").json()["base"] == "org/base"
    assert command("strip", "org/base@up", "--output", "stripped").status == 0
    assert same_tensors(tmp_path / "stripped", bases[0])


NO_REVISION = "has no revision behind '@', or is local, where there are none; expected a hub id"
NOT_FOUND = (
    "'org/base' is no local folder, and the Hub answers with status 404 (404 Client Error. Revision Not Found for"
)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("org/base@v9", NOT_FOUND),
        ("org/base@" + "0" * 40, NOT_FOUND),
        ("org/base@", f"'org/base@' {NO_REVISION}"),
        ("./old@v1", f"'./old@v1' {NO_REVISION}"),
    ],
)
def test_a_revision_that_cannot_be_is_refused(two_revisions, command, refused, base, message):
    refused(command("--base", base, *REQUEST), message, None)


def test_a_folder_with_an_at_in_its_name_is_a_folder(bases, command, tmp_path):
    shutil.copytree(bases[0], tmp_path / "base@v1")
    assert command("--base", tmp_path / "base@v1", "--method", "midus-hml", "--dry-run").status == 0


@pytest.fixture
def with_second_copies(tmp_path):
    """A sharded base as some publish it: beside it the same weights in other layouts, and whatever a tokenizer needs."""
    folder = save_base(tmp_path / "mistral", "mistral", max_shard_size="60KB")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for name in (*OF_THE_MODEL, *SECOND_COPIES):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"contents of {name}")
    return folder


def test_one_copy_of_the_model_is_downloaded_index_first(hub, with_second_copies, bases, command, tmp_path):
    hub.repositories["org/base"] = Repository(files_of(with_second_copies))
    index = json.loads((with_second_copies / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    words = ("--method", "llama-pro", "--output", "out")
    done = command("--base", "org/base", *words)
    assert done.status == 0, done.err
    model = {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md", *OF_THE_MODEL}
    assert hub.downloaded("org/base") == model | shards
    requests = [path.rpartition("/")[2] for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    assert requests.index("model.safetensors.index.json") < min(requests.index(shard) for shard in shards)
    assert requests.index("config.json") < requests.index("model.safetensors.index.json")
    assert set(OF_THE_MODEL) <= files_of(tmp_path / "out").keys()
    assert not set(SECOND_COPIES) & files_of(tmp_path / "out").keys()
    # Of a single file and shards it is the one that transformers loads.
    single = {"model.safetensors": (save_base(tmp_path / "one", "mistral") / "model.safetensors").read_bytes()}
    hub.repositories["org/both"] = Repository({**files_of(with_second_copies), **single})
    assert command("--base", "org/both", *words, "--overwrite").status == 0
    assert {n for n in hub.downloaded("org/both") if n.endswith(".safetensors")} == {"model.safetensors"}


def test_a_repository_in_another_layout_alone_says_what_is_expected(hub, bases, command):
    files = files_of(bases[0])
    files["consolidated.safetensors"] = files.pop("model.safetensors")
    hub.repositories["org/base"] = Repository(files)
    done = command("--base", "org/base", *REQUEST)
    message = "'org/base' holds consolidated.safetensors; expected model.safetensors or an index of shards"
    assert done.status == 2 and message in done.err.splitlines()[-1]  # behind bars of the download


def test_a_base_that_transformers_downloaded_needs_no_hub(hub, bases, command, tmp_path, monkeypatch):
    hub.repositories["org/base"] = Repository(files_of(bases[0]))
    for name in ("config.json", "model.safetensors"):
        hf_hub_download("org/base", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    done = command("--base", "org/base", *REQUEST)
    assert done.status == 0, done.err
    assert hub.requests == []
    assert base_tensors(tmp_path / "out") == base_tensors(bases[0])


def test_an_adapter_and_the_upscaled_model_are_read_from_the_hub_without_weights_of_the_model_and_pickles(
    hub, tmp_path, command
):
    base = save_base(tmp_path / "base")
    upscale(base=base, method="llama-pro", output=tmp_path / "model", verify=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"pickled")
    for name in ("model", "adapter"):
        hub.repositories[f"org/{name}"] = Repository(files=files_of(tmp_path / name))
    done = command("adapter", "org/adapter", "--onto", "org/model", "--output", "out", "--json")
    assert done.status == 0, done.err
    assert hub.downloaded("org/model") == {"config.json", "upscale.json"}
    assert hub.downloaded("org/adapter") == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/model" and len(config["target_modules"]) == 4


def test_the_main_branch_is_pinned_too_and_may_move_while_working(
    two_revisions, bases, command, tmp_path, monkeypatch
):
    resolve = run.resolve_source
    first, files = two_revisions.revision, dict(two_revisions.files)

    def after_a_push(name, **options):
        if not options["config_only"]:  # the run has been planned
            two_revisions.tags["before"] = files
            two_revisions.files = files_of(bases[0])
        return resolve(name, **options)

    two_revisions.tags.clear()
    monkeypatch.setattr(run, "resolve_source", after_a_push)
    assert command("--base", "org/base", *REQUEST).status == 0
    assert base_tensors(tmp_path / "out") == base_tensors(bases[1])
    assert record_of(tmp_path / "out")["base"]["revision"] == first
    assert f"base: org/base@{first}" in (tmp_path / "out" / "README.md").read_text()


def test_the_code_of_a_tokenizer_is_downloaded_where_a_config_names_it(hub, tmp_path, command):
    base = save_base(tmp_path / "base")
    (base / "tokenization_own.py").write_text("from .own_letters import LETTERS\nraise SystemExit\n")
    (base / "own_letters.py").write_text("LETTERS = {}\n")
    hub.repositories["org/base"] = Repository(files=files_of(base))
    assert command("--base", "org/base", *REQUEST).status == 0
    assert not {name for name in hub.downloaded("org/base") if name.endswith(".py")}
    named = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    hub.repositories["org/own"] = Repository(files=files_of(base))
    assert command("--base", "org/own", *REQUEST[:2], "--output", "own", *REQUEST[4:]).status == 0
    assert {"tokenization_own.py", "own_letters.py"} <= files_of(tmp_path / "own").keys()
