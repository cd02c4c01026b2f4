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
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from jaxserve.request import ErrorCode, RequestError
from jaxserve.text import Tokenizer
from jaxserve.text.messages import Json, plain_json, template_messages

_FIRST_ALIAS, _NUM_ALIASES = 0xD800, 2048  # the surrogates
_ALIAS = re.compile("([\ud800-\udfff])")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping],
    *,
    tools: Sequence[Mapping] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The prompt's ids, with exactly one BOS if the model wants one.  tools: as OpenAI writes them.

    Raises RequestError naming the message or the field that the template has no place for, or with the template's own
    words when it refuses the conversation."""
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: send a plain prompt instead", field="messages")
    template = _template(tokenizer, for_tools=bool(tools))
    checked = template_messages(messages)
    plain_tools = _tools(tools)
    template.check_places(checked, plain_tools)
    text = template.render(checked, plain_tools, add_generation_prompt=add_generation_prompt)
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
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: send a plain prompt instead", field="messages")
    template = _template(tokenizer, for_tools=False)
    text = template.render(template_messages(messages), None, add_generation_prompt=add_generation_prompt)
    words = {token_id: word for word, token_id in tokenizer.special_tokens.items()}
    return _ALIAS.sub(lambda match: words[template.aliases[match[0]]], text)


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the template that a chat with tools is rendered by reads them."""
    return tokenizer.chat_template is not None and "tools" in _template(tokenizer, for_tools=True).reads


def template_words(tokenizer: Tokenizer) -> str:
    """Every text that stands in the template for chats with tools, as it would be printed: what a model was taught."""
    return "" if tokenizer.chat_template is None else _template(tokenizer, for_tools=True).words


@dataclass(frozen=True, slots=True)
class _Template:
    template: jinja2.Template
    aliases: Mapping[str, int]  # surrogate -> the control token it stands for
    variables: Mapping[str, str]  # bos_token, eos_token
    reads: frozenset[str]  # names of variables and attributes
    words: str

    def render(self, messages: Sequence[Json], tools: list[Json] | None, *, add_generation_prompt: bool) -> str:
        try:
            return self.template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.variables
            )
        except Exception as error:  # whatever these messages make the template's expressions do
            raise RequestError(f"the model's chat template refuses these messages: {error}", field="messages") from None

    def check_places(self, messages: Sequence[dict], tools: list[Json] | None) -> None:
        """Refuses what the template would pass over in silence.  A tool's answer may name its call and its tool in any
        case: most templates go by the order."""
        if tools and "tools" not in self.reads:
            raise RequestError("this model's chat template takes no tools", field="tools")
        for i, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in self.reads:
                sentence = f"messages[{i}].tool_calls: this model's chat template has no place for tool calls"
                raise RequestError(sentence, field="messages")
            if "name" in message and message["role"] != "tool" and not self._prints_name(messages, i, tools):
                sentence = f"messages[{i}].name: this model's chat template has no place for names"
                raise RequestError(sentence, field="messages")

    def _prints_name(self, messages: Sequence[dict], index: int, tools: list[Json] | None) -> bool:
        unnamed = {name: value for name, value in messages[index].items() if name != "name"}
        both = messages, [*messages[:index], unnamed, *messages[index + 1 :]]
        named, without = (self.render(each, tools, add_generation_prompt=False) for each in both)
        return named != without


def _template(tokenizer: Tokenizer, *, for_tools: bool) -> _Template:
    source = tokenizer.tool_template if for_tools else None
    return _compile(tokenizer, source or tokenizer.chat_template or "")


@functools.lru_cache(maxsize=16)
def _compile(tokenizer: Tokenizer, source: str) -> _Template:
    environment = _environment()
    aliases: dict[str, int] = {}  # a token's text -> the number of its alias

    def alias(text: str) -> str:
        number = aliases.setdefault(text, len(aliases))
        assert number < _NUM_ALIASES, "a template with thousands of control tokens"
        return chr(_FIRST_ALIAS + number)

    longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    words: list[str] = []
    try:
        tree = environment.parse(source)
        reads = _names(tree)
        for node in tree.find_all((nodes.TemplateData, nodes.Const)):
            if isinstance(node, nodes.TemplateData):
                words.append(node.data)
                node.data = control.sub(lambda match: alias(match[0]), node.data)
            elif isinstance(node, nodes.Const) and isinstance(node.value, str):
                words.append(node.value)
                node.value = control.sub(lambda match: alias(match[0]), node.value)
        template = environment.from_string(tree)
    except jinja2.TemplateError as error:
        message = f"the model's chat template does not compile: {error}"
        raise RequestError(message, code=ErrorCode.INTERNAL, field="messages") from None
    text_of = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_ids[0] if tokenizer.eos_ids else None}
    variables = {name: alias(text_of[i]) if i in text_of else "" for name, i in named.items()}
    ids = {chr(_FIRST_ALIAS + number): tokenizer.special_tokens[text] for text, number in aliases.items()}
    return _Template(template, ids, variables, reads, "\n".join(words))


def _names(tree: nodes.Template) -> frozenset[str]:
    """Variables that a template is given, and attributes it looks at, as x.name or x['name']."""
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return frozenset(
        jinja2.meta.find_undeclared_variables(tree) | attributes | {i for i in items if isinstance(i, str)}
    )


def _tools(tools: Sequence[Mapping] | None) -> list[Json] | None:
    if not tools:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", field="tools")
    return [plain_json(tool, f"tools[{i}]", field="tools") for i, tool in enumerate(tools)]


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
