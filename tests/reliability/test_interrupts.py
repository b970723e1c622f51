"""An interrupt (Ctrl-C) in the midst of a change never makes the next commit write half of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hybridmem

from .book import Book, read
from .histories import CONFIG

WATCHED = ("store.py", "_commit.py", "_entries.py", "_limits.py", "_signatures.py")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the watched modules run."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def life(store: Any, book: Book) -> None:
    book.put(store)
    store.delete(1)
    book.drop([1])
    store.flush()


@pytest.mark.parametrize("start", [1, 9])
def test_an_interrupt_anywhere(start: int, tmp_path: Path) -> None:
    for at in range(start, 2000, 17):
        path = tmp_path / str(at)
        store = hybridmem.create(path, **CONFIG)
        book = Book()
        book.put(store)
        store.flush()
        old = book.commit()
        interrupt = Interrupt(at)
        sys.settrace(interrupt)
        try:
            life(store, book)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        store.close()
        with hybridmem.open(path) as store:
            found = read(store)
        whole = {1: old.items[1], **book.live}
        assert all(item == whole[i] for i, (item, _) in found.items() if i in whole)
        assert found.keys() <= {1, 2}
        if interrupt.left > 0:
            return
    raise AssertionError("never came to an end")
