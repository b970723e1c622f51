"""A chat with an RWKV-X model that goes on where the last process left it.

    python examples/rwkv_x_chat.py --checkpoint RWKV-X-0.2B-64k-Base.pth "My key is in the shed."
    python examples/rwkv_x_chat.py --checkpoint RWKV-X-0.2B-64k-Base.pth "Where is my key?"

Each prompt is read and answered through `PIPELINE.generate`; without prompts it asks for them. What
the model's cache drops goes to the store in --memory, and the conversation is saved beside it after
every answer: kill the process, start it again, and it remembers. --forget deletes the conversation.
Without --checkpoint small random weights are used, whose answers are noise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv_x.model import RWKV_X
from rwkv_x.utils import PIPELINE, PIPELINE_ARGS

from hybridmem.integrations import rwkv_x
from hybridmem.integrations.rwkv_x.checkpoint import random_checkpoint


def main() -> None:
    options = parse()
    options.memory.mkdir(parents=True, exist_ok=True)
    model = RWKV_X(model_path=str(checkpoint(options)), strategy=options.strategy)
    conversation = options.memory / "conversation.pt"
    with rwkv_x.attach(model, options.memory / "store", top_k=options.top_k) as memory:
        if options.forget:
            deleted = memory.forget(conversation) if conversation.exists() else 0
            memory.store.compact()
            print(f"Forgot the conversation: {deleted} entries deleted.")
            return
        state = memory.load(conversation) if conversation.exists() else memory.new_state()
        print(f"Going on after {heard(state)} tokens.")
        pipeline = PIPELINE(model)
        args = PIPELINE_ARGS(temperature=1.0, top_p=0.5, token_stop=[0])
        for prompt in prompts(options):
            print(f"\n> {prompt}\n")
            turn = f"\n\nUser: {prompt}\n\nAssistant:"
            pipeline.generate(turn, options.tokens, args, show, state)
            memory.save(state, conversation)
            report(memory, state)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", help="what to say; asked for where there are none")
    parser.add_argument("--checkpoint", type=Path, help="a .pth of RWKV-X; else random weights")
    parser.add_argument("--strategy", default="cpu fp32", help="as RWKV_X takes it")
    parser.add_argument("--memory", type=Path, default=Path("rwkv_x_memory"), help="directory")
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of an answer")
    parser.add_argument("--top-k", type=int, default=8, help="entries that a search gives")
    parser.add_argument("--forget", action="store_true", help="delete the conversation, and stop")
    return parser.parse_args()


def checkpoint(options: argparse.Namespace) -> Path:
    """Path of the weights; small random ones are written where none are given."""
    if options.checkpoint:
        return options.checkpoint
    path = options.memory / "random.pth"
    if not path.exists():
        random_checkpoint(path)
    print("No --checkpoint: using small random weights. They remember, but they only babble.")
    return path


def prompts(options: argparse.Namespace) -> Iterator[str]:
    if options.prompts:
        yield from options.prompts
        return
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            return


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def heard(state: dict[str, Any]) -> int:
    """Tokens that a conversation has had so far."""
    return state["attn"][0].get("hybridmem", {"seen": 0})["seen"]


def report(memory: Any, state: dict[str, Any]) -> None:
    stats = memory.store.stats()
    held = state["attn"][0]
    print(
        f"\n\n[{heard(state)} tokens so far: per layer {held['k_cache'].shape[1]} in the cache, "
        f"{len(held['hybridmem']['keys'])} waiting, the rest in {stats.entries} entries on disk, "
        f"{stats.disk_bytes / 1e6:.1f} MB]"
    )


if __name__ == "__main__":
    main()
