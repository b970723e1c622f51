"""Sphinx configuration: MyST pages, API reference from docstrings."""

import hybridmem

project = "HybridMem"
author = "The HybridMem developers"
project_copyright = "The HybridMem developers"
release = hybridmem.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Types in docstrings are prose, "array_like of float, shape (n, embed_dim)".
nitpick_ignore_regex = [("py:class", ".*")]
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it
autodoc_mock_imports = ["torch", "transformers", "rwkv_x"]
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"HybridMem {release}"
html_static_path: list[str] = []
