"""What is found on a disk, without a cluster: other files, damage, other clusters; and copies."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import hybridmem
from hybridmem import verify

from .helpers import CONFIG, matrix
from .nodes import HOW

pytest.importorskip("ray", reason=HOW)

ABOUT = {
    "format": "hybridmem-cluster",
    "format_version": 1,
    "cluster_id": "a" * 32,
    "partitions": 2,
    "replicas": 1,
    "route": "hash",
    "remote": None,
    "config": CONFIG,
}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk with a partition of a cluster."""
    path = tmp_path / "disk"
    hybridmem.create(path / "partition-0001", **CONFIG).close()
    (path / "cluster.json").write_text(json.dumps(ABOUT))
    return path


def look(path: Path, make: bool = False) -> Any:
    from hybridmem.integrations.ray import _actors

    return _actors._look(str(path), make)


def test_what_is_no_partition_is_passed_over(disk: Path) -> None:
    """A process that died leaves copies beside the partitions."""
    for name in ("partition-0001.sent", "partition-1", "partition-00001", "partition-x"):
        hybridmem.create(disk / name, **CONFIG).close()
    (disk / "partition-0000").mkdir()
    assert look(disk)[2:] == (ABOUT, (1,), {})


def test_copies_of_a_process_that_died_go(disk: Path) -> None:
    """Their links keep the bytes of what was deleted."""
    from hybridmem.integrations.ray._partition import Partition

    for name in ("sent", "lent", "taken"):
        hybridmem.create(disk / f"partition-0001.{name}", **CONFIG).close()
    Partition(disk / "partition-0001", "r").close()
    assert len(list(disk.iterdir())) == 5  # a reader removes nothing
    Partition(disk / "partition-0001").close()
    assert sorted(one.name for one in disk.iterdir()) == ["cluster.json", "partition-0001"]


def test_disks_of_nodes_that_were_set_up_alike_differ(tmp_path: Path) -> None:
    """Device and inode are the same on them."""
    seen = [look(tmp_path / name, make=True)[1] for name in "ab"]
    assert seen[0][0] != seen[1][0]
    assert [look(tmp_path / name)[1] for name in "ab"] == seen
    assert [look(tmp_path / name, make=True)[1] for name in "ab"] == seen


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "null", '"\\ud800', "[" * 99999, '{"cluster_id": "x"}',
        *(
            json.dumps(ABOUT | change)
            for change in (
                {"partitions": "2"}, {"partitions": True}, {"partitions": 0}, {"replicas": None},
                {"route": "both"}, {"config": {}},
                {"config": CONFIG | {"seed": "x"}}, {"remote": 3}, {"cluster_id": 3},
                {"format": "other"}, {"format_version": "1"},
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(text: str, disk: Path) -> None:
    (disk / "cluster.json").write_text(text)
    assert f"{disk}/cluster.json is damaged" in look(disk)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"view": "x"}', '{"view": 1e400}'])
def test_a_damaged_view_is_named(text: str, disk: Path) -> None:
    from hybridmem.integrations.ray._partition import Partition

    for name in ("known-0001.json", "partition-0001.json"):
        (disk / name).write_text(text)
    assert f"{disk}/known-0001.json is damaged" in look(disk)
    partition = Partition(disk / "partition-0001", "r")
    with pytest.raises(hybridmem.CorruptStoreError, match=r"partition-0001\.json is damaged"):
        partition.state()
    partition.close()


def test_disks_that_do_not_agree_are_refused(disk: Path) -> None:
    from hybridmem.integrations import ray as hm
    from hybridmem.integrations.ray._actors import Disk

    def found(**change: Any) -> Disk:
        about = ABOUT | change
        return Disk("node", "host", str(disk), ("id", 1), about, (1,), {})

    assert hm._about("root", [found(), found()], {}) == ABOUT
    with pytest.raises(hybridmem.CorruptStoreError, match="differ"):
        hm._about("root", [found(), found(partitions=3)], {})
    with pytest.raises(hybridmem.CorruptStoreError, match=r"a partition 1, .* there are 1$"):
        hm._about("root", [found(partitions=1)], {})


def test_a_disk_is_given_to_one_cluster(tmp_path: Path) -> None:
    from hybridmem.integrations.ray import _actors

    outcomes = []

    def claim(number: int) -> None:
        outcomes.append(_actors._claimed(str(tmp_path), ABOUT | {"cluster_id": f"{number:032x}"}))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [value for kind, value in outcomes if kind == "error"]
    assert len(errors) == 7
    assert all(isinstance(error, hybridmem.StoreExistsError) for error in errors)


@pytest.mark.parametrize(
    "options",
    [
        {name: value}
        for name in ("deadline_s", "write_deadline_s")
        for value in (0, -1, math.nan, math.inf, "5", None, True)
    ]
    + [
        {name: value}
        for name in ("max_inflight_bytes", "max_unflushed_bytes", "search_threads")
        for value in (-1, 1.5, "1", None, True)
    ]
    + [{"search_threads": 0}],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    from hybridmem.integrations import ray as hm

    (name,) = options
    for call in (
        lambda: hm.create("/x", partitions=1, embed_dim=4, **options),
        lambda: hm.open("/x", **options),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got "):
            call()


# -- the journal ----------------------------------------------------------------------------------


def test_what_comes_late_or_too_early_keeps_nobody_waiting(tmp_path: Path) -> None:
    from hybridmem.integrations.ray._partition import Behind, Delete, Partition
    from hybridmem.integrations.ray._views import NOTHING

    partition = Partition(tmp_path / "partition-0000")
    partition.create(hybridmem.Config(**CONFIG))
    partition.catch_up([], 0, NOTHING)
    with pytest.raises(Behind):
        partition.apply(2, Delete(2))  # before the first
    partition.catch_up([(1, Delete(1))], 1, NOTHING)
    begun = time.monotonic()
    with pytest.raises(Behind, match="did not arrive"):
        partition.wait_for(2, 60)
    assert time.monotonic() - begun < 30
    partition.catch_up([(1, Delete(1)), (2, Delete(2))], 2, NOTHING)
    partition.catch_up([], 1, NOTHING)  # late
    partition.wait_for(2, 0)
    partition.close()


# -- copies ---------------------------------------------------------------------------------------


class Copies:
    """Two replicas that flush at different times, and the copy that either may send."""

    def __init__(self, path: Path) -> None:
        pytest.importorskip("fsspec", reason="needs fsspec: pip install 'hybridmem[remote]'")
        self.path, self.url = path, f"file://{path}/copy"
        self.stores = [hybridmem.create(path / name, **CONFIG) for name in "ab"]
        self.sent = 0

    def put(self, *flushing: int) -> None:
        """Put an entry into both, at one time as the writer of a cluster does."""
        with mock.patch("time.time_ns", return_value=time.time_ns()):
            for number, store in enumerate(self.stores):
                store.put(matrix(1), matrix(2), 0)
                if number in flushing:
                    store.flush()

    def send(self, number: int) -> None:
        from hybridmem.integrations.ray import _remote

        self.sent += 1
        snapshot = self.path / f"sent{self.sent}"
        self.stores[number].snapshot(snapshot)
        _remote.upload(snapshot, self.url)

    def held(self) -> list[int]:
        """The entries of the copy, all of which verify."""
        from hybridmem.integrations.ray import _remote

        self.sent += 1
        path = self.path / f"fetched{self.sent}"
        path.mkdir()
        for name, pieces in _remote.download(self.url):
            (path / name).write_bytes(b"".join(map(bytes, pieces)))
        assert verify.verify(path).ok
        with hybridmem.open(path, mode="r") as store:
            return list(store)

    def close(self) -> None:
        for store in self.stores:
            store.close()


def test_replicas_take_turns_at_the_copy(tmp_path: Path) -> None:
    """Their shards of one name differ, and so do the generations of what is the same."""
    copies = Copies(tmp_path)
    for _ in range(4):
        copies.put(0)
    copies.put(0, 1)
    copies.send(0)
    for number in (1, 0, 1):
        copies.put(0, 1)
        copies.send(number)
        assert copies.held() == list(copies.stores[0])
    for store in copies.stores:
        store.delete(2)
        store.flush()
    copies.send(1)
    assert copies.held() == list(copies.stores[0])
    commits = tmp_path / "copy" / "commits"
    assert len(list(commits.iterdir())) == 1
    stored = {path.name for path in (tmp_path / "copy" / "shards").iterdir()}
    assert len(stored) == len(list((tmp_path / "b").glob("shard_*")))
    copies.send(0)  # the same entries
    assert {path.name for path in (tmp_path / "copy" / "shards").iterdir()} == stored
    copies.close()


def test_a_copy_that_is_ahead_is_not_replaced(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    copies.put(0, 1)
    copies.stores[0].put(matrix(1), matrix(2), 0)
    copies.stores[0].flush()
    copies.send(0)
    with pytest.raises(hybridmem.StoreIOError, match="come further than the partition"):
        copies.send(1)
    copies.stores[1].put(matrix(1), matrix(2), 0)  # as many entries, of another history
    copies.stores[1].flush()
    with pytest.raises(hybridmem.StoreIOError, match="come further than the partition"):
        copies.send(1)
    assert copies.held() == [1, 2]
    copies.close()


def test_a_copy_that_was_not_finished_is_none(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    copies.put(0)
    copies.send(0)
    copies.put(0)
    copies.send(0)
    (commit,) = (tmp_path / "copy" / "commits").iterdir()
    copies.put(0)
    cut = commit.with_name(f"{4:020d}-{1:020d}-{0:020d}-00000000")
    cut.mkdir()
    (cut / "entries.bin").write_bytes(b"")
    assert copies.held() == [1, 2]
    copies.send(0)
    assert copies.held() == [1, 2, 3]
    assert not cut.exists()
    copies.close()


def test_what_is_taken_replaces_nothing_before_all_is_there(tmp_path: Path) -> None:
    from hybridmem.integrations.ray._partition import Partition

    with hybridmem.create(tmp_path / "partition-0000", **CONFIG) as store:
        store.put(matrix(1), matrix(2), 0)
    with hybridmem.create(tmp_path / "other", **CONFIG) as other:
        for _ in range(3):
            other.put(matrix(1), matrix(2), 0)
    files = [
        (path.name, [path.read_bytes()])
        for path in sorted((tmp_path / "other").iterdir())
        if path.name != "lock"
    ]

    def ends_early() -> Any:
        yield files[0]
        raise hybridmem.StoreIOError("the other went away")

    partition = Partition(tmp_path / "partition-0000")
    with pytest.raises(hybridmem.StoreIOError, match="went away"):
        partition.replace(ends_early())
    assert partition.read_count() == 1
    partition.replace(files)
    assert partition.read_count() == 3
    partition.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "partition-0000"]
