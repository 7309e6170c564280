"""Take back the scripts of sphinx-thebe, which Jupyter Book loads without being asked.

They would let a reader run cells through a script of another host. Our pages load nothing from
elsewhere, and Colab and Binder run cells better.
"""

from __future__ import annotations

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Disconnect what sphinx-thebe has connected."""
    for event, listeners in app.events.listeners.items():
        kept = [
            each for each in listeners if not each.handler.__module__.startswith("sphinx_thebe")
        ]
        app.events.listeners[event] = kept
    return {"parallel_read_safe": True, "parallel_write_safe": True}
