"""The documentation site: `make docs`. Pages are Markdown; `python docs/generate.py` writes
methods.md and api.md."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "fedjax_sim"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
suppress_warnings = ["myst.header"]  # files of `fedjax-sim paper` begin at the second level
root_doc = "index"  # README.md and the tables of contents, which a code host would show as text
exclude_patterns = ["_build", "README.md"]
myst_heading_anchors = 3  # links to headings, as on a code host
highlight_language = "none"  # commands; other blocks name their language
smartquotes = False  # two dashes are an option
html_theme = "furo"
html_title = f"fedjax_sim {version}"
html_static_path = html_css_files = ["site.css"]
html_show_copyright = False


def setup(app):
    """A figure and its deviation stay on one line."""
    app.connect("source-read", lambda app, page, text: text.append(unbroken(text.pop())))


def unbroken(text: str) -> str:
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
