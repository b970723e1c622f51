"""FORMAT-AND-API "Modes" and RELIABILITY section 2: readers, the one writer, forks, file modes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem import _fileio, _snapshot

from .helpers import contents, fill, hit_bytes, pair, photograph, run_python

ROW = np.ones((2, 24), np.float32)

WRITES: dict[str, Callable[[Any], object]] = {
    "put": lambda s: s.put(ROW, ROW, layer_idx=0),
    "put_many": lambda s: s.put_many([(ROW, ROW)], layer_idx=0),
    "delete": lambda s: s.delete(1),
    "evict": lambda s: s.evict(0),
    "compact": lambda s: s.compact(),
    "calibrate": lambda s: s.calibrate(0, keys=ROW),
    "flush": lambda s: s.flush(),
}


@pytest.mark.parametrize("call", WRITES)
def test_a_reader_refuses_every_write(call: str, store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.close()
    before = photograph(Path(store.path))
    with hybridmem.open(store.path, mode="r") as reader:
        with pytest.raises(hybridmem.ReadOnlyError):
            WRITES[call](reader)
        assert list(reader) == [1, 2]
    assert photograph(Path(store.path)) == before


def use_as_reader(reader: Any, query: Any) -> None:
    contents(reader)
    reader.query(query, layer_idx=0)
    reader.query_many([query, query], layer_idx=0)
    hybridmem.augmented_kv(query, query, query, reader, layer_idx=0)
    reader.stats()
    assert len(reader.entries) == len(reader)
    reader.refresh()


def test_a_reader_writes_nothing(new_store: Callable[..., Any], rng: np.random.Generator) -> None:
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 20)
    store.delete(3)
    store.close()
    (Path(store.path) / ".hybridmem-0000.tmp").write_bytes(b"an orphan is not a reader's affair")
    before = photograph(Path(store.path))
    with hybridmem.open(store.path, mode="r") as reader:
        use_as_reader(reader, pair(rng, 1)[0])
    assert photograph(Path(store.path)) == before


READ = """
import os, sys
import numpy as np
import crc32c, hybridmem  # the former as the other user may not read where packages are
if len(sys.argv) > 2:
    os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with hybridmem.open(sys.argv[1], mode="r") as store:
    total = sum(float(store.get(i).keys.sum()) for i in store)
    hits = store.query(np.ones(24, np.float32), layer_idx=0)
    store.refresh()
    print(len(store), len(hits), repr(total))
"""


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that other users may enter, which tmp_path is not."""
    path = Path(tempfile.mkdtemp(prefix="hybridmem-test-"))
    path.chmod(0o755)
    yield path
    for sub in path.rglob("*"):
        if sub.is_dir():
            sub.chmod(0o755)
    shutil.rmtree(path)


def test_a_reader_works_where_it_may_not_write(
    public_directory: Path, rng: np.random.Generator
) -> None:
    """Under another uid where the tests run as root, for whom no directory is read-only."""
    path = public_directory / "mem"
    with hybridmem.create(path, embed_dim=24, hdc_dim=512, shard_max_bytes=4096) as store:
        fill(store, rng, 10)
        total = sum(float(store.get(i).keys.sum()) for i in store)
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    before = photograph(path)
    identity = ["65534"] if os.geteuid() == 0 else []
    assert run_python(READ, path, *identity) == f"10 5 {total!r}"
    assert photograph(path) == before


def test_a_reader_sees_one_snapshot_until_refresh(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    store = new_store()
    fill(store, rng, 5)
    store.flush()
    query = pair(rng, 1)[0]
    with hybridmem.open(store.path, mode="r") as reader:
        wanted, stats = contents(reader), reader.stats()
        hits = [hit_bytes(hit) for hit in reader.query(query, 0, 10)]
        fill(store, rng, 2)
        store.delete(1)
        for step in (lambda: None, store.flush, lambda: store.evict(3)):
            step()
            assert contents(reader) == wanted
            assert [hit_bytes(hit) for hit in reader.query(query, 0, 10)] == hits
            assert reader.entries["entry_id"].tolist() == [1, 2, 3, 4, 5]
            assert reader.stats().generation == stats.generation
            assert reader.stats().entries == 5
            assert 6 not in reader
        reader.refresh()
        assert contents(reader) == contents(store)
        assert reader.stats().generation == store.stats().generation
        assert len(reader.query(query, 0, 10)) == 3


def test_a_snapshot_survives_compaction_or_says_it_is_gone(
    new_store: Callable[..., Any], rng: np.random.Generator
) -> None:
    """Open files stay valid; one that was never opened may be gone: never wrong data."""
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 40)
    store.flush()
    wanted = contents(store)
    with hybridmem.open(store.path, mode="r") as reader:
        held = reader.get(1)
        store.evict(2)
        store.compact()
        fill(store, rng, 40)
        store.flush()
        assert list(reader) == sorted(wanted)
        gone = []
        for entry_id in reader:
            try:
                entry = reader.get(entry_id)
            except hybridmem.SnapshotGoneError as error:
                gone.append(str(error))
            else:
                assert entry.keys.tobytes() == wanted[entry_id][1]
        assert held.keys.tobytes() == wanted[1][1]
        assert gone, "no shard was removed: the test shows nothing"
        assert all("refresh" in message for message in gone)
        with pytest.raises(hybridmem.SnapshotGoneError):
            reader.query(pair(rng, 1)[0], 0, 40)
        reader.refresh()
        assert contents(reader) == contents(store)
        assert len(reader.query(pair(rng, 1)[0], 0, 100)) == 42


@pytest.mark.parametrize("call", ["open", "refresh"])
@pytest.mark.parametrize("commits", [1, 3])
def test_a_reader_that_meets_commits_in_progress_reads_again(
    commits: int,
    call: str,
    new_store: Callable[..., Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its looks at index.json and at the other files the writer compacts."""
    store = new_store(shard_max_bytes=4096)
    fill(store, rng, 40)
    store.flush()
    reader = hybridmem.open(store.path, mode="r")
    fill(store, rng, 1)
    store.flush()
    read, left = _snapshot.read_manifest, [30, 20, 10][:commits]

    def then_compacted(directory: Any) -> Any:
        manifest = read(directory)
        if left:
            store.evict(left.pop(0))
            store.compact()
        return manifest

    monkeypatch.setattr(_snapshot, "read_manifest", then_compacted)
    if call == "open":
        reader.close()
        reader = hybridmem.open(store.path, mode="r")
    else:
        reader.refresh()
    with reader:
        assert not left
        assert contents(reader) == contents(store)


def test_refresh_of_a_writer_loses_nothing(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 2)
    store.refresh()
    assert list(store) == [1, 2, 3, 4]


def test_many_readers_beside_the_writer(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 3)
    store.flush()
    readers = [hybridmem.open(store.path, mode="r") for _ in range(5)]
    fill(store, rng, 1)
    store.flush()
    for reader in readers:
        assert list(reader) == [1, 2, 3]
        reader.refresh()
        assert list(reader) == [1, 2, 3, 4]
        reader.close()
    fill(store, rng, 1)
    store.flush()


# --- the one writer ------------------------------------------------------------------------------

TRY_TO_WRITE = """
import sys, hybridmem
try:
    hybridmem.open(sys.argv[1]).close()
except hybridmem.StoreLockedError as error:
    print("locked", sys.argv[1] in str(error))
else:
    print("opened")
"""


def test_a_second_writer_is_refused_and_changes_nothing(
    store: Any, rng: np.random.Generator
) -> None:
    fill(store, rng, 2)
    store.flush()
    fill(store, rng, 2)
    (Path(store.path) / ".hybridmem-0000.tmp").write_bytes(b"perhaps the writer's")
    before = photograph(Path(store.path))
    with pytest.raises(hybridmem.StoreLockedError):
        hybridmem.open(store.path)
    assert run_python(TRY_TO_WRITE, store.path) == "locked True"
    with pytest.raises(hybridmem.StoreExistsError):
        hybridmem.create(store.path, embed_dim=24)
    assert photograph(Path(store.path)) == before
    fill(store, rng, 1)
    store.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 2, 3, 4, 5]


def test_the_lock_survives_readers_and_refused_writers_of_the_same_process(store: Any) -> None:
    """fcntl locks would vanish when any descriptor of the file is closed."""
    for _ in range(3):
        hybridmem.open(store.path, mode="r").close()
        with pytest.raises(hybridmem.StoreLockedError):
            hybridmem.open(store.path)
    assert run_python(TRY_TO_WRITE, store.path) == "locked True"


def test_close_gives_the_lock_back(store: Any) -> None:
    store.close()
    assert run_python(TRY_TO_WRITE, store.path) == "opened"
    hybridmem.open(store.path).close()
    shutil.rmtree(store.path)
    hybridmem.create(store.path, embed_dim=24).close()
    assert run_python(TRY_TO_WRITE, store.path) == "opened"


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(30, "read-only")])
def test_a_writer_that_may_not_write_is_told_to_read(
    error: OSError, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    system_open = _fileio.calls.open

    def refused(name: str, *args: Any) -> int:
        if name == "lock":
            raise error
        return system_open(name, *args)

    monkeypatch.setattr(_fileio.calls, "open", refused)
    with pytest.raises(hybridmem.StoreIOError, match='mode="r" to read only'):
        hybridmem.open(store.path)
    with hybridmem.open(store.path, "r") as reader:
        assert len(reader) == 0


def test_a_killed_writer_leaves_no_lock(store: Any, rng: np.random.Generator) -> None:
    fill(store, rng, 2)
    store.close()
    code = (
        "import sys, time, numpy as np, hybridmem\n"
        "s = hybridmem.open(sys.argv[1])\n"
        "x = np.ones((1, 24), np.float32)\n"
        "s.put(x, x, layer_idx=0); s.flush(); s.put(x, x, layer_idx=0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(Path(hybridmem.__file__).parents[1]))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(hybridmem.StoreLockedError):
            hybridmem.open(store.path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    with hybridmem.open(store.path) as again:
        assert list(again) == [1, 2, 3]


FORK = """
import os, sys
import numpy as np
import hybridmem
from hybridmem import ReadOnlyError

path = sys.argv[1]
store = hybridmem.open(path)
x = np.ones((2, 24), np.float32)
store.put(x, x, layer_idx=0)
store.flush()
store.put(x, x, layer_idx=0)

child = os.fork()
if child == 0:
    status = 0
    calls = [
        lambda: store.put(x, x, layer_idx=0),
        lambda: store.put_many([(x, x)], layer_idx=0),
        lambda: store.delete(1),
        lambda: store.evict(0),
        lambda: store.compact(),
        lambda: store.calibrate(0, keys=x),
        lambda: store.flush(),
    ]
    for number, call in enumerate(calls, 1):
        try:
            call()
        except ReadOnlyError:
            continue
        except BaseException as error:
            print("write", number, repr(error), flush=True)
        status = number
    store.close()
    try:
        hybridmem.open(path)
    except hybridmem.StoreLockedError:
        pass
    else:
        status = 20
    os._exit(status)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

grandchild = os.fork()
if grandchild == 0:
    try:
        hybridmem.open(path)
    except hybridmem.StoreLockedError:
        os._exit(0)
    os._exit(1)
print("still locked", os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
store.put(x, x, layer_idx=0)
store.close()
with hybridmem.open(path) as store:
    print(list(store))
"""


def test_a_forked_child_cannot_write_and_does_not_unlock(store: Any) -> None:
    store.close()
    assert run_python(FORK, store.path).splitlines() == ["child 0", "still locked 0", "[1, 2, 3]"]


FORK_EXIT = """
import gc, os, sys
import numpy as np
import hybridmem

path = sys.argv[1]
x = np.ones((2, 24), np.float32)
with hybridmem.open(path) as store:
    store.put(x, x, layer_idx=0)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if child == 0:      # the child left the with block: nothing may have been written by it
    del store
    gc.collect()
    os._exit(0)
with hybridmem.open(path) as store:
    print(status, list(store))
"""


def test_a_child_that_leaves_the_with_block_writes_nothing(store: Any) -> None:
    store.close()
    assert run_python(FORK_EXIT, store.path) == "0 [1]"


# --- file modes ----------------------------------------------------------------------------------

MODES = """
import os, sys
import numpy as np
import hybridmem
os.umask(int(sys.argv[2], 8))
x = np.ones((4, 24), np.float32)
with hybridmem.create(sys.argv[1], embed_dim=24, shard_max_bytes=2000) as store:
    for _ in range(3):
        for _ in range(10):
            store.put(x, x, layer_idx=0)
        store.flush()
        store.evict(12)
    store.compact()
with hybridmem.open(sys.argv[1]) as store:
    store.put(x, x, layer_idx=0)
modes = {os.stat(file).st_mode & 0o7777 for file in os.scandir(sys.argv[1])}
print(*sorted(map(oct, modes)))
"""


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_files_get_0666_less_the_umask(umask: int, tmp_path: Path) -> None:
    assert run_python(MODES, tmp_path / "mem", oct(umask)[2:]) == oct(0o666 & ~umask)


def test_file_modes_are_kept_by_later_commits(store: Any, rng: np.random.Generator) -> None:
    """A store that its owner opened to a group stays so far as each new file's own mode goes."""
    fill(store, rng, 2)
    store.flush()
    assert {oct(p.stat().st_mode & 0o7000) for p in Path(store.path).iterdir()} == {"0o0"}
    assert all(p.is_file() and not p.is_symlink() for p in Path(store.path).iterdir())
