"""A conversation outlives its process: saved states, branches, and what other conversations see."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import left_padding, make, run, text, torch, transformers

import hybridmem
from hybridmem.integrations.transformers import HybridCache, retrieval

pytestmark = [pytest.mark.torch, pytest.mark.transformers]


def reference(model: Any, ids: Any, mask: Any = None) -> Any:
    return run(model, ids, [ids.shape[1]], transformers.DynamicCache(config=model.config), mask)


def close_to(a: Any, b: Any) -> bool:
    return float((a - b).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_save_and_load(tiny_model: Any, new_cache: Any, tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    ids, mask = text(60, batch=2), left_padding(60, [0, 9])
    wanted = reference(model, ids, mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(model, path=tmp_path / "mem", query_tokens=3)
    at = 0
    for count in (20, 13, 1, 1, 25):
        end = at + count
        with retrieval(model):
            got = model(
                ids[:, at:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, at:end],
                cache=cache,
            ).logits
        assert close_to(got * mask[:, at:end, None], wanted[:, at:end] * mask[:, at:end, None])
        cache.save(tmp_path / "chat.state")
        cache.close()
        cache = HybridCache.load(model.config, tmp_path / "mem", tmp_path / "chat.state")
        assert (cache.window, cache.query_tokens, cache.get_seq_length()) == (5, 3, end)
        at = end
    cache.close()


_ANOTHER_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tiny_models import make, run, text
from hybridmem.integrations.transformers import HybridCache, retrieval
torch.set_num_threads(1)
model = make("llama")
cache = HybridCache.load(model.config, sys.argv[2], sys.argv[3])
with torch.no_grad(), retrieval(model):
    logits = run(model, text(60)[:, 40:], [9, 1, 10], cache)
torch.save(logits, sys.argv[4])
"""


def test_another_process_goes_on(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    model = make("llama")
    ids = text(60)
    cache = new_cache(model, path=tmp_path / "mem")
    with retrieval(model):
        run(model, ids[:, :40], [20, 20], cache)
    cache.save(tmp_path / "chat.state")
    cache.close()
    arguments = [Path(__file__).parent, tmp_path / "mem", tmp_path / "chat.state", tmp_path / "out"]
    subprocess.run([sys.executable, "-c", _ANOTHER_PROCESS, *map(str, arguments)], check=True)
    got = torch.load(tmp_path / "out", weights_only=True)
    assert close_to(got, reference(model, ids)[:, 40:])


def test_branches_do_not_see_each_other(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    trunk, ways = text(30), [text(25, seed=7), text(25, seed=8)]
    cache = new_cache(model)
    with retrieval(model):
        run(model, trunk, [30], cache)
    stored = len(cache.store)
    branches = [cache.branch(), copy.deepcopy(cache)]
    assert len(cache.store) == stored
    got: list[list[Any]] = [[], []]
    with retrieval(model):
        for at in range(0, 25, 5):  # turn by turn, in the one process
            for branch, way, out in zip(branches, ways, got, strict=True):
                out.append(run(model, way[:, at : at + 5], [4, 1], branch))
    for way, out in zip(ways, got, strict=True):
        wanted = reference(model, torch.cat((trunk, way), dim=1))[:, 30:]
        assert close_to(torch.cat(out, dim=1), wanted)
    assert cache.get_seq_length() == 30
    with retrieval(model):
        again = run(model, ways[0], [25], cache)
    assert close_to(again, torch.cat(got[0], dim=1))


def test_reset_begins_a_new_conversation(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(30), [30], cache)
        old, names = len(cache.store), cache.sessions(1)[:]
        cache.reset()
        got = run(model, text(30, seed=4), [10, 20], cache)
    assert close_to(got, reference(model, text(30, seed=4)))
    assert len(cache.store) > old
    assert cache.sessions(1) != names


def test_new_conversation_sees_others_only_if_asked(tiny_model: Any, new_cache: Any) -> None:
    model = tiny_model()
    first = new_cache(model)
    with retrieval(model):
        run(model, text(40), [40], first)
        alone = run(model, text(9, seed=3), [9], new_cache(model, path=first.store))
        mixed = run(model, text(9, seed=3), [9], new_cache(model, path=first.store, recall="all"))
    assert close_to(alone, reference(model, text(9, seed=3)))
    assert not close_to(mixed, alone)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", ["llama", "cohere", "phi3", "gpt_neox", "smollm3", "smollm3 without RoPE"]
)
def test_other_conversations_are_placed_before_this_one(
    tiny_model: Any, new_cache: Any, name: str, attention: str
) -> None:
    """Memory of another text is attended to as if its tokens stood at positions -n to -1.

    The model itself says what that means: positions are relative, so all of them are shifted.
    """
    changes = {"no_rope_layers": [int(name == "smollm3")]} if "smollm3" in name else {}
    model = tiny_model(name.split()[0], attention, num_hidden_layers=1, **changes)
    other, ids = text(30), text(12, seed=3)
    first = new_cache(model, sink_tokens=0)
    # Somewhere else in its own conversation, and not at its beginning.
    with retrieval(model):
        model(other, position_ids=torch.arange(200, 230)[None], cache=first)
        cache = new_cache(model, path=first.store, recall="all", window=100)
        got = run(model, ids, [5, 1, 6], cache)
    n = sum(entry.n_tokens for entry in map(first.store.get, first.store))
    assert n == 24
    both = torch.cat((other[:, :n], ids), dim=1)
    wanted = model(both).logits[:, n:]  # one layer: its keys know of no other tokens
    assert close_to(got, wanted)


def test_placements_are_kept_and_removed_with_their_entries(
    tiny_model: Any, new_cache: Any, tmp_path: Path
) -> None:
    model = tiny_model()
    cache = new_cache(model, path=tmp_path / "mem")
    with retrieval(model):
        run(model, text(40), [20, 20], cache)
    wanted = {entry_id: cache.placement(entry_id) for entry_id in cache.store}
    assert None not in wanted.values()
    gone = min(wanted)
    cache.store.delete(gone)
    cache.store.compact()
    assert cache.placement(gone) is None
    cache.close()
    del wanted[gone]
    with new_cache(model, path=tmp_path / "mem") as cache:
        assert {entry_id: cache.placement(entry_id) for entry_id in cache.store} == wanted
    assert not any(path.name.startswith("transformers") for path in (tmp_path / "mem").iterdir())


@pytest.mark.parametrize(
    "source",
    [None, 7, {"transformers": {}}, {"transformers": {"session": "x", "tokens": [1]}}],
)
def test_entries_of_other_programs_are_passed_over(
    tiny_model: Any, new_cache: Any, source: Any
) -> None:
    """They are found, but nobody knows where they stood."""
    model = tiny_model()
    cache = new_cache(model, recall="all", centre=False)
    rows = np.ones((4, cache.store.config.embed_dim))
    with retrieval(model):
        entry_id = cache.store.put(rows, rows, layer_idx=0, source=source)
        got = run(model, text(9, seed=5), [9], cache)
    assert cache.store.get(entry_id).access_count > 0
    assert cache.placement(entry_id) is None
    assert close_to(got, reference(model, text(9, seed=5)))


@pytest.mark.parametrize("other", ["weights", "rope"])
def test_an_entry_of_another_model_is_refused_when_it_is_found(
    tiny_model: Any, new_cache: Any, other: str
) -> None:
    model = tiny_model()
    cache = new_cache(model, recall="all", centre=False)
    with retrieval(model):
        run(model, text(30), [30], cache)
        place = cache.placement(next(iter(cache.store)))
        rows = np.ones((4, cache.store.config.embed_dim))
        changed = place._replace(**{other: 7})
        cache.store.put(rows, rows, layer_idx=0, source=changed.source())
        with pytest.raises(hybridmem.ModelMismatchError, match=r"other (weights|RoPE)"):
            run(model, text(9, seed=5), [9], new_cache(model, path=cache.store, recall="all"))


def test_means_are_learned_once(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    model = tiny_model()
    means = []
    for seed in range(2):
        with new_cache(model, path=tmp_path / "mem") as cache, retrieval(model):
            run(model, text(60, seed=seed), [60], cache)
            means.append([np.array(cache.store.calibration[layer]) for layer in range(3)])
    np.testing.assert_array_equal(means[0], means[1])
    assert np.abs(means[0]).max() > 0.01


def test_state_of_another_store_or_model(tiny_model: Any, new_cache: Any, tmp_path: Path) -> None:
    model = tiny_model()
    for name in ("one", "two"):
        cache = new_cache(model, path=tmp_path / name)
        with retrieval(model):
            run(model, text(30), [30], cache)
        cache.save(tmp_path / f"{name}.state")
        cache.close()
    with pytest.raises(hybridmem.ModelMismatchError, match="another store"):
        HybridCache.load(model.config, tmp_path / "two", tmp_path / "one.state")
    other = tiny_model("qwen2")
    with pytest.raises(hybridmem.ModelMismatchError, match="another model"):
        HybridCache.load(other.config, tmp_path / "three", tmp_path / "one.state")
    data = (tmp_path / "one.state").read_bytes()
    for bad in (b"", data[:50], b"\x08" + bytes(7) + b"{}      "):
        (tmp_path / "bad.state").write_bytes(bad)
        with pytest.raises(hybridmem.CorruptStoreError, match="no saved conversation"):
            HybridCache.load(model.config, tmp_path / "one", tmp_path / "bad.state")
    with pytest.raises(FileNotFoundError):
        HybridCache.load(model.config, tmp_path / "one", tmp_path / "missing.state")


def test_state_is_replaced_whole(
    tiny_model: Any, new_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridmem import _fileio

    model = tiny_model()
    cache = new_cache(model)
    with retrieval(model):
        run(model, text(20), [20], cache)
    cache.save(tmp_path / "states" / "chat")
    before = (tmp_path / "states" / "chat").read_bytes()
    with retrieval(model):
        run(model, text(3), [3], cache)

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_fileio.calls, "writev", fail)
        with pytest.raises(hybridmem.StoreFullError):
            cache.save(tmp_path / "states" / "chat")
    assert (tmp_path / "states" / "chat").read_bytes() == before
    assert [p.name for p in (tmp_path / "states").iterdir()] == ["chat"]


def test_entries_that_the_store_evicted(tiny_model: Any, new_cache: Any) -> None:
    """A limit on the store may take any entry away; what is left is still served."""
    model = tiny_model()
    cache = new_cache(model, limits={"max_entries": 6})
    with retrieval(model):
        run(model, text(60), [30, 1, 1, 28], cache)
    assert len(cache.store) == 6
