"""Pure rendering: an OmniModel in an OmniPool becomes the process spec that an agent runs.

Agents and controllers call it. It does no I/O and reads no clock; the same input gives the same bytes.
"""

from __future__ import annotations

from omnimodel.render.card import model_card, spec_card
from omnimodel.render.identity import user_id
from omnimodel.render.origins import files_of_sources, references_of_sources
from omnimodel.render.process import render
from omnimodel.render.references import Config, fill_secrets

render_process = render  # under the name that does not read as the package's

__all__ = [
    "Config",
    "files_of_sources",
    "fill_secrets",
    "model_card",
    "references_of_sources",
    "render",
    "render_process",
    "spec_card",
    "user_id",
]
