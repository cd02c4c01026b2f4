"""The grammar that an answer with tools obeys, in llguidance's dialect of Lark.

Text outside of calls is free: every text is allowed that does not begin a call.  Once one has begun, its name is a
tool's, its arguments obey that tool's schema, and it ends as the form says.  Between keys and values the grammar asks
for JSON as templates print it, so a model cannot lose itself in white space."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from jaxserve.text import Tokenizer
from jaxserve.text.tool_forms import ToolForm
from jaxserve.text.tools import Tool, ToolChoice

_ANY = "(?s:.*)"


def tool_grammar(
    form: ToolForm, tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
) -> str:
    """parallel: more than one call may stand in an answer, if the form has a place for them."""
    if choice.mode == "none":
        return "\n".join(["start: text", *_text_rules(form, tokenizer)])
    several = parallel and form.several and choice.name is None
    if choice.mode == "required":
        rules = _required_rules(form, tokenizer, several)
    else:
        rules = [*_auto_rules(form, tokenizer, several), *_text_rules(form, tokenizer)]
    chosen = [tool for tool in tools if choice.name in (None, tool.name)]
    return "\n".join([*rules, *_call_rules(form, tokenizer, chosen)])


def _required_rules(form: ToolForm, tokenizer: Tokenizer, several: bool) -> list[str]:
    if form.is_bare:
        return ["start: call"]
    return [
        "start: opened (WHITE opened)*" if several else "start: opened",
        f"opened: {_marker(form.opening, tokenizer)} call",
    ]


def _auto_rules(form: ToolForm, tokenizer: Tokenizer, several: bool) -> list[str]:
    opening = _marker(form.opening, tokenizer)
    is_token = opening.startswith("<")
    if form.is_bare:  # an opening that is no token of this model is one that it never learnt to write
        return ["start: text | call" + f" | text {opening} call" * is_token]
    start = "start: opened* text" if several else "start: text | opened text"
    if is_token:
        return [start, f"opened: text {opening} call"]
    # Lazy: the opening's last letter ends free text, whatever else might follow.
    return [start, "opened: text up_to_opening call", f"up_to_opening[lazy]: /{_ANY}{_regex(form.opening)}/"]


def _text_rules(form: ToolForm, tokenizer: Tokenizer) -> list[str]:
    """Text in which no call begins, and control tokens that mean none."""
    text = f"/{_ANY}/ & ~/{_ANY}{_regex(form.opening)}{_ANY}/"
    if form.is_bare:
        space = r"[ \t\n\r]*"
        text += rf' & ~/{space}\{{{space}"name"{space}:{_ANY}/'
    others = tokenizer.special_ids - form.marker_ids(tokenizer) - set(tokenizer.eos_ids)
    # Never two TEXTs in a row: together they could spell what neither may.
    return [f"text: TEXT (<[{_ranges(others)}]> TEXT)*" if others else "text: TEXT", f"TEXT: {text}"]


def _call_rules(form: ToolForm, tokenizer: Tokenizer, tools: Sequence[Tool]) -> list[str]:
    """Every schema is a grammar of its own, so that its references find their definitions."""
    closing = f" WHITE {_marker(form.closing, tokenizer)}" if form.closing else ""
    rules = [f"call: ({' | '.join(f'tool_{i}' for i in range(len(tools)))}){closing}", r"WHITE: /[ \n]{0,2}/"]
    for i, tool in enumerate(tools):
        rules.append(f'tool_{i}: HEAD_{i} arguments_{i} "}}"')
        rules.append(f"HEAD_{i}: /{_head(form, tool)}/")
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(tool))}")
    return rules


def _head(form: ToolForm, tool: Tool) -> str:
    """One lexeme with the white space before it: the lexer must not have to choose between it and free text."""
    return rf'[ \n]{{0,2}}\{{"name": ?"{_regex(tool.name)}", ?"{form.arguments_key}": ?'


def _schema(tool: Tool) -> dict:
    """Keywords that llguidance does not know are passed over unless the tool is strict: OpenAI, too, holds only strict
    tools to their whole schema."""
    spacing = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    return {**tool.parameters, "x-guidance": {**spacing, "lenient": not tool.is_strict}}


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """A control token by its id, or a text."""
    token_id = tokenizer.special_tokens.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _ranges(ids: Collection[int]) -> str:
    """1-3,7: the ids, with runs taken together."""
    runs: list[list[int]] = []
    for token_id in sorted(ids):
        if runs and token_id == runs[-1][1] + 1:
            runs[-1][1] = token_id
        else:
            runs.append([token_id, token_id])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
