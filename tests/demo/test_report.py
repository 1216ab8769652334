"""The demo's report holds what was measured, and refuses an upscaled model that is not its base."""

import copy
import json

import pytest

from demo.report import write_report

MEASURED = {"perplexity": {"perplexity": 33.8613, "tokens": 100}, "parameters": 134_515_008}

WEIGHTS = {"tensors": 272, "bytes": 538_060_032, "sha256": "0123456789abcdef" * 4}


@pytest.fixture
def arguments(tmp_path):
    log = tmp_path / "trainer_state.json"
    seen = [{"step": step, "num_input_tokens_seen": 1024 * step} for step in range(15)]
    events = [{**one, "loss": 4.0 - 0.1 * one["step"]} for one in seen[1:]]
    events += [{**one, "eval_a_loss": 3.5 - 0.1 * one["step"], "eval_b_loss": 3.0} for one in (seen[0], seen[14])]
    events.append({**seen[14], "train_loss": 3.3, "train_runtime": 7.0})  # of the last call alone
    log.write_text(json.dumps({"log_history": events}))
    upscaled = copy.deepcopy(MEASURED) | {"parameters": 143_409_088}
    trained = copy.deepcopy(upscaled)
    trained["perplexity"]["perplexity"] = 28.5646
    return {
        "models": {"base": copy.deepcopy(MEASURED), "upscaled": upscaled, "trained": trained},
        "samples": {
            name: {"text": f"{name} <text>", "tokens_per_second": 6.4} for name in ("base", "upscaled", "trained")
        },
        "prompt": "Fellow-citizens",
        "log": log,
        "texts": {"a": "what is learned", "b": "what is kept"},
        "upscale_record": {"new_layers": [1, 4], "parameters": {"trainable": 8_894_080, "total": 143_409_088}},
        "weights": {"base": dict(WEIGHTS), "strip's": dict(WEIGHTS)},
        "commands": ["upscale --base a --output b"],
        "seconds": {"upscale": 60.0, "training": 300.0, "strip": 120.0},
        "machine": "two cores",
    }


def test_the_report_shows_every_measure_of_every_model(tmp_path, arguments):
    table = write_report(tmp_path, **arguments)
    assert "| base | 33.8613 | 134.5 M | 6.4 |" in table and "| trained | 28.5646 | 143.4 M | 6.4 |" in table
    assert "| what is learned | 3.5000 | 2.1000 | -1.4000 |\n| what is kept | 3.0000 | 3.0000 | +0.0000 |" in table
    assert all(f"| {model} | 272 | 538,060,032 | 0123456789abcdef |" in table for model in ("base", "strip's"))
    assert "| upscale | 1.0 |\n| training | 5.0 |\n| strip | 2.0 |\n| all | 8.0 |" in table
    page = (tmp_path / "report.html").read_text()
    assert "upscaled &lt;text&gt;" in page and "upscale --base a" in page
    assert "took 5.0 minutes, everything below 8.0, on two cores." in page
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert (kept["seconds"], kept["weights"]) == (arguments["seconds"], arguments["weights"])


def test_an_upscaled_model_that_measures_otherwise_than_its_base_is_refused(tmp_path, arguments):
    arguments["models"]["upscaled"]["perplexity"]["perplexity"] = 0.123
    with pytest.raises(ValueError, match="perplexity differs from the base's; expected equality to the last digit"):
        write_report(tmp_path, **arguments)


def test_weights_that_strip_gives_back_and_are_not_the_base_s_are_refused(tmp_path, arguments):
    arguments["weights"]["strip's"]["sha256"] = "f" * 64
    with pytest.raises(
        ValueError, match=r"strip gave back .*'sha256': 'ffff.*; expected the base's .*0123456789abcdef"
    ):
        write_report(tmp_path, **arguments)
