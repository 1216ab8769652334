"""What a person should know of a result is warned of and stands in its model card; that it is not causal, in its config too."""

import pytest

from tests.upscalers.checkpoints import SMALL_MEMORY, config_of, load, record_of, save_base
from upscalers.runs.upscale import upscale

SMALL_CHAPTERS = {"memory_tokens": 24, "chapters": 6, "k": 2, "layers": [1]}
NOT_CAUSAL = "routing is 'sequence', so chapters are chosen by all tokens of a text, later ones included"
HEADING = "## Know before use"


def upscaled_with(command, base, output, routing: str):
    options = {**SMALL_CHAPTERS, "routing": routing}
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    done = command("--base", base, "--method", "moc", "--output", output, *words)
    assert done.status == 0, done.err
    return done


def test_a_model_that_looks_at_later_tokens_says_so_wherever_it_is_met(command, base, tmp_path):
    out = tmp_path / "out"
    assert f"upscale: warning: {NOT_CAUSAL}" in upscaled_with(command, base, out, "sequence").err
    assert f"{HEADING}\n\n- {NOT_CAUSAL}" in (out / "README.md").read_text()
    for record in (
        config_of(out)["upscale"],
        record_of(out),
    ):
        assert record["causal"] is False
    load(out).save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").config.upscale["causal"] is False
    assert command("inspect", out, "--json").json()["causal"] is False
    assert "what a token gets depends on later tokens" in command("inspect", out).out


@pytest.mark.parametrize("routing", ["chunk", "prompt", "token"])
def test_a_causal_model_says_nothing_of_it(command, base, tmp_path, routing):
    out = tmp_path / "out"
    assert "causal" not in upscaled_with(command, base, out, routing).err
    assert HEADING not in (out / "README.md").read_text()
    assert "causal" not in config_of(out)["upscale"]
    assert command("inspect", out, "--json").json()["causal"] is True
    assert "depends on later tokens" not in command("inspect", out).out


def test_a_dry_run_warns_as_well(command, base):
    done = command("--base", base, "--method", "moc", "--dry-run", "--set", "preset=released-adapter")
    assert done.status == 0 and f"upscale: warning: {NOT_CAUSAL}" in done.err


def test_what_is_upscaled_again_is_no_more_causal_than_before(base, tmp_path):
    upscale(base=base, method="moc", output=tmp_path / "once", options={**SMALL_CHAPTERS, "routing": "sequence"})
    upscale(base=tmp_path / "once", method="midus-hml", output=tmp_path / "twice", options=SMALL_MEMORY)
    assert load(tmp_path / "twice").config.upscale["causal"] is False


def test_the_concerns_of_every_method_stand_in_the_card(tmp_path):
    base = save_base(tmp_path / "base", "gemma2")
    upscale(base=base, method="avg-deus", output=tmp_path / "out", placement="1")
    (section,) = (tmp_path / "out" / "README.md").read_text().split(HEADING)[1:]
    assert (
        "sliding and full attention, whose rotary embeddings and windows may differ" in section.partition("\n## ")[0]
    )
