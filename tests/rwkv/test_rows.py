"""Where each row of a text is, what it is worth, and which ones a search may give."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridmem
from hybridmem.integrations import rwkv_x

from .helpers import (
    EVERYTHING,
    MARKS,
    TOLERANCE,
    attended_rows,
    hooks,
    largest,
    load,
    reference,
    run,
    text,
    torch,
)

pytestmark = MARKS


def rows_of(
    path: Path, tokens: list[int], layer: int, parts: Sequence[str] = ("k_cache",)
) -> np.ndarray:
    """Keys, or what is asked for, of every token of a text in one attention layer, sorted."""
    _, state = run(load(path, EVERYTHING), tokens, [len(tokens)])
    held = state["attn"][layer]
    return sort_rows(torch.cat([held[part][0] for part in parts], 1).numpy())


def sort_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("pieces", [[130], [50, 1, 1, 40, 38], [1] * 130, [100] + [1] * 30])
def test_every_row_is_in_one_place(checkpoint: Path, tmp_path: Path, pieces: list[int]) -> None:
    tokens = text(130)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8) as memory:
        _, state = run(model, tokens, pieces)
        for layer, held in enumerate(state["attn"]):
            own = held["hybridmem"]
            places = [held["k_cache"][0].numpy(), own["keys"].numpy()]
            places += [memory.store.get(number).keys for number in own["entries"].tolist()]
            assert all(len(entry) == 8 for entry in places[2:])
            assert len(own["keys"]) < 8
            found = sort_rows(np.concatenate(places))
            np.testing.assert_allclose(found, rows_of(checkpoint, tokens, layer), atol=1e-4)


def test_no_row_is_attended_to_twice(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token sees each row of the text once, whatever the search gives again."""
    tokens = text(121)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8, recall="all"):
        _, state = run(model, tokens[:120], [60, 30] + [1] * 30)
        seen = attended_rows(monkeypatch)
        run(model, tokens[120:], [1], state)
    assert len(seen) == 2
    for layer, rows in enumerate(seen):
        expected = rows_of(checkpoint, tokens, layer, ("k_cache", "v_cache"))
        np.testing.assert_allclose(sort_rows(rows), expected, atol=1e-4)


@pytest.mark.parametrize("importance", ["upstream", "corrected"])
def test_importance_is_the_mean_memory_loss(
    checkpoint: Path, tmp_path: Path, importance: str
) -> None:
    tokens = text(50)
    model = load(checkpoint, 10)
    losses: list[Any] = []
    block = model.rwkv.blocks[1]  # the one before the first attention layer
    original = block.calculate_layer_memory_loss

    def noting(state: Any, k: Any, v: Any) -> Any:
        plain = original(state, k, v)
        corrected = hooks.corrected_loss(block, state, k, v)
        losses.append((plain, corrected if importance == "corrected" else plain))
        return plain

    block.calculate_layer_memory_loss = noting
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=20, importance=importance) as memory:
        run(model, tokens, [50])
        entries = [memory.store.get(number) for number in memory.store]
        first_layer = [entry.importance for entry in entries if entry.layer_idx == 0]
    ranked, wanted = losses[0]
    dropped = sorted(set(range(50)) - set(torch.topk(ranked, 10).indices.tolist()))
    expected = [float(wanted[dropped[:20]].mean()), float(wanted[dropped[20:]].mean())]
    assert first_layer == pytest.approx(expected, rel=1e-5)


def test_decoded_rows_count_as_usual(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, 30)
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=4) as memory:
        _, state = run(model, text(30), [30])
        total, count = state["attn"][0]["hybridmem"]["losses"]
        assert count == 30
        run(model, text(4, seed=2), [1] * 4, state)
        entries = [memory.store.get(number) for number in memory.store]
    assert entries[0].importance == pytest.approx(total / count, rel=1e-5)


def test_decoded_rows_before_any_prefill_count_one(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, 30)
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=4) as memory:
        run(model, text(4), [1] * 4)
        assert [memory.store.get(number).importance for number in memory.store] == [1.0, 1.0]


def test_entries_are_consecutive_dropped_tokens(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(60)
    _, everything = run(load(checkpoint, EVERYTHING), tokens, [60])
    in_order_of_loss = everything["attn"][0]["k_cache"][0]
    keys = torch.empty_like(in_order_of_loss)
    keys[_order_of_keep(checkpoint, tokens)] = in_order_of_loss
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=10) as memory:
        _, state = run(model, tokens, [60])
        kept = state["attn"][0]["hybridmem"]["cached"][:, 0].int().tolist()
        dropped = [at for at in range(60) if at not in kept]
        for number, entry_id in enumerate(state["attn"][0]["hybridmem"]["entries"].tolist()):
            expected = keys[dropped[10 * number : 10 * number + 10]].numpy()
            np.testing.assert_allclose(memory.store.get(entry_id).keys, expected, atol=1e-5)


def test_rows_leave_in_the_order_of_the_text(checkpoint: Path, tmp_path: Path) -> None:
    """What an older prefill kept goes before the tokens that were decoded after it."""
    tokens = text(60)
    model = load(checkpoint, 10)
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=20, top_k=EVERYTHING) as memory:
        _, state = run(model, tokens, [20] + [1] * 5 + [35])
        first = memory.store.get(int(state["attn"][0]["hybridmem"]["entries"][0]))
    np.testing.assert_allclose(
        sort_rows(first.keys), rows_of(checkpoint, tokens[:20], 0), atol=1e-4
    )


def _order_of_keep(path: Path, tokens: list[int]) -> Any:
    model = load(path, EVERYTHING)
    kept: list[Any] = []
    block = model.rwkv.blocks[1]
    original = block.prefill

    def noting(*args: Any) -> Any:
        result = original(*args)
        kept.append(result[3])
        return result

    block.prefill = noting
    run(model, tokens, [len(tokens)])
    return kept[0]


def test_new_conversation_sees_only_its_own(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(80, seed=5)
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8):
        run(model, text(80), [80])
        logits, _ = run(model, tokens, [40] + [1] * 40)
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


def test_recall_all_sees_every_conversation(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(80, seed=5)
    model = load(checkpoint, 8)
    with rwkv_x.attach(
        model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=8, recall="all"
    ) as memory:
        run(model, text(80), [80])
        before = memory.store.stats().hits
        logits, _ = run(model, tokens[:1], [1])
        assert memory.store.stats().hits - before == len(memory.store)
        logits, _ = run(model, tokens, [40] + [1] * 40)
    assert largest(logits - reference(checkpoint, tokens)) > 0.1


def test_rows_of_a_branch_are_not_attended_to_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recall="all" a branch finds entries that hold rows which it holds itself."""
    root, left, right = text(45), text(20, seed=3), text(31, seed=4)
    model = load(checkpoint, 4)
    options = {"top_k": EVERYTHING, "chunk_tokens": 10, "recall": "all"}
    with rwkv_x.attach(model, tmp_path / "mem", **options) as memory:
        _, state = run(model, root, [30] + [1] * 15)
        branch = copy.deepcopy(state)
        run(model, left, [1] * 20, state)
        seen = attended_rows(monkeypatch)
        run(model, right, [1] * 31, branch)
        assert len(memory.store) > 10
    for number, rows in enumerate(seen):
        assert len(np.unique(rows, axis=0)) == len(rows)
        # the root and its own tokens, and what the other branch has put of its 20
        own = 45 + number // 2 + 1
        assert own <= len(rows) <= own + 20
    assert len(seen[-1]) > own


@pytest.mark.parametrize("rerank", ["late", "tokens", "pooled"])
def test_options_of_queries(checkpoint: Path, tmp_path: Path, rerank: str) -> None:
    model = load(checkpoint, 8)
    options = {"rerank": rerank, "n_heads": 2, "candidates": 6}
    with rwkv_x.attach(
        model, tmp_path / "mem", chunk_tokens=8, top_k=2, query_options=options
    ) as memory:
        logits, _ = run(model, text(120), [60] + [1] * 60)
        assert memory.store.stats().hits > 0
    assert torch.isfinite(logits).all()
    with pytest.raises((TypeError, ValueError), match="rerank"):
        rwkv_x.attach(model, tmp_path / "mem", query_options={"rerank": "none such"})
    hybridmem.open(tmp_path / "mem").close()


def test_searches_are_decided_by_signatures_and_the_whole_query(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another answer than that of the query's signs, of the same candidates."""
    others: list[bool] = []
    query_many = hybridmem.Store.query_many

    def spy(store: Any, queries: Any, layer_idx: int, top_k: int, **options: Any) -> Any:
        found = query_many(store, queries, layer_idx, top_k, **options)
        assert options.pop("rerank") == "signatures"
        signs = query_many(store, queries, layer_idx, 4 * top_k, **options)
        for mine, plain in zip(found, signs, strict=True):
            ids, candidates = ([hit.entry_id for hit in hits] for hits in (mine, plain))
            assert set(ids) <= set(candidates)
            others.append(ids != candidates[:top_k])
        return found

    model = load(checkpoint, 8)
    with (
        monkeypatch.context() as patch,
        rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8, top_k=2, search_every=4),
    ):
        patch.setattr(hybridmem.Store, "query_many", spy)
        run(model, text(160), [100] + [1] * 60)
    assert any(others)


def test_layers_are_centred_by_their_first_tokens(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(120)
    model = load(checkpoint, EVERYTHING)
    with rwkv_x.attach(model, tmp_path / "mem", centre_tokens=100) as memory:
        run(model, tokens[:60], [60])
        assert memory.store.calibration == {}
        _, state = run(model, tokens, [60, 60])
        centres = memory.store.calibration
        assert set(centres) == {0, 1}
        frozen = {layer: mean.copy() for layer, (mean, _) in centres.items()}
        run(model, text(300, seed=2), [300], state)
    with rwkv_x.attach(model, tmp_path / "mem", centre_tokens=100) as memory:
        run(model, text(300, seed=3), [300])
        for layer, (mean, query) in memory.store.calibration.items():
            np.testing.assert_array_equal(mean, frozen[layer])
            assert query is not None
    expected = rows_of(checkpoint, tokens[:60], 0).mean(0)  # the same 60 tokens twice
    np.testing.assert_allclose(frozen[0], expected, atol=1e-4)
    with rwkv_x.attach(model, tmp_path / "plain", centre_tokens=0) as memory:
        run(model, text(2000), [2000])
        assert memory.store.calibration == {}


def test_a_layer_that_cannot_be_centred_is_named(checkpoint: Path, tmp_path: Path) -> None:
    """Entries of index keys, which are not stored, cannot be signed anew."""
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", centre_tokens=40) as memory:
        rows = np.ones((4, memory.store.config.embed_dim), np.float32)
        memory.store.put(rows, rows, 1, index_keys=-rows)
        with pytest.warns(RuntimeWarning, match=r"layer 1 of .*uncentred.*index_keys"):
            run(model, text(60), [60])
        assert set(memory.store.calibration) == {0}


def test_everything_is_still_found_while_centring(checkpoint: Path, tmp_path: Path) -> None:
    tokens = text(150)
    model = load(checkpoint, 8)
    options = {"top_k": EVERYTHING, "chunk_tokens": 8, "centre_tokens": 70}
    with rwkv_x.attach(model, tmp_path / "mem", **options) as memory:
        logits, _ = run(model, tokens, [40] + [1] * 50 + [60])
        assert set(memory.store.calibration) == {0, 1}
    assert largest(logits - reference(checkpoint, tokens)) < TOLERANCE


@pytest.mark.parametrize("top_k", [1, 3])
def test_results_do_not_depend_on_the_pieces(checkpoint: Path, tmp_path: Path, top_k: int) -> None:
    """Few entries of another conversation are found for the same rows however a text is cut."""
    tokens = text(100, seed=6)
    cuts = [[100], [50, 50], [1] * 100, [13, 1, 1, 60, 25]]
    model = load(checkpoint, EVERYTHING)
    with rwkv_x.attach(model, tmp_path / "a", chunk_tokens=8) as memory:
        run(model, text(200), [100, 100])
        assert len(memory.store) > 10
    options = {"chunk_tokens": 1000, "top_k": top_k, "recall": "all", "query_tokens": 4}
    with rwkv_x.attach(model, tmp_path / "a", **options, search_at_end=False):
        results = [run(model, tokens, pieces)[0] for pieces in cuts]
    for logits in results[1:]:
        assert largest(logits - results[0]) < TOLERANCE


def test_the_end_of_a_piece_searches(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer begins with what the whole question finds, wherever the grid of searches is."""
    model = load(checkpoint, 8)
    asked: list[list[Any]] = []
    query_many = hybridmem.Store.query_many

    def noting(store: Any, queries: Any, *args: Any, **options: Any) -> Any:
        asked.append([np.asarray(one) for one in queries])
        return query_many(store, queries, *args, **options)

    options = {"chunk_tokens": 8, "top_k": 2, "query_tokens": 4, "search_every": 64}
    found = {}
    for at_end in (True, False):
        path = tmp_path / str(at_end)
        with rwkv_x.attach(model, path, **options, search_at_end=at_end):
            _, state = run(model, text(70), [70])
            _, state = run(model, text(1), [1], state)  # what has left the cache is searched for
            asked.clear()
            with monkeypatch.context() as patch:
                patch.setattr(hybridmem.Store, "query_many", noting)
                _, state = run(model, text(20, seed=4), [20], state)
            found[at_end] = [layer["hybridmem"]["hits"].tolist() for layer in state["attn"]]
            if at_end:
                last = [queries[-1] for queries in asked]
                kept = [layer["hybridmem"]["queries"].numpy() for layer in state["attn"]]
                for query, queries in zip(last, kept, strict=True):
                    np.testing.assert_array_equal(query[-3:], queries)
            else:
                assert not asked  # the grid has no point there
    assert found[True] != found[False]


def test_a_limit_of_the_store_costs_memories_and_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = load(checkpoint, 8)
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8, top_k=4, max_entries=6) as memory:
        logits, state = run(model, text(200), [100] + [1] * 60 + [40])
        assert len(memory.store) == 6
        memory.save(state, tmp_path / "conversation.pt")
        assert torch.isfinite(logits).all()
        run(model, text(20), [1] * 20, memory.load(tmp_path / "conversation.pt"))


def test_kl_falls_with_top_k(checkpoint: Path, tmp_path: Path) -> None:
    texts = [text(200, seed=20 + number) for number in range(3)]
    expected = [torch.log_softmax(reference(checkpoint, one)[100:], -1) for one in texts]
    model = load(checkpoint, 8)
    divergences = []
    with rwkv_x.attach(model, tmp_path / "mem", chunk_tokens=8) as memory:
        for top_k in (1, 6, EVERYTHING):
            memory.top_k = top_k
            each = []
            for one, wanted in zip(texts, expected, strict=True):
                logits, _ = run(model, one, [100, 60] + [1] * 40)
                got = torch.log_softmax(logits[100:], -1)
                each.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
            divergences.append(sum(each) / len(each))
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 1e-6
    assert divergences[0] > 1000 * divergences[-1]
