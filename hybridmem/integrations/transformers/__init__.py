"""A transformers model that remembers what left its cache.

`HybridCache` is a cache whose layers keep a window of tokens and send older ones to a store; inside
`retrieval(model)` every query searches the store and attends to what it finds.

Needs PyTorch and transformers: `pip install hybridmem[transformers]`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401  (its absence is explained)
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"{error}; hybridmem.integrations.transformers needs PyTorch and transformers: "
        "pip install hybridmem[transformers]"
    ) from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        "hybridmem.integrations.transformers needs transformers 5 or newer, found "
        f"{_transformers.__version__}"
    )

from hybridmem.integrations.transformers._attention import retrieval
from hybridmem.integrations.transformers._cache import HybridCache
from hybridmem.integrations.transformers._entries import Placement

__all__ = ["HybridCache", "Placement", "retrieval"]
