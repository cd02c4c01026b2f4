"""What a folder in Hugging Face layout says about its tokenizer beside the tokenizer's own file.

Reads tokenizer_config.json, generation_config.json, config.json and the chat template's file, each if it is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOOL_TEMPLATE = "tool_use"  # what transformers calls the template for chats with tools


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    bos_token: str | None = None
    eos_token: str | None = None
    more_eos_ids: tuple[int, ...] = ()  # of generation_config.json and config.json
    add_bos: bool | None = None  # None: as the tokenizer's own file says
    chat_template: str | None = None
    tool_template: str | None = None
    legacy: bool = True  # a space in front of every text behind a control token, not of the first alone
    added_tokens: Mapping[int, tuple[str, bool]] = field(default_factory=dict)  # id -> (text, is it a control token)

    @property
    def control_tokens(self) -> set[str]:
        """Texts that are control tokens whatever the tokenizer's own file says."""
        return {text for text in (self.bos_token, self.eos_token) if text}

    def eos_ids(self, ids_of: Mapping[str, int]) -> tuple[int, ...]:
        first = ids_of.get(self.eos_token) if self.eos_token else None
        return tuple(dict.fromkeys(([] if first is None else [first]) + list(self.more_eos_ids)))

    @staticmethod
    def read(folder: Path) -> FolderConfig:
        """Raises ValueError naming the file that is no JSON object."""
        config = _json(folder / "tokenizer_config.json")
        more: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            more += [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
        add_bos = config.get("add_bos_token")
        templates = _templates(folder, config.get("chat_template"))
        return FolderConfig(
            bos_token=_token(config.get("bos_token")),
            eos_token=_token(config.get("eos_token")),
            more_eos_ids=tuple(more),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            chat_template=templates.get("default"),
            tool_template=templates.get(TOOL_TEMPLATE),
            legacy=config.get("legacy") is not False,
            added_tokens=_added_tokens(folder, config.get("added_tokens_decoder")),
        )


def _json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _token(value: object) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _templates(folder: Path, value: object) -> Mapping[str, str]:
    """By name; a folder that has only one calls it "default".  A file of its own goes before tokenizer_config.json."""
    value = value or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in entries}
    else:
        found = {"default": value}
    files = [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in [*files, ("default", folder / "chat_template.jinja")]:
        if path.is_file():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8: {error}") from None
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


def _added_tokens(folder: Path, decoder: object) -> dict[int, tuple[str, bool]]:
    try:
        tokens = {int(token_id): (str(text), True) for text, token_id in _json(folder / "added_tokens.json").items()}
        for token_id, token in (decoder or {}).items():  # pyright: ignore[reportAttributeAccessIssue]
            tokens[int(token_id)] = (str(token["content"]), bool(token.get("special")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder}: added_tokens_decoder or added_tokens.json is malformed ({error!r})") from None
    return tokens
