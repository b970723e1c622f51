"""Actors and nodes that die, hang, or have no space: named, waited for, or replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hybridmem

from .helpers import (
    LAYERS,
    answers,
    at,
    fill_disk,
    free_disk,
    matrix,
    pid,
    put,
    replicas,
    stopped,
    within_deadline,
)
from .nodes import HOW, Nodes

ray: Any = pytest.importorskip("ray", reason=HOW)


def test_killed_actor_opens_again_and_has_all_that_was_put(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(30))
    memory.flush()
    ids = put(memory, range(30, 45))
    memory.delete(3)
    wanted = answers(memory)
    before = pid(at(memory, 1))
    ray.kill(at(memory, 1), no_restart=False)
    assert answers(memory) == wanted
    assert pid(at(memory, 1)) != before
    assert len(memory) == 44
    ray.kill(at(memory, 0), no_restart=False)  # and so does a flush
    memory.flush()
    assert not any(owner.journal for owner in memory._owners.all)
    ray.kill(at(memory, 0), no_restart=False)
    assert answers(memory) == wanted
    assert memory.get(ids[-1]).keys.tobytes() == matrix(44).tobytes()


def test_slow_partition_is_waited_for_and_named_at_the_deadline(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(30))
    wanted = answers(memory)
    left = [one[:2] for one in wanted[0] if one[0] % 2 != 1]

    def named() -> None:
        memory.on_missing = "raise"
        begun = time.monotonic()
        with pytest.raises(hybridmem.PartitionError, match="partition-0001") as caught:
            memory.query(matrix(1000, 1), 0)
        assert 0.9 * memory.deadline_s < time.monotonic() - begun < 40
        assert caught.value.partitions == ("partition-0001",)
        memory.on_missing = "report"
        hits = memory.query(matrix(1000, 1), 0, 50)
        assert hits.missing == ("partition-0001",)
        assert [(hit.entry_id, hit.score) for hit in hits] == left
        assert memory.query_layers({0: matrix(1000, 1)})[0].missing == ("partition-0001",)
        with pytest.raises(hybridmem.PartitionError, match="partition-0001"):
            len(memory)

    with stopped(at(memory, 1)):
        within_deadline(memory, named)
    memory.deadline_s, memory.on_missing = 60, "raise"
    process = pid(at(memory, 1))
    os.kill(process, signal.SIGSTOP)
    threading.Timer(1.8, os.kill, (process, signal.SIGCONT)).start()
    assert answers(memory) == wanted  # it is waited for as long as that takes
    assert memory.query(matrix(1000, 1), 0).missing == ()


@pytest.mark.parametrize("replicas", [1, 2])
def test_actor_that_is_killed_for_good_is_replaced_by_repair(create: Any, replicas: int) -> None:
    memory = create(route="hash", replicas=replicas, partitions=3 - replicas)
    put(memory, range(30))
    memory.flush()
    put(memory, range(30, 45))
    wanted = answers(memory)
    dead = str(memory._owners.all[-1].replicas[0])
    said = rf"{memory._owners.all[-1]}.*repair\(\) does"
    ray.kill(at(memory, -1))
    begun = time.monotonic()
    if replicas == 1:
        with pytest.raises(hybridmem.PartitionError, match=said):
            answers(memory)
    else:
        assert answers(memory) == wanted
    with pytest.raises(hybridmem.PartitionError, match=said):
        memory.flush()
    assert time.monotonic() - begun < 30  # nothing to wait for
    assert memory.repair() == [dead]
    memory.flush()
    memory._owners.all[-1].replicas.reverse()  # what was made holds all of it
    assert answers(memory) == wanted
    assert not any(owner.journal for owner in memory._owners.all)


def test_repair_replaces_what_is_damaged_where_it_is(create: Any, nodes: Nodes) -> None:
    memory = create(replicas=2, partitions=1)
    put(memory, range(12))
    memory.flush()
    wanted = answers(memory)
    one = replicas(memory, 0)[0]
    index = Path(one.disk.root) / "partition-0000" / "index.json"
    index.write_bytes(index.read_bytes()[:-20])
    ray.kill(one.actor, no_restart=False)
    assert answers(memory) == wanted
    assert memory.repair() == [str(one)]
    memory.flush()
    memory._owners.all[0].replicas.reverse()
    assert answers(memory) == wanted


def test_repair_names_who_does_not_answer(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = create(partitions=1)
    look_s = "hybridmem.integrations.ray._repair._LOOK_S"
    monkeypatch.setattr(look_s, 1.0)
    slow = str(memory._owners.all[0].replicas[0])
    with (
        stopped(at(memory, 0)),
        pytest.raises(hybridmem.PartitionError, match="no answer within 1 s") as caught,
    ):
        memory.repair()
    assert caught.value.partitions == (slow,)
    monkeypatch.setattr(look_s, 60.0)
    assert memory.repair() == []


def test_what_keeps_a_node_from_taking_part_is_told(nodes: Nodes) -> None:
    from hybridmem.integrations import ray as hm

    with pytest.raises(ValueError, match=r"0 disks of their own: \[\]; .*ValueError: "):
        hm.create("/mem\0", partitions=1, embed_dim=4)


def test_layers_of_other_partitions_are_not_missed(create: Any) -> None:
    memory = create(route="layer", on_missing="report")
    put(memory, range(30))

    def only_one() -> None:
        found = memory.query_layers({layer: matrix(1, 1) for layer in range(LAYERS)})
        assert [found[layer].missing for layer in range(LAYERS)] == [(), ("partition-0001",), ()]
        assert [len(found[layer]) for layer in range(LAYERS)] == [5, 0, 5]

    with stopped(at(memory, 1)):
        within_deadline(memory, only_one)


def test_another_replica_answers_for_a_slow_one(create: Any) -> None:
    memory = create(replicas=2, partitions=2, route="hash")
    put(memory, range(30))
    wanted = answers(memory)

    def is_quick() -> bool:
        begun = time.monotonic()
        assert answers(memory) == wanted
        return time.monotonic() - begun < memory.deadline_s / 2

    def other_answers() -> None:
        assert answers(memory) == wanted
        assert any(is_quick() for _ in range(3))  # the slow one is not asked first any more

    with stopped(at(memory, 0)):
        within_deadline(memory, other_answers)


def test_full_disk_of_one_partition_is_named(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(30))
    memory.flush()
    put(memory, range(30, 60))
    wanted = answers(memory)
    fill_disk(at(memory, 1))
    with pytest.raises(hybridmem.PartitionFullError, match="partition-0001") as caught:
        memory.flush()
    assert isinstance(caught.value, hybridmem.StoreFullError)
    assert len(caught.value.partitions) == 1
    assert answers(memory) == wanted
    assert [len(owner.journal) for owner in memory._owners.all] == [0, 15]
    ray.kill(at(memory, 1), no_restart=False)  # with what the full disk did not take
    assert answers(memory) == wanted
    memory.flush()
    assert [len(owner.journal) for owner in memory._owners.all] == [0, 0]


def test_put_that_a_full_disk_refused_is_never_passed_over(create: Any) -> None:
    memory = create(partitions=1, shard_max_bytes=1000)
    put(memory, range(3))
    fill_disk(at(memory, 0))
    put(memory, range(3, 9))  # shards are full: they are to be written
    with pytest.raises(hybridmem.PartitionFullError, match="no space left"):
        answers(memory)
    with pytest.raises(hybridmem.PartitionFullError):
        memory.flush()
    free_disk(at(memory, 0))
    assert sum(map(len, answers(memory))) == 9
    memory.flush()


def test_puts_wait_for_a_partition_that_does_not_take_them(create: Any) -> None:
    chunk = matrix(1, 64)
    room = 10 * 2 * chunk.nbytes
    memory = create(partitions=1, write_deadline_s=1.0, max_inflight_bytes=room)
    taken = []
    with stopped(at(memory, 0)):
        begun = time.monotonic()
        for _ in range(10):
            taken.append(memory.put(chunk, chunk, 0))
        assert memory._owners.inflight_bytes == room
        with pytest.raises(hybridmem.PartitionError, match="partition-0000"):
            memory.put(chunk, chunk, 0)
        assert 0.9 < time.monotonic() - begun < 30
    memory._owners.write_deadline_s = 60
    assert sorted(hit.entry_id for hit in memory.query(chunk, 0, 50)) == taken
    memory.put(chunk, chunk, 0)
    assert len(memory) == 11


def test_puts_flush_what_is_too_much_to_keep(create: Any) -> None:
    chunk = matrix(1, 64)
    memory = create(partitions=1, max_unflushed_bytes=5 * 2 * chunk.nbytes)
    for _ in range(20):
        memory.put(chunk, chunk, 0)
        assert memory._owners.all[0].journal_bytes <= 5 * 2 * chunk.nbytes
    assert memory.stats().unflushed_bytes <= 5 * 2 * chunk.nbytes
    assert len(memory) == 20


def test_a_cluster_that_cannot_be_made_leaves_nothing(
    create: Any, root: str, nodes: Nodes, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: pip install 'hybridmem[remote]'")
    name = root.split("/")[1]
    paths = [nodes.disks / disk / name for disk in ("head", "a", "b")]
    for path in paths:
        path.mkdir(parents=True)
        (path / "partition-0001").write_text("in the way")
    options = {"partitions": 3, "route": "hash", "remote": f"file://{tmp_path}/copies"}
    with pytest.raises(hybridmem.PartitionError, match=r"partition-0001.*is a file"):
        create(**options)
    for path in paths:
        left = {one.name for one in path.iterdir()}
        assert left <= {"disk.json", "lock", "partition-0001"}
        (path / "partition-0001").unlink()
    put(create(**options), range(3))


def test_flush_names_the_replica_that_did_not(create: Any, root: str) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(replicas=2, partitions=2, route="hash")
    put(memory, range(20))
    memory.flush()
    put(memory, range(20, 30))
    fill_disk(at(memory, 1, 1))
    behind = str(replicas(memory, 1)[1])
    with pytest.raises(hybridmem.PartitionFullError) as caught:
        memory.flush()
    assert caught.value.partitions == (behind,)
    wanted = answers(memory)
    memory._owners.end()  # as if this process died: what is on the disks differs
    memory = hm.open(root, deadline_s=60)
    try:
        assert answers(memory) == wanted
        assert [len(one) for one in memory.replicas()] == [2, 1]
        with pytest.raises(hybridmem.PartitionError, match=r"1 of 2 replicas"):
            memory.flush()
        (made,) = memory.repair()
        assert made.startswith("partition-0001")
        memory.flush()
        ray.kill(at(memory, 1, 0), no_restart=False)
        assert answers(memory) == wanted
    finally:
        memory._owners.end()


def test_second_writer_is_refused_and_readers_are_not(create: Any, root: str) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(route="hash")
    put(memory, range(30))
    memory.flush()
    wanted = answers(memory)
    with pytest.raises(hybridmem.StoreLockedError):
        hm.open(root)
    with hm.open(root, mode="r", deadline_s=60) as reader:
        assert answers(reader) == wanted
        assert reader.store_id == memory.store_id
        put(memory, range(30, 33))
        memory.flush()
        assert len(reader) == 30
        assert reader.refresh()
        assert answers(reader) == answers(memory)
        with pytest.raises(hybridmem.ReadOnlyError):
            reader.put(matrix(1), matrix(1), 0)
    memory.close()
    with pytest.raises(hybridmem.StoreClosedError):
        memory.query(matrix(1), 0)
    with hm.open(root, deadline_s=60) as again:
        assert sum(map(len, answers(again))) == 33
        assert put(again, range(33, 34)) == [34]


def test_partition_that_was_not_there_when_it_was_opened(
    create: Any, root: str, nodes: Nodes
) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(route="hash")
    put(memory, range(30))
    wanted = answers(memory)
    memory.close()
    (path,) = nodes.disks.glob(f"*/{root.split('/')[1]}/partition-0001")
    path.rename(path.with_name("away"))
    with hm.open(root, deadline_s=60) as again:
        with pytest.raises(hybridmem.PartitionError, match="partition-0001"):
            answers(again)
        again.delete(2)
        with pytest.raises(hybridmem.PartitionError, match="partition-0001") as caught:
            put(again, range(30, 32))  # ids that it may have given to others
        assert caught.value.partitions == ("partition-0001",)
        path.with_name("away").rename(path)
        assert len(again.repair()) == 1
        assert sum(map(len, answers(again))) == 29
        assert put(again, range(30, 32)) == [31, 32]
        assert [one for one in answers(again)[0] if one in wanted[0]] != []


def test_what_is_found_outlives_the_cluster(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(30))
    big = matrix(1, 4000)
    one = memory.put(big, big, 7)
    (hit,) = memory.query(big, 7, 1)
    assert hit.entry_id == one
    assert not hit.keys.flags.writeable
    assert not hit.keys.flags.owndata  # in the object store
    memory.close()
    assert hit.keys.tobytes() == big.tobytes()
