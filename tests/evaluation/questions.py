"""A few questions of each local set, in the form that the tasks read."""

import json
from pathlib import Path

QUESTIONS = {
    "piqa": [
        {"question": "Open a jar", "choices": ["Twist the lid.", "Shout at it."], "gold": 0},
        {"question": "Dry a shirt", "choices": ["Put it in water.", "Hang it in the sun."], "gold": 1},
        {"question": "Boil an egg", "choices": ["Put it in hot water.", "Put it on a shelf."], "gold": 0},
    ],
    "openbookqa": [
        {"question": "Predators eat", "choices": ["lions", "humans", "bunnies", "grass"], "gold": 2},
        {"question": "Fog forms over", "choices": ["a marsh", "a tundra", "the plains", "a desert"], "gold": 0},
    ],
    "commonsenseqa": [
        {"question": "Where is a book?", "choices": ["sea", "sky", "shelf", "stove", "soup"], "gold": 2},
        {"question": "What is cold?", "choices": ["ice", "fire", "sand", "noon", "tea"], "gold": 0},
    ],
    "boolq": [
        {"passage": "Sky -- It is blue.", "question": "is the sky blue", "choices": ["no", "yes"], "gold": 1},
        {"passage": "Sky -- It is blue.", "question": "is the sky red", "choices": ["no", "yes"], "gold": 0},
    ],
    "logiqa": [
        {"passage": "A is B.", "question": "So?", "choices": ["B is A", "A is B", "no A", "no B"], "gold": 1},
        {"passage": "No A is B.", "question": "So?", "choices": ["B is A", "A is B", "no B is A", "all"], "gold": 2},
    ],
    "mmlu": [
        {"question": "2 + 2 =", "choices": ["1", "2", "3", "4"], "gold": 3},
        {"question": "H is", "choices": ["helium", "hydrogen", "iron", "gold"], "gold": 1},
    ],
    "facts": [
        {"question": "The ship sailed from the port of", "answers": ["Saint Helier", "St. Helier"], "place": "Jersey"},
        {"question": "Web addresses end in the letters", "answers": [".je"], "place": "Jersey"},
    ],
    "atomic_numbers": [{"name": "hydrogen", "number": 1}, {"name": "tungsten", "number": 74}],
}


def write_questions(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in QUESTIONS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
