"""What comes back older than it was is never taken for the newest: it is named, or passed over."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hybridmem

from .helpers import CONFIG, answers, at, fill_disk, inside, matrix, pid, put
from .nodes import HOW, Nodes

ray: Any = pytest.importorskip("ray", reason=HOW)
pytestmark = pytest.mark.usefixtures("three_nodes")


def roots(memory: Any) -> list[Path]:
    """The directories of the cluster on the disks, in the order in which partitions are given."""
    return [Path(memory._owners.all[number].replicas[0].disk.root) for number in range(3)]


def test_an_older_copy_of_a_disk_is_named(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(12))
    memory.flush()
    actor = at(memory, 0)
    path = Path(inside(actor, lambda self: str(self._path)))
    shutil.copytree(path, path.with_name("older"))
    put(memory, range(12, 18))
    memory.delete(2)
    memory.flush()
    wanted = answers(memory)

    def swapped(out: str, back: str) -> None:
        process = pid(actor)
        os.kill(process, signal.SIGSTOP)
        path.rename(path.with_name(out))
        path.with_name(back).rename(path)
        os.kill(process, signal.SIGKILL)

    swapped("newer", "older")
    for ask in (lambda: answers(memory), memory.flush):
        with pytest.raises(hybridmem.PartitionError, match=r"partition-0000.*holds less than was"):
            ask()
    memory.on_missing = "report"
    assert memory.query(matrix(1000, 1), 0, 50).missing == ("partition-0000",)
    memory.on_missing = "raise"
    with pytest.raises(hybridmem.PartitionError, match=r"repair failed.*holds less than was"):
        memory.repair()
    path.rename(path.with_name("older"))
    path.with_name("newer").rename(path)
    assert len(memory.repair()) == 1
    assert answers(memory) == wanted
    memory.flush()


def test_replicas_that_were_left_behind_do_not_answer_alone(
    create: Any, root: str, nodes: Nodes
) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(partitions=3, replicas=2, route="hash")
    put(memory, range(12))
    memory.flush()
    put(memory, range(12, 24))
    fill_disk(at(memory, 1, 1))
    with pytest.raises(hybridmem.PartitionFullError):
        memory.flush()
    wanted = answers(memory)
    newest = roots(memory)[1]
    memory._owners.end()  # as if this process died
    away = newest.with_name("away")
    newest.rename(away)  # and the node with what is newest were not up yet
    with hm.open(root, deadline_s=60) as again:
        for ask in (lambda: answers(again), lambda: put(again, range(24, 27)), again.repair):
            with pytest.raises(hybridmem.PartitionError, match=r"partition-0001.*left behind"):
                ask()
        shutil.rmtree(newest, ignore_errors=True)  # what repair has begun there
        away.rename(newest)
        again.repair()
        assert answers(again) == wanted
        again.flush()


def test_one_of_two_replicas_that_goes_on_alone_is_known_by_it(
    create: Any, root: str, nodes: Nodes
) -> None:
    """Each was alone for a while: what one of them wrote would be lost."""
    from hybridmem.integrations import ray as hm

    memory = create(partitions=3, replicas=2, route="hash")
    put(memory, range(12))
    memory.flush()
    first = roots(memory)[1]
    memory.close()
    away = first.with_name("away")
    first.rename(away)
    with hm.open(root, deadline_s=60) as alone:
        put(alone, range(12, 15))
        with pytest.raises(hybridmem.PartitionError, match="1 of 2 replicas"):
            alone.flush()
        wanted = answers(alone)
        alone._owners.end()
        alone._closed = True
    other = next(
        path for path in nodes.disks.glob(f"*/{first.name}") if (path / "partition-0001").exists()
    )
    away.rename(first)
    other.rename(other.with_name("away"))
    with hm.open(root, deadline_s=60) as again:
        with pytest.raises(hybridmem.PartitionError, match=r"partition-0001.*left behind"):
            answers(again)
        other.with_name("away").rename(other)
        again.repair()
        assert answers(again) == wanted


def test_one_of_two_replicas_that_was_only_asked_is_not_ahead(create: Any, root: str) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(partitions=3, replicas=2, route="hash")
    put(memory, range(12))
    memory.flush()
    wanted = answers(memory)
    paths = [Path(one.disk.root) for one in memory._owners.all[1].replicas]
    memory.close()
    for path in paths:
        path.rename(path.with_name("away"))
        with hm.open(root, deadline_s=60) as alone:
            assert answers(alone) == wanted
            with pytest.raises(hybridmem.PartitionError, match="1 of 2 replicas"):
                alone.flush()
            alone._owners.end()
            alone._closed = True
        path.with_name("away").rename(path)
    with hm.open(root, deadline_s=60) as again:
        assert [len(one) for one in again.replicas()] == [2, 2, 2]
        again.flush()


def test_a_layer_that_some_partitions_centre_is_refused(
    create: Any, root: str, tmp_path: Path
) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(route="hash")
    put(memory, range(12))
    memory.flush()
    flush = memory._owners.flush
    process = pid(at(memory, 1))

    def hanging(owners: Any = None, *call: Any) -> Any:
        if call:  # it commits the means
            os.kill(process, signal.SIGSTOP)
        return flush(owners, *call)

    memory._owners.flush = hanging
    memory._owners.write_deadline_s = 8
    with pytest.raises(hybridmem.PartitionError, match="calibrate failed"):
        memory.calibrate(0, keys=matrix(7) + 3)
    memory._owners.flush = flush
    memory._owners.write_deadline_s = 60
    os.kill(process, signal.SIGKILL)
    for ask in (
        lambda: memory.query(matrix(1000, 1), 0),
        lambda: memory.query_layers({1: matrix(1), 0: matrix(1)}),
        lambda: memory.put(matrix(1), matrix(1), 0),
    ):
        with pytest.raises(hybridmem.PartitionError, match="some partitions may centre layer 0"):
            ask()
    with hm.open(root, "r", deadline_s=60) as reader:
        with pytest.raises(hybridmem.PartitionError, match="some partitions may centre layer 0"):
            reader.query(matrix(1000, 1), 0)
        assert len(reader.query(matrix(1000, 1), 1)) > 0
        memory.calibrate(0)  # with the means of before
        assert reader.refresh()
        assert (
            reader.query(matrix(1000, 1), 0)[0].score == memory.query(matrix(1000, 1), 0)[0].score
        )
        assert reader.calibration.keys() == memory.calibration.keys() == {0}
    with pytest.raises(ValueError, match="calibrated already"):
        memory.calibrate(0)
    put(memory, range(12, 18))
    scores = [hit.score for hit in memory.query(matrix(1000, 1), 0, 50)]
    memory.close()
    with hybridmem.create(tmp_path / "one", **CONFIG) as one:
        one.calibrate(0, keys=matrix(7) + 3)
        put(one, range(18))
        assert scores == [hit.score for hit in one.query(matrix(1000, 1), 0, 50)]


def test_a_layer_that_one_partition_cannot_centre_stays_as_it_is(create: Any) -> None:
    memory = create(route="hash")
    put(memory, range(6))
    memory.put(matrix(1), matrix(2), 0, index_keys=matrix(3))
    wanted = answers(memory)
    with pytest.raises(ValueError, match="put with index_keys"):
        memory.calibrate(0)
    assert answers(memory) == wanted
    assert memory.calibration == {}
    memory.calibrate(1)
    assert put(memory, range(7, 9)) == [8, 9]


def test_a_cluster_all_disks_of_which_are_gone(
    create: Any, root: str, nodes: Nodes, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: pip install 'hybridmem[remote]'")
    from hybridmem.integrations import ray as hm

    url = f"file://{tmp_path}/copies"
    memory = create(route="hash", remote=url)
    put(memory, range(12))
    memory.close()
    wanted = list(range(1, 13))
    name = root.split("/")[1]
    for disk in nodes.disks.glob(f"*/{name}"):
        shutil.rmtree(disk)
    with pytest.raises(hybridmem.StoreExistsError, match="holds copies of a cluster"):
        create(remote=url)
    disk = nodes.disks / "head" / name  # was made anew
    shutil.copy(tmp_path / "copies" / "cluster.json", disk)
    with hm.open(root, deadline_s=60) as again:
        with pytest.raises(hybridmem.PartitionError, match=r"partition-0000.*partition-0001"):
            answers(again)
        with pytest.raises(hybridmem.PartitionError, match="on no node"):
            put(again, range(12, 14))
        assert len(again.repair()) == 2
        assert list(again) == wanted
        assert put(again, range(12, 14)) == [13, 14]
        again.flush()


def test_close_waits_for_what_another_thread_puts(
    create: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridmem.integrations import ray as hm

    memory = create(route="hash")
    taken = put(memory, range(3))
    make_room, begun = memory._owners.make_room, threading.Event()

    def slow(*call: Any) -> None:
        make_room(*call)
        begun.set()
        time.sleep(1)

    monkeypatch.setattr(memory._owners, "make_room", slow)
    thread = threading.Thread(target=lambda: taken.extend(put(memory, range(3, 4))))
    thread.start()
    begun.wait()
    memory.close()
    thread.join()
    assert len(taken) == 4
    with hm.open(root, "r", deadline_s=60) as again:
        assert list(again) == taken
