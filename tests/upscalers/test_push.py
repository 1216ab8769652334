"""Uploading the result: what is checked before work begins, and what is left when an upload fails."""

import shlex
import time

import pytest
import torch
from huggingface_hub import constants

from tests.upscalers.checkpoints import logits
from tests.upscalers.conftest import point_client_at
from tests.upscalers.hub_server import ACCOUNT, Repository, client_environment, files_of
from tests.upscalers.processes import run_python
from upscalers.checkpoint.hub import check_write_access
from upscalers.request.errors import RequestError
from upscalers.runs import upscale as run

REQUEST = ("--method", "midus-hml", "--output", "out", "--set", "n=8", "--set", "k=2", "--no-verify")
HF = "from huggingface_hub.cli.hf import main; main()"
LOG_IN = "Log in with 'hf auth login', with a token that may write."


def token(role: str, *scopes: tuple[str, str]) -> dict:
    """What the hub tells of a token; scopes are names of owners or repositories, and a permission."""
    scoped = [{"entity": {"name": name}, "permissions": ["repo.content.read", right]} for name, right in scopes]
    fine = {"fineGrained": {"global": [], "scoped": scoped}} if role == "fineGrained" else {}
    return {"accessToken": {"displayName": "laptop", "role": role, **fine}}


def member(role: str) -> list[dict]:
    return [{"name": "lab", "roleInOrg": role}]


UNKNOWN = {
    "no login": ("HF_TOKEN", "", f"but nobody is logged in to the hub here. {LOG_IN}"),
    "a token that the hub does not know": ("HF_TOKEN", "hf_wrong", "but the hub does not accept the token (Invalid"),
    "offline": ("HF_HUB_OFFLINE", True, "but HF_HUB_OFFLINE is set; expected a hub that can be reached."),
    "no hub": ("ENDPOINT", "http://127.0.0.1:9", "but the hub does not answer (ConnectError"),
}


@pytest.mark.parametrize(("name", "value", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_without_a_hub_that_knows_the_person_nothing_is_begun(
    base, hub, command, tmp_path, name, value, message, refused, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    if name == "HF_TOKEN":
        monkeypatch.setenv(name, value)
    elif name == "ENDPOINT":
        point_client_at(value, monkeypatch)
    else:
        monkeypatch.setattr(constants, name, value)
    refused(command("--base", base, *REQUEST, "--push-to-hub", "me/x"), f"push-to-hub is 'me/x', {message}", None)
    assert hub.repositories == {}


ACCESS = {
    "a token that may only read": (
        {**ACCOUNT, "auth": token("read")}, "me/x", f"the token 'laptop' may only read. {LOG_IN}",
    ),
    "a token for other repositories": (
        {**ACCOUNT, "auth": token("fineGrained", ("me", "discussion.write"), ("me/y", "repo.write"))}, "me/x",
        "the token 'laptop' may not write to repositories of 'me'; expected the permission repo.write.",
    ),
    "an organisation of others": (
        {**ACCOUNT, "orgs": member("write")}, "others/x",
        "me is no member of 'others'; expected a repository of one of: me, lab.",
    ),
    "an organisation that may only be read": (
        {**ACCOUNT, "orgs": member("read")}, "lab/x",
        "me may only read in 'lab'; expected the role contributor, write or admin.",
    ),
    "a repository of others": (ACCOUNT, "others/theirs", "which me may not write to with this token"),
    "a token for this owner": ({**ACCOUNT, "auth": token("fineGrained", ("me", "repo.write"))}, "me/x", None),
    "a token for this repository": ({**ACCOUNT, "auth": token("fineGrained", ("me/x", "repo.write"))}, "me/x", None),
    "a member who may write": ({**ACCOUNT, "orgs": member("contributor")}, "lab/x", None),
    "names in another case": ({**ACCOUNT, "orgs": member("write")}, "Lab/x", None),
    "a token of which the hub tells nothing": ({**ACCOUNT, "auth": {}}, "me/x", None),
    "an existing repository of one's own": (ACCOUNT, "me/mine", None),
    "a repository without its owner": (ACCOUNT, "x", None),
}  # fmt: skip


@pytest.mark.parametrize(("account", "repository", "message"), ACCESS.values(), ids=ACCESS)
def test_the_right_to_write_is_checked(hub, account, repository, message):
    hub.repositories = {"others/theirs": Repository(read_only=True), "me/mine": Repository()}
    hub.account = account
    if message is None:
        owned = repository if "/" in repository else f"me/{repository}"
        assert check_write_access(repository, private=False) == owned
    else:
        with pytest.raises(RequestError) as refusal:
            check_write_access(repository, private=False)
        assert str(refusal.value).startswith(f"push-to-hub is {repository!r}, ")
        assert message in str(refusal.value)


@pytest.mark.parametrize("status", [0, 500], ids=["a cut connection", "an error of the hub"])
def test_a_hub_that_fails_while_access_is_checked_is_named(hub, monkeypatch, status):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's own attempts
    hub.fails_access = status
    with pytest.raises(RequestError, match=r"push-to-hub is 'me/x', but the hub does not answer .*Try again later"):
        check_write_access("me/x", private=False)


def test_a_dry_run_asks_no_hub(base, hub, command):
    assert command("--base", base, *REQUEST, "--push-to-hub", "others/x", "--dry-run").status == 0
    assert hub.requests == []


def test_a_private_repository_is_made_private_and_a_public_one_is_not_taken_for_it(
    base, hub, command, tmp_path, refused
):
    hub.repositories["me/public"] = Repository()
    done = command("--base", base, *REQUEST, "--push-to-hub", "me/public", "--private")
    refused(done, "push-to-hub is 'me/public', which exists and is public; expected a new or a private", None)
    assert command("--base", base, *REQUEST, "--push-to-hub", "mine", "--private").status == 0
    assert hub.repositories["me/mine"].private
    assert hub.repositories["me/mine"].files == files_of(tmp_path / "out")
    assert command("--base", base, *REQUEST, "--push-to-hub", "me/mine", "--private", "--overwrite").status == 0
    assert command("--base", base, *REQUEST, "--push-to-hub", "open", "--overwrite").status == 0
    assert not hub.repositories["me/open"].private
    assert 'from_pretrained("me/open", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()


def test_private_is_refused_where_nothing_is_uploaded(base, command, refused):
    message = "private is given without push-to-hub; expected both. Pass --push-to-hub REPO as well."
    refused(command("--base", base, *REQUEST, "--private"), message, None)


@pytest.mark.parametrize("place", ["/commit/", "/lfs/"], ids=["small files", "weights"])
def test_a_connection_that_dies_while_uploading_keeps_report_and_checkpoint(
    base, hub, command, tmp_path, monkeypatch, place
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's own attempts
    hub.dies_in = place
    done = command("--base", base, *REQUEST, "--push-to-hub", "me/x", "--private", "--json")
    assert hub.repositories["me/x"].commits == 0
    assert done.status == 1, done.err
    assert (done.json()["output"], done.json()["num_layers"]) == ("out", 6)
    last_line = done.err.splitlines()[-1]
    assert "upscale: the upload to me/x failed (" in last_line
    assert last_line.endswith("; out is complete. Upload it with: hf upload me/x out --private")
    assert "Traceback" not in done.err
    assert torch.equal(logits(base), logits(tmp_path / "out"))


def test_the_command_that_a_failed_upload_names_uploads_the_folder(base, hub, command, tmp_path):
    hub.refuses_commits = 503
    failed = command("--base", base, *REQUEST, "--push-to-hub", "me/x", "--private")
    hub.refuses_commits = None
    words = shlex.split(failed.err.rpartition("Upload it with: hf ")[2])
    uploaded = run_python(HF, *words, folder=tmp_path, **client_environment(hub, tmp_path))
    assert uploaded.returncode == 0, uploaded.stderr
    assert hub.repositories["me/x"].private
    assert hub.repositories["me/x"].files == files_of(tmp_path / "out")


def test_an_interrupted_upload_says_that_the_folder_is_complete(base, command, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check_write_access", lambda repository, private: repository)
    monkeypatch.setattr(run, "push_folder", interrupted)
    monkeypatch.chdir(tmp_path)
    done = command("--base", base, *REQUEST, "--push-to-hub", "me/x", "--json")
    assert done.status == 130
    assert done.json()["output"] == "out"
    assert "the upload to me/x was interrupted; out is complete. Upload it with: hf upload me/x out" in done.err
    assert "nothing is left" not in done.err
    assert torch.equal(logits(base), logits(tmp_path / "out"))
