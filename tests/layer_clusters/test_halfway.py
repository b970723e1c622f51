"""Memory ends, or somebody interrupts, while clusters change: none is left half changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hybridmem import _clusters, _index
from hybridmem._blocks import Block
from hybridmem._index import LayerIndex

from .helpers import Model, check_clusters, check_groups, end_of, found, looked_at


@pytest.mark.parametrize("broken", ["_majority", "_parted"])
def test_dealing_that_ends_halfway_begins_anew(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(3)
    model.extend(model.signatures(400))
    model.deal_all()
    whole = getattr(_clusters, broken)
    for _ in range(6):
        model.extend(model.signatures(_clusters.BATCH))
        with monkeypatch.context() as patch:
            patch.setattr(_clusters, broken, failing(whole, calls=3))
            try:
                model.index.view(approximate=True)
            except MemoryError:
                assert model.index._clusters is None
        view = model.deal_all()
        check_clusters(view)
        check_groups(model.index)
        query = model.signatures(1)[0]
        assert found(view, query, 5) == model.expect(query, 5, looked_at(view, query, 5))


def test_compaction_that_ends_halfway_loses_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(4)
    model.extend(model.signatures(400))
    end = end_of(model.deal_all())
    with monkeypatch.context() as patch:
        patch.setattr(Block, "take", failing(Block.take, calls=0))
        for entry_id in list(model.records):
            del model.records[entry_id]
            try:
                model.index.remove(entry_id)
            except MemoryError:
                break  # it is gone, and its block is replaced another time
        else:
            raise AssertionError("no block was replaced")
    assert model.index._clusters is not None
    assert model.index._clusters.end == end
    model.extend(model.signatures(_clusters.BATCH))
    view = model.deal_all()
    check_clusters(view)
    query = model.signatures(1)[0]
    assert found(view, query, 5) == model.expect(query, 5, looked_at(view, query, 5))


def test_an_interrupt_while_a_block_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before whichever line of it: no cluster holds what is elsewhere by then."""
    monkeypatch.setattr(_index, "BLOCK_BYTES", 2000)
    passed = stop = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code is not LayerIndex._compact.__code__:
            return None
        passed += event == "line"
        if passed == stop:
            raise KeyboardInterrupt
        return trace

    while passed == stop:  # until a block is replaced in fewer lines
        passed, stop = 0, stop + 1
        model = Model(16)
        model.extend(model.signatures(400))
        model.deal_all()
        before = sys.gettrace()
        for entry_id in sorted(model.records)[:30]:
            del model.records[entry_id]
            sys.settrace(trace)
            try:
                model.index.remove(entry_id)
            except KeyboardInterrupt:
                break
            finally:
                sys.settrace(before)
            if passed:
                break
        query = model.signatures(1)[0]
        for view in (model.index.view(), model.deal_all()):
            check_clusters(view)
            assert found(view, query, 400) == model.expect(query, 400)
    assert stop > 20


def failing(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Find no memory from the so-many-th call on."""
    left = [calls]

    def called(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return call(*given)

    return called
