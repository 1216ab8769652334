"""What the page on chapters shows in Python changes the loss while it lasts; its commands run in `tests/docs/test_sessions.py`."""

import torch
from tiny import prompt

from tests.docs.snippets import take
from tests.upscalers.checkpoints import load
from tests.upscalers.edits.test_edited_models import make

(SCRIPT,) = take("docs/chapters.md", "python")


def test_the_script_runs_as_it_is_printed(tmp_path):
    model = load(make(tmp_path, chapters=8, memory_tokens=16))
    defined = {"model": model, "tokens": prompt()}
    with torch.no_grad():
        usual = model(prompt(), labels=prompt()).loss
        exec(compile(SCRIPT.text, SCRIPT.page, "exec"), defined)
        assert defined["loss"] != usual == model(prompt(), labels=prompt()).loss
