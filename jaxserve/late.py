"""What the loop works out from tokens it has just read, while the next step computes: stop strings and token masks.

Both follow a sequence's read output, so a dropped or preempted row needs no undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.request import Chunk, FinishReason, MaskError, TokenMask
from jaxserve.sched.plan import Cut, Outcome, Plan
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.sequence import ALL_OF_ONE, SequenceState
from jaxserve.text import Tokenizer
from jaxserve.text.detokenize import Detokenizer
from jaxserve.text.masks import MaskFiller, Words

Key = tuple[str, int]  # request id, index


class StopStrings:
    """Decodes the sequences that have stop strings, and only those; the others are decoded by their readers."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoders: dict[int, Detokenizer] = {}  # by sequence
        self._sequences: dict[Key, int] = {}  # those with a decoder

    def search(self, plan: Plan, outcome: Outcome, scheduler: Scheduler) -> tuple[dict[int, Cut], dict[int, str]]:
        """-> sequence -> where its new tokens must be cut; sequence -> the text they add up to there."""
        cuts: dict[int, Cut] = {}
        texts: dict[int, str] = {}
        for row, drawn in zip(plan.rows, outcome.rows, strict=True):
            if not row.has_stops or not drawn.token_ids or drawn.is_nan:
                continue
            sequence = scheduler.current(row)
            if sequence is None:
                continue
            decoder = self._decoders.get(row.sequence) or self._open(sequence)
            ending, token_ids = sequence.ending(drawn.token_ids, None), drawn.token_ids
            if ending is not ALL_OF_ONE:
                token_ids = token_ids[: ending.keep]
                if ending.reason is FinishReason.STOP and not sequence.request.params.include_stop_str_in_output:
                    token_ids = token_ids[:-1]  # a stop id: its own text is cut
            piece = decoder.feed(token_ids)
            texts[row.sequence] = piece.text
            if piece.cut is not None:
                cuts[row.sequence] = Cut(piece.cut.keep, piece.cut.stop)
        return cuts, texts

    def finish(self, chunks: Sequence[Chunk]) -> None:
        """Give last chunks the tail of their text, unless a stop string has cut it."""
        if not self._sequences:
            return
        for chunk in chunks:
            if chunk.finish_reason is None:
                continue
            number = self._sequences.pop((chunk.request_id, chunk.index), None)
            if number is not None:
                tail = self._decoders.pop(number).flush()  # nothing, of a text that was cut
                chunk.text = (chunk.text or "") + tail

    def _open(self, sequence: SequenceState) -> Detokenizer:
        request, params = sequence.request, sequence.request.params
        decoder = Detokenizer(
            self._tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            shown_ids=request.shown_ids,
            min_tokens=params.min_tokens,
        )
        self._decoders[sequence.number] = decoder
        self._sequences[request.id, sequence.index] = sequence.number
        return decoder


class LateMasks:
    """The masks of the rows whose next token is constrained by their last one."""

    def __init__(self, width: int):
        """width: W, words of a mask."""
        self._filler = MaskFiller(width)
        self._masks: dict[int, tuple[TokenMask, int]] = {}  # sequence -> its mask, output tokens it has seen

    def words(self, plan: Plan, scheduler: Scheduler, drafts: Mapping[int, Sequence[int]]) -> dict[int, Words]:
        """-> sequence -> [1 + drafts, W], the mask at each position, for the plan's masked rows that still live; zeros
        from the first position that its drafts cannot reach.  A sequence that has no mask any more ends here.

        drafts: sequence -> its drafts of this plan.  Called when all steps before the plan's have been committed."""
        rows, asks = [], []
        for row in plan.rows:
            sequence = scheduler.current(row) if row.masked else None
            if sequence is None:
                continue
            try:
                asks.append((self._advanced(row.sequence, sequence), drafts.get(row.sequence, ())))
                rows.append(row)
            except MaskError as error:
                scheduler.fail(row, error.message, error.code)
        words = {}
        for row, filled in zip(rows, self._filler.fill(asks), strict=True):
            if isinstance(filled, MaskError):
                scheduler.fail(row, filled.message, filled.code)
            else:
                words[row.sequence] = filled
        return words

    def forget_ended(self, scheduler: Scheduler) -> None:
        for number in [number for number in self._masks if not scheduler.is_alive(number)]:
            del self._masks[number]

    def _advanced(self, number: int, sequence: SequenceState) -> TokenMask:
        make_mask = sequence.request.make_mask
        assert make_mask is not None
        mask, seen = self._masks.get(number) or (make_mask(), 0)
        new = sequence.output[seen:]
        if new:
            mask.advance(new)
        self._masks[number] = (mask, seen + len(new))
        return mask
