"""The prefix cache against a naive one, and its events against what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvgrpc.demo.engine.page_allocator import PageAllocator
from kvgrpc.demo.engine.prefix_cache import CacheEvent, PrefixCache, page_hash, page_hashes
from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored

PAGE_TOKENS = 2
PAGES = 24


def a_cache() -> tuple[PageAllocator, PrefixCache]:
    pages = PageAllocator(PAGES)
    return pages, PrefixCache(pages, PAGE_TOKENS)


def cached(pages: PageAllocator, cache: PrefixCache, prompt: Sequence[int]) -> list[int]:
    """Computes a prompt, keeps it and gives its pages back, as a request does."""
    taken = pages.take(-(-len(prompt) // PAGE_TOKENS))
    cache.insert(prompt, taken)
    pages.release(taken)
    return taken


def test_a_page_hash_is_the_same_in_every_process_and_depends_on_all_tokens_before() -> None:
    assert page_hash(None, [1, 2]) == -1871280535689632213
    assert page_hashes([1, 2, 3, 4, 5], 2) == [page_hash(None, [1, 2]), page_hash(page_hash(None, [1, 2]), [3, 4])]
    assert page_hashes([1, 2, 3, 4], 2)[1] != page_hashes([0, 2, 3, 4], 2)[1]


def test_the_longest_cached_prefix_is_found_in_whole_pages() -> None:
    pages, cache = a_cache()
    first, second, _ = cached(pages, cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 5, 6]) == [first, second]
    assert cache.match([1, 2, 3, 9]) == [first]
    assert cache.match([9, 2, 3, 4]) == []


def test_what_was_found_belongs_to_the_finder_until_released() -> None:
    pages, cache = a_cache()
    cached(pages, cache, [1, 2])
    found = cache.match([1, 2])
    assert cache.idle == 0
    assert cache.evict(1) == 0
    pages.release(found)
    assert cache.evict(1) == 1


def test_a_stored_event_names_the_parent_and_holds_the_tokens_of_new_pages_only() -> None:
    pages, cache = a_cache()
    cached(pages, cache, [1, 2, 3, 4])
    cache.take_events()
    cached(pages, cache, [1, 2, 3, 4, 5, 6, 7])
    chain = page_hashes([1, 2, 3, 4, 5, 6], PAGE_TOKENS)
    assert cache.take_events() == [BlockStored([*chain[2:]], chain[1], [5, 6], PAGE_TOKENS)]


def test_what_is_cached_already_makes_no_event_and_keeps_its_page() -> None:
    pages, cache = a_cache()
    first = cached(pages, cache, [1, 2])
    cache.take_events()
    cached(pages, cache, [1, 2])
    assert cache.take_events() == []
    assert cache.match([1, 2]) == first


def test_the_least_recently_used_leaf_goes_first_and_never_a_parent_before_its_child() -> None:
    pages, cache = a_cache()
    cached(pages, cache, [1, 2, 3, 4])
    cached(pages, cache, [5, 6])
    pages.release(cache.match([1, 2, 3, 4]))
    cache.take_events()
    order = []
    for _ in range(3):
        cache.evict(1)
        order += [event.block_hashes[0] for event in cache.take_events() if isinstance(event, BlockRemoved)]
    chain = page_hashes([1, 2, 3, 4], PAGE_TOKENS)
    assert order == [page_hash(None, [5, 6]), chain[1], chain[0]]


def test_clear_says_so_even_when_nothing_was_cached() -> None:
    _, cache = a_cache()
    cache.clear()
    assert cache.take_events() == [AllBlocksCleared()]


def test_clear_takes_no_page_from_a_running_request() -> None:
    pages, cache = a_cache()
    cached(pages, cache, [1, 2])
    found = cache.match([1, 2])
    cache.clear()
    assert pages.users(found[0]) == 1
    assert cache.match([1, 2]) == []


class AgainstNaive(RuleBasedStateMachine):
    """Requests come, share, compute, keep and go; a dict from prefix to page must always say the same."""

    runs = Bundle("runs")

    @initialize()
    def begin(self) -> None:
        self.pages, self.cache = a_cache()
        self.naive: dict[tuple[int, ...], int] = {}
        self.told: set[int | bytes] = set()
        self.running: list[list[int]] = []

    @rule(target=runs, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def admit(self, prompt: list[int]) -> object:
        found = self.cache.match(prompt)
        known = 0
        while tuple(prompt[: (known + 1) * PAGE_TOKENS]) in self.naive and (known + 1) * PAGE_TOKENS <= len(prompt):
            known += 1
        assert found == [self.naive[tuple(prompt[: (page + 1) * PAGE_TOKENS])] for page in range(known)]
        missing = -(-len(prompt) // PAGE_TOKENS) - len(found)
        self.cache.evict(missing - self.pages.free)
        self.follow()
        if missing > self.pages.free:
            self.pages.release(found)
            return multiple()
        run = found + self.pages.take(missing)
        self.running.append(run)
        return (prompt, run)

    @rule(run=runs)
    def keep(self, run: tuple[list[int], list[int]]) -> None:
        prompt, pages = run
        if pages not in self.running:
            return
        self.cache.insert(prompt, pages)
        for page in range(len(prompt) // PAGE_TOKENS):
            self.naive.setdefault(tuple(prompt[: (page + 1) * PAGE_TOKENS]), pages[page])
        self.follow()

    @rule(run=consumes(runs))
    def end(self, run: tuple[list[int], list[int]]) -> None:
        if run[1] in self.running:
            self.running.remove(run[1])
            self.pages.release(run[1])

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        assert self.cache.evict(count) == self.follow()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.follow()

    def follow(self) -> int:
        """Reads the events; the number of pages that they removed."""
        removed = 0
        for event in self.cache.take_events():
            removed += self.apply(event)
        return removed

    def apply(self, event: CacheEvent) -> int:
        names = {page_hashes(prefix, PAGE_TOKENS)[-1]: prefix for prefix in self.naive}
        if isinstance(event, BlockStored):
            assert not self.told.intersection(event.block_hashes)
            assert event.parent_block_hash is None or event.parent_block_hash in self.told
            self.told.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                assert isinstance(name, int)
                gone = names[name]
                assert not any(prefix[: len(gone)] == gone for prefix in self.naive if len(prefix) > len(gone))
                del self.naive[gone]
                self.told.remove(name)
            return len(event.block_hashes)
        else:
            self.naive.clear()
            self.told.clear()
        return 0

    @invariant()
    def the_cache_holds_what_the_naive_one_and_the_events_say(self) -> None:
        names = {page_hashes(prefix, PAGE_TOKENS)[-1] for prefix in self.naive}
        assert set(self.cache.hashes()) == self.told == names
        assert len(self.cache) == len(self.naive)

    @invariant()
    def every_page_has_as_many_users_as_hold_it(self) -> None:
        held = [page for run in self.running for page in run] + list(self.naive.values())
        assert [self.pages.users(page) for page in range(PAGES)] == [held.count(page) for page in range(PAGES)]


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
