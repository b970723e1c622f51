"""Conversations: copied, saved, loaded, forgotten, held in several threads."""

from __future__ import annotations

import copy
import errno
import io
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _fileio
from hybridmem.integrations import rwkv_x

from .helpers import (
    EVERYTHING,
    MARKS,
    TOLERANCE,
    attended_rows,
    largest,
    load,
    reference,
    run,
    text,
    torch,
)

pytestmark = MARKS


@pytest.fixture
def held(checkpoint: Path, tmp_path: Path) -> Any:
    """A model with a memory, and a state after 120 tokens of `text(200)`."""
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state = run(model, text(200)[:120], [100] + [1] * 20)
        yield model, memory, state


def test_plain_copies_of_a_state_go_on(held: Any, checkpoint: Path) -> None:
    model, _, state = held
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(state), torch.load(buffer, weights_only=True), state]
    expected = reference(checkpoint, text(200))[120:]
    for one in copies:
        logits, _ = run(model, text(200)[120:], [40] + [1] * 40, one)
        assert largest(logits - expected) < TOLERANCE


def test_new_state_is_what_upstream_makes_of_none(held: Any) -> None:
    model, memory, _ = held
    expected, theirs = run(model, text(30), [20] + [1] * 10)
    logits, ours = run(model, text(30), [20] + [1] * 10, memory.new_state())
    assert torch.equal(logits, expected)
    assert [t.shape for t in ours["rwkv"]] == [t.shape for t in theirs["rwkv"]]
    assert [t.dtype for t in ours["rwkv"]] == [t.dtype for t in theirs["rwkv"]]
    assert ours["attn"][0].keys() == theirs["attn"][0].keys()


def test_save_and_load_bit_for_bit(held: Any, tmp_path: Path) -> None:
    model, memory, state = held
    memory.top_k = 2
    _, state = run(model, text(3, seed=8), [1] * 3, state)  # between two searches
    memory.save(state, tmp_path / "c.pt")
    expected, _ = run(model, text(30, seed=9), [1] * 30, copy.deepcopy(state))
    memory._tier.let_go()
    logits, _ = run(model, text(30, seed=9), [1] * 30, memory.load(tmp_path / "c.pt"))
    assert torch.equal(logits, expected)


def test_save_flushes_the_store_first(held: Any, tmp_path: Path) -> None:
    _, memory, state = held
    assert memory.store.stats().unflushed_bytes > 0
    memory.save(state, tmp_path / "c.pt")
    assert memory.store.stats().unflushed_bytes == 0
    with hybridmem.open(tmp_path / "mem", mode="r") as reader:
        for layer in state["attn"]:
            assert all(number in reader for number in layer["hybridmem"]["entries"].tolist())


def test_snapshot_holds_only_what_the_state_is_made_of(held: Any, tmp_path: Path) -> None:
    _, memory, state = held
    base = torch.zeros(1_000_000)
    state["attn"][0]["ffn_x_prev"] = base[:128].copy_(state["attn"][0]["ffn_x_prev"])
    memory.save(state, tmp_path / "c.pt")
    assert (tmp_path / "c.pt").stat().st_size < 1_000_000


class _Failing(_fileio.Syscalls):
    """Fails every call of one name on snapshots."""

    def __init__(self, name: str) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.EIO, "made to fail")

        setattr(self, name, fail)


@pytest.mark.parametrize("call", ["open", "writev", "fsync", "rename"])
def test_failed_save_leaves_the_old_snapshot(
    held: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    model, memory, state = held
    path = tmp_path / "c.pt"
    memory.save(state, path)
    old = path.read_bytes()
    _, state = run(model, text(10), [1] * 10, state)
    memory.store.flush()
    with monkeypatch.context() as patched:
        patched.setattr(_fileio, "calls", _Failing(call))
        with pytest.raises(hybridmem.StoreIOError):
            memory.save(state, path)
    assert path.read_bytes() == old
    assert memory.load(path)["attn"][0]["hybridmem"]["seen"] == 120


def test_snapshot_is_synced_before_it_gets_its_name(
    held: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, memory, state = held
    memory.store.flush()
    made: list[str] = []

    class Noting(_fileio.Syscalls):
        def writev(self, *args: Any) -> int:
            made.append("write")
            return super().writev(*args)

        def fsync(self, fd: int) -> None:
            made.append("fsync")
            super().fsync(fd)

        def rename(self, *args: Any) -> None:
            made.append("rename")
            super().rename(*args)

    monkeypatch.setattr(_fileio, "calls", Noting())
    memory.save(state, tmp_path / "c.pt")
    assert made[-4:] == ["write", "fsync", "rename", "fsync"]


def test_killed_processes_leave_a_whole_conversation(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever a process was at when it was killed, what it last saved goes on."""
    model, tokens = load(checkpoint, 8), text(2000)
    path, rng = tmp_path / "c.pt", random.Random(0)

    def attached() -> Any:
        return rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8)

    def seen_by(state: Any) -> int:
        return int(state["attn"][0]["hybridmem"]["seen"])

    def talk(acknowledge: int) -> None:
        with attached() as memory:
            state = memory.load(path) if path.exists() else memory.new_state()
            at = seen_by(state) if path.exists() else 0
            while at + 5 < len(tokens) - 20:
                for piece in (4, 1):
                    _, state = model.forward(tokens[at : at + piece], state)
                    at += piece
                memory.save(state, path)
                os.write(acknowledge, at.to_bytes(4, "little"))

    for _ in range(6):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                talk(writing)
            finally:
                os._exit(1)
        os.close(writing)
        for _ in range(rng.randrange(2, 12)):
            told = os.read(reading, 4)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 4):
            told = more
        os.close(reading)
        acknowledged = int.from_bytes(told, "little")
        with attached() as memory:
            state = memory.load(path)
            at = seen_by(state)
            assert acknowledged <= at <= acknowledged + 5
            logits, _ = run(model, tokens[at : at + 20], [9] + [1] * 11, state)
    assert at > 30
    expected = reference(checkpoint, tokens[: at + 20])[at:]
    assert largest(logits - expected) < TOLERANCE


def test_damaged_snapshots_are_refused(held: Any, tmp_path: Path) -> None:
    _, memory, state = held
    path = tmp_path / "c.pt"
    memory.save(state, path)
    data = path.read_bytes()
    for at in range(1000, len(data), len(data) // 40):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            loaded = memory.load(path)
        except hybridmem.CorruptStoreError:
            continue
        assert _same(loaded, state)  # the byte was padding
    path.write_bytes(data[:-1000])
    with pytest.raises(hybridmem.CorruptStoreError):
        memory.load(path)
    torch.save({"other": 1}, path)
    with pytest.raises(hybridmem.CorruptStoreError, match="no snapshot"):
        memory.load(path)
    with pytest.raises(FileNotFoundError):
        memory.load(tmp_path / "none.pt")


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left.nan_to_num(-7.0), right.nan_to_num(-7.0))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def test_state_of_another_store_is_refused(held: Any, checkpoint: Path, tmp_path: Path) -> None:
    _, memory, state = held
    memory.save(state, tmp_path / "c.pt")
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "other") as other:
        run(model, text(300), [300])
        other.store.flush()
        other.store.flush()
        with pytest.raises(ValueError, match="another store"):
            model.forward([1], state)
        with pytest.raises((ValueError, hybridmem.CorruptStoreError), match="another"):
            other.load(tmp_path / "c.pt")


def test_older_copy_of_the_store_is_refused(held: Any, checkpoint: Path, tmp_path: Path) -> None:
    model, memory, state = held
    memory.store.flush()
    shutil.copytree(tmp_path / "mem", tmp_path / "backup")
    _, state = run(model, text(40), [40], state)
    memory.save(state, tmp_path / "c.pt")
    with (
        rwkv_x.attach(load(checkpoint, 8), tmp_path / "backup") as other,
        pytest.raises(hybridmem.CorruptStoreError, match="older copy"),
    ):
        other.load(tmp_path / "c.pt")


def test_ids_that_were_never_flushed_are_not_mistaken(
    held: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """A state kept without memory.save names entries that died with the process."""
    model, memory, state = held
    memory.store.flush()
    shutil.copytree(tmp_path / "mem", tmp_path / "after_crash")
    _, state = run(model, text(40), [40], state)
    state = copy.deepcopy(state)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "after_crash", chunk_tokens=8):
        run(model, text(60, seed=7), [60])  # takes the same ids
        with pytest.raises(ValueError, match=r"memory\.save"):
            model.forward([1], state)


def test_forget_a_conversation(held: Any, tmp_path: Path) -> None:
    model, memory, state = held
    _, other = run(model, text(80, seed=3), [80])
    theirs = {n for layer in other["attn"] for n in layer["hybridmem"]["entries"].tolist()}
    memory.save(state, tmp_path / "c.pt")
    count = len(memory.store) - len(theirs)
    assert count > 0
    assert memory.forget(tmp_path / "c.pt") == count
    assert set(memory.store) == theirs
    assert not (tmp_path / "c.pt").exists()
    with hybridmem.open(tmp_path / "mem", mode="r") as reader:
        assert set(reader) == theirs
    assert memory.forget(other) == len(theirs)
    assert "hybridmem" not in other["attn"][0]


def test_a_branch_attends_to_nothing_that_was_forgotten(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before its next search nor after it."""
    model, memory, state = held
    _, state = run(model, text(3, seed=8), [1] * 3, state)  # between two searches
    branch, hidden = copy.deepcopy(state), copy.deepcopy(state)
    entries = [memory.store.get(number) for number in memory.store]
    forgotten = {row.tobytes() for one in entries for row in np.hstack((one.keys, one.values))}
    seen = attended_rows(monkeypatch)
    run(model, [1], [1], branch)
    assert {row.tobytes() for row in seen[0]} & forgotten
    seen.clear()
    memory.forget(state)
    run(model, text(30, seed=9), [1] * 30, hidden)
    assert len(seen) == 60
    assert not {row.tobytes() for rows in seen for row in rows} & forgotten


def test_branch_of_a_forgotten_conversation_goes_on(held: Any) -> None:
    model, memory, state = held
    branch = copy.deepcopy(state)
    memory.forget(state)
    logits, branch = run(model, text(40), [20] + [1] * 20, branch)
    assert torch.isfinite(logits).all()
    assert len(memory.store) > 0  # its own new entries


def test_threads_hold_conversations_of_their_own(held: Any, checkpoint: Path) -> None:
    model, _, _ = held
    texts = [text(90, seed=30 + number) for number in range(4)]
    results: dict[int, Any] = {}

    def talk(number: int) -> None:
        results[number] = run(model, texts[number], [50] + [1] * 20 + [20])[0]

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in enumerate(texts):
        assert largest(results[number] - reference(checkpoint, tokens)) < TOLERANCE


def test_state_from_before_attach_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(100)
    model = load(checkpoint, EVERYTHING)
    _, state = run(model, tokens[:60], [60])
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8):
        logits, _ = run(model, tokens[60:], [1] * 20 + [20], state)
    assert largest(logits - reference(checkpoint, tokens)[60:]) < TOLERANCE


def test_state_goes_on_after_detach_and_back(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, 8)
    for _ in range(2):
        state = None
        with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8):
            _, state = run(model, text(40), [40])
        _, state = run(model, text(30), [30], state)
        with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8):
            logits, _ = run(model, text(20), [10] + [1] * 10, state)
        assert torch.isfinite(logits).all()


def test_two_states_that_share_what_they_hold_go_on_apart(held: Any) -> None:
    """Rows are written behind those of a token before, and a state from before is still that."""
    model, _, state = held
    _, state = run(model, text(2, seed=8), [1] * 2, state)

    def branch() -> Any:
        return {"rwkv": list(state["rwkv"]), "attn": [dict(layer) for layer in state["attn"]]}

    expected = [run(model, text(9, seed=seed), [1] * 9, copy.deepcopy(state))[0] for seed in (1, 2)]
    one, other = branch(), branch()
    got: list[list[Any]] = [[], []]
    for at in range(9):
        for seed, mine, logits in ((1, one, got[0]), (2, other, got[1])):
            logits.append(run(model, text(9, seed=seed)[at : at + 1], [1], mine)[0])
    for logits, wanted in zip(got, expected, strict=True):
        assert largest(torch.cat(logits) - wanted) < TOLERANCE
