"""From the hub and to the hub, with huggingface_hub's own client against a server on loopback."""

import socket

import pytest
import torch
from processes.warm import run_warm
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.banks.memory_bank import MemoryBank
from tests.upscalers.checkpoints import load, logits, record_of, save_base
from tests.upscalers.conftest import point_client_at
from tests.upscalers.hub_server import Repository, client_environment, files_of
from upscalers.runs.upscale import upscale

SMALL = ("--set", "n=8", "--set", "k=2")


@pytest.fixture
def base(tmp_path):
    """A sharded base, with files that a model does not need."""
    folder = save_base(tmp_path / "base", max_shard_size="60KB")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "LICENSE").write_text("licence")
    return folder


def test_a_base_is_downloaded_and_the_result_uploaded_and_loaded_again(base, hub, command, tmp_path):
    hub.repositories["org/base"] = Repository(files_of(base))
    done = command(
        "--base", "org/base", "--method", "midus-hml", "--output", "out", *SMALL, "--max-shard-size", "60KB",
        "--push-to-hub", "me/upscaled", "--json",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert hub.downloaded("org/base") == files_of(base).keys() - {"pytorch_model.bin"}
    assert hub.repositories["me/upscaled"].files == files_of(tmp_path / "out")
    assert hub.repositories["me/upscaled"].commits == 1
    loaded = AutoModelForCausalLM.from_pretrained("me/upscaled", dtype="auto").eval()
    assert any(name.endswith(".safetensors") for name in hub.downloaded("me/upscaled"))
    with torch.no_grad():
        assert torch.equal(loaded(prompt()).logits, logits(base))
    report = done.json()
    assert report["base"] == "org/base"
    assert report["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    record = record_of(tmp_path / "out")
    assert (record["base"]["name"], record["base"]["revision"]) == ("org/base", hub.repositories["org/base"].revision)
    assert "base_model: org/base" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "LICENSE").read_text() == "licence"


def test_a_dry_run_and_inspect_download_no_weights(base, hub, command, tmp_path):
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options={"n": 8, "k": 2}, verify=False)
    hub.repositories |= {"org/base": Repository(files_of(base)), "me/upscaled": Repository(files_of(tmp_path / "out"))}
    planned = command("--base", "org/base", "--method", "midus-hml", "--dry-run", "--json")
    assert planned.status == 0, planned.err
    assert planned.json()["num_layers"] == 6
    assert hub.downloaded("org/base") == {"config.json"}
    told = command("inspect", "me/upscaled", "--json")
    assert told.status == 0, told.err
    assert told.json()["base"] == "base"
    assert hub.downloaded("me/upscaled") == {"config.json", "upscale.json"}


REQUEST = ("--base", "org/base", "--method", "midus-hml", "--output", "out")


def test_a_repository_that_is_not_there_is_told_apart_from_a_hub_that_is_not(hub, command, refused, monkeypatch):
    refused(command(*REQUEST), "'org/base' is no local folder and was not found on the hub. Check its spelling.", None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_client_at(f"http://127.0.0.1:{unused.getsockname()[1]}", monkeypatch)
        refused(command(*REQUEST), "'org/base' is no local folder, and the hub cannot be reached", None)


def test_a_gated_repository_says_what_to_do(base, hub, command, tmp_path):
    hub.repositories["org/base"] = Repository(files_of(base), gated=True)
    done = command(*REQUEST)
    assert done.status == 2
    assert (
        "'org/base' is gated; accept its terms on the hub and log in with 'hf auth login'."
        in done.err.splitlines()[-1]
    )
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


LOAD_WITHOUT_THE_PACKAGE = """
import os
import sys
import torch
import transformers.dynamic_module_utils
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("midus_hf", "upscalers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
# These variables were read when the libraries were imported.
address = os.environ["HF_ENDPOINT"]
constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
HfApi.endpoint = property(lambda client: address, lambda client, value: None)
transformers.dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_HOME"] + "/modules"
torch.set_num_threads(1)
for repository in ("me/pushed", "me/saved-and-pushed"):
    model = AutoModelForCausalLM.from_pretrained(repository, dtype="auto", trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load(sys.argv[1])).logits, f"{sys.argv[2]}-{repository.partition('/')[2]}.pt")
"""


def test_a_model_pushed_from_python_brings_its_code(base, hub, tmp_path):
    upscale(base=base, method="midus-hml", output=tmp_path / "out", options={"n": 8, "k": 2}, verify=False)
    model = load(tmp_path / "out")
    model.push_to_hub("me/pushed")
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved-and-pushed")
    for name in ("me/pushed", "me/saved-and-pushed"):
        assert {"config.json", "modeling_midus.py"} <= hub.repositories[name].files.keys()
    torch.save(prompt(), tmp_path / "tokens.pt")
    arguments = (tmp_path / "tokens.pt", tmp_path / "logits")
    loaded = run_warm(LOAD_WITHOUT_THE_PACKAGE, *arguments, folder=tmp_path, **client_environment(hub, tmp_path))
    assert loaded.returncode == 0, loaded.stderr
    for name in ("pushed", "saved-and-pushed"):
        assert torch.equal(torch.load(tmp_path / f"logits-{name}.pt"), logits(base))


def test_a_model_pushed_from_python_brings_its_bank(base, hub, tmp_path):
    options = {"sizes": [3, 2], "branching": 2}
    upscale(base=base, method="hier-ffn", output=tmp_path / "out", options=options, verify=False)
    model = load(tmp_path / "out")
    bank = MemoryBank(tmp_path / "out" / "memory_bank" / "hier-ffn", model.banks.layouts["hier-ffn"])
    bank.write(2, 3, torch.randn(bank.layout.record_numel(2), generator=torch.Generator().manual_seed(0)))
    model.open_banks(tmp_path / "out")
    model.push_to_hub("me/fetching", commit_message="A bank")
    repository = hub.repositories["me/fetching"]
    names = {"bank.json", "level-1.safetensors", "level-2.safetensors"}
    assert {f"memory_bank/hier-ffn/{name}" for name in names} | {"config.json"} <= repository.files.keys()
    assert repository.commits == 1
    loaded = AutoModelForCausalLM.from_pretrained("me/fetching", dtype="auto").eval()
    ids = torch.tensor([[1, 3]] * len(prompt()))
    with torch.no_grad():
        fetched = model(prompt(), memory_ids=ids).logits
        assert torch.equal(loaded(prompt(), memory_ids=ids).logits, fetched)
        assert not torch.equal(loaded(prompt()).logits, fetched)
    with pytest.raises(ValueError, match=r"expected push_to_hub\(repo_id\), which uploads both"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/other")
