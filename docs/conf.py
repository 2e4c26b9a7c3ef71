"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

import celery_dq  # noqa: E402

project = "celery-dq"
author = "the celery-dq authors"
copyright = f"2026, {author}"
version = release = celery_dq.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"celery-dq {release}"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
# The tutorial's commands and their output.
highlight_language = "none"
