"""The day that chat templates read in a run: its first one, so that a run that is resumed later reads the same tokens."""

import json
import string
from datetime import datetime
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from midus_hf.files.checkpoint_files import INPUTS_FILE

DAY_KEY = "first_day"  # of the inputs that a checkpoint records
_CLOCK = "strftime_now"  # the only clock that transformers gives to templates
# A template gets data, and no functions; a macro takes the place of the clock. What follows a tag would lose its first line break.
_MACRO = (
    "{{% macro strftime_now(format) %}}{{% set day = namespace(text=format) %}}{{% for code, written in {codes}.items() %}}"
    "{{% set day.text = day.text.replace(code, written) %}}{{% endfor %}}{{{{ day.text }}}}{{% endmacro %}}{{{{ '' }}}}"
)


def first_day(checkpoint: Path | None = None) -> str:
    """Return the day on which the run of a checkpoint began, as YYYY-MM-DD; of a new run, today."""
    path = None if checkpoint is None else checkpoint / INPUTS_FILE
    recorded = {} if path is None or not path.is_file() else json.loads(path.read_text(encoding="utf-8"))
    return str(recorded.get(DAY_KEY, {}).get("day") or _today())


def _today() -> str:
    chats = [[{"role": "user", "content": ""}]]
    rendered = render_jinja_template(conversations=chats, chat_template=f"{{{{ {_CLOCK}('%Y-%m-%d') }}}}")
    return str(rendered[0][0])


def reads_clock(template: str | None) -> bool:
    """Return whether a chat template writes the date or the time."""
    return template is not None and _CLOCK in template


def with_day(template: str, day: str) -> str:
    """Return a chat template whose clock stands at the beginning of a day (YYYY-MM-DD)."""
    moment = datetime.fromisoformat(day)
    codes = [f"%{flag}{letter}" for flag in ("", "-") for letter in string.ascii_letters]
    written = {code: moment.strftime(code) for code in codes}
    return _MACRO.format(codes=json.dumps({"%%": "\0", **written, "\0": "%"})) + template
