"""Functions that fetch each material, by name: for the command, and for tables that are reproduced from a clone."""

from collections.abc import Callable
from pathlib import Path

from material.addresses import addresses
from material.articles import articles
from material.benchmarks import benchmarks
from material.chats import chats
from material.dictionaries import gcide, glosses
from material.elements import elements
from material.excerpts import address_excerpts, article_excerpts
from material.factbook import factbook
from material.joined_models import gemma_270m, qwen_500m, qwen_1500m
from material.minilm import minilm
from material.smollm2 import smollm2_135m, smollm2_gguf, tiny_llama
from material.stages import mixed, stages

# Each function fetches the material, unless that has been done, and returns the path.
FETCH: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2_135m,
    "smollm2-gguf": smollm2_gguf,
    "tiny-llama": tiny_llama,
    "addresses": lambda: addresses().train.parent,
    "addresses/train": lambda: addresses().train,
    "addresses/held_out": lambda: addresses().held_out,
    "addresses/excerpts": address_excerpts,
    "articles": articles,
    "articles/excerpts": article_excerpts,
    "benchmarks": benchmarks,
    "chats": lambda: chats().train.parent,
    "chats/train": lambda: chats().train,
    "chats/held_out": lambda: chats().held_out,
    "elements": elements,
    "gemma": gemma_270m,
    "qwen-0.5b": qwen_500m,
    "qwen-1.5b": qwen_1500m,
    "factbook": lambda: factbook().questions,
    "minilm": minilm,
    "gcide": gcide,
    "glosses": glosses,
    "stages": stages,
    "mixed": mixed,
}
