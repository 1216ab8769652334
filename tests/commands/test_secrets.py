"""No file that a command leaves or pushes holds a secret, and none pushed names the home folder."""

import json
from pathlib import Path

import pytest
from commands.installed import run_in_process
from compare.small_comparison import HEADWISE, compare_in_this_process, keys, write_room
from sft.tiny_chats import chat, save_base, write_rows
from training.tiny_run import write_corpus

from tests.upscalers.conftest import hub  # noqa: F401 - a fixture
from tests.upscalers.hub_server import TOKEN

NAMED, BY_ITSELF = "opensesame", "hf_Planted0Planted1"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "janes-home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def left(home, hub, monkeypatch):  # noqa: F811
    def run(name: str, output: str, *words: object) -> Path:
        status = run_in_process(name, [*map(str, words)], monkeypatch)
        assert status == 0
        files = {path: path.read_bytes() for path in (home / output).rglob("*") if path.is_file()}
        pushed = {(name, path): held for name, one in hub.repositories.items() for path, held in one.files.items()}
        for secret in (NAMED, BY_ITSELF, TOKEN):
            assert not [path for path, held in [*files.items(), *pushed.items()] if secret.encode() in held]
        assert not [path for path, held in pushed.items() if str(home).encode() in held]
        return home / output

    return run


def test_upscaled_and_trained_models_hold_no_secrets(home, hub, left):  # noqa: F811
    save_base("llama", home, None)
    corpus = write_corpus(home / "corpus")
    chats = write_rows(home / "chats.jsonl", [{"messages": chat(number)} for number in range(8)])
    small = ("--num-new-layers", 2, "--set", "n=8", "--set", "k=2", "--no-verify", "--push-to-hub", "me/up")
    left("upscale", "up", "--base", home / "base", "--method", "midus-hml", "--output", home / "up", *small)
    recipe = home / "recipe.yaml"
    recipe.write_text("max_steps: 2\nper_device_train_batch_size: 2\nbf16: false\nlogging_steps: 1\n")
    planted = (f"--fsdp_config={{api_key: {NAMED}}}", f"--run_name={BY_ITSELF}", f"--model_name_or_path={home / 'up'}")
    pushes = ("--push_to_hub=true", f"--hub_token={TOKEN}", "--hub_strategy=every_save", "--save_steps=1")
    held = write_corpus(home / "held", 2)
    best = (f"--eval_text={{held: {held}}}", "--eval_steps=1", "--load_best_model_at_end=true")
    best += ("--metric_for_best_model=held_loss",)
    words = [recipe, *planted, *pushes, *best, "--report_to=tensorboard", "--hub_always_push=true"]
    trained = (f"--corpus={corpus}", "--sequence_length=16", f"--output_dir={home / 'tr'}", "--hub_model_id=me/tr")
    output = left("midus", "tr", "train", *words, *trained)
    assert {"train_config.yaml", "training_args.bin"} <= set(hub.repositories["me/tr"].files)
    assert "model_name_or_path: ~/up\n" in (output / "train_config.yaml").read_text()
    assert "corpus: corpus\n" in (output / "README.md").read_text()
    assert [path for path in output.rglob("*") if "tfevents" in path.name]
    planted += (f"--hub_token={NAMED}", f"--output_dir={home / 'sft'}", "--adapters={r: 2}", "--save_steps=1")
    chats_of = (f"--dataset_name={chats}", "--chat_template_path=chatml", "--max_length=64")
    left("midus", "sft", "sft", recipe, *planted, *chats_of)


def test_comparisons_hold_no_secrets(home, left, monkeypatch):
    compare_in_this_process(monkeypatch)
    room, train = write_room(home), {"max_steps": 1, "hub_token": NAMED, "run_name": BY_ITSELF}
    values = keys(room, home / "compared", {"hml": {"upscale": HEADWISE}}, train=train, controls=False)
    config = home / "compare.yaml"
    config.write_text(json.dumps(values))
    output = left("midus", "compared", "compare", config)
    (result,) = output.glob("runs/hml/*/seed-0.json")
    request = json.loads(result.read_text())["request"]
    assert (request["train"]["hub_token"], request["base"]) == ("<hidden>", "~/base")
    left("midus", "compared", "compare", config, "--report")  # the results are known for those of this request


def test_message_hides_secrets(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 2")
    for words in (
        ("train", recipe, "--model", f"https://jane:{NAMED}@host/m", "--corpus", recipe),
        ("train", recipe, "--model", BY_ITSELF, "--corpus", recipe),
        ("eval", f"https://jane:{NAMED}@host/model"),
        ("eval", BY_ITSELF),
    ):
        assert run_in_process("midus", [*map(str, words)], monkeypatch) == 2
        said = capsys.readouterr().err
        assert "<hidden>" in said
        assert NAMED not in said
        assert BY_ITSELF not in said
