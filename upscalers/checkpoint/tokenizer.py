"""Tokenizer and processors of a result: as the base's, though Transformers chooses by `model_type`."""

# ruff: noqa: RUF001 - texts have letters that look alike
import json
from functools import partial
from pathlib import Path
from typing import Any

from midus_hf.config.errors import first_line
from midus_hf.files.checkpoint_files import read_json
from upscalers.checkpoint.source import Source
from upscalers.request import Progress, VerificationError

TOKENIZER_CONFIG, TOKENIZER_JSON = "tokenizer_config.json", "tokenizer.json"
_PROCESSOR, _PREPROCESSOR, _VIDEO = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
#: The text that small files had in the base, None if absent, and whether tokenizer files are as `AutoTokenizer` had loaded them.
CHANGED_KEY, REWRITTEN_KEY = "changed_files", "rewritten_tokenizer"
CHANGED_FILES = (TOKENIZER_CONFIG, _PROCESSOR, _PREPROCESSOR, _VIDEO)
# By kind of processor: the module of its Auto class, the keys that it finds a class by (the first is written), and files.
_PROCESSORS = (
    ("processing_auto", "PROCESSOR", ("processor_class",), (_PROCESSOR, _PREPROCESSOR, _VIDEO)),
    ("image_processing_auto", "IMAGE_PROCESSOR", ("image_processor_type", "feature_extractor_type"), (_PREPROCESSOR,)),
    ("video_processing_auto", "VIDEO_PROCESSOR", ("video_processor_type",), (_VIDEO, _PREPROCESSOR)),
    ("feature_extraction_auto", "FEATURE_EXTRACTOR", ("feature_extractor_type",), (_PREPROCESSOR,)),
)
_FILES = (
    *(TOKENIZER_JSON, "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
# Text that tokenizers of families, and their fixes, split or normalise differently.
_TEXTS = (
    "The 1st of 2,048 naïve   tests:\n\tit's x=3.14 — “quoted”, 東京, don't! DON'T we'LL O'Neil",
    "eBay sells NaOH at pH 7 in mL; McDonald's iPhone, HTTPServer.getURL, XMLHttpRequest, snake_case, kebab-case, v2Beta3",
    "007 1984 12345678 1e-5 ±½ x² €5 £6.50 50% #tag @name &c. /a/b\\c ^~`|<>[]{}()... …?!?! <s> </s> <unk> <|endoftext|>",
    " Ångström crème brûlée, cafe\u0301, Łódź, İstanbul, Straße, Việt Nam, ﬁn, ＡＢＣ１２３",
    "Пётр и ЁЖ из МГУим. Ελληνικά ΑΒΓδ ά. العربيّة ٣٫١٤؛ قال: «لا». עִבְרִית שלום, ת״א.",
    "हिन्दी क्षत्रिय १२३। বাংলা। தமிழ். 东京塔，漢字「かな」カタカナ・ｶﾅー。한국어 각 ㄱ. ภาษาไทยไม่เว้นวรรค",
    "👩‍👩‍👧 👍🏽🇫🇷 ☺️ 𝔘𝔫𝔦 🜁",
    'def f(x: int) -> str:\n    return f"{x!r}\\t"  # TODO\n\n\n\t\tif a != b:\r\n\r\n  \u00a0\u2003\u200b end  \n \n   ',
)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def keep_tokenizer(source: Source, folder: Path, progress: Progress) -> dict[str, Any]:
    """Make `AutoTokenizer` load a result's tokenizer as the base's; return what `strip` needs to undo it.

    It chooses a class by `model_type`, and fixes known errors in files of some types. If it would load another tokenizer, the class
    is written to the folder (`changed_files` has the config's text before); if that is not enough, the tokenizer is saved as loaded
    from the base, with a message (`rewritten_tokenizer`); if it still differs, a `VerificationError` is raised.
    """
    if not has_tokenizer(folder):
        return {}
    from transformers import AutoTokenizer

    load = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=False)
    try:
        # By name: transformers has special cases for some repositories.
        base = load(source.folder) if source.revision is None else load(source.name, revision=source.revision)
        expected = _reading(base)
    except MemoryError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        is_code = isinstance(error, ValueError) and "trust_remote_code=True" in str(error)
        reason = "it is custom code, which is never run" if is_code else first_line(error).rstrip(".")
        progress.warn(f"the base's tokenizer does not work here ({reason}); its files are copied unchanged.")
        return {}
    record: dict[str, Any] = {}
    new = load(folder)
    if type(new) is not type(base):
        path = folder / TOKENIZER_CONFIG
        before = path.read_text(encoding="utf-8") if path.is_file() else None
        config = {**json.loads(before or "{}"), "tokenizer_class": type(base).__name__}
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        record = {CHANGED_KEY: {TOKENIZER_CONFIG: before}}
        new = load(folder)
    if _whole(new) != _whole(base) or _reading(new) != expected:
        base.init_kwargs.pop("local_files_only", None)  # an argument of this load, not of the tokenizer
        base.save_pretrained(folder)
        record = {REWRITTEN_KEY: True}
        new = load(folder)
        progress.note(
            "the tokenizer is written as transformers loads the base's: by the base's model_type it reads the same files differently."
        )
    if _reading(new) != expected:
        raise VerificationError(
            f"the result's tokenizer ({type(new).__name__}) tokenizes a text differently than the base's ({type(base).__name__}); "
            "expected the same ids."
        )
    return record


def name_processors(model_type: str, folder: Path, progress: Progress) -> dict[str, str]:
    """Name the processors of the base's `model_type` in a result's files; return the files' old texts."""
    from importlib import import_module

    texts = {file: (folder / file).read_text(encoding="utf-8") for file in CHANGED_FILES if (folder / file).is_file()}
    named: dict[str, dict[str, str]] = {}
    for module, kind, keys, files in _PROCESSORS:
        table = getattr(import_module(f"transformers.models.auto.{module}"), f"{kind}_MAPPING_NAMES")
        name = table.get(model_type)
        if isinstance(name, dict):
            without_torchvision = (name.get("pil") or "").removesuffix("Pil")
            name = name.get("torchvision") or without_torchvision
        file = next((file for file in files if file in texts), None)
        if name and file and not any(f'"{word}"' in text for text in texts.values() for word in (*keys, "auto_map")):
            named.setdefault(file, {})[keys[0]] = name
    for file, names in named.items():
        changed = {**read_json(folder / file), **names}
        (folder / file).write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        classes = " and ".join(names.values())
        progress.note(f"{file} names {classes}, which transformers chooses by the base's model_type.")
    return {file: texts[file] for file in named}


def _whole(tokenizer: Any) -> tuple[Any, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(tokenizer), None if backend is None else backend.to_str()


def _reading(tokenizer: Any) -> tuple[Any, ...]:
    ids = [tokenizer(text)["input_ids"] for text in _TEXTS]
    specials = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")]
    return ids, [tokenizer.decode(each) for each in ids], specials, getattr(tokenizer, "chat_template", None)
