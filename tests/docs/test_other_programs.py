"""Options of other programs on pages exist, and so do options and keys that stand there without a command."""

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from click.testing import CliRunner
from huggingface_hub.cli.hf import app as hf_app
from lm_eval.__main__ import cli_evaluate
from peft import LoraConfig
from torch.distributed.run import get_args_parser

from midus_hf.cli import upscale
from midus_hf.cli.entry_points import COMMANDS
from midus_hf.compare.plan import Comparison
from tests.docs.snippets import pages
from tests.docs.test_pages import KEYS, NOTEBOOKS, shell_of, text_of
from upscalers.methods.contract import METHODS

OPTION = re.compile(r"(?<![\w/-])--[a-zA-Z][\w-]*")
PROGRAM = re.compile(r"(?:accelerate|hf|lm_eval|torchrun) ")
# Options of programs that are not installed for tests, or take long to ask: vLLM, transformers serve, model_signing.
NOT_ASKED = {
    "docs/serve.md": {
        "--continuous-batching", "--enable-dbo", "--enable-lora", "--enable-prompt-embeds", "--enforce-eager",
        "--kv-cache-dtype", "--kv-transfer-config", "--speculative-config",
    },
    "docs/trust.md": {"--allow_symlinks", "--ignore-paths"},
}  # fmt: skip


def hf_help(*command: str) -> str:
    return CliRunner().invoke(hf_app, [*command, "--help"], env={"COLUMNS": "200"}).output


def lm_eval_help() -> str:
    printed = io.StringIO()
    with patch.object(sys, "argv", ["lm_eval", "run", "--help"]), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            cli_evaluate()
    return printed.getvalue()


HELP: dict[str, Callable[[], str]] = {
    "accelerate launch": lambda: " ".join(launch_command_parser()._option_string_actions),  # its help leaves some out
    "hf auth login": lambda: hf_help("auth", "login"),
    "hf download": lambda: hf_help("download"),
    "hf upload": lambda: hf_help("upload"),
    "lm_eval run": lm_eval_help,
    "torchrun": lambda: get_args_parser().format_help(),
}


@cache
def program_options(command: str) -> set[str]:
    options = {*OPTION.findall(HELP[command]())}
    assert "--help" in options, f"{command} printed no help"
    return options


def unknown_options(line: str) -> list[str]:
    """Return the options of a line that its program has not; what a launcher starts is not its own."""
    (command,) = [name for name in HELP if f"{line} ".startswith(f"{name} ")]
    return [option for option in OPTION.findall(line.partition(" -m ")[0]) if option not in program_options(command)]


def options_in(command: typer.core.TyperGroup | typer.core.TyperCommand) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options_in(each) for each in getattr(command, "commands", {}).values()))


@cache
def our_options() -> set[str]:
    apps = [upscale.app, *(importlib.import_module(f"midus_hf.cli.{module}").app for module in COMMANDS.values())]
    options = {"--model", "--output"}.union(*(options_in(typer.main.get_command(app)) for app in apps))
    options |= {f"--{field.name}" for kind in KEYS.values() for field in dataclasses.fields(kind)}
    return {*options, *(option[:2] + option[2:].replace("-", "_") for option in options)}


def inline_code(page: str) -> list[str]:
    """Return the code within the sentences of a page, each on a line."""
    outside = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def users_pages() -> list[str]:
    return [page for page in (*pages(), *NOTEBOOKS) if not re.match(r"CONTRIBUTING|RELEASING", page)]


def shown_lines(page: str) -> list[str]:
    lines = [re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S* )*", "", line) for line in shell_of(page).splitlines()]
    return [re.split(r"\s#\s", line)[0] for line in (*lines, *inline_code(page)) if PROGRAM.match(line)]


def test_pages_show_options_that_other_programs_have():
    lines = [(page, line) for page in users_pages() for line in shown_lines(page)]
    assert {name for name in HELP if not any(line.startswith(name) for _, line in lines)} == set()
    assert [(page, line, wrong) for page, line in lines if (wrong := unknown_options(line))] == []


@pytest.mark.parametrize(("line", "mistake"), [
    ("hf upload me/trained trained --exclud 'checkpoint-*'", "--exclud"),
    ("torchrun --nproc-per-nod 8 -m midus_hf train --lr 1", "--nproc-per-nod"),
    ("lm_eval run --model hf --model_arg a", "--model_arg"),
])  # fmt: skip
def test_unknown_options_of_other_programs_are_noticed(line, mistake):
    assert unknown_options(line) == [mistake]


def test_options_without_a_command_exist():
    known = our_options().union(*(program_options(name) for name in HELP))
    alone = [(page, span) for page in users_pages() for span in inline_code(page) if span.startswith("--")]
    assert len(alone) > 30
    unknown = [(page, option) for page, span in alone for option in OPTION.findall(span) if option not in known]
    assert {each for each in unknown if each[1] not in NOT_ASKED.get(each[0], ())} == set()


def test_keys_with_a_value_exist():
    kinds = (*KEYS.values(), Comparison, LoraConfig, *(method.options_class for method in METHODS.values()))
    known = {"layers"}.union(*({field.name for field in dataclasses.fields(kind)} for kind in kinds))
    keys = [
        (page, match[1])
        for page in users_pages()
        for match in map(re.compile(r"(\w+): \S").match, inline_code(page))
        if match
    ]
    assert len(keys) > 15
    assert [each for each in keys if each[1] not in known] == []
