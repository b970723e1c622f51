"""RWKV-X remembers: the third tier under the models of the `rwkv-x` package.

    memory = rwkv_x.attach(model, "mem/", top_k=8, chunk_tokens=64)

From then on `model.forward` and `PIPELINE.generate` put what tier 2 drops into the store and attend
back to it, in prefill and in decode. `memory.save(state, path)` and `memory.load(path)` carry a
conversation over process lifetimes, `memory.detach()` restores the model. See docs/rwkv_x.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridmem.integrations.rwkv_x._memory import RwkvMemory
    from hybridmem.memory import Memory

__all__ = ["attach"]


def attach(
    model: Any,
    store: Memory | str | os.PathLike[str],
    *,
    top_k: int = 8,
    chunk_tokens: int = 64,
    search_every: int = 16,
    search_at_end: bool = True,
    query_tokens: int = 8,
    recall: str = "own",
    importance: str = "upstream",
    centre_tokens: int = 1024,
    query_options: Mapping[str, Any] | None = None,
    force: bool = False,
    **config: Any,
) -> RwkvMemory:
    """Give a loaded RWKV-X model a memory on disk.

    Parameters
    ----------
    model : rwkv_x.model.RWKV_X or rwkv_x.model_old.RWKV_X
        As loaded; only this instance is changed.
    store : Memory or path
        An open store, several that are layered, or the directory of one, which is opened, or made
        where there is none, and closed by `detach`.
    top_k : int
        Entries of each attention layer that a search gives.
    chunk_tokens : int
        Tokens of an entry. Rows that do not fill one yet are held in the state and attended to.
    search_every : int
        Tokens between two searches of a layer; the layers take turns. 1 searches at every token.
    search_at_end : bool
        Whether the last token of a piece of several tokens searches too, since an answer may begin
        there. Without, what a row attends to does not depend on how a text is cut into pieces.
    query_tokens : int
        A search asks with the queries of the last so many tokens.
    recall : {"own", "all"}
        Whether a conversation sees the entries that it made itself, or all of the store.
    importance : {"upstream", "corrected"}
        Importance of an entry, by which the store evicts: the mean memory loss of its tokens as
        upstream computes it and ranks by it, or with the recurrent state contracted over its key
        axis. Which rows upstream keeps in tier 2 does not change.
    centre_tokens : int
        Tokens of a layer from which the mean key and the mean query are learned, once for a store;
        signatures are centred by them from then on (`Store.calibrate`). 0 never does.
    query_options : mapping, optional
        Options of `Store.query` for every search, such as `{"rerank": "late", "n_heads": 12}`.
        `rerank` is "signatures" where it is not given.
    force : bool
        Take a store of other weights all the same.
    **config
        Fields of `hybridmem.Config` for a store that is made, and limits for one that is opened.

    Returns
    -------
    RwkvMemory

    Raises
    ------
    ImportError
        Without PyTorch.
    ModelMismatchError
        If the store holds keys of other weights.
    """
    try:
        import torch  # noqa: F401  (only asked for, so that its absence can be explained)
    except ImportError as error:
        raise ImportError(
            "hybridmem.integrations.rwkv_x needs PyTorch: pip install 'hybridmem[rwkv]'"
        ) from error
    from hybridmem.integrations.rwkv_x._memory import RwkvMemory

    return RwkvMemory(
        model,
        store,
        top_k=top_k,
        chunk_tokens=chunk_tokens,
        search_every=search_every,
        search_at_end=search_at_end,
        query_tokens=query_tokens,
        recall=recall,
        importance=importance,
        centre_tokens=centre_tokens,
        query_options=query_options,
        force=force,
        config=config,
    )
