"""What the page on chapters shows can be done as it is shown."""

import re
from pathlib import Path

import torch
from tiny import prompt
from training.tiny_run import tiny_tokenizer

from midus_hf.cli import edit, look
from tests.upscalers.chapters.made import save_chapters
from tests.upscalers.chapters.test_edited_models import make
from tests.upscalers.checkpoints import load

PAGE = (Path(__file__).parents[3] / "docs" / "chapters.md").read_text(encoding="utf-8")


def test_commands_run_as_they_are_printed(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m-moc", "another-moc"):
        save_chapters(tmp_path / name, chapters=12, memory_tokens=24)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    for name in ("code", "chats"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "w5 w7 w11"}\n{"text": "w4 w6"}', encoding="utf-8")
    edits = re.findall(r"^midus edit (.*)$", PAGE, flags=re.MULTILINE)
    looks = re.findall(r"^midus look (.*)$", PAGE, flags=re.MULTILINE)
    assert {line.split()[0] for line in edits} == {"list", "zero", "swap", "prune", "quantise", "export", "import"}
    assert {line.split()[0] for line in looks} == {"usage", "ablation", "values"}
    for main, lines in ((edit.main, edits), (look.main, looks)):
        for line in lines:
            done = in_process(main, *line.split())
            assert done.status == 0, (line, done.err)


def test_the_script_runs_as_it_is_printed(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    model = load(make(tmp_path, chapters=8, memory_tokens=16))
    defined = {"model": model, "tokens": prompt()}
    with torch.no_grad():
        usual = model(prompt(), labels=prompt()).loss
        exec(compile(script, "chapters.md", "exec"), defined)
        assert defined["loss"] != usual == model(prompt(), labels=prompt()).loss
