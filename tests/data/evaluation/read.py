"""The documents of the tasks beside this file, whatever folder they are run from."""

from pathlib import Path

import datasets

HERE = Path(__file__).parent


def paragraphs(**_) -> dict[str, datasets.Dataset]:
    """river.txt, a document a paragraph."""
    text = (HERE / "river.txt").read_text(encoding="utf-8")
    return {"test": datasets.Dataset.from_list([{"text": part.strip()} for part in text.split("\n\n")])}


def choices(**_) -> dict[str, datasets.Dataset]:
    return {"test": _lines("choices.jsonl")}


def greedy(**_) -> dict[str, datasets.Dataset]:
    return {"test": _lines("greedy.jsonl")}


def _lines(name: str) -> datasets.Dataset:
    import json

    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return datasets.Dataset.from_list([json.loads(line) for line in lines])
