"""Chat messages -> token ids, through the checkpoint's own template in jinja2's sandbox.

Only words that stand in the template itself become control tokens: before it is compiled, each one in its literals is
replaced by a lone surrogate, a character no user text can hold, and in the rendered text just these become ids.  So no
content, however a template joins, cuts or trims it, can make one.  (Words a template puts together from pieces while it
renders stay plain text.)"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from jaxserve.request import ErrorCode, RequestError
from jaxserve.text import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64  # of lists and objects inside one another

Json = dict | list | str | int | float | bool | None

_FIRST_ALIAS, _NUM_ALIASES = 0xD800, 2048  # the surrogates
_ALIAS = re.compile("([\ud800-\udfff])")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The prompt's ids, with exactly one BOS if the model wants one.  Raises RequestError naming the message at fault,
    or with the template's own words when it refuses the conversation."""
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: send a plain prompt instead", field="messages")
    template = _compile(tokenizer)
    text = template.render(_messages(messages), _tools(tools), add_generation_prompt=add_generation_prompt)
    parts = [template.aliases[piece] if i % 2 else piece for i, piece in enumerate(_ALIAS.split(text)) if piece]
    ids = tokenizer.encode_parts(parts)
    bos = tokenizer.bos_id
    if tokenizer.adds_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    while ids[:2] == [bos, bos]:
        del ids[0]
    return ids


def render_text(tokenizer: Tokenizer, messages: Sequence[Mapping], *, add_generation_prompt: bool = True) -> str:
    """The prompt as one text, control tokens by their words; for who must handle prompts as text, and trusts the
    contents: encoded with `parse_special`, words in them become control tokens too."""
    template = _compile(tokenizer)
    text = template.render(_messages(messages), None, add_generation_prompt=add_generation_prompt)
    words = {token_id: word for word, token_id in tokenizer.special_tokens.items()}
    return _ALIAS.sub(lambda match: words[template.aliases[match[0]]], text)


@dataclass(frozen=True, slots=True)
class _Template:
    template: jinja2.Template
    aliases: Mapping[str, int]  # surrogate -> the control token it stands for
    variables: Mapping[str, str]  # bos_token, eos_token

    def render(self, messages: list[Json], tools: list[Json] | None, *, add_generation_prompt: bool) -> str:
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.variables
            )
        except Exception as error:  # whatever these messages make the template's expressions do
            raise RequestError(f"the model's chat template refuses these messages: {error}", field="messages") from None


@functools.lru_cache(maxsize=8)
def _compile(tokenizer: Tokenizer) -> _Template:
    environment = _environment()
    aliases: dict[str, int] = {}  # a token's text -> the number of its alias

    def alias(text: str) -> str:
        number = aliases.setdefault(text, len(aliases))
        assert number < _NUM_ALIASES, "a template with thousands of control tokens"
        return chr(_FIRST_ALIAS + number)

    longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    try:
        tree = environment.parse(tokenizer.chat_template or "")
        for node in tree.find_all((nodes.TemplateData, nodes.Const)):
            if isinstance(node, nodes.TemplateData):
                node.data = control.sub(lambda match: alias(match[0]), node.data)
            elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                node.value = control.sub(lambda match: alias(match[0]), node.value)
        template = environment.from_string(tree)
    except jinja2.TemplateError as error:
        message = f"the model's chat template does not compile: {error}"
        raise RequestError(message, code=ErrorCode.INTERNAL, field="messages") from None
    text_of = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_ids[0] if tokenizer.eos_ids else None}
    variables = {name: alias(text_of[i]) if i in text_of else "" for name, i in named.items()}
    ids = {chr(_FIRST_ALIAS + number): tokenizer.special_tokens[text] for text, number in aliases.items()}
    return _Template(template, ids, variables)


def _environment() -> jinja2.Environment:
    """As transformers sets it up, so that templates written for it render the same."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _messages(messages: Sequence[Mapping]) -> list[Json]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", field="messages")
    if not messages:
        raise RequestError("messages must not be empty", field="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping, place: str) -> Json:
    copy = _json(message, place)
    if not isinstance(copy, dict):
        raise RequestError(f"{place} must be an object with a role and a content", field="messages")
    if copy.get("role") not in ROLES:
        allowed = ", ".join(ROLES)
        raise RequestError(f"{place}.role must be one of {allowed}; got {copy.get('role')!r:.80}", field="messages")
    calls = copy.get("tool_calls")
    copy["content"] = _content(copy.get("content"), bool(calls), f"{place}.content")
    if calls:
        copy["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return copy


def _content(content: Json, has_calls: bool, place: str) -> str:
    """One text.  A list of text parts is joined by newlines, as most templates take texts only."""
    if content is None and has_calls:
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        got = "an empty list" if content == [] else type(content).__name__
        raise RequestError(f"{place} must be a text or a list of text parts, got {got}", field="messages")
    return content


def _part(part: Json, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"{place} must be a part of type 'text' with a text, got {kind!r:.80}", field="messages")
    return part["text"]


def _tool_calls(calls: Json, place: str) -> list[Json]:
    """Arguments come as JSON in a text; templates want the object."""
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", field="messages")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{i}].function must be an object with a name", field="messages")
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise RequestError(f"{place}[{i}].function.arguments is not JSON", field="messages") from None
            _json(function["arguments"], f"{place}[{i}].function.arguments")
    return calls


def _tools(tools: Sequence[Mapping] | None) -> list[Json] | None:
    if not tools:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", field="tools")
    return [_json(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _json(value: object, place: str, depth: int = 0) -> Json:
    """A plain copy that holds nothing but JSON, and no surrogate: those are the template's."""
    field = "tools" if place.startswith("tools") else "messages"
    if depth > MAX_DEPTH:
        raise RequestError(f"{place[:80]}... is nested deeper than {MAX_DEPTH}", field=field)
    if isinstance(value, str):
        if _ALIAS.search(value):
            raise RequestError(f"{place} holds a lone surrogate, which is not Unicode text", field=field)
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(_json(str(k), place, depth)): _json(v, f"{place}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_json(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{place} must be JSON, got {type(value).__name__}", field=field)
