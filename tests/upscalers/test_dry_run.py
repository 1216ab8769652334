"""`upscale --dry-run`: prices a plan from `config.json` alone, and quickly."""

import json
import os
import resource
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.upscalers.checkpoints import save_base
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.methods.contract import get_method
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale

ATTEMPTS = 3  # where both cores are taken, the same work takes a processor twice as long

COMMAND = "import sys; from midus_hf.cli.upscale import main; sys.exit(main())"
IMPORTED = """
import json, sys
from midus_hf.cli.upscale import main
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def run_python(code: str, *arguments: Any) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter, with these as its `sys.argv[1:]`."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_report_has_exactly_the_promised_keys(command, tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    result = command("--base", folder, "--method", "midus-hml", "--dry-run", "--json")
    assert (result.status, result.err) == (0, "")
    report = result.json()
    assert list(report) == [
        "method", "base", "output", "model_type", "num_layers", "new_layer_indices", "parameters", "bytes", "identity",
        "seconds", "peak_rss_bytes",
    ]  # fmt: skip
    assert list(report["parameters"]) == ["base", "new", "total", "trainable"]
    assert (report["method"], report["model_type"], report["output"]) == ("midus-hml", "midus_llama", None)
    assert report["bytes"] == {"read": 0, "written": 2 * report["parameters"]["total"]}
    assert report["identity"].items() >= {"checked": None, "max_abs_diff": None}.items()


# The model that Mixture of Chapters was trained with.
TABLE_5 = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BASES = {"1B": LLAMA_3_2_1B, "8B": LLAMA_3_1_8B, "table 5": TABLE_5}
BASE_PARAMETERS = {"1B": 1_235_814_400, "8B": 8_030_261_248, "table 5": 147_874_560}

# A block of a memory: attention with its output projection and norm, query projection, values, gain and bias of the batch norm.
BLOCK = {
    "1B": 10_487_808 + 4_194_304 + 8_388_608 + 2 * 32 * 64,
    "8B": 41_947_136 + 16_777_216 + 16_777_216 + 2 * 32 * 128,
}
DENSE = ("llama-pro", "solar", "avg-deus", "lesa", "opt-deus")
# Method, base, options, new parameters, and billions that MIDUS prints of new ones and of all (tables 1, 4 and 12, but that it has
# 0.35 for linear memory at 1B); None where it prints nothing.
COUNTS = [
    *((method, "1B", {}, 486_572_032, 0.49, 1.72) for method in DENSE),
    *((method, "8B", {}, 3_489_792_000, 3.49, 11.52) for method in DENSE),
    ("midus-hml", "1B", {}, 54_542_336, 0.05, 1.29),
    ("midus-hml", "8B", {}, 423_690_240, 0.42, 8.45),
    ("midus-pkm", "1B", {}, 8 * (BLOCK["1B"] + 2 * 32 * 64 * 32), 0.19, None),
    ("midus-pkm", "8B", {}, 16 * (BLOCK["8B"] + 2 * 32 * 64 * 64), 1.21, None),
    ("midus-linear", "1B", {}, 8 * (BLOCK["1B"] + 32 * 4096 * 64), 0.25, None),
    ("midus-linear", "8B", {}, 16 * (BLOCK["8B"] + 32 * 4096 * 128), 1.48, None),
    ("moc", "1B", {}, 76_030_208, None, None),
    ("moc", "8B", {}, 555_778_560, None, None),
    ("moc", "table 5", {"preset": "paper"}, 223_418_372, None, None),
    ("hier-ffn", "1B", {"sizes": [768, 256, 16, 0]}, 0, None, None),
]


@pytest.mark.parametrize(("method", "name", "options", "new", "new_printed", "total_printed"), COUNTS)
def test_a_published_model_gets_as_many_parameters_as_papers_and_documentation_say(
    method, name, options, new, new_printed, total_printed, tmp_path
):
    base, layers = BASE_PARAMETERS[name], BASES[name]["num_hidden_layers"]
    folder = write_config(tmp_path / "base", BASES[name])
    report = upscale(base=folder, method=method, options=options, dry_run=True)
    counts = report.parameters
    assert (counts.base, counts.new, counts.total) == (base, new, base + new)
    assert counts.trainable == (base + new if method == "solar" else new + (counts.bank or 0))
    assert new_printed in (None, round(new / 1e9, 2)) and total_printed in (None, round((base + new) / 1e9, 2))
    assert (counts.fetched, counts.bank) == ((102_236_160, 14_092_861_440) if method == "hier-ffn" else (None, None))
    has_buffers = method in ("midus-pkm", "midus-linear")  # the statistics of batch norms
    assert (report.bytes.written == 2 * counts.total) is not has_buffers, "bfloat16"
    assert report.num_layers == (3 * layers // 2 if get_method(method).adds_layers else layers)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "n=none"], "n is 'none'"),
        (["--set", "width=8"], "has no option 'width'"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--base", "absent/folder/of/none"], "absent"),
    ],
)
def test_a_request_is_refused_without_torch_and_transformers(arguments, message, tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    result = run_python(IMPORTED, "--base", folder, "--method", "midus-hml", *arguments, "--dry-run")
    *said, imported = result.stderr.splitlines()
    assert message in " ".join(said)
    assert "upscalers" in json.loads(imported) and not {"torch", "transformers"} & {*json.loads(imported)}


def seconds_of(code: str, *arguments: Any) -> float:
    """Seconds of a processor that a run took; what else the machine does is not counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run_python(code, *arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


STARTED_BY_A_LARGE_PROCESS = """
import subprocess, sys
held = bytearray(b"x") * 1_500_000_000
code = "from upscalers.runs.upscale import _peak_rss_bytes; print(_peak_rss_bytes())"
subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_peak_memory_is_that_of_the_process_itself_whoever_started_it():
    done = run_python(STARTED_BY_A_LARGE_PROCESS)
    assert done.returncode == 0, done.stderr
    assert 10_000_000 < int(done.stdout) < 1_000_000_000


def test_a_dry_run_takes_about_as_long_as_importing_the_models_of_transformers(tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_1_8B)
    words = ("--base", folder, "--method", "midus-hml", "--dry-run")
    limits = (1.5 * seconds_of("import midus_hf.models") for _ in range(ATTEMPTS))
    assert any(seconds_of(COMMAND, *words) < limit for limit in limits)


def test_a_dry_run_does_without_shards_that_the_index_names(tmp_path):
    whole = save_base(tmp_path / "whole", max_shard_size="30KB")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(whole / name, bare)
    plans = [upscale(base=base, method="midus-hml", num_new_layers=2, dry_run=True) for base in (whole, bare)]
    assert plans[0].parameters == plans[1].parameters
    assert plans[0].bytes.written == plans[1].bytes.written


def test_the_python_call_refuses_what_the_command_line_would(base):
    for changes, message in (
        ({"num_new_layers": "2"}, "num-new-layers is '2'; expected an integer"),
        ({"seed": 1.5}, "seed is 1.5; expected an integer"),
        ({"placement": []}, "placement '' is unknown"),
    ):
        with pytest.raises(RequestError, match=message):
            upscale(base=base, method="midus-hml", dry_run=True, **changes)
