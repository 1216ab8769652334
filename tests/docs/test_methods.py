"""Pages of methods have the same sections and drawn pictures, and price methods as dry runs do."""

import re
from pathlib import Path

import matplotlib
import pytest

from docs.pictures.__main__ import main
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_1_70B, LLAMA_3_2_1B, LLAMA_3_2_3B, write_config
from upscalers.methods.contract import METHODS
from upscalers.methods.dense_block import DenseMethod
from upscalers.record.provenance import ParameterCounts
from upscalers.runs.upscale import upscale

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
CHOOSING, COSTS = ((FOLDER.parent / name).read_text(encoding="utf-8") for name in ("choosing.md", "results.md"))
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
# Baselines of papers and variants have a mark in the table.
RESEARCH = set(re.findall(r"^\| \[([\w-]+)\]\([\w-]+\.md\)°", INDEX, flags=re.MULTILINE))
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
SHIPPED = sorted(name for name, method in METHODS.items() if method.__module__.startswith("upscalers."))
BYTES_TRAINED, BYTES_FROZEN = 16, 2
SECTIONS = ["When to use it", "How", "Cost", "Evidence", "Limits"]
CONFIGS = {"Llama-3.2-1B": LLAMA_3_2_1B, "Llama-3.2-3B": LLAMA_3_2_3B}
BITS_OF_NF4 = 4.127  # with double quantisation: 4 + 8 / 64 + 32 / (64 * 256)
TOKENS = 4096


def index_row(method: str) -> list[str]:
    (row,) = [line for line in INDEX.splitlines() if line.startswith(f"| [{method}](")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_methods_index_has_every_page():
    named = re.findall(r"\]\(([\w-]+\.md)\)", "".join(index_row(method)[0] for method in SHIPPED))
    assert {page.name for page in PAGES} == {*named}


@pytest.mark.parametrize("method", SHIPPED)
def test_decision_table_has_every_method_for_work(method):
    if method in RESEARCH:
        assert "(methods/README.md#at-a-glance)" in CHOOSING.partition("\n## ")[0]
        return
    named = re.compile(rf"(?<![\w-]){method}(?![\w-])")
    (page,) = re.findall(r"\]\(([\w-]+\.md)\)", index_row(method)[0])
    decisions = [line for line in CHOOSING.partition("\n## ")[0].splitlines() if named.search(line)]
    assert any(f"(methods/{page})" in line for line in decisions)


def test_readme_counts_methods_that_start_at_the_base():
    exact = [name for name in SHIPPED if METHODS[name].identity and METHODS[name].identity_except is None]
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert (
        f"With {len(exact)} of {len(SHIPPED)} methods the new model first computes exactly what the base computes"
        in readme
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_method_pages_have_the_same_sections(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == SECTIONS
    (description,) = re.findall(rf"^!\[(.+)\]\(\.\./images/architecture-{page.stem}\.svg\)$", text, flags=re.MULTILINE)
    assert len(description.split()) > 5


def labels(picture: str) -> list[str]:
    """Return the texts of a picture, which matplotlib writes as comments."""
    return re.findall(r"<!-- (.+?) -->", picture, flags=re.DOTALL)


def test_tracked_pictures_are_what_the_script_draws(tmp_path):
    main(["--output", str(tmp_path)])
    images = FOLDER.parent / "images"
    assert {file.name for file in images.glob("architecture-*.svg")} == {file.name for file in tmp_path.iterdir()}
    for file in tmp_path.iterdir():
        tracked, new = (path.read_text(encoding="utf-8") for path in (images / file.name, file))
        if f"Matplotlib v{matplotlib.__version__}," not in tracked:  # another version may write other numbers
            tracked, new = labels(tracked), labels(new)
        assert tracked == new != [], f"{file.name} is not what the script draws; run make pictures"


def state_bytes(counts: ParameterCounts) -> int:
    """Return the bytes of weights, gradients and AdamW; of a bank, of the blocks that a text fetches."""
    trained = counts.trainable if counts.fetched is None else counts.fetched
    frozen = counts.total - (counts.trainable if counts.fetched is None else 0)
    return BYTES_TRAINED * trained + BYTES_FROZEN * frozen


def activation_bytes(config: dict, layers: int) -> int:
    """Return the bytes of activations as the page of results counts them."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    return TOKENS * (2 * hidden * layers + 2 * (10 * hidden + 4 * wide) + 10 * config["vocab_size"])


def costs_row(name: str) -> list[str]:
    costs = COSTS.partition("## Parameters and memory")[2].partition("\n## ")[0]
    (row,) = [line for line in costs.splitlines() if re.match(rf"\| \[?{name}[\],| ]", line)]
    return [cell.strip() for cell in row.strip("|").split("|")][1:5]


@pytest.mark.parametrize("method", SHIPPED)
def test_table_costs_are_those_of_a_dry_run(method, tmp_path):
    small, middle = (
        upscale(
            base=write_config(tmp_path / name, config),
            method=method,
            options={"layers": [0, f"0-{config['num_hidden_layers'] - 1}"]} if method == "stack" else {},
            dry_run=True,
        )
        for name, config in CONFIGS.items()
    )
    left_out = ", but from a name on" if method == "packs" else ""
    assert (small.identity_except is None) is (left_out == "")
    new = [report.parameters.new or report.parameters.trainable for report in (small, middle)]
    kind = METHODS[method]
    assert index_row(method)[2:5] == [
        "nothing" if not kind.adds_parameters else kind.trainable,
        "deeper" if kind.adds_layers else "same",
        f"exact{left_out}" if small.promises_identity else "another",
    ]
    assert index_row(method)[6] == ("yes" if issubclass(kind, DenseMethod) else "no")
    expected = {"packs": "0", "stack": "by ranges"}.get(method, f"{new[0] / 1e6:,.1f} M")
    assert index_row(method)[7] == expected
    if method in RESEARCH:
        return
    memory = [
        (state_bytes(report.parameters) + activation_bytes(config, report.num_layers)) / 1e9
        for report, config in ((small, LLAMA_3_2_1B), (middle, LLAMA_3_2_3B))
    ]
    trains = small.parameters.trainable > 0
    computed = [each.training["bytes"] / 1e9 if each.training else None for each in (small, middle)]
    assert computed == (memory if trains else [None, None])
    assert costs_row(method) == [
        *(f"{count / 1e6:,.1f} M" if trains else "0" for count in new),
        *(f"{size:.1f}" if trains else "" for size in memory),
    ]


@pytest.mark.parametrize("name", ["full", "LoRA", "QLoRA"])
def test_costs_without_a_method_follow_from_the_sizes(name):
    """LoRA of rank 16 on all projections; QLoRA has these in NF4."""
    expected = []
    for config in (LLAMA_3_2_1B, LLAMA_3_2_3B):
        hidden, wide, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        heads, groups = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
        shapes = [(hidden, heads), *[(hidden, groups)] * 2, (heads, hidden), *[(hidden, wide)] * 3]
        projections = layers * sum(rows * columns for rows, columns in shapes)
        lora = 16 * layers * sum(rows + columns for rows, columns in shapes)
        rest = config["vocab_size"] * hidden + (2 * layers + 1) * hidden
        state = {
            "full": BYTES_TRAINED * (projections + rest),
            "LoRA": BYTES_TRAINED * lora + BYTES_FROZEN * (projections + rest),
            "QLoRA": BYTES_TRAINED * lora + BITS_OF_NF4 / 8 * projections + BYTES_FROZEN * rest,
        }[name]
        new = "" if name == "full" else f"{lora / 1e6:.1f} M"
        expected.append((new, f"{(state + activation_bytes(config, layers)) / 1e9:.1f}"))
    assert costs_row(name) == [cell for column in zip(*expected, strict=True) for cell in column]


def test_plan_page_has_what_dry_runs_compute(tmp_path):
    page = (FOLDER.parent / "plan.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    head, *rows = [row for row in rows if len(row) == 10]
    configs = {"1B": LLAMA_3_2_1B, "8B": LLAMA_3_1_8B, "70B": LLAMA_3_1_70B}
    folders = {size: write_config(tmp_path / size, config) for size, config in configs.items()}
    assert head[1:] == [f"{size}, {what}" for what in ("GB", "GB of 8", "hours") for size in configs]
    for name, *cells in rows:
        method = re.sub(r"\[(.+)\]\(.+\)", r"\1", name)
        key = {"LoRA, r = 16": "lora_bytes", "QLoRA, r = 16": "qlora_bytes", "all of the base": "base_bytes"}.get(
            method
        )
        costs = [
            upscale(base=folder, method="moda" if key else method, dry_run=True).training
            for folder in folders.values()
        ]
        shown, sharded, hours = cells[:3], cells[3:6], cells[6:]
        assert shown == [f"{cost[key or 'bytes'] / 1e9:,.0f}" for cost in costs], method
        if not key:
            each = [(cost["bytes"] - cost["activation_bytes"]) / 8 + cost["activation_bytes"] for cost in costs]
            assert hours == [f"{cost['flops_per_token'] * 100e6 / 400e12 / 3600:.1f}" for cost in costs], method
            expected = ["", "", ""] if method == "hier-ffn" else [f"{size / 1e9:,.0f}" for size in each]
            assert sharded == expected, method
        else:
            assert sharded == ["", "", ""], method
            assert hours == ["", "", ""], method
