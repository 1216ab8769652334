"""From the hub and to it, with its own client: revisions, files, rights, and what is told."""

import contextlib
import json
import re
import shutil
import sys
import time
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.cli import hf
from tiny import prompt, save_tiny_tokenizer
from transformers import AutoModelForCausalLM

from midus_hf.sources.names import check_model_name
from tests.upscalers.checkpoints import REQUEST, save_base, unverified
from tests.upscalers.contents import config_of, load, logits, read_tensors, recipe_of, record_of, same_tensors
from tests.upscalers.hub_server import Fault, Repository, files_of
from upscalers.checkpoint.source import prepare_repository
from upscalers.runs import upscale as run

DOWNLOADED = ("--base", "org/base", *REQUEST)
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
def base(tmp_path):
    """A sharded base, with files that a model does not need."""
    folder = save_base(tmp_path / "base", max_shard_size="60KB")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "LICENSE").write_text("licence")
    return folder


def test_base_is_downloaded_and_result_uploaded(base, hub, command, tmp_path):
    hub.repositories["org/base"] = Repository(files_of(base))
    words = ("--max-shard-size", "60KB", "--push-to-hub", "me/upscaled", "--json")
    done = command("--base", "org/base", *REQUEST[:-1], *words).succeeded()
    assert done.json()["base"] == "org/base"
    assert hub.downloaded("org/base") == files_of(base).keys() - {"pytorch_model.bin"}
    assert hub.repositories["me/upscaled"].files == files_of(tmp_path / "out")
    assert hub.repositories["me/upscaled"].commits == 1
    loaded = AutoModelForCausalLM.from_pretrained("me/upscaled", dtype="auto").eval()
    assert any(name.endswith(".safetensors") for name in hub.downloaded("me/upscaled"))
    with torch.no_grad():
        assert torch.equal(loaded(prompt()).logits, logits(base))
    assert (tmp_path / "out" / "LICENSE").read_text() == "licence"


def test_dry_run_and_inspect_download_no_weights(base, hub, command, tmp_path):
    unverified(base, tmp_path / "out")
    hub.repositories |= {"org/base": Repository(files_of(base)), "me/upscaled": Repository(files_of(tmp_path / "out"))}
    assert command("--base", "org/base", "--method", "midus-hml", "--dry-run", "--json").json()["num_layers"] == 6
    assert hub.downloaded("org/base") == {"config.json"}
    assert command("inspect", "me/upscaled", "--json").json()["base"] == "base"
    code_and_what_names_it = {"modeling_midus.py", "generation_config.json"}
    assert hub.downloaded("me/upscaled") == {"config.json", "upscale.json"} | code_and_what_names_it


def pushed(model, tmp_path):
    """Upload a model from Python in two ways; yield each name, and the model loaded from it."""
    model.push_to_hub("me/pushed")
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved-and-pushed")
    for name in ("me/pushed", "me/saved-and-pushed"):
        yield name, AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()


def test_model_pushed_from_python_has_code_and_weights(base, hub, tmp_path):
    out = unverified(base, tmp_path / "out")
    for name, model in pushed(load(out), tmp_path):
        files = hub.repositories[name].files
        assert files["modeling_midus.py"] == (out / "modeling_midus.py").read_bytes()
        assert json.loads(files["config.json"])["auto_map"] == config_of(out)["auto_map"]
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits, logits(base))


def test_model_is_not_uploaded_without_its_bank(base, hub, tmp_path):
    model = load(unverified(base, tmp_path / "out", method="hier-ffn", options={"sizes": [3, 2], "branching": 2}))
    for upload in (
        lambda: model.push_to_hub("me/fetching"),
        lambda: model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/fetching"),
    ):
        with pytest.raises(ValueError, match=r"expected save_pretrained\(folder\), and then in a shell: hf upload"):
            upload()
    assert "me/fetching" not in hub.repositories


def test_packs_are_uploaded_with_their_glossary(base, hub, tmp_path):
    save_tiny_tokenizer(base)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"name": "word5", "text": "word7 word8"}))
    model = load(unverified(base, tmp_path / "out", method="packs", options={"corpus": str(tmp_path / "rows.jsonl")}))
    model.glossary.add("word6", "word9")
    tokens = torch.tensor([[5, 6, 50]])
    for _, loaded in pushed(model, tmp_path):
        assert [*loaded.glossary] == [*model.glossary]
        assert len(loaded.glossary) == 2
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)


MAY_NOT = "but the Hub does not let this account write there ("
REFUSED = {
    "no login": ("HF_TOKEN", "", "me/x", MAY_NOT),
    "a repository of others": (None, None, "others/theirs", MAY_NOT),
    "offline": ("HF_HUB_OFFLINE", True, "me/x", "but the Hub does not answer (OfflineModeIsEnabled: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_upload_without_write_access_is_refused(base, hub, command, tmp_path, case, refused, monkeypatch):
    name, value, repository, message = REFUSED[case]
    hub.repositories = {"others/theirs": Repository(read_only=True)}
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    if name == "HF_TOKEN":
        monkeypatch.setenv(name, value)
    elif name is not None:
        monkeypatch.setattr(constants, name, value)
    done = command("--base", base, *REQUEST, "--push-to-hub", repository)
    refused(done, f"push-to-hub is '{repository}', {message}", None)
    assert hub.repositories.keys() == {"others/theirs"}


RIGHTS = "check the name, and log in with 'hf auth login'"
ANSWERS = {
    0: r"the Hub does not answer \(.*\); try again later",
    **{status: rf"the Hub answers with status {status} \(.*\); {RIGHTS}" for status in (403, 404)},
    **{status: rf"the Hub answers with status {status} \(.*\); try again later" for status in (429, 500)},
}


@pytest.mark.parametrize(("status", "answer"), ANSWERS.items())
def test_answers_of_the_hub_are_reported(hub, command, refused, monkeypatch, status, answer):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's own attempts
    broken = {"cut_after": 0} if status == 0 else {"status": status}
    hub.faults = [Fault("/api/models/", **broken)]
    message = re.escape(MAY_NOT) if status == 403 else f"but {answer}.*, or upload the output afterwards"
    with pytest.raises(ValueError, match=f"push-to-hub is 'me/x', {message}"):
        prepare_repository("me/x", private=False)
    if status:
        refused(command(*DOWNLOADED), rf"'org/base' is no local folder, and {answer}.* Give a folder otherwise", None)
        with pytest.raises(ValueError, match=rf"^model is 'org/base', which is no folder here, and {answer}"):
            check_model_name("model", "org/base")


def test_refused_upload_asks_the_hub_only_what_is_needed(base, hub, command, refused, monkeypatch):
    hub.repositories["org/base"] = Repository(files_of(base))
    assert command("--base", base, *REQUEST, "--push-to-hub", "others/x", "--dry-run").status == 0
    assert hub.requests == []
    words = (*REQUEST[:-1], "--push-to-hub", "me/x", "--num-new-layers", "9")
    refused(command("--base", base, *words), "num-new-layers is 9", None)
    assert hub.requests == [("GET", "/api/whoami-v2")]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(command(*DOWNLOADED, "--push-to-hub", "me/x"), MAY_NOT, None)
    assert hub.downloaded("org/base") == {"config.json"}
    assert hub.repositories.keys() == {"org/base"}


def test_private_upload_needs_a_private_repository(base, hub, command, tmp_path, refused):
    hub.repositories["me/public"] = Repository()
    words = ("--base", base, *REQUEST, "--overwrite", "--push-to-hub")
    refused(command(*words, "me/public", "--private"), "'me/public', which exists and is public; expected a new", None)
    for name in ("mine", "me/mine"):  # made, and found again
        assert command(*words, name, "--private").status == 0
        assert hub.repositories["me/mine"].private, name
        assert hub.repositories["me/mine"].files == files_of(tmp_path / "out"), name
    assert command(*words, "open").status == 0
    assert not hub.repositories["me/open"].private
    assert 'from_pretrained("me/open", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()


def test_failed_upload_keeps_checkpoint_and_report(base, hub, command, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's own attempts
    hub.faults = [Fault("/lfs/", cut_after=0)]
    done = command("--base", base, *REQUEST, "--push-to-hub", "me/x", "--private", "--json")
    assert hub.repositories["me/x"].commits == 0
    assert (done.status, done.json()["output"], done.json()["num_layers"]) == (1, "out", 6)
    said, _, remedy = done.err.splitlines()[-1].partition("; out is complete. Upload it with: hf ")
    assert "upscale: the upload to me/x failed (" in said
    assert remedy == "upload me/x out --private"
    assert "Traceback" not in done.err
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    hub.faults = []
    monkeypatch.setattr(sys, "argv", ["hf", *remedy.split()])
    with contextlib.suppress(SystemExit):
        hf.main()
    assert hub.repositories["me/x"].private
    assert hub.repositories["me/x"].files == files_of(tmp_path / "out")
    monkeypatch.setattr(run, "push_folder", Mock(side_effect=KeyboardInterrupt))
    done = command("--base", base, *REQUEST, "--overwrite", "--push-to-hub", "me/x", "--json")
    assert (done.status, done.json()["output"]) == (130, "out")
    assert "the upload to me/x was interrupted; out is complete. Upload it with: hf upload me/x out" in done.err
    assert torch.equal(logits(base), logits(tmp_path / "out"))


@pytest.fixture
def bases(tmp_path):
    return save_base(tmp_path / "old"), save_base(tmp_path / "new", initializer_range=0.5)


@pytest.fixture
def two_revisions(hub, bases):
    """A repository whose main branch has moved on since its tag v1."""
    old, new = map(files_of, bases)
    hub.repositories["org/base"] = Repository(files=new, tags={"v1": old})
    return hub.repositories["org/base"]


def base_tensors(folder) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in read_tensors(folder).items() if "layers" not in name}


def test_revision_is_recorded_and_pinned(two_revisions, bases, command, tmp_path):
    (commit, _), out, recipe = two_revisions.at("v1"), tmp_path / "out", tmp_path / "recipe.yaml"
    assert command("--base", "org/base@v1", *REQUEST).status == 0
    assert base_tensors(out) == base_tensors(bases[0])
    source = record_of(out)["base"]
    assert (source["name"], source["revision"]) == ("org/base", commit)
    recipe.write_text(recipe_of(out))
    assert yaml.safe_load(recipe.read_text())["base"] == f"org/base@{commit}"
    del two_revisions.tags["v1"]
    two_revisions.tags["another"] = files_of(bases[0])  # the commit is still there, the tag is not
    assert command("--config", recipe, "--output", "again", "--no-verify").status == 0
    assert files_of(tmp_path / "again") == files_of(out)
    # What was made from it is found by a revision as well.
    two_revisions.tags["up"] = files_of(out)
    assert command("inspect", "org/base@up", "--json").json()["base"] == "org/base"
    assert command("strip", "org/base@up", "--output", "stripped").status == 0
    assert same_tensors(tmp_path / "stripped", bases[0])


def test_wrong_revision_is_refused(two_revisions, bases, command, tmp_path, refused):
    none = "has no revision after '@', or is local, where there are none; expected a hub id"
    for base, message in (
        ("org/base@v9", "no local folder, and the Hub answers with status 404 (404 Client Error. Revision Not Found"),
        ("org/base@", f"'org/base@' {none}"),
        ("./old@v1", f"'./old@v1' {none}"),
    ):
        refused(command("--base", base, *REQUEST), message, None)
    shutil.copytree(bases[0], tmp_path / "base@v1")
    assert command("--base", tmp_path / "base@v1", "--method", "midus-hml", "--dry-run").status == 0


def test_one_copy_is_downloaded_index_first(hub, command, tmp_path):
    """Of a sharded base with the same weights in other layouts, and files of its tokenizer."""
    folder, index = save_base(tmp_path / "mistral", "mistral", max_shard_size="60KB"), "model.safetensors.index.json"
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for name in (*OF_THE_MODEL, *SECOND_COPIES):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"contents of {name}")
    hub.repositories["org/base"] = Repository(files_of(folder))
    shards, done = set(json.loads((folder / index).read_text())["weight_map"].values()), command(*DOWNLOADED)
    assert done.status == 0, done.err
    assert len(shards) > 1
    model = {"config.json", "generation_config.json", index, "README.md", *OF_THE_MODEL}
    assert hub.downloaded("org/base") == model | shards
    requests = [request.file[1] for request in hub.log if request.method == "GET" and request.file is not None]
    places = [requests.index(name) for name in ("config.json", index)]
    assert places[0] < places[1] < min(requests.index(shard) for shard in shards)
    made = files_of(tmp_path / "out").keys()
    assert set(OF_THE_MODEL) <= made
    assert not set(SECOND_COPIES) & made
    # Of a single file and shards it is the one that transformers loads.
    single = {"model.safetensors": (save_base(tmp_path / "one", "mistral") / "model.safetensors").read_bytes()}
    hub.repositories["org/both"] = Repository({**files_of(folder), **single})
    assert command("--base", "org/both", *REQUEST, "--overwrite").status == 0
    assert {n for n in hub.downloaded("org/both") if n.endswith(".safetensors")} == {"model.safetensors"}


def test_repository_without_safetensors_is_refused(hub, bases, command):
    files = files_of(bases[0])
    files["consolidated.safetensors"] = files.pop("model.safetensors")
    hub.repositories["org/base"] = Repository(files)
    done = command(*DOWNLOADED)
    message = "'org/base' holds consolidated.safetensors; expected model.safetensors or an index of shards"
    assert done.status == 2
    assert message in done.err.splitlines()[-1]  # after bars of the download


def test_cached_base_needs_no_hub(hub, bases, command, tmp_path, monkeypatch):
    hub.repositories["org/base"] = Repository(files_of(bases[0]))
    for name in ("config.json", "model.safetensors"):
        hf_hub_download("org/base", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    done = command(*DOWNLOADED)
    assert (done.status, hub.requests) == (0, []), done.err
    assert base_tensors(tmp_path / "out") == base_tensors(bases[0])


def test_main_branch_is_pinned(two_revisions, bases, command, tmp_path, monkeypatch):
    resolve, first, files = run.resolve_source, two_revisions.revision, dict(two_revisions.files)

    def after_a_push(name, **options):
        if not options["config_only"]:  # the run has been planned
            two_revisions.tags["before"] = files
            two_revisions.files = files_of(bases[0])
        return resolve(name, **options)

    two_revisions.tags.clear()
    monkeypatch.setattr(run, "resolve_source", after_a_push)
    assert command(*DOWNLOADED).status == 0
    assert base_tensors(tmp_path / "out") == base_tensors(bases[1])
    assert record_of(tmp_path / "out")["base"]["revision"] == first
    assert f"base: org/base@{first}" in (tmp_path / "out" / "README.md").read_text()


def test_named_tokenizer_code_is_downloaded(hub, tmp_path, command):
    base = save_base(tmp_path / "base")
    (base / "tokenization_own.py").write_text("from .own_letters import LETTERS\nraise SystemExit\n")
    (base / "own_letters.py").write_text("LETTERS = {}\n")
    hub.repositories["org/base"] = Repository(files=files_of(base))
    assert command(*DOWNLOADED).status == 0
    assert not {name for name in hub.downloaded("org/base") if name.endswith(".py")}
    named = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (base / "tokenizer_config.json").write_text(json.dumps(named))
    hub.repositories["org/base"] = Repository(files=files_of(base))
    assert command(*DOWNLOADED, "--overwrite").status == 0
    assert {"tokenization_own.py", "own_letters.py"} <= files_of(tmp_path / "out").keys()
