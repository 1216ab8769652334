"""What counts as a secret, and what is shown in its place."""

import pytest

from midus_hf.files.secrets import for_record, names_secret, without_secrets

LONG = "hf_" + "abcdefghij" * 3


@pytest.mark.parametrize(("key", "is_secret"), [
    *((key, True) for key in ("token", "hub_token", "HF_TOKEN", "api-key", "apiKey", "key", "client_secret")),
    *((key, True) for key in ("password", "db.password", "access_token", "wandb_api_key", "accesskey")),
    *((key, False) for key in ("eos_token", "pad_token", "image_token", "add_bos_token", "vision_start_token")),
    *((key, False) for key in ("length_key", "sub_key", "tokens", "eos_token_id", "keys", "tokenizer", 3)),
])  # fmt: skip
def test_key_names_a_secret_by_its_ending(key, is_secret):
    assert names_secret(key) is is_secret


def test_secrets_are_hidden_at_any_depth():
    def values(secret: str, text: str = "hf_SECRETSECRET", user: str = "jane:pass") -> dict:
        inner = {"dtype": "auto", "inner": [{"secret": {"user": [secret, 3, True, None]}}]}
        return {
            **{"hub_token": secret, "pad_token": "<pad>", "api_key": 7, "password": ""},
            "model_init_kwargs": {"token": secret, **inner},
            "corpus": (text, f"https://{user}@host/texts", "hf_datasets/texts", "org/model@main"),
        }

    given = values("abc")
    hidden = without_secrets(given)
    assert hidden == values("<hidden>", "<hidden>", "<hidden>")
    assert given == values("abc")
    assert without_secrets(hidden) == hidden


@pytest.mark.parametrize(("text", "shown"), [
    (f"cannot log in with {LONG}.", "cannot log in with <hidden>."),
    ("override 'hub_token=[abc' is wrong", "override 'hub_token=<hidden>' is wrong"),
    ("kwargs={token: abc, attn: eager}", "kwargs={token: <hidden>, attn: eager}"),
    ("{'token': 'abc', 'eos_token': '</s>'}", "{'token': '<hidden>', 'eos_token': '</s>'}"),
    ("eos_token=<end> length_key=n token=7", "eos_token=<end> length_key=n token=7"),
    ("it has no key: texts", "it has no key: texts"),
])  # fmt: skip
def test_secrets_are_hidden_in_texts(text, shown):
    assert without_secrets(text) == shown


def test_records_name_the_home_by_a_tilde(monkeypatch, tmp_path):
    home = tmp_path / "jane"
    monkeypatch.setenv("HOME", str(home))
    others = [f"{home}t/x", f"/mnt{home}/x"]
    assert for_record({"a": f"{home}/models/a", "b": [str(home), *others]}) == {"a": "~/models/a", "b": ["~", *others]}
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    assert for_record([str(tmp_path / "link" / "a"), str(home / "a")]) == ["~/a", "~/a"]
    monkeypatch.setenv("HOME", "/")
    assert for_record("/data") == "/data"


def test_records_are_made_without_a_home(no_home):
    assert for_record(["/data", "~/a"]) == ["/data", "~/a"]
