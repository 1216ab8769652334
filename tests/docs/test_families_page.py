"""docs/families.md says which methods take which type."""

import pytest
import transformers
from pairs import by_default

from midus_hf.anatomy.types import UnknownType, model_type_of
from scripts import families
from scripts.anatomy.tiny import composite_class_of

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
