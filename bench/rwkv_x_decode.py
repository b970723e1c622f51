"""Cost of the memory while an RWKV-X model decodes.

Bare and attached decode take turns, token by token, on two instances of one checkpoint, so that
whatever else the machine does hits both; who is first changes, as the second one finds the weights
in the caches. Without --checkpoint random weights of the shapes of the
0.2B model are written first: the cost does not depend on their values. The store is filled with
random entries that the conversation may see.

    python bench/rwkv_x_decode.py --entries 10000 --tokens 200
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rwkv_x.model import RWKV_X

from hybridmem import simd_level
from hybridmem.integrations import rwkv_x
from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = options.checkpoint or make_checkpoint(folder)
        bare, attached = RWKV_X(str(checkpoint), "cpu fp32"), RWKV_X(str(checkpoint), "cpu fp32")
        share_weights(bare, attached)
        memory = rwkv_x.attach(
            attached,
            folder / "mem",
            top_k=options.top_k,
            chunk_tokens=options.chunk_tokens,
            search_every=options.search_every,
        )
        with memory:
            prompt = torch.randint(0, 65_536, (options.prompt,)).tolist()
            _, bare_state = bare.forward(prompt, None)
            _, state = attached.forward(prompt, None)
            fill(memory.store, state, options)
            if options.warm:
                for entry_id in memory.store:
                    memory.store.get(entry_id)
            pairs = measure(bare, bare_state, attached, state, options)
            report(pairs, memory.store, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a real .pth; random weights otherwise")
    parser.add_argument("--entries", type=int, default=10_000, help="over all layers")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to time")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prefill before")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--search-every", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    parser.add_argument(
        "--warm", action="store_true", help="look at every entry first, as a long run would have"
    )
    parser.add_argument("--cpu-time", action="store_true", help="on a machine with other work")
    parser.add_argument("--dir", type=Path, help="keep checkpoint and store here (about 5 GB)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    return parser.parse_args()


def make_checkpoint(folder: Path) -> Path:
    path = folder / "random-0.2b.pth"
    if not path.exists():
        random_checkpoint(path, width=768, rwkv_layers=12, attention_layers=4)
    return path


def share_weights(bare: Any, attached: Any) -> None:
    """Let both read the same memory: two copies are not equally fast to read."""
    attached.rwkv.z = bare.rwkv.z
    for block in attached.rwkv.blocks:
        block.z = bare.rwkv.z
    attached.attn.load_state_dict(bare.attn.state_dict(), assign=True)


def fill(store: Any, state: Any, options: argparse.Namespace) -> None:
    """Put random entries until there are enough, and let the conversation see all."""
    rng = np.random.default_rng(0)
    layers, width = len(state["attn"]), store.config.embed_dim
    counts = store.stats().entries_by_layer
    for layer in range(layers):
        for _ in range(counts.get(layer, 0), options.entries // layers):
            keys, values = rng.standard_normal((2, options.chunk_tokens, width), np.float32)
            store.put(keys, values, layer)
    store.flush()
    records = store.entries
    for layer, layer_state in enumerate(state["attn"]):
        mine = records[records["layer_idx"] == layer]
        held = layer_state["hybridmem"]
        held["entries"] = torch.from_numpy(mine["entry_id"].astype(np.int64))
        held["stamps"] = torch.from_numpy(mine["timestamp"].astype(np.int64))


def measure(
    bare: Any, bare_state: Any, attached: Any, state: Any, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Milliseconds of each token, bare and attached."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    turns = [(bare, bare_state), (attached, state)]
    pairs = []
    for at, token in enumerate(torch.randint(0, 65_536, (options.tokens + 20,)).tolist()):
        took = [0.0, 0.0]
        for which in (at % 2, 1 - at % 2):
            model, its_state = turns[which]
            start = clock()
            model.forward([token], its_state)
            took[which] = 1e3 * (clock() - start)
        pairs.append((took[0], took[1]))
    return pairs[20:]


def report(pairs: list[tuple[float, float]], store: Any, options: argparse.Namespace) -> None:
    # A search every few tokens shows in the mean of its period only.
    period = options.search_every
    periods = [pairs[at : at + period] for at in range(0, len(pairs) - period + 1, period)]
    means = [
        tuple(statistics.fmean(column) for column in zip(*one, strict=True)) for one in periods
    ]
    ratios = [attached / bare for bare, attached in means]
    figures = {
        "entries": len(store),
        "search_every": options.search_every,
        "top_k": options.top_k,
        "warm": options.warm,
        "threads": torch.get_num_threads(),
        "simd": simd_level(),
        "bare_ms": statistics.median(bare for bare, _ in means),
        "attached_ms": statistics.median(attached for _, attached in means),
        "overhead_percent": 100 * (statistics.median(ratios) - 1),
        "overhead_percent_quartiles": [
            100 * (value - 1) for value in statistics.quantiles(ratios, n=4)[::2]
        ],
    }
    for name, value in figures.items():
        print(f"{name:28s} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
