"""The memory that partitions make together."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybridmem import _arrays, _chunks
from hybridmem._adopting import Row
from hybridmem._chunks import Chunk, Given
from hybridmem._codec import Codec, Tensor
from hybridmem._signatures import Signatures
from hybridmem.config import Config
from hybridmem.errors import PartitionError, ReadOnlyError, StoreClosedError, no_entry
from hybridmem.hdc import mean_pool
from hybridmem.integrations.ray._actors import Places
from hybridmem.integrations.ray._answers import Answer, Gone, ask
from hybridmem.integrations.ray._calls import Owner
from hybridmem.integrations.ray._centring import Centring
from hybridmem.integrations.ray._owners import Owners, failures
from hybridmem.integrations.ray._partition import Delete, Fetched, Put
from hybridmem.integrations.ray._repair import repair
from hybridmem.memory import Floats, Memory, Question
from hybridmem.results import Entry, Hit, Hits, Stats

__all__ = ["Cluster"]


class Cluster(Memory):
    """A memory whose entries are spread over partitions: stores on the disks of a Ray cluster.

    Made by `create` and `open` of `hybridmem.integrations.ray`. Answers are those of one store of
    all entries, bit for bit. One object may be used from many threads.

    Attributes
    ----------
    path : str
        The directory on the nodes, as it was given.
    config : Config
    mode : {"r+", "r"}
    route : {"layer", "hash"}
        Whether a partition holds whole layers, or every so manieth entry of each.
    deadline_s : float
        Seconds in which a question is answered; with "report", partitions have half of it, as what
        the others found is fetched then.
    on_missing : {"raise", "report"}
        What happens where a partition has not answered then: a PartitionError, or an answer from
        the others that names it in `Hits.missing`.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        places: Places,
        config: Config,
        next_id: int,
        deadline_s: float,
        on_missing: str,
    ) -> None:
        self.path, self.config, self.mode = places.root, config, places.mode
        self.route, self.deadline_s = places.about["route"], deadline_s
        self.on_missing = on_missing
        self._owners = owners
        self._places = places
        self._next_id = next_id
        self._codec = Codec(config.kv_dtype, quantize_stored=config.quantize_stored)
        self._signatures = Signatures(config)
        self._centring = Centring(owners, self._signatures, self._of_layer)
        self._centring.settle(self.mode == "r+")
        self._writing_lock = threading.RLock()
        self._queries = self._hits = 0
        self._closed = False

    # -- asking -----------------------------------------------------------------------------------

    def query_layers(
        self,
        queries: Mapping[int, Any],
        top_k: int = 5,
        *,
        entry_ids: Mapping[int, Any] | None = None,
        **options: Any,
    ) -> dict[int, Hits]:
        """Answer a query of each of several layers, with one call for each partition.

        Parameters
        ----------
        queries : mapping of int to array_like
            By layer, a query as for `query`.
        top_k : int, default 5
        entry_ids : mapping of int to array_like of int, optional
            By layer, to search only among these.
        **options
            As for `query`, but for `rerank_query`.

        Returns
        -------
        dict of int to Hits
        """
        self._check_open()
        questions = [
            self._question(
                [self._rows(query, f"query of layer {layer}")],
                layer,
                top_k,
                None if entry_ids is None else entry_ids.get(layer),
                [None],
                **options,
            )
            for layer, query in queries.items()
        ]
        answers = self._answers(questions)
        return {
            layer: self._made(answer)[0] for layer, answer in zip(queries, answers, strict=True)
        }

    def _hits_of(self, question: Question) -> list[list[Hit]]:
        (answer,) = self._answers([question])
        return list(self._made(answer))

    def _stored_of(self, question: Question) -> list[list[list[Tensor]]]:
        (answer,) = self._answers([question])
        return [[fetched.tensors for _, fetched in found] for found in answer.found]

    def _made(self, answer: Answer) -> list[Hits]:
        results = []
        for found in answer.found:
            hits = Hits(self._hit(score, fetched) for score, fetched in found)
            hits.missing = answer.missing
            results.append(hits)
        return results

    def _hit(self, score: float, fetched: Fetched) -> Hit:
        fields, source, tensors = fetched
        keys, values = self._codec.decode(tensors, fields["n_tokens"], self.config.embed_dim)
        return Hit(score=score, keys=keys, values=values, escaped_source=source, **fields)

    def _answers(self, questions: Sequence[Question]) -> list[Answer]:
        for _ in range(2):
            with contextlib.suppress(Gone):
                return self._asked(questions)
        with self._writing_lock:  # nothing goes meanwhile
            return self._asked(questions)

    def _asked(self, questions: Sequence[Question]) -> list[Answer]:
        layers = {question.layer_idx for question in questions}
        if self._centring.unsettled.keys() & layers:
            with self._writing_lock:  # it may be under way
                self._centring.check(layers)
        centres = self._signatures.centres
        owned = [self._of_layer(question.layer_idx) for question in questions]
        go_on = self.on_missing == "report"
        answers, failed = ask(
            self._owners, questions, owned, self.config.signature, self.deadline_s, go_on
        )
        if self._signatures.centres is not centres or (self._centring.unsettled.keys() & layers):
            raise Gone
        if failed and not go_on:
            raise self._missing(failed)
        self._queries += sum(len(question.queries) for question in questions)
        self._hits += sum(len(found) for answer in answers for found in answer.found)
        return answers

    def _missing(self, failed: Mapping[int, Exception]) -> PartitionError:
        return failures("asking", {self._owners.all[one]: why for one, why in failed.items()})

    def take_back(self, hits: Sequence[Hit]) -> None:
        """Count the query no longer that gave these hits: they could not be used."""
        self._queries -= 1
        self._hits -= len(hits)
        by_owner: dict[int, list[int]] = {}
        for hit in hits:
            by_owner.setdefault(self._owner_of(hit.entry_id).number, []).append(hit.entry_id)
        self._read({one: ("take_back", ids) for one, ids in by_owner.items()})

    def _read(self, wanted: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask partitions all of which must answer."""
        self._check_open()
        answers, failed = self._owners.read(wanted, self.deadline_s)
        if failed:
            raise self._missing(failed)
        return answers

    def _of_layer(self, layer: int) -> list[Owner]:
        owners = self._owners.all
        return [owners[layer % len(owners)]] if self.route == "layer" else owners

    def _owner_of(self, entry_id: int) -> Owner:
        return self._owners.all[entry_id % len(self._owners.all)]

    # -- contents ---------------------------------------------------------------------------------

    @property
    def store_id(self) -> str:
        """32 hexadecimal digits that tell this cluster from all others."""
        cluster_id: str = self._places.about["cluster_id"]
        return cluster_id

    @property
    def calibration(self) -> dict[int, tuple[Floats, Floats | None]]:
        """Mean key and mean query (or None) of the layers that are calibrated."""
        self._check_open()
        return dict(self._signatures.centres)

    def get(self, entry_id: int) -> Entry:
        """Return an entry. This is no access.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer; it is a KeyError too.
        """
        one = _arrays.entry_id(entry_id)
        owner = self._owner_of(one).number
        entry: Entry = self._read({owner: ("get", one)})[owner]
        return entry

    def source(self, entry_id: int) -> Any:
        """Return what `put` was given as the source of an entry; KeyError without the entry."""
        one = _arrays.entry_id(entry_id)
        owner = self._owner_of(one).number
        return self._read({owner: ("source", one)})[owner]

    def timestamps(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the time of the put of each entry, 0 for those that are not there."""
        ids = [_arrays.entry_id(one) for one in entry_ids]
        by_owner: dict[int, list[int]] = {}
        for one in ids:
            by_owner.setdefault(self._owner_of(one).number, []).append(one)
        answers = self._read({owner: ("timestamps", some) for owner, some in by_owner.items()})
        stamps = {
            one: stamp
            for owner, some in by_owner.items()
            for one, stamp in zip(some, answers[owner], strict=True)
        }
        return [stamps[one] for one in ids]

    def __contains__(self, entry_id: object) -> bool:
        try:
            return self.timestamps([_arrays.entry_id(entry_id)])[0] > 0
        except (KeyError, TypeError):
            return False

    def __len__(self) -> int:
        return sum(self._of_all("count").values())

    def __iter__(self) -> Iterator[int]:
        ids = np.concatenate(list(self._of_all("ids").values()))
        return iter(np.sort(ids).tolist())

    def _of_all(self, method: str, *args: Any) -> dict[int, Any]:
        return self._read({owner.number: (method, *args) for owner in self._owners.all})

    def stats(self) -> Stats:
        """Return counts and sizes of this moment, summed over one replica of each partition."""
        parts: list[Stats] = list(self._of_all("stats").values())
        layers: dict[int, int] = {}
        for part in parts:
            for layer, count in part.entries_by_layer.items():
                layers[layer] = layers.get(layer, 0) + count
        summed: dict[str, Any] = {
            field.name: sum(getattr(part, field.name) for part in parts)
            for field in dataclasses.fields(Stats)
            if field.name != "entries_by_layer"
        }
        summed |= {"queries": self._queries, "hits": self._hits}
        return Stats(entries_by_layer=dict(sorted(layers.items())), **summed)

    # -- changing ---------------------------------------------------------------------------------

    def put(
        self,
        keys: Any,
        values: Any,
        layer_idx: int,
        importance: float = 1.0,
        *,
        index_keys: Any = None,
        source: Any = None,
    ) -> int:
        """Store a chunk of consecutive tokens of one layer, as `Store.put`.

        It is on its way to its partition on return, and every later query waits for it. Waits
        where too much is on its way.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid; nothing is stored.
        PartitionError
            If there was no room in time; nothing is stored.
        """
        self._check_writing()
        layer = _arrays.layer_index(layer_idx)
        weight = _arrays.importance(importance)
        return self._put(layer, [Given(keys, values, index_keys, source)], [weight])[0]

    def put_many(
        self,
        entries: Iterable[tuple[Any, Any]],
        layer_idx: int,
        importance: float | Sequence[float] = 1.0,
        *,
        index_keys: Sequence[Any] | None = None,
        sources: Sequence[Any] | None = None,
    ) -> list[int]:
        """Store several chunks of one layer, all or none, as `Store.put_many`."""
        self._check_writing()
        layer = _arrays.layer_index(layer_idx)
        given = _chunks.many(entries, index_keys, sources)
        return self._put(layer, given, _chunks.weights(importance, len(given)))

    def _put(self, layer: int, given: Sequence[Given], weights: Sequence[float]) -> list[int]:
        def prepared() -> list[Chunk]:
            return [
                _chunks.prepare(self._codec, self._signatures, layer, self.config.embed_dim, one)
                for one in given
            ]

        centres = self._signatures.centres
        chunks = prepared()
        with self._writing_lock:
            self._check_writing()
            self._centring.check([layer])
            if self._signatures.centres is not centres:  # calibrated meanwhile
                chunks = prepared()
            ids = self._new_ids(layer, len(chunks))
            rows: dict[int, list[Row]] = {}
            for one, weight, chunk in zip(ids, weights, chunks, strict=True):
                row = Row(one, weight, time.time_ns(), chunk)
                rows.setdefault(self._owner_of(one).number, []).append(row)
            puts = [(self._owners.all[at], Put(layer, some)) for at, some in rows.items()]
            for owner, put in puts:
                self._owners.make_room(owner, put.nbytes)
            for owner, put in puts:
                self._owners.tell(owner, put)
            if ids:
                self._next_id = ids[-1] + 1
        return ids

    def _new_ids(self, layer: int, count: int) -> list[int]:
        """Return the next ids; what is left of one by the number of partitions says its owner."""
        if self.route == "hash":
            return list(range(self._next_id, self._next_id + count))
        n = len(self._owners.all)
        first = self._next_id + (layer - self._next_id) % n
        return list(range(first, first + count * n, n))

    def delete(self, entry_id: int) -> None:
        """Remove an entry; the next flush commits it.

        Raises
        ------
        EntryNotFoundError
            If there is no such entry, or no longer; it is a KeyError too.
        """
        self._check_writing()
        one = _arrays.entry_id(entry_id)
        with self._writing_lock:
            if not self.timestamps([one])[0]:
                raise no_entry("the cluster", one)
            owner, op = self._owner_of(one), Delete(one)
            self._owners.make_room(owner, op.nbytes)
            self._owners.tell(owner, op)

    def calibrate(self, layer_idx: int, *, keys: Any = None, queries: Any = None) -> None:
        """Centre the keys and queries of a layer from now on, as `Store.calibrate`.

        Raises
        ------
        ValueError
            If the layer is calibrated already, or cannot be any more.
        PartitionError
            If a partition could not commit it: call it again with the same means. Until then what
            asks for the layer, or puts into it, raises this too.
        """
        self._check_writing()
        layer = _arrays.layer_index(layer_idx)
        mean, mean_query = (
            None if rows is None else mean_pool(self._rows(rows, name))[0]
            for name, rows in (("keys", keys), ("queries", queries))
        )
        with self._writing_lock:
            if layer in self._signatures.centres and layer not in self._centring.unsettled:
                raise ValueError(f"layer {layer} is calibrated already, and its means are frozen")
            self._centring.calibrate(layer, mean, mean_query, self.get)

    def flush(self, wait: bool = True) -> None:
        """Make everything that was put and deleted durable on all replicas of all partitions.

        Parameters
        ----------
        wait : bool, default True
            There is no other way: False waits too.

        Raises
        ------
        PartitionError
            Naming the replicas that did not; what is not durable on all replicas of a partition is
            kept: flush again. A PartitionFullError, which is a StoreFullError, where all of them
            lack space.
        """
        self._check_writing()
        self._owners.flush()

    def compact(self) -> int:
        """Rewrite all partitions without the bytes of deleted entries; committed on return.

        Returns
        -------
        int
            The bytes given back.
        """
        self._check_writing()
        freed: int = sum(self._owners.flush(None, "compact").values())
        return freed

    def repair(self) -> list[str]:
        """Bring lost partitions back, and make as many replicas as there are to be.

        Replicas on nodes that are gone, and dead actors, are given up. Others are copied from the
        ones that are left, found on the disks of nodes that came back, or fetched from `remote`.
        Ask for it after a node was lost or added; queries are answered meanwhile.

        Returns
        -------
        list of str
            The replicas that were made or found.

        Raises
        ------
        PartitionError
            Naming the partitions that lack replicas still and the replicas that do not answer, and
            why.
        """
        self._check_writing()
        with self._writing_lock:
            made, next_id = repair(self._owners, self._places)
            self._next_id = max(self._next_id, next_id)
            self._centring.settle(True)
        return made

    def replicas(self) -> list[tuple[str, ...]]:
        """Return where the replicas of each partition are, the one asked first in front."""
        return [tuple(map(str, owner.replicas)) for owner in self._owners.all]

    # -- life -------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Move a reader to the newest commits; a writer is always there."""
        self._check_open()
        if self.mode != "r":
            return False
        with self._writing_lock:
            moved = any(self._owners.everywhere("refresh").values())
            self._centring.settle(False)
        return moved

    def close(self) -> None:
        """Flush and close; a second close does nothing. Arrays that were handed out stay valid."""
        with self._writing_lock:  # what is being put is flushed too
            if self._closed:
                return
            try:
                if self.mode == "r+":
                    self._owners.flush()
            finally:
                self._closed = True
                self._owners.end()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._owners.all)} partitions"
        return f"<hybridmem.Cluster {self.path!r} mode={self.mode!r} {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the cluster {self.path} is closed; open it again")

    def _check_writing(self) -> None:
        self._check_open()
        if self.mode != "r+":
            raise ReadOnlyError(f'{self.path} is open with mode="r"; open it with mode="r+"')
