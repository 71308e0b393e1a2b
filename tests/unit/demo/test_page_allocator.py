"""Pages are free, used or shared; nothing else."""

from __future__ import annotations

import pytest

from kvgrpc.demo.engine.page_allocator import OutOfPages, PageAllocator


def test_taken_pages_are_different_and_no_longer_free() -> None:
    pages = PageAllocator(4)
    assert sorted(pages.take(3) + pages.take(1)) == [0, 1, 2, 3]
    assert pages.free == 0


def test_who_wants_more_than_is_free_gets_none() -> None:
    pages = PageAllocator(4)
    pages.take(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free"):
        pages.take(2)
    assert pages.free == 1


def test_a_shared_page_is_free_after_its_last_user_only() -> None:
    pages = PageAllocator(1)
    page = pages.take(1)
    pages.share(page)
    pages.release(page)
    assert pages.free == 0
    pages.release(page)
    assert pages.free == 1


def test_the_page_that_was_freed_last_is_taken_last() -> None:
    pages = PageAllocator(3)
    first = pages.take(1)
    pages.release(first)
    assert pages.take(3)[-1:] == first


@pytest.mark.parametrize("misuse", ["share", "release"])
def test_a_free_page_cannot_be_shared_or_released(misuse: str) -> None:
    with pytest.raises(ValueError, match="page 2 is free"):
        getattr(PageAllocator(4), misuse)([2])
