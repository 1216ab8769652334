"""Lines of Python with which a model card shows how to load the model."""


def card_example(model_type: str, auto_class: str, writes: bool, repository: str | None = None) -> list[str]:
    """Return the lines of a block of Python that loads the model of a card and, if `writes`, its tokenizer, and continues a text."""
    path = "PATH" if repository is None else f'"{repository}"'
    arguments = f"({path}, trust_remote_code=True)" if model_type.startswith("midus_") else f"({path})"
    continuing = [
        f"tokenizer = AutoTokenizer.from_pretrained{arguments}",
        'tokens = tokenizer("Once upon a time", return_tensors="pt").input_ids',
        "print(tokenizer.decode(model.generate(tokens, max_new_tokens=20)[0]))",
    ]
    return [
        "```python",
        f"from transformers import {auto_class}" + (", AutoTokenizer" if writes else ""),
        "",
        *(['PATH = "."  # the folder that this file lies in'] if repository is None else []),
        f"model = {auto_class}.from_pretrained{arguments}",
        *(continuing if writes else []),
        "```",
    ]
