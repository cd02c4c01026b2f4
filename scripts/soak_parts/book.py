"""What must be true after a soak: of each request as its client saw it, and of the server's own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.soak_parts.clients import COMPLETE, Told

MIB = 2**20
GROWTH_MIB = 64  # that resident memory may grow from the first third of a soak to its end
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Check:
    promise: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """told: by every client; first, warm, last: the server's numbers before any request, after the first third of
    them, and when it was idle again."""

    told: Sequence[Told]
    first: Numbers
    warm: Numbers
    last: Numbers
    exit_code: int

    def checks(self) -> list[Check]:
        return [check(self) for check in CHECKS]

    def grown(self, name: str) -> int:
        return round(self.last[f"jaxserve:{name}"] - self.first[f"jaxserve:{name}"])

    def ended(self, reason: str) -> int:
        return self.grown(f'request_success_total{{finished_reason="{reason}"}}')

    @property
    def complete(self) -> int:
        return self.ended("stop") + self.ended("length")

    @property
    def accepted(self) -> list[Told]:
        """Those whose client knows that they were queued; of others that left at once, nobody outside can know."""
        return [result for result in self.told if result.is_accepted]


def is_idle(numbers: Numbers) -> bool:
    return not numbers["jaxserve:num_requests_running"] and not numbers["jaxserve:num_requests_waiting"]


def clients_are_content(book: Book) -> Check:
    faults = [result for result in book.told if result.faults]
    found = "; ".join(f"{r.ask.number} ({r.ask.front}, {r.ask.way}): {r.faults[0]}" for r in faults[:3])
    return Check("every client saw its request end once, as it meant to", found or f"{len(book.told)} did", not faults)


def sequences_end_once(book: Book) -> Check:
    ends = {reason: book.ended(reason) for reason in ("stop", "length", "abort", "error")}
    accepted = book.grown("sequences_total")
    found = f"{accepted} = {' + '.join(f'{count} {reason}' for reason, count in ends.items())}"
    return Check("every sequence that was accepted has ended once", found, accepted == sum(ends.values()))


def nothing_fails(book: Book) -> Check:
    errors, nans = book.ended("error"), book.grown("nan_rows_total")
    return Check("no sequence ended by an error or a NaN", f"{errors} and {nans}", errors == nans == 0)


def requests_add_up(book: Book) -> Check:
    least, counted, most = len(book.accepted), book.grown("requests_total"), len(book.told)
    return _between(
        "requests counted: those known to be queued, or more, and no more than were sent", least, counted, most
    )


def prompt_tokens_add_up(book: Book) -> Check:
    least, most = (sum(len(r.ask.prompt) * r.ask.n for r in results) for results in (book.accepted, book.told))
    return _between("and their prompt tokens", least, book.grown("prompt_tokens_total"), most)


def tokens_add_up(book: Book) -> Check:
    """A client that read to the end was told how many tokens it got; what others were sent counts too."""
    told = sum(result.tokens for result in book.told if result.status in COMPLETE)
    drawn, complete = book.grown("generation_tokens_total"), round(
        book.last["jaxserve:request_generation_tokens_sum"] - book.first["jaxserve:request_generation_tokens_sum"]
    )  # fmt: skip
    found = f"{told} <= {complete} <= {drawn}"
    return Check("tokens: told to clients <= of complete sequences <= drawn", found, 0 < told <= complete <= drawn)


def histograms_add_up(book: Book) -> Check:
    names = ("e2e_request_latency_seconds", "request_generation_tokens", "request_prompt_tokens")
    counts = [book.grown(f"{name}_count") for name in names]
    return Check(
        "histograms count each complete sequence once", f"{counts}, {book.complete}", set(counts) == {book.complete}
    )


def counters_never_fall(book: Book) -> Check:
    names = [name for name in book.first if name.partition("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))]
    fallen = [name for name in names if not book.first[name] <= book.warm[name] <= book.last[name]]
    return Check("no counter fell", ", ".join(fallen) or f"none of {len(names)}", not fallen)


def pages_come_back(book: Book) -> Check:
    def free(numbers: Numbers) -> int:
        return round(sum(numbers[f'jaxserve:kv_cache_pages{{state="{state}"}}'] for state in ("free", "cached")))

    before, after = free(book.first), free(book.last)
    return Check("free pages are what they were", f"{before}, {after}", before == after)


def nothing_is_compiled(book: Book) -> Check:
    compiles = round(book.last["jaxserve:compiles_total"])
    return Check("nothing was compiled after the start", str(compiles), compiles == 0)


def memory_is_flat(book: Book) -> Check:
    name = "process_resident_memory_bytes"
    growth = (book.last[name] - book.warm[name]) / MIB
    found = f"{growth:+.1f} MiB of {book.last[name] / MIB:.0f}, at most {GROWTH_MIB}"
    return Check("resident memory is flat", found, growth <= GROWTH_MIB)


def it_leaves_in_peace(book: Book) -> Check:
    return Check("SIGTERM ends the process with 0", str(book.exit_code), book.exit_code == 0)


CHECKS: tuple[Callable[[Book], Check], ...] = (
    clients_are_content,
    sequences_end_once,
    nothing_fails,
    requests_add_up,
    prompt_tokens_add_up,
    tokens_add_up,
    histograms_add_up,
    counters_never_fall,
    pages_come_back,
    nothing_is_compiled,
    memory_is_flat,
    it_leaves_in_peace,
)


def _between(promise: str, least: int, counted: int, most: int) -> Check:
    return Check(promise, f"{least} <= {counted} <= {most}", least <= counted <= most)


def summary(told: Sequence[Told]) -> list[tuple[str, str, str, int]]:
    """-> front, way, status, how many."""
    counts = Counter((r.ask.front, r.ask.way, r.status or "left") for r in told)
    return [(*key, count) for key, count in sorted(counts.items())]
