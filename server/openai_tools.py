"""Tools in OpenAI's chats: the fields of a request, and the calls of an answer, as a whole or as deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.constraints import StructuredOutputs
from jaxserve.request import Chunk, FinishReason, Request, RequestError
from jaxserve.text import Tokenizer
from jaxserve.text.chat import takes_tools
from jaxserve.text.tool_calls import CallDelta, ToolCallParser
from jaxserve.text.tool_forms import FORMS, ToolForm, form_of
from jaxserve.text.tool_grammar import tool_grammar
from jaxserve.text.tools import MAX_TOOLS, Tool, ToolChoice, choice_of, tools_of
from server.json_schema import BOOLEAN, STRING, any_of, array_of, object_of
from server.json_types import Field, Json, boolean


def _as_it_is(name: str, value: Json) -> Json:
    """What may be chosen depends on the tools: `tool_use_of` checks it."""
    return value


_FUNCTION: Mapping[str, Json] = {"const": "function"}
_NAME: Mapping[str, Json] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_TOOL = object_of(
    type=_FUNCTION,
    function=object_of(
        {
            "description": STRING,
            "parameters": {"type": "object", "properties": {"type": {"const": "object"}}},
            "strict": BOOLEAN,
        },
        name=_NAME,
    ),
)
_NAMED = object_of(type=_FUNCTION, function=object_of(name=_NAME))
TOOL_CALLS = array_of(  # of an assistant's message
    object_of(id=STRING, type=_FUNCTION, function=object_of(name=STRING, arguments=STRING))
)
TOOL_FIELDS: Mapping[str, Field] = {
    "tools": Field(lambda name, value: tools_of(value), array_of(_TOOL, minItems=1, maxItems=MAX_TOOLS)),
    "tool_choice": Field(_as_it_is, any_of({"enum": ["none", "auto", "required"]}, _NAMED)),
    "parallel_tool_calls": Field(boolean, BOOLEAN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A request's tools, and what follows from them for its answer."""

    form: ToolForm
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    @property
    def specs(self) -> list[Mapping[str, Json]]:
        """What the template shows the model.  With tool_choice "none" as well: the prompt is that of the turns before,
        and so are its pages."""
        return [tool.spec for tool in self.tools]

    def constrain(self, request: Request, tokenizer: Tokenizer) -> Request:
        """The request with the grammar of its answer; RequestError when it asks for another one, too."""
        params = request.params
        if params.structured_outputs is not None:
            if self.choice.mode != "none":
                name = params.structured_outputs.name
                raise RequestError(f"{name} goes with tools only if tool_choice is none", field=name)
            return request
        grammar = tool_grammar(self.form, tokenizer, self.tools, self.choice, parallel=self.parallel)
        structured = StructuredOutputs(grammar=grammar, asked_as="tools")
        shown = self.form.marker_ids(tokenizer)
        return replace(request, params=replace(params, structured_outputs=structured), shown_ids=shown)

    def reader(self) -> AnswerReader | None:
        """What finds the calls in one sample; None when there can be none."""
        return None if self.choice.mode == "none" else AnswerReader(self.form)


def tool_use_of(values: Mapping[str, Any], tokenizer: Tokenizer, parser: str) -> ToolUse | None:
    """values: a body's checked fields; parser: the server's flag.  RequestError names the field at fault."""
    if "tools" not in values:
        for name in ("tool_choice", "parallel_tool_calls"):
            if name in values and values[name] != "none":
                raise RequestError(f"{name} goes with tools", field=name)
        return None
    form = form_of(tokenizer, parser)
    if form is None:
        if not takes_tools(tokenizer):
            raise RequestError("this model's chat template takes no tools", field="tools")
        known = " or ".join(FORMS)
        sentence = f"how this model writes tool calls is not known: start the server with --tool-call-parser {known}"
        raise RequestError(sentence, field="tools")
    tools = values["tools"]
    choice = choice_of(values.get("tool_choice"), tools)
    return ToolUse(form=form, tools=tools, choice=choice, parallel=values.get("parallel_tool_calls", True))


class AnswerReader:
    """One sample's chunks, its text parted into content and calls."""

    def __init__(self, form: ToolForm):
        self._parser = ToolCallParser(form)

    def read(self, chunk: Chunk) -> tuple[Chunk, list[dict[str, Json]]]:
        """-> the chunk with the content alone as its text, and the calls' deltas in OpenAI's shape."""
        delta = self._parser.feed(chunk.text or "")
        content, calls = delta.content, [_delta(call) for call in delta.calls]
        if chunk.finish_reason is not None:
            content += self._parser.finish().content
        return replace(chunk, text=content), calls

    def finish_parts(self, chunk: Chunk) -> dict[str, Json]:
        """finish_reason is tool_calls when the answer ended by itself, with calls that are whole."""
        has_called = chunk.finish_reason is FinishReason.STOP and self._parser.is_whole
        return {"finish_reason": "tool_calls"} if has_called else {}


def message_parts(reader: AnswerReader | None, sample: Chunk) -> tuple[dict[str, Json], dict[str, Json]]:
    """sample: a whole one -> what its message says, and what its choice has besides."""
    sample, calls = reader.read(sample) if reader else (sample, [])
    if reader is None or not calls:
        return {"content": sample.text or ""}, {}
    whole = [{name: part for name, part in call.items() if name != "index"} for call in calls]
    return {"content": sample.text or None, "tool_calls": whole}, reader.finish_parts(sample)


def _delta(call: CallDelta) -> dict[str, Json]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
