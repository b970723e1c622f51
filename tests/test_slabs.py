"""Memory of tensors is used again, and never while something still refers to it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridmem import _slabs
from hybridmem._codec import Codec
from hybridmem._slabs import LEAST_BYTES, Pool

SHAPE = (64, 1024)
NBYTES = 64 * 1024 * 4


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def filled(pool: Pool, value: float, shape: tuple[int, ...] = SHAPE) -> Any:
    room = pool.empty(shape, np.float32)
    room.fill[...] = value
    return room.kept


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, LEAST_BYTES // 4), (7, 9001), (5000, 900)])
def test_both_arrays_are_the_same_aligned_memory(shape: tuple[int, int]) -> None:
    fill, kept = Pool().empty(shape, np.float32)
    fill[...] = np.arange(fill.size).reshape(shape)
    assert kept.shape == fill.shape == shape
    assert address(kept) == address(fill)
    assert address(kept) % 64 == 0
    np.testing.assert_array_equal(kept.reshape(-1), np.arange(fill.size, dtype=np.float32))


@pytest.mark.parametrize("shape", [(3, 5), SHAPE])
def test_what_is_kept_can_be_made_writeable_through_no_view_of_it(shape: tuple[int, int]) -> None:
    array = filled(Pool(), 1, shape)
    while isinstance(array, np.ndarray):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        array = array.base
    with pytest.raises(TypeError):
        array[0] = 1


def test_memory_is_used_again_when_it_is_free() -> None:
    pool = Pool()
    first = filled(pool, 1)
    place = address(first)
    other = filled(pool, 2)
    del first
    assert pool.idle_bytes >= NBYTES
    assert address(filled(pool, 3)) == place
    assert (other == 2).all()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a view": lambda array: array[3:5],
    "a view of a view": lambda array: array.reshape(-1)[7:].view(np.uint8)[::2],
    "a memoryview": memoryview,
    "its base": lambda array: array.base,
    "an array over a memoryview": lambda array: np.asarray(memoryview(array))[1],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_that_something_refers_to_is_not_used_again(kind: str) -> None:
    pool = Pool()
    array = filled(pool, 1)
    kept = VIEWS[kind](array)
    before = bytes(np.asarray(kept).tobytes())
    del array
    gc.collect()
    others = [filled(pool, 2 + at) for at in range(5)]
    assert np.asarray(kept).tobytes() == before
    del kept
    assert pool.idle_bytes > 0
    assert [float(one[0, 0]) for one in others] == [2, 3, 4, 5, 6]


def test_no_more_is_kept_than_the_bound() -> None:
    pool = Pool(3 * NBYTES)
    arrays = [filled(pool, at) for at in range(8)]
    del arrays
    assert pool.idle_bytes == 3 * NBYTES
    pool.keep(NBYTES)
    assert pool.idle_bytes == NBYTES
    pool.keep(0)
    assert pool.idle_bytes == 0
    assert (filled(pool, 5) == 5).all()


def test_sizes_that_are_not_asked_for_any_more_go_first() -> None:
    pool = Pool(2 * NBYTES)
    old = filled(pool, 1, (32, 1024))
    del old
    arrays = [filled(pool, at) for at in range(2)]
    places = {address(array) for array in arrays}
    del arrays
    assert {address(array) for array in [filled(pool, 1), filled(pool, 2)]} <= places


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_what_is_beyond_the_bound_goes_back_to_the_system() -> None:
    def resident() -> int:
        """In bytes; other files of /proc tell what each processor has counted at some time."""
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            (kib,) = (int(line.split()[1]) for line in file if line.startswith("Rss:"))
        return kib << 10

    pool = Pool(0)
    keeper = filled(pool, 1)  # of the first slab: it cannot be unmapped
    before = resident()
    arrays = [filled(pool, at) for at in range(200)]
    assert resident() - before > 100 * NBYTES
    del arrays
    assert resident() - before < 20 * NBYTES
    assert (keeper == 1).all()


def test_memory_comes_back_while_the_pool_is_at_work() -> None:
    pool = Pool()
    array = filled(pool, 1)
    place = address(array)
    with pool._lock:  # as in a garbage collection in the middle of a call
        del array
    assert address(filled(pool, 2)) == place


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no memory for"):
        Pool().empty((1 << 30, 1 << 30), np.uint8)


def test_large_arrays_have_memory_of_their_own() -> None:
    pool = Pool()
    large = filled(pool, 1, (5, 1 << 20))
    small = filled(pool, 2)
    assert (large == 1).all()
    assert (small == 2).all()


def test_threads_never_share_memory() -> None:
    pool = Pool()
    wrong: list[float] = []

    def work(number: int) -> None:
        for at in range(200):
            one = filled(pool, number * 1000 + at)
            two = filled(pool, -1)
            if not (one == number * 1000 + at).all():
                wrong.append(number)
            del two

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("codec", [Codec(), Codec("float16"), Codec(quantize_stored=True)])
def test_tensors_of_an_entry_lie_there(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(_slabs, "empty", pool.empty)
    keys = np.random.default_rng(1).standard_normal((128, 1024), np.float32)
    tensors = codec.encode(keys, keys)
    assert pool.idle_bytes == 0
    stored = sum(tensor.data.nbytes for tensor in tensors)
    decoded = codec.decode(tensors, 128, 1024)
    del tensors
    if codec.dtype != "F32":
        assert pool.idle_bytes >= 0.9 * stored
    before = [array.copy() for array in decoded]
    codec.encode(-keys, -keys)
    for array, same in zip(decoded, before, strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_was_forked_meanwhile_gets_memory() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _slabs._pool._lock:
            held.set()
            done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(120)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for a lock nobody holds any more
        _slabs.empty(SHAPE, np.float32).fill[...] = 1
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_pages_are_the_systems_own() -> None:
    """What the allocator has used before lies in small pages, whatever is asked for later."""
    for _ in range(4):
        np.full(18 << 20, 1, np.uint8)
    array = _slabs.pages((1 << 15, 512))
    assert array.ctypes.data % (2 << 20) == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not array.any()
    few = _slabs.pages((64, 64))
    assert few.ctypes.data % 64 == 0
