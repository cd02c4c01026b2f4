"""Roster: every living sequence, waiting or running, and the slots and pages of those that run.

It moves sequences between the two and keeps their prefixes in the pool's table; *which* sequence moves is for the
planners, and what the caller is told is for the scheduler.

Pages and slots may be given away while an unread step still writes them: every device effect goes through one chain,
so the next owner's writes come later.  Only the host's own view must not be ahead of what has been dispatched."""

from __future__ import annotations

import itertools

from jaxserve.config import SchedulerConfig
from jaxserve.sched.counters import Counters
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import SlotLoad
from jaxserve.sched.queue import WaitingQueue
from jaxserve.sched.sequence import SequenceState


class Roster:
    def __init__(self, config: SchedulerConfig, counters: Counters):
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.counters = counters
        self.waiting = WaitingQueue(config.age_seconds)
        self.running: dict[int, SequenceState] = {}  # by number, in order of admission
        self.alive: dict[int, SequenceState] = {}  # by number, running and waiting
        self.free_slots = list(range(config.slots - 1, -1, -1))
        self.moves = 0  # while it stands, the same sequences run, in the same slots, and none has given back a page
        self._admissions = 0

    def enlist(self, sequence: SequenceState) -> None:
        self.alive[sequence.number] = sequence
        self.waiting.push(sequence)

    def admit(self, sequence: SequenceState) -> SlotLoad:
        """From waiting to running: a slot, and pages for every token known, shared as far as the table holds them."""
        page_size = self.config.page_size
        self.waiting.remove(sequence)
        self._admissions += 1
        self.moves += 1
        sequence.admitted, sequence.slot = self._admissions, self.free_slots.pop()
        sequence.target = sequence.length
        if self.config.prefix_reuse and not sequence.is_resumed:
            self.counters.prefix_query_tokens += sequence.prompt_len
        found = self.count_hits(sequence)
        sequence.pages = [self.pool.share(key) for key in sequence.keys[:found]]
        sequence.pages += self.pool.allocate(-(-sequence.target // page_size) - found)
        self._skip(sequence, found)
        self.running[sequence.number] = sequence
        return sequence.load()

    def preempt(self, sequence: SequenceState) -> None:
        """From running to waiting.  What it drew and nobody read is dropped (by its epoch) and drawn again later."""
        known = sequence.computed if sequence.is_prefilling else sequence.length - 1
        sequence.reached = max(sequence.reached, known)
        sequence.is_resumed = True
        self._name_output(sequence)
        self._leave(sequence)
        self.waiting.push(sequence)
        self.counters.preemptions += 1

    def remove(self, sequence: SequenceState) -> None:
        """It has ended: everything it held comes back."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        del self.alive[sequence.number]

    def _leave(self, sequence: SequenceState) -> None:
        self.moves += 1
        del self.running[sequence.number]
        self.free_slots.append(sequence.slot)
        self.pool.release(sequence.pages)
        self.unclaim(sequence)
        sequence.epoch += 1
        sequence.slot, sequence.pages, sequence.row = -1, [], None
        sequence.computed = sequence.target = sequence.published = 0
        sequence.draft_len = sequence.unread = sequence.unread_most = 0

    # What a sequence takes from the table and gives to it.

    def shareable(self, sequence: SequenceState) -> int:
        """Leading pages that may be prefix hits: at least one token is always computed, and every position whose
        logits a prompt logprob still needs (those at p score the token at p + 1)."""
        last = sequence.length - 1
        if sequence.next_scored < sequence.prompt_len:
            last = min(last, sequence.next_scored - 1)
        return min(last // self.config.page_size, len(sequence.keys))

    def count_hits(self, sequence: SequenceState) -> int:
        """Leading pages it has computed, or would find in the table."""
        index, limit = sequence.computed // self.config.page_size, self.shareable(sequence)
        while index < limit and self.pool.lookup(sequence.keys[index]) is not None:
            index += 1
        return index

    def pages_wanted(self, sequence: SequenceState, hits: int) -> int:
        """Pages that admitting it would take from those available, at the most: a hit that somebody holds takes none,
        unless one before it is held by nobody, and may be gone when its turn comes."""
        pages = [self.pool.lookup(key) for key in sequence.keys[:hits]]
        held = itertools.takewhile(lambda page: page is not None and self.pool.holders(page) > 0, pages)
        return -(-sequence.length // self.config.page_size) - len(list(held))

    def rematch(self, sequence: SequenceState) -> None:
        """Pages that others have computed since it was admitted replace its own that are still empty."""
        size = self.config.page_size
        if sequence.computed % size:
            return
        first, found = sequence.computed // size, self.count_hits(sequence)
        for index in range(first, found):
            own, sequence.pages[index] = sequence.pages[index], self.pool.share(sequence.keys[index])
            self.pool.release([own])
        self._skip(sequence, found)

    def _skip(self, sequence: SequenceState, hits: int) -> None:
        """The first `hits` pages need no prefill.  A sequence that gets back what it had before hit nothing."""
        position = max(sequence.computed, hits * self.config.page_size)
        fresh = position - max(sequence.computed, min(sequence.reached, position))
        sequence.cached_tokens += fresh
        self.counters.prefix_hit_tokens += fresh
        sequence.computed = position
        sequence.published = max(sequence.published, hits)
        self.find_drafted(sequence, sequence.computed)

    def find_drafted(self, sequence: SequenceState, written: int) -> None:
        """Of the target's first `written` positions, the draft's K/V too stands in all pages before the first that
        lacks it, whoever computed it."""
        size = self.config.page_size
        while sequence.draft_len < written and self.pool.is_drafted(sequence.pages[sequence.draft_len // size]):
            sequence.draft_len = (sequence.draft_len // size + 1) * size

    def advance_draft(self, sequence: SequenceState, stop: int) -> None:
        """The call that computes the draft's K/V up to position `stop` is about to be dispatched."""
        size = self.config.page_size
        self.pool.mark_drafted(sequence.pages[sequence.draft_len // size : stop // size])
        sequence.draft_len = stop

    def claim(self, sequence: SequenceState, hits: int) -> bool:
        """Says that it computes the page behind its hits, for everybody.  False when somebody else does: it waits.

        One claim each is enough: who shares a prefix catches up with the claimant's page and meets the claim there."""
        pool = self.pool
        self.unclaim(sequence)
        if hits < len(sequence.keys) and pool.lookup(sequence.keys[hits]) is None:
            key = sequence.keys[hits]
            pool.claim(key, sequence.number)
            if pool.claimed_by(key) == sequence.number:
                sequence.claim = key
            elif hits < self.shareable(sequence):
                sequence.blocked_on = key
                return False
        sequence.blocked_on = None
        return True

    def unclaim(self, sequence: SequenceState) -> None:
        if sequence.claim is not None:
            self.pool.unclaim(sequence.claim, sequence.number)
            sequence.claim = None

    def publish(self, sequence: SequenceState, written: int) -> None:
        """Its full pages among the first `written` positions may be shared: their tokens are read and the step that
        writes them has been dispatched."""
        full = min(written // self.config.page_size, len(sequence.keys))
        for index in range(sequence.published, full):
            self.pool.publish(sequence.keys[index], sequence.parent_of(index), sequence.pages[index])
        sequence.published = max(sequence.published, full)

    def publish_output(self, sequence: SequenceState) -> None:
        """The pages that its output has filled.  The newest token's K/V is not written yet: the step that reads it
        does that, and it may never be dispatched."""
        written = sequence.length - 1
        size, first = self.config.page_size, sequence.published
        if written // size > first:
            self._name_output(sequence)
            self.publish(sequence, written)
            self.pool.mark_drafted(sequence.pages[first : min(written, sequence.draft_len) // size])

    def _name_output(self, sequence: SequenceState) -> None:
        """Names the pages that generated tokens have filled.  Not when a row's bits may not depend on its mates: decode
        and prefill run different shapes."""
        if self.config.prefix_reuse and not self.config.batch_invariant:
            sequence.extend_keys(sequence.length, self.config.page_size)

    def trim(self, sequence: SequenceState) -> None:
        """Gives back pages kept for drafts that were rejected, but none that an unread step may still write."""
        needed = -(-sequence.longest_kv(0) // self.config.page_size)
        if needed < len(sequence.pages):
            self.pool.release(sequence.pages[needed:])
            del sequence.pages[needed:]
            sequence.row = None
            self.moves += 1

    def check(self) -> None:
        """Proves that pages, slots and claims belong to running sequences and to them alone.  For tests."""
        self.pool.check([sequence.pages for sequence in self.running.values()], self.running)
        slots = [*self.free_slots, *(sequence.slot for sequence in self.running.values())]
        assert sorted(slots) == list(range(self.config.slots)), f"slots are lost or shared: {slots}"
        assert len(self.alive) == len(self.running) + len(self.waiting)
        for sequence in self.alive.values():
            sequence.check()
