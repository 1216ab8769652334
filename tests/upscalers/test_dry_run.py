"""`upscale --dry-run`: prices a plan from `config.json` alone, and quickly."""

import json
import resource
import shutil

import pytest

from tests.upscalers.checkpoints import save_base
from tests.upscalers.processes import run_python, run_upscale
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.request.errors import RequestError
from upscalers.runs.upscale import upscale

MODELS = {
    "llama-3.2-1b": (LLAMA_3_2_1B, 1.29e9),
    "llama-3.1-8b": (LLAMA_3_1_8B, 8.45e9),
}
# 0.25 and 1.2 on a quiet machine; where both cores are taken, the same work takes a processor twice as long.
HELP_SECONDS, DRY_RUN_SECONDS, ATTEMPTS = 0.5, 3.0, 3

IMPORTED = """
import json, sys
from midus_hf.cli.upscale import main
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def test_the_report_has_exactly_the_promised_keys(command, tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    result = command("--base", folder, "--method", "midus-hml", "--dry-run", "--json")
    assert (result.status, result.err) == (0, "")
    report = result.json()
    assert list(report) == [
        "method", "base", "output", "model_type", "num_layers", "new_layer_indices", "parameters", "bytes", "identity",
        "seconds", "peak_rss_bytes",
    ]  # fmt: skip
    counts = report["parameters"]
    assert list(counts) == ["base", "new", "total", "trainable"]
    assert counts["base"] + counts["new"] == counts["total"] and counts["trainable"] == counts["new"]
    assert (report["method"], report["model_type"], report["output"]) == ("midus-hml", "midus_llama", None)
    assert report["bytes"] == {"read": 0, "written": 2 * counts["total"]}
    assert report["identity"].items() >= {"checked": None, "max_abs_diff": None}.items()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


# At 1B: attention with its output projection and norm, query projection, values, gain and bias of the batch norm.
BLOCK = 10_487_808 + 4_194_304 + 8_388_608 + 2 * 32 * 64
BLOCK_8B = 41_947_136 + 16_777_216 + 16_777_216 + 2 * 32 * 128

# New parameters, and in billions; tables 12 and 4 print the same but for linear memory at 1B: 0.35.
COUNTS = {
    ("midus-hml", "llama-3.2-1b"): (54_542_336, 0.05),
    ("midus-hml", "llama-3.1-8b"): (423_690_240, 0.42),
    ("midus-pkm", "llama-3.2-1b"): (8 * (BLOCK + 2 * 32 * 64 * 32), 0.19),
    ("midus-pkm", "llama-3.1-8b"): (16 * (BLOCK_8B + 2 * 32 * 64 * 64), 1.21),
    ("midus-linear", "llama-3.2-1b"): (8 * (BLOCK + 32 * 4096 * 64), 0.25),
    ("midus-linear", "llama-3.1-8b"): (16 * (BLOCK_8B + 32 * 4096 * 128), 1.48),
}


@pytest.mark.parametrize(("method", "name"), COUNTS, ids=" ".join)
def test_every_memory_has_as_many_parameters_as_the_paper_says(method, name, tmp_path):
    config, total = MODELS[name]
    counts = upscale(base=write_config(tmp_path / "base", config), method=method, dry_run=True).parameters
    exact, printed = COUNTS[method, name]
    assert (counts.new, round(counts.new / 1e9, 2)) == (exact, printed)
    assert counts.trainable == counts.new == counts.total - counts.base
    assert method != "midus-hml" or round(counts.total, -7) == total, "table 1"


def test_a_dry_run_imports_neither_torch_nor_transformers(tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    result = run_python(IMPORTED, "--base", folder, "--method", "midus-hml", "--dry-run")
    assert result.returncode == 0
    imported = set(json.loads(result.stderr))
    assert "upscalers" in imported
    assert not {"torch", "transformers", "numpy", "huggingface_hub"} & imported


def answers_within(limit: float, *arguments) -> bool:
    """Whether one of a few runs took no more seconds of a processor; what else the machine does is not counted."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_upscale(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return any(seconds() < limit for _ in range(ATTEMPTS))


STARTED_BY_A_LARGE_PROCESS = """
import subprocess, sys
held = bytearray(b"x") * 500_000_000
code = "import sys; from midus_hf.cli.upscale import main; sys.exit(main())"
subprocess.run([sys.executable, "-c", code, *sys.argv[1:]], check=True)
"""


def test_peak_memory_is_that_of_the_process_itself_whoever_started_it(tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    words = ("--base", folder, "--method", "midus-hml", "--dry-run", "--json")
    done = run_python(STARTED_BY_A_LARGE_PROCESS, *words)
    assert done.returncode == 0, done.stderr
    assert 10_000_000 < json.loads(done.stdout)["peak_rss_bytes"] < 300_000_000


def test_help_answers_at_once():
    assert answers_within(HELP_SECONDS, "--help")


def test_a_dry_run_answers_soon(tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_1_8B)
    assert answers_within(DRY_RUN_SECONDS, "--base", folder, "--method", "midus-hml", "--dry-run")


def test_a_dry_run_does_without_shards_that_the_index_names(tmp_path):
    whole = save_base(tmp_path / "whole", max_shard_size="30KB")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(whole / name, bare)
    plans = [upscale(base=base, method="midus-hml", num_new_layers=2, dry_run=True) for base in (whole, bare)]
    assert plans[0].parameters == plans[1].parameters
    assert plans[0].bytes.written == plans[1].bytes.written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_new_layers": "2"}, "num-new-layers is '2'; expected an integer"),
        ({"seed": 1.5}, "seed is 1.5; expected an integer"),
        ({"placement": []}, "placement '' is unknown"),
    ],
)
def test_the_python_call_refuses_what_the_command_line_would(tmp_path, changes, message):
    with pytest.raises(RequestError, match=message):
        upscale(base=save_base(tmp_path / "base"), method="midus-hml", dry_run=True, **changes)


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


@pytest.mark.parametrize(
    ("config", "options", "new", "total"),
    [
        (LLAMA_3_2_1B, {}, 76_030_208, 1_311_844_608),
        (LLAMA_3_1_8B, {}, 555_778_560, 8_586_039_808),
        (TABLE_5, {"preset": "paper"}, 223_418_372, 371_292_932),
    ],
)
def test_chapters_have_the_sizes_that_the_documentation_gives(config, options, new, total, tmp_path):
    base = write_config(tmp_path / "base", config)
    counts = upscale(base=base, method="moc", options=options, dry_run=True).parameters
    assert (counts.new, counts.total, counts.trainable) == (new, total, new)
