"""`midus sft` from the outside: what it prints, what it writes, how it exits."""

import runpy
import sys
from pathlib import Path

import pytest
from sft.tiny_chats import chat, write_rows
from transformers import AutoModelForCausalLM

from midus_hf.cli import sft as command
from midus_hf.cli.sft import main
from midus_hf.config.wording import install_extra
from midus_hf.training.sft.arguments import SftArguments

SCRIPT = Path(__file__).with_name("midus_sft.py")


@pytest.fixture
def words(base, chats, tmp_path) -> list[str]:
    """A recipe and what it needs."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 3\nlearning_rate: 1e-2\nchat_template_path: chatml\nbf16: false\nlogging_steps: 1\n")
    arguments = [
        f"--model_name_or_path={base('llama', True)}",
        f"--dataset_name={chats}",
        f"--output_dir={tmp_path / 'out'}",
    ]
    return [str(recipe), *arguments, "--max_length=96", "--per_device_train_batch_size=2"]


def test_it_trains_and_leaves_a_model(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "Training new: " in printed
    assert "16 sequences, 947 tokens, 173 of them with a loss (18.3%)" in printed
    assert printed.splitlines()[-1].startswith(f"{tmp_path / 'out'}: 3 steps, ")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_default_of_activation_checkpointing_is_that_of_trl(tmp_path):
    needed = {"output_dir": str(tmp_path), "model_name_or_path": "m", "dataset_name": "d", "bf16": False}
    assert SftArguments(**needed).activation_checkpointing
    assert not SftArguments(**needed, activation_checkpointing=False).gradient_checkpointing


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--packing=true", "--truncation_mode=keep_end"], "truncation_mode is 'keep_end', and packing keeps the first tokens"),
        (["--dataset_name=nothing.jsonl"], "dataset_name is "),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_request_is_told_in_one_line_and_writes_nothing(words, more, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "nothing.jsonl", [])
    assert main([*words, *more]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(f"midus sft: {message}") and len(err.splitlines()) <= 2, err
    assert not (tmp_path / "out").exists()


def test_one_chat_that_cannot_be_is_named_by_its_file_and_line_among_those_that_can(words, tmp_path, capsys):
    """A chat that begins with an answer is trained on."""
    begun = [{"role": "assistant", "content": "what is it?"}, *chat(1)]
    for number, wrong in enumerate(([{"role": "usr", "content": "q"}, chat(1)[1]], None)):
        rows = [{"messages": chat(2)}, {"messages": begun}, *([{"messages": wrong}] if wrong else [])]
        data = write_rows(tmp_path / f"chats-{number}.jsonl", rows)
        assert main([*words, f"--dataset_name={data}"]) == (2 if wrong else 0)
        out, err = capsys.readouterr()
        if wrong:
            assert f"row 3 of '{data}' has the role 'usr', which no template knows; expected one of" in err
        else:
            assert "2 sequences, " in out


def test_packages_that_are_not_installed_are_named(words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_NEEDED", ("datasets", "no_such_package"))
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"midus sft: midus sft needs no_such_package, not installed; {install_extra('train')}.\n"
    )
