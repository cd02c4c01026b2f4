"""Do two tokenizers mean the same by every id?"""

from __future__ import annotations

from jaxserve.text import Tokenizer


def first_difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Between two tables of tokens, as the end of a sentence about theirs; None when ids can pass from one to the other.

    Which text is cut into which tokens may differ: only ids are shared."""
    for token_id in range(min(ours.vocab_size, theirs.vocab_size)):
        mine, other = ours.token_bytes(token_id), theirs.token_bytes(token_id)
        if mine != other:
            return f"its token {token_id} is {other!r}, not {mine!r}"
        if (token_id in ours.special_ids) != (token_id in theirs.special_ids):
            which = ("not a control token", "a control token")[token_id in theirs.special_ids]
            return f"its token {token_id} ({other!r}) is {which}"
    if ours.vocab_size != theirs.vocab_size:
        return f"it has {theirs.vocab_size} tokens, not {ours.vocab_size}"
    return None
