"""docs/families.md says which methods take which type."""

import pytest
import transformers
from pairs import by_default

from midus_hf.anatomy.types import MAIN_TYPES, UnknownType, model_type_of
from midus_hf.config.errors import RequestError
from scripts import families
from scripts.anatomy.tiny import composite_class_of, tiny_model
from tests.tiny import save_tiny_tokenizer
from upscalers.runs.upscale import upscale

TEXT = families.PAGE.read_text(encoding="utf-8")
ALONE, COMPOSITE = TEXT.partition(families.HEADING)[2].split(families.COMPOSITE_HEADING)
TAKEN, COMPOSITE_TAKEN = families.rows_in(ALONE), families.rows_in(COMPOSITE)
OF_THIS_VERSION = f"causal types of Transformers {transformers.__version__}, and" in TEXT
# Types that differ in what works, and take seconds each: by default one that some methods take, one of them only at some places, and
# others refuse. The page as a whole is a test of the product.
TRIED = by_default(["lfm2"], ["lfm2", "cohere", "qwen3_5_text"])
# Of each row of the page the first type, in place of all.
FIRST_OF_ROWS = {methods: name for name, methods in reversed(TAKEN.items())}.values()
pytestmark = pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was made with another version of Transformers")


@pytest.mark.parametrize("model_type", FIRST_OF_ROWS)
def test_type_of_each_row_can_host_memory(model_type):
    assert model_type_of(model_type).layers


@pytest.mark.parametrize("model_type", TRIED)
def test_row_says_what_methods_give(model_type):
    row = families.row_of(model_type)
    assert TAKEN.get(model_type, "") == families.shortened(row.methods)
    assert row.methods or row.refusal


def test_type_without_larger_models_is_refused():
    message = "'llama' has no class of models for text and images or sounds in this"
    with pytest.raises(UnknownType, match=message):
        composite_class_of(transformers.LlamaConfig)


@pytest.mark.parametrize("model_type", by_default(["mistral3"], ["mistral3", "qwen2_5_vl"]))
def test_composite_row_says_what_methods_give(model_type):
    row = families.composite_row_of(model_type)
    assert COMPOSITE_TAKEN.get(model_type, "") == ", ".join(row.methods)
    assert row.methods or row.refusal


@pytest.mark.product
def test_families_page_is_what_the_script_writes(capsys):
    assert families.main([]) == 0, capsys.readouterr().out


def named_models() -> list[tuple[str, list[str]]]:
    table = TEXT.partition("## By name")[2].partition("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    return [(row[1], row[2:]) for row in rows[1:]]


def test_named_models_take_what_their_types_take():
    groups = (
        families.SETS["midus-*"],
        ("moc", "ultramem-v2"),
        ("moda",),
        families.SETS["hier-*"],
        families.SETS["copies"],
    )
    groups += (("opt-deus", "lesa"),)
    for model_type, (_, _, *cells) in named_models():
        taken = families.methods_on_the_page(model_type)
        expected = [{*group} & {*taken} for group in groups]
        said = [
            "yes" if {*group} == found else "some" if found else "no"
            for group, found in zip(groups, expected, strict=True)
        ]
        assert cells == said, model_type


@pytest.mark.parametrize(
    "model_type", by_default(["qwen3_5_text"], sorted({name for name, _ in named_models()} - {*MAIN_TYPES}))
)
def test_named_models_take_packs_and_engram(model_type, tmp_path):
    tiny_model(model_type).save_pretrained(tmp_path / "base")
    save_tiny_tokenizer(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"name": "word5", "text": "word7"}\n')
    (cells,) = [cells for name, cells in named_models() if name == model_type]
    for method, options, said in (
        ("packs", {"corpus": str(tmp_path / "rows.jsonl")}, cells[0]),
        ("engram", {"rows": 101}, cells[1]),
    ):
        try:
            upscale(base=tmp_path / "base", method=method, options=options, output=tmp_path / method)
        except RequestError:
            assert said == "no"
        else:
            assert said.startswith("yes")
