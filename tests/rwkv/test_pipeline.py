"""Through `PIPELINE.generate`, with the package's own tokenizer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridmem.integrations import rwkv_x

from .helpers import EVERYTHING, MARKS, TOLERANCE, checkpoints, largest, load, run

pytestmark = MARKS

PROMPTS = [
    "Dragons live in a remote valley of Tibet. " * 6,
    " The key to the cellar hangs behind the red door. " * 3,
    "x",  # one token: upstream decodes it
    " Where is the key?",
]


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with the vocabulary of the tokenizer."""
    path = tmp_path_factory.mktemp("rwkv") / "worded.pth"
    checkpoints.random_checkpoint(path, vocab=65_536)
    return path


class Recorder:
    """A model that notes the tokens and the last logits of each forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.logits: list[tuple[int, np.ndarray]] = []
        self.state: Any = None

    def forward(self, tokens: list[int], state: Any) -> Any:
        logits, self.state = self.model.forward(tokens, state)
        self.tokens += tokens
        self.logits.append((len(self.tokens), logits.numpy().copy()))
        return logits, self.state


@pytest.mark.slow
def test_generate_over_several_turns(worded: Path, tmp_path: Path) -> None:
    utils = importlib.import_module("rwkv_x.utils")
    args = utils.PIPELINE_ARGS(temperature=1.0, top_p=0.7, alpha_frequency=0, alpha_presence=0)
    model = load(worded, 8)
    np.random.seed(0)  # noqa: NPY002 - upstream samples with the global generator
    recorder = Recorder(model)
    pipeline = utils.PIPELINE(recorder)
    with rwkv_x.attach(model, tmp_path / "mem", top_k=EVERYTHING, chunk_tokens=16) as memory:
        state = memory.new_state()
        for prompt in PROMPTS:
            pipeline.generate(prompt, token_count=12, args=args, state=state)
            memory.save(state, tmp_path / "conversation.pt")
            state = memory.load(tmp_path / "conversation.pt")
        assert len(memory.store) > 0
    expected, _ = run(load(worded, EVERYTHING), recorder.tokens, [len(recorder.tokens)])
    assert len(recorder.logits) == 12 * len(PROMPTS)
    for position, logits in recorder.logits:
        assert largest(expected[position - 1] - expected.new_tensor(logits)) < TOLERANCE
    # without memory the same run differs
    bare = Recorder(load(worded, 8))
    pipeline = utils.PIPELINE(bare)
    for prompt in PROMPTS:
        pipeline.generate(prompt, token_count=12, args=args, state=bare.state)
    expected, _ = run(load(worded, EVERYTHING), bare.tokens, [len(bare.tokens)])
    position, logits = bare.logits[-1]
    assert largest(expected[position - 1] - expected.new_tensor(logits)) > 0.5
