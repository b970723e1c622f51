"""HybridCache on layered stores: packs under the store of its conversations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import run, text, torch, transformers

import hybridmem
from hybridmem.errors import ModelMismatchError, ReadOnlyError
from hybridmem.integrations.transformers import HybridCache, retrieval

pytestmark = [pytest.mark.torch, pytest.mark.transformers]


def close_to(a: Any, b: Any) -> bool:
    return float((a - b).abs().max()) < 1e-4


@pytest.fixture
def pack(tiny_model: Any, new_cache: Any, tmp_path: Path) -> Path:
    """A pack of what another conversation has stored."""
    model = tiny_model()
    cache = new_cache(model, path=tmp_path / "first")
    with retrieval(model):
        run(model, text(40, seed=7), [40], cache)
    cache.close()
    assert hybridmem.pack(tmp_path / "first", tmp_path / "pack") > 0
    return tmp_path / "pack"


@pytest.fixture(autouse=True)
def opened() -> Iterator[list[Any]]:
    """What is open longer than the caches of a test."""
    opened: list[Any] = []
    yield opened
    for one in reversed(opened):
        one.close()


@pytest.fixture
def layered(opened: list[Any], pack: Path, tmp_path: Path) -> Callable[[], hybridmem.Layered]:
    """Make stores that have nothing yet, and put the pack under them."""

    def make() -> hybridmem.Layered:
        with hybridmem.open(pack, mode="r") as like:
            mine = hybridmem.create(tmp_path / f"mine{len(opened)}", config=like.config)
        opened.extend((mine, hybridmem.layered([pack, mine])))
        memory: hybridmem.Layered = opened[-1]
        return memory

    return make


def test_a_conversation_sees_its_own_entries_only(
    tiny_model: Any, new_cache: Any, layered: Any
) -> None:
    model, ids = tiny_model(), text(50)
    memory = layered()
    with retrieval(model):
        got = run(model, ids, [30, 1, 1, 18], new_cache(model, path=memory))
    assert close_to(got, run(model, ids, [50], transformers.DynamicCache(config=model.config)))
    assert len(memory.stores[1]) > 0


def test_all_of_a_pack_is_recalled_as_from_one_store(
    tiny_model: Any, new_cache: Any, layered: Any, pack: Path, tmp_path: Path
) -> None:
    model, ids = tiny_model(), text(50)
    for number, top_k in enumerate((1000, 3)):
        with hybridmem.open(pack, mode="r") as opened:
            opened.snapshot(tmp_path / f"union{number}")
        got = []
        for store in (layered(), tmp_path / f"union{number}"):
            cache = new_cache(model, path=store, recall="all", top_k=top_k)
            with retrieval(model):
                got.append(run(model, ids, [30, 1, 1, 18], cache))
        assert close_to(*got)
        assert not close_to(
            got[0], run(model, ids, [50], transformers.DynamicCache(config=model.config))
        )


def test_a_saved_conversation_goes_on_without_the_pack(
    tiny_model: Any, new_cache: Any, layered: Any, tmp_path: Path
) -> None:
    model, ids = tiny_model(), text(50)
    wanted = run(model, ids, [50], transformers.DynamicCache(config=model.config))[:, 30:]
    memory = layered()
    cache = new_cache(model, path=memory)
    with retrieval(model):
        run(model, ids[:, :30], [30], cache)
    cache.save(tmp_path / "chat.state")
    for store in (memory, memory.stores[1]):
        cache = HybridCache.load(model.config, store, tmp_path / "chat.state")
        with retrieval(model):
            got = model(ids[:, 30:], position_ids=torch.arange(30, 50)[None], cache=cache).logits
        assert close_to(got, wanted)


def test_a_pack_of_other_weights_is_refused_at_once(
    tiny_model: Any, new_cache: Any, tmp_path: Path, opened: list[Any]
) -> None:
    """The first entry of each store is looked at, not of the first store only."""
    model, other = tiny_model(), copy.deepcopy(tiny_model())
    for weights in other.parameters():
        weights.mul_(1.5)
    for number, one in enumerate((model, other)):
        cache = new_cache(one, path=tmp_path / f"store{number}", centre=False)
        with retrieval(one):
            run(one, text(40), [40], cache)
        config = cache.store.config
        cache.close()
        hybridmem.pack(tmp_path / f"store{number}", tmp_path / f"pack{number}")
    opened.append(hybridmem.create(tmp_path / "mine", config=config))
    opened.append(hybridmem.layered([tmp_path / "pack0", tmp_path / "pack1", opened[0]]))
    cache = new_cache(model, path=opened[1])
    with retrieval(model), pytest.raises(ModelMismatchError, match="weights"):
        run(model, text(10), [10], cache)
    assert len(opened[0]) == 0


def test_layers_without_a_private_store_are_refused(tiny_model: Any, pack: Path) -> None:
    with hybridmem.layered([pack]) as memory, pytest.raises(ReadOnlyError):
        HybridCache(tiny_model().config, memory)
