"""PagePool: which page of the KV pool is free, held or cached, and what the cached ones hold.

Numbers only: it hands out page ids and never sees a key or a value.  Page 0 is scrap and is never handed out.  Every
other page is in exactly one of three states: *free*; *held* by one or more sequences; *cached*, held by none but
keyed, so that an equal prefix may take it back until the page is needed for something else (least recently used goes
first).  A key names the whole prefix up to and including its page, so equal keys mean equal K/V.

A draft that keeps K/V of its own keeps it in a second pool, in pages of the same ids; a page is *drafted* once that
part of it is whole, too."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

KEY_BYTES = 16


def root_key(salt: str) -> bytes:
    """The parent of a first page's key: prefixes meet only under one salt."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page that holds `tokens` behind the prefix that `parent` names."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class PagePool:
    """Ref-counted pages with hash-chained reuse.

    `publish` gives a full page its key; `share` takes a keyed page for one more sequence; `release` gives pages back.
    A key that is still being computed is *claimed* by its sequence, so that others wait for the page instead of
    computing it again."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # the page given back last is handed out first
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parent_of: dict[bytes, bytes] = {}
        self._claims: dict[bytes, int] = {}  # key being computed -> the sequence that computes it
        self._drafted = [False] * num_pages

    @property
    def total(self) -> int:
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: the free ones, and the cached ones that would lose their keys."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` private pages.  The caller has asked `available` first."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._drafted[page] = False
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._drop_key(self._key_of[page])
        return page

    def release(self, pages: Sequence[int]) -> None:
        """One holder gives its pages back.  The deepest goes first, so a prefix outlives what was built on it."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is given back but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def lookup(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def holders(self, page: int) -> int:
        """How many sequences hold this page."""
        return self._holders[page]

    def share(self, key: bytes) -> int:
        """One more sequence holds this key's page."""
        page = self._page_of[key]
        if not self._holders[page]:
            del self._cached[page]
        self._holders[page] += 1
        return page

    def publish(self, key: bytes, parent: bytes, page: int) -> None:
        """`page`, held, full and computed, may be shared from now on.  The first page of a key stays its page: another
        that holds the same remains private."""
        assert self._holders[page] > 0, f"page {page} gets a key but nobody holds it"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page], self._parent_of[key] = page, key, parent

    def forget(self, pages: Iterable[int]) -> None:
        """What these pages hold is not to be trusted (NaN): they lose their keys, and so does all that was built on
        them."""
        lost = [self._key_of[page] for page in pages if page in self._key_of]
        children = defaultdict(list)
        for key, parent in self._parent_of.items():
            children[parent].append(key)
        while lost:
            key = lost.pop()
            if key in self._page_of:
                page = self._drop_key(key)
                if not self._holders[page]:
                    del self._cached[page]
                    self._free.append(page)
            lost.extend(children.pop(key, ()))

    def mark_drafted(self, pages: Iterable[int]) -> None:
        """The draft's K/V of these pages is whole, or will be before anything dispatched from now on reads it."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is drafted but nobody holds it"
            self._drafted[page] = True

    def is_drafted(self, page: int) -> bool:
        return self._drafted[page]

    def _drop_key(self, key: bytes) -> int:
        page = self._page_of.pop(key)
        del self._key_of[page], self._parent_of[key]
        return page

    def claim(self, key: bytes, sequence: int) -> None:
        """`sequence` is about to compute this key's page, unless another is already."""
        self._claims.setdefault(key, sequence)

    def unclaim(self, key: bytes, sequence: int) -> None:
        if self._claims.get(key) == sequence:
            del self._claims[key]

    def claimed_by(self, key: bytes) -> int | None:
        return self._claims.get(key)

    def check(self, tables: Iterable[Sequence[int]], claimants: Iterable[int] = ()) -> None:
        """Proves conservation: free + cached + held = total, each page in one state, held exactly by these page tables
        (one per sequence); keys and pages name each other; only `claimants` compute keys.  For tests: it walks the
        whole pool."""
        holders = Counter(page for table in tables for page in table)
        assert all(self._holders[page] == holders[page] for page in range(self.num_pages)), "a page's holders are lost"
        states = sorted([*self._free, *self._cached, *holders])
        assert states == list(range(1, self.num_pages)), f"free + cached + held is not every page once: {states}"
        assert self.free + self.cached + self.held == self.total
        assert set(self._cached) <= set(self._key_of), "a cached page without a key"
        assert not set(self._free) & set(self._key_of), "a free page with a key"
        assert self._page_of == {key: page for page, key in self._key_of.items()}, "keys and pages disagree"
        assert set(self._parent_of) == set(self._page_of)
        assert set(self._claims.values()) <= set(claimants), "a key is claimed by a sequence that does not compute"
