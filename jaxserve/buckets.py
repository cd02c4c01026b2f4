"""The shapes that are compiled: rows of decode calls, rows x chunk of prefill calls.  Numbers only.

Few enough to load in a start (6 decode and 9 prefill programs at most), varied enough that many short prompts share a
call and one long prompt fills one."""

from __future__ import annotations

from jaxserve.config import EngineConfig


def decode_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Rows: one, and 1/8, 1/4, 1/2, 3/4 and all of the slots; only the slots when batch invariant."""
    slots = config.slots
    if config.batch_invariant:
        return (slots,)
    return tuple(sorted({1, slots, *(-(-slots * eighths // 8) for eighths in (1, 2, 4, 6))}))


def prefill_buckets(config: EngineConfig, max_len: int) -> tuple[tuple[int, int], ...]:
    """(rows, chunk), by tokens then rows: single rows of five sizes; the second, third and last of them with as many rows
    as fill a call; and two small shapes, for short prompts that come while rows decode."""
    chunk = min(config.prefill_chunk, -(-max_len // 16) * 16)
    tokens = max(config.prefill_tokens, chunk)
    if config.batch_invariant:
        return ((min(config.slots, tokens // chunk), chunk),)
    smaller = [2**i for i in range(4, chunk.bit_length()) if 2**i < chunk]
    sizes = [*smaller[-4:], chunk]
    single = {(1, size) for size in sizes}
    full = {(min(config.slots, tokens // size), size) for size in (*sizes[1:3], chunk)}
    small = {(min(config.slots, 4), 16), (min(config.slots, 2), sizes[min(1, len(sizes) - 1)])}
    return tuple(sorted(single | full | small, key=lambda bucket: (bucket[0] * bucket[1], bucket[0])))
