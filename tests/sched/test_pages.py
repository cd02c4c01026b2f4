"""PagePool's promises, without a scheduler."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.sched.pages import PagePool, page_key, root_key

ROOT = root_key("")


def keyed(pool: PagePool, count: int, root: bytes = ROOT) -> tuple[list[int], list[bytes]]:
    """A sequence's first `count` pages, computed and in the table; the sequence still holds them."""
    pages, keys, parent = pool.allocate(count), [], root
    for index, page in enumerate(pages):
        keys.append(page_key(parent, [index]))
        pool.publish(keys[-1], parent, page)
        parent = keys[-1]
    return pages, keys


def test_keys_name_the_whole_prefix_and_the_salt():
    one = page_key(ROOT, [1, 2])
    assert one == page_key(root_key(""), [1, 2])
    assert len({one, page_key(ROOT, [2, 1]), page_key(one, [1, 2]), page_key(root_key("tenant"), [1, 2])}) == 4


def test_scrap_page_is_never_handed_out():
    pool = PagePool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    with pytest.raises(AssertionError, match="1 pages wanted, 0 available"):
        pool.allocate(1)


def test_an_unheld_prefix_is_cached_until_its_pages_are_needed():
    pool = PagePool(5)
    pages, keys = keyed(pool, 3)
    pool.release(pages)
    assert (pool.free, pool.cached, pool.held) == (1, 3, 0)
    assert pool.share(keys[0]) == pages[0]
    assert (pool.free, pool.cached, pool.held) == (1, 2, 1)
    pool.allocate(3)
    assert [pool.lookup(key) for key in keys] == [pages[0], None, None]


def test_the_deepest_page_of_the_oldest_prefix_is_evicted_first():
    pool = PagePool(7)
    (old, old_keys), (new, new_keys) = keyed(pool, 3), keyed(pool, 3, root_key("other"))
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert [pool.lookup(key) for key in old_keys] == [old[0], old[1], None]
    pool.allocate(2)
    assert [pool.lookup(key) for key in old_keys] == [None] * 3
    assert [pool.lookup(key) for key in new_keys] == new


def test_a_shared_page_comes_back_with_its_last_holder():
    pool = PagePool(3)
    pages, keys = keyed(pool, 1)
    pool.share(keys[0])
    pool.release(pages)
    assert (pool.holders(pages[0]), pool.held, pool.cached) == (1, 1, 0)
    pool.release(pages)
    assert (pool.holders(pages[0]), pool.held, pool.cached) == (0, 0, 1)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(pages)


def test_a_key_keeps_its_first_page():
    pool = PagePool(4)
    (first, keys), second = keyed(pool, 1), pool.allocate(1)
    pool.publish(keys[0], ROOT, second[0])
    assert pool.lookup(keys[0]) == first[0]
    pool.release(second)
    assert pool.free == 3 - 1


def test_forgotten_pages_take_along_what_was_built_on_them():
    pool = PagePool(6)
    pages, keys = keyed(pool, 4)
    pool.release(pages[2:])
    pool.forget(pages[1:2])
    assert [pool.lookup(key) for key in keys] == [pages[0], None, None, None]
    assert (pool.free, pool.cached, pool.held) == (3, 0, 2)
    pool.check([pages[:2]])


def test_a_claim_belongs_to_the_first_and_ends_with_it():
    pool = PagePool(3)
    pool.claim(ROOT, 7)
    pool.claim(ROOT, 8)
    pool.unclaim(ROOT, 8)
    assert pool.claimed_by(ROOT) == 7
    pool.unclaim(ROOT, 7)
    assert pool.claimed_by(ROOT) is None


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, publish, share, release and forget."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(8)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count <= self.pool.available:
            self.tables.append(self.pool.allocate(count))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), token=st.integers(0, 3))
    def publish(self, data, token):
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        parent = ROOT
        for page in table:
            key = page_key(parent, [token])
            self.pool.publish(key, parent, page)
            parent = key

    @rule(token=st.integers(0, 3), depth=st.integers(1, 3))
    def share(self, token, depth):
        table, key = [], ROOT
        for _ in range(depth):
            key = page_key(key, [token])
            if self.pool.lookup(key) is None:
                break
            table.append(self.pool.share(key))
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data):
        self.pool.forget(data.draw(st.sampled_from(self.tables)))

    @invariant()
    def pages_are_conserved(self):
        self.pool.check(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)
TestPagesAreConserved = PoolMachine.TestCase
