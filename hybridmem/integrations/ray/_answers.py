"""Answering questions from partitions as one store of all their entries would.

A partition that holds a layer alone answers whole. Where several do, each says what its signatures
found; what comes into the result is chosen here, as a store chooses, and only the keys and values
of that travel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridmem._merging import Candidates, Place, choose
from hybridmem._ranking import Scores
from hybridmem.hdc import SignatureSpec
from hybridmem.integrations.ray._calls import Calls, Owner
from hybridmem.integrations.ray._partition import Fetched
from hybridmem.memory import Ids, Question

__all__ = ["Answer", "Gone", "ask"]


class Answer(NamedTuple):
    """What was found for each query of a question, best first, with scores; and who is missing."""

    found: list[list[tuple[float, Fetched]]]
    missing: tuple[str, ...]


class Gone(Exception):
    """An entry went between two looks at it: ask again."""


class _Missing(Exception):
    """Partitions did not answer; go on without them."""


def ask(
    owners: Calls,
    questions: Sequence[Question],
    owned: Sequence[Sequence[Owner]],
    spec: SignatureSpec,
    seconds: float,
    go_on: bool,
) -> tuple[list[Answer], dict[int, Exception]]:
    """Answer questions; return the answers, and why partitions did not.

    Parameters
    ----------
    owned : sequence of sequence of Owner
        The partitions that may hold something, for each question.
    go_on : bool
        Whether to go on without partitions that do not answer; else there are no answers then.
    """
    asking = _Asking(owners, questions, owned, spec, seconds, go_on)
    while True:
        try:
            found = asking.found()
        except _Missing:
            if go_on:
                continue
            return [], asking.failed
        failed = asking.failed
        return [
            Answer(some, tuple(str(one) for one in who if one.number in failed))
            for some, who in zip(found, owned, strict=True)
        ], failed


class _Asking:
    """Questions under way: what partitions have said, and which have failed."""

    def __init__(
        self,
        owners: Calls,
        questions: Sequence[Question],
        owned: Sequence[Sequence[Owner]],
        spec: SignatureSpec,
        seconds: float,
        go_on: bool,
    ) -> None:
        self._owners, self._questions, self._owned = owners, questions, owned
        self._spec = spec
        self._ends = time.monotonic() + seconds
        self._go_on = go_on
        self._spread = any(len(who) > 1 for who in owned)
        self._fetched: dict[int, Fetched] = {}
        self.failed: dict[int, Exception] = {}
        wanted: dict[int, list[tuple[bool, Question]]] = {}
        self._at: dict[tuple[int, int], int] = {}
        for number, (question, who) in enumerate(zip(questions, owned, strict=True)):
            for owner in who:
                asked = wanted.setdefault(owner.number, [])
                self._at[number, owner.number] = len(asked)
                asked.append((len(who) == 1, question))
        self._said = self._read({owner: ("ask", asked) for owner, asked in wanted.items()})

    def _read(self, wanted: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        left = self._ends - time.monotonic()
        # Who does not answer now must leave time to go on without it.
        seconds = left / 2 if self._go_on and self._spread else left
        answers, failed = self._owners.read(wanted, seconds)
        self.failed |= failed
        return answers

    def found(self) -> list[list[list[tuple[float, Fetched]]]]:
        """Return what was found for each query of each question.

        Raises
        ------
        _Missing
            If one more partition failed, or one where it is not to go on without.
        """
        if self.failed and not self._go_on:
            raise _Missing
        results: list[Any] = [None] * len(self._questions)
        chosen: dict[int, list[list[tuple[int, int]]]] = {}
        for number, (question, who) in enumerate(zip(self._questions, self._owned, strict=True)):
            there = [one.number for one in who if one.number not in self.failed]
            said = [self._said[one][self._at[number, one]] for one in there]
            if not there:
                results[number] = [[] for _ in question.queries]
            elif len(who) == 1:
                results[number] = said[0]
            else:
                layer_ids = self._layer_ids(question, there)
                chosen[number] = [
                    self._choose(question, at, [one[at] for one in said], layer_ids)
                    for at in range(len(question.queries))
                ]
        self._fetch([one for each in chosen.values() for hits in each for one, _ in hits])
        for number, each in chosen.items():
            queries = self._questions[number].queries
            results[number] = [
                [
                    (self._spec.score(distance, len(query)), self._fetched[one])
                    for one, distance in hits
                ]
                for query, hits in zip(queries, each, strict=True)
            ]
        return results

    def _layer_ids(self, question: Question, there: Sequence[int]) -> Ids | None:
        """Return all ids of the layer where it matters which were put one after the other."""
        if not question.ranking.max_run:
            return None
        answers = self._read(dict.fromkeys(there, ("ids", question.layer_idx)))
        if len(answers) < len(there):
            raise _Missing
        return np.sort(np.concatenate(list(answers.values())))

    def _choose(
        self,
        question: Question,
        at: int,
        found: Sequence[Candidates],
        layer_ids: Ids | None,
    ) -> list[tuple[int, int]]:
        """Return id and distance of the hits of a query."""
        merged = _merged(found)
        if layer_ids is not None:
            merged = merged._replace(
                positions=np.searchsorted(layer_ids, merged.ids), layer_entries=len(layer_ids)
            )

        def said(places: Sequence[Place]) -> Scores:
            return self._entries_say(question, at, [int(merged.ids[one]) for _, one in places])

        return [
            (merged.ids.item(one), merged.distances.item(one))
            for _, one in choose([merged], question.top_k, question.ranking, said)
        ]

    def _entries_say(self, question: Question, at: int, ids: Sequence[int]) -> Scores:
        one = question._replace(
            queries=[question.queries[at]], exact=[question.exact[at]], entry_ids=None
        )
        by_owner = self._by_owner(ids)
        try:
            answers = self._read({who: ("said", one, some) for who, some in by_owner.items()})
        except KeyError:
            raise Gone from None
        if len(answers) < len(by_owner):
            raise _Missing
        said = {
            entry_id: each
            for who, some in by_owner.items()
            for entry_id, each in zip(some, answers[who], strict=True)
        }
        return np.stack([said[entry_id] for entry_id in ids])

    def _fetch(self, ids: Sequence[int]) -> None:
        """Have the entries of these ids; count an access for each time that one is named."""
        by_owner = self._by_owner([one for one in ids if one not in self._fetched])
        answers = self._read({who: ("fetch", some) for who, some in by_owner.items()})
        for who, entries in answers.items():
            if any(entry is None for entry in entries):
                raise Gone
            self._fetched.update(zip(sorted(set(by_owner[who])), entries, strict=True))
        if len(answers) < len(by_owner):
            raise _Missing

    def _by_owner(self, ids: Sequence[int]) -> dict[int, list[int]]:
        by_owner: dict[int, list[int]] = {}
        for one in ids:
            by_owner.setdefault(one % len(self._owners.all), []).append(one)
        return by_owner


def _merged(found: Sequence[Candidates]) -> Candidates:
    """Return the candidates of several partitions in the order of one store."""
    ids = np.concatenate([one.ids for one in found])
    distances = np.concatenate([one.distances for one in found])
    if found[0].estimates is None:
        order = np.lexsort((ids, distances))
        return Candidates(ids[order], distances[order])
    estimates = np.concatenate([one.estimates for one in found if one.estimates is not None])
    order = np.lexsort((ids, -estimates))
    return Candidates(ids[order], distances[order], estimates[order])
