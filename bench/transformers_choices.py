"""What each choice of the transformers client is worth, one left out at a time.

The text, the facts and the model are those of ``examples/transformers_needle.py`` (see there what
to install). Prints, for each way to read the text and to answer, the mean loss of the right answers
in nats a token, that of the worst of them, and how many answers the model gave by itself.

    python bench/transformers_choices.py [--tokens 2600] [--window 256] [--top-k 6]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from hybridmem.integrations.transformers import HybridCache, retrieval

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_needle.py"

#: What a way changes; "piece" is the tokens read at a time.
WAYS: dict[str, dict[str, Any]] = {
    "HybridMem": {},
    "read in one piece": {"piece": 1 << 20},
    "everything retrieved": {"top_k": 1 << 20},
    "each layer by itself": {"fuse_layers": False},
    "without centring": {"centre": False},
    "without sinks": {"sink_tokens": 0},
    "cache only": {"recall": "none"},
    "cache only, without sinks": {"recall": "none", "sink_tokens": 0},
}


def example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("transformers_needle", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2600)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--piece", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    needle = example()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model, tokenizer = needle.load(Path(folder) / "model.pt")
        text = needle.TEXT.read_text(encoding="utf-8")
        ids = needle.plant(text, tokenizer, options.tokens)
        print(f"{ids.shape[1]:,} tokens\n")
        print("| | mean loss | worst | exact |\n|---|---|---|---|")
        full = transformers.DynamicCache(config=model.config)
        needle.read(model, ids, full, options.piece)
        answers = []
        for fact in needle.FACTS:
            answers.append(needle.ask(model, tokenizer, full, fact))
            full.crop(ids.shape[1] - full.get_seq_length())
        show("full cache", answers, needle.FACTS)
        for number, (name, changed) in enumerate(WAYS.items()):
            way = {"piece": options.piece, "top_k": options.top_k, **changed}
            piece = way.pop("piece")
            store = Path(folder) / str(number)
            with (
                HybridCache(model.config, store, window=options.window, **way) as cache,
                retrieval(model),
            ):
                needle.read(model, ids, cache, piece)
                answers = [
                    needle.ask(model, tokenizer, cache.branch(), fact) for fact in needle.FACTS
                ]
            show(name, answers, needle.FACTS)


def show(name: str, answers: list[tuple[str, float]], facts: Any) -> None:
    """Print a row of the table."""
    losses = [loss for _, loss in answers]
    exact = sum(said == fact.answer for (said, _), fact in zip(answers, facts, strict=True))
    mean = sum(losses) / len(losses)
    print(f"| {name} | {mean:.2f} | {max(losses):.2f} | {exact} of {len(facts)} |", flush=True)


if __name__ == "__main__":
    main()
