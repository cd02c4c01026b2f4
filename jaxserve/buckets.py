"""The shapes that are compiled: rows of decode calls, rows and drafts of verify calls, rows x chunk of prefill calls.
Numbers only.

Few enough to load in a start (6 decode, 6 verify and 9 prefill programs at most), varied enough that many short prompts
share a call and one long prompt fills one."""

from __future__ import annotations

from jaxserve.config import MAX_DRAFTS, EngineConfig


def decode_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Rows: one, and 1/8, 1/4, 1/2, 3/4 and all of the slots; only the slots when batch invariant."""
    slots = config.slots
    if config.batch_invariant:
        return (slots,)
    return tuple(sorted({1, slots, *(-(-slots * eighths // 8) for eighths in (1, 2, 4, 6))}))


def verify_shapes(config: EngineConfig) -> tuple[tuple[int, int], ...]:
    """(rows, K): a chosen K for all rows of decode calls; else one row with three K, an eighth or more of the slots with
    two, all slots with one.

    The fewer the rows, the less a draft costs beside the weights that are read anyway, so there the larger K are.  K = 1
    is left out: where it gains, K = 3 gains as much or nearly."""
    if not config.speculates:
        return ()
    buckets = decode_buckets(config)
    if config.fixed_drafts is not None:
        return tuple((rows, config.fixed_drafts) for rows in buckets)
    several = next((rows for rows in buckets if rows >= config.slots / 4), config.slots)
    shapes = {(buckets[-1], 3), (several, 3), (several, 7), *((buckets[0], drafts) for drafts in (3, 7, MAX_DRAFTS))}
    return tuple(sorted(shapes))


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
