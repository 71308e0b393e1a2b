"""Who owns which page: one owner each, always, and whoever breaks that hears it at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgrpc.errors import PageStateInvalid
from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.pages import PageState, PageTable, as_pages


def taken(table: PageTable, count: int) -> np.ndarray:
    pages = table.take(count)
    assert not isinstance(pages, NotEnoughPages)
    return pages


class TestOwners:
    def test_a_page_that_is_freed_twice_is_an_error_and_nothing_changes(self) -> None:
        table = PageTable(4, "pool")
        pages = taken(table, 2)
        table.release(pages)
        with pytest.raises(PageStateInvalid) as refused:
            table.release(pages)
        assert refused.value.metadata["verb"] == "free" and table.free_count == 4

    def test_a_page_twice_in_one_call_is_an_error(self) -> None:
        table = PageTable(4, "pool")
        page = int(taken(table, 1)[0])
        with pytest.raises(PageStateInvalid):
            table.release(as_pages([page, page]))
        assert table.free_count == 3

    @pytest.mark.parametrize("page", [-1, 4])
    def test_a_page_of_no_pool_is_an_error(self, page: int) -> None:
        with pytest.raises(PageStateInvalid):
            PageTable(4, "pool").release(as_pages([page]))

    def test_a_page_that_a_copy_reads_is_not_freed(self) -> None:
        table = PageTable(4, "pool")
        pages = taken(table, 2)
        table.commit(pages)
        table.read(pages)
        with pytest.raises(PageStateInvalid):
            table.release(pages[:1])
        table.end_read(pages)
        table.release(pages)
        assert table.free_count == 4

    def test_a_page_whose_bytes_are_not_there_is_not_read(self) -> None:
        table = PageTable(4, "pool")
        with pytest.raises(PageStateInvalid):
            table.read(taken(table, 1))

    def test_a_full_pool_says_how_many_are_missing_and_gives_none(self) -> None:
        table = PageTable(4, "pool")
        taken(table, 3)
        answer = table.take(3)
        assert answer == NotEnoughPages(2) and not answer
        assert table.free_count == 1


class Owners(RuleBasedStateMachine):
    """Any order of calls: the table and a plain model agree, and every page is free or has one owner."""

    PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(self.PAGES, "pool")
        self.reserved: list[int] = []
        self.present: list[int] = []
        self.readers: dict[int, int] = {}

    @rule(count=st.integers(0, PAGES + 2))
    def take(self, count: int) -> None:
        answer = self.table.take(count)
        free = self.PAGES - len(self.reserved) - len(self.present)
        if count > free:
            assert answer == NotEnoughPages(count - free)
        else:
            assert not isinstance(answer, NotEnoughPages)
            assert not set(answer.tolist()) & {*self.reserved, *self.present}
            self.reserved += answer.tolist()

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.reserved), unique=True, min_size=1))
        self.table.commit(as_pages(pages))
        self.reserved = [page for page in self.reserved if page not in pages]
        self.present += pages

    @rule(pages=st.lists(st.integers(0, PAGES - 1), max_size=4))
    def release(self, pages: list[int]) -> None:
        right = (
            len(set(pages)) == len(pages)
            and all(page in self.reserved or page in self.present for page in pages)
            and not any(self.readers.get(page) for page in pages)
        )
        if right:
            self.table.release(as_pages(pages))
            self.reserved = [page for page in self.reserved if page not in pages]
            self.present = [page for page in self.present if page not in pages]
        else:
            with pytest.raises(PageStateInvalid):
                self.table.release(as_pages(pages))

    @rule(page=st.integers(0, PAGES - 1))
    def read(self, page: int) -> None:
        if page in self.present:
            self.table.read(as_pages([page]))
            self.readers[page] = self.readers.get(page, 0) + 1
        else:
            with pytest.raises(PageStateInvalid):
                self.table.read(as_pages([page]))

    @rule(page=st.integers(0, PAGES - 1))
    def end_read(self, page: int) -> None:
        if self.readers.get(page):
            self.table.end_read(as_pages([page]))
            self.readers[page] -= 1
        else:
            with pytest.raises(PageStateInvalid):
                self.table.end_read(as_pages([page]))

    @invariant()
    def counts_agree(self) -> None:
        counts = self.table.counts()
        assert counts["reserved"] == len(self.reserved) and counts["present"] == len(self.present)
        assert counts["free"] == self.table.free_count == self.PAGES - len(self.reserved) - len(self.present)
        assert counts["read"] == sum(count > 0 for count in self.readers.values())
        assert all(self.table.state(page) is PageState.RESERVED for page in self.reserved)


TestAnyOrderOfCalls = Owners.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=40, stateful_step_count=25)
