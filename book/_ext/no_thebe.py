"""Take back what sphinx-thebe adds, which Jupyter Book loads without being asked.

It would let a reader run cells through a script of another host. Our pages load nothing from
elsewhere, and Colab and Binder run cells better.
"""

from __future__ import annotations

from sphinx.application import Sphinx


def drop_thebe(app: Sphinx) -> None:
    """Disconnect what sphinx-thebe has connected, and drop its style sheet."""
    for listeners in app.events.listeners.values():
        for listener in list(listeners):
            if listener.handler.__module__.startswith("sphinx_thebe"):
                app.disconnect(listener.id)
    app.registry.css_files = [file for file in app.registry.css_files if "thebe" not in file[0]]


def setup(app: Sphinx) -> dict[str, bool]:
    """Wait until every extension is loaded, this one first or last."""
    app.connect("config-inited", lambda app, config: drop_thebe(app))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
