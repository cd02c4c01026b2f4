"""How models write tool calls: the forms that are known here, and which of them a model was taught.

Hermes' form is that of NousResearch's Hermes 2 Pro and 3 and of Qwen 2.5 and 3; Llama 3's is that of Meta's Llama 3.1
to 3.3 for tools given as JSON ("JSON based tool calling" in its model card)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.text import Tokenizer
from jaxserve.text.chat import takes_tools, template_words


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """`opening`, then {"name": ..., `arguments_key`: {...}}, then `closing`."""

    name: str
    opening: str
    closing: str  # "" = the object's end is the call's
    arguments_key: str
    is_bare: bool  # the opening may be left out where an answer begins, and behind a call
    several: bool  # the models' own templates take several calls in one message

    def marker_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The control tokens among the markers: decoding must show them, or no call can be seen."""
        markers = (self.opening, self.closing)
        return frozenset(tokenizer.special_tokens[text] for text in markers if text in tokenizer.special_tokens)


HERMES = ToolForm(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    arguments_key="arguments",
    is_bare=False,
    several=True,
)
LLAMA3 = ToolForm(
    name="llama3", opening="<|python_tag|>", closing="", arguments_key="parameters", is_bare=True, several=False
)
FORMS = {form.name: form for form in (HERMES, LLAMA3)}

_OTHERS = ("<function=", "<arg_key>")  # Qwen 3 Coder's and GLM's: <tool_call> around something that is no JSON


def form_of(tokenizer: Tokenizer, wanted: str = "auto") -> ToolForm | None:
    """The form the model's template teaches, or the one that is wanted by name; None when the template takes no tools,
    or `auto` does not know its form.  Raises ValueError for a name that is not known."""
    if wanted != "auto" and wanted not in FORMS:
        raise ValueError(f"tool_call_parser={wanted!r} is not known (known: auto, {', '.join(FORMS)})")
    if not takes_tools(tokenizer):
        return None
    if wanted != "auto":
        return FORMS[wanted]
    words = template_words(tokenizer)
    if any(word in words for word in _OTHERS):
        return None
    if HERMES.opening in words and '"arguments"' in words:
        return HERMES
    knows_tag = LLAMA3.opening in words or LLAMA3.opening in tokenizer.special_tokens
    return LLAMA3 if knows_tag and '"parameters"' in words else None
