"""A lesson as a post: its committed notebook as one HTML or Markdown file, with the figures as files beside it."""

from __future__ import annotations

import base64
import copy
import json
import re
import struct
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import nbformat
from bs4 import BeautifulSoup
from jinja2 import DictLoader
from nbconvert import HTMLExporter, MarkdownExporter
from nbconvert.filters import strip_ansi
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

from nanoserve_lab.bench.provenance import write_files

FORMATS = {"html": HTMLExporter, "markdown": MarkdownExporter}
SUFFIXES = {"html": ".html", "markdown": ".md"}
FOLDER = "figures"
WIDGET = "application/vnd.jupyter.widget-view+json"

#: A Markdown link to a file of the repository: no scheme, and more than a heading of the page itself.
RELATIVE_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?![a-z][a-z0-9+.-]*:|#)([\w./-]+\.\w+(?:#[\w-]+)?)\)")
RELATIVE_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)|<(?:img|source)\b")


class PostRefused(RuntimeError):
    """A post that cannot be made. The message names the lesson, cell or folder, what is wanted and seen."""


def write_post(course: Path, lesson: str, out: Path, form: str = "html", repository: str | None = None) -> list[Path]:
    """Render a lesson of ``course`` (the folder of ``notebooks/`` and ``figures/``) into ``out``; returns the paths.

    ``lesson`` is its number or its name, ``form`` a key of `FORMATS`. ``repository`` is the address under which
    the course's files can be read; links to them go there, and are plain text without it. The same lesson gives the
    same bytes. Raises `PostRefused`, before anything is written, for a lesson that is not there or was not run, and
    for a folder with files that are not this post's.
    """
    path = find_lesson(course / "notebooks", lesson)
    files = render_post(path, course / "figures", form, repository)
    own = {*files, *(path.stem + suffix for suffix in SUFFIXES.values())}
    if out.exists() and not out.is_dir():
        raise PostRefused(f"{out}: wanted a folder, saw a file")
    others = sorted({p.relative_to(out).as_posix() for p in out.rglob("*") if not p.is_dir()} - own)
    if others:
        raise PostRefused(f"{out}: wanted an empty folder or an earlier post of {path.stem}, saw {', '.join(others)}")
    write_files((out / name, content) for name, content in files.items())
    return [out / name for name in files]


def find_lesson(notebooks: Path, lesson: str) -> Path:
    """The notebook of ``lesson``, a number (``6``, ``06``) or a name; raises `PostRefused`, listing what is there."""
    name = lesson.removesuffix(".ipynb")
    found = sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))
    chosen = [path for path in found if path.stem == name or (name.isdecimal() and int(path.stem[:2]) == int(name))]
    if len(chosen) != 1:
        there = ", ".join(path.stem for path in found) or "none"
        raise PostRefused(f"lesson {lesson}: wanted one of {there}")
    return chosen[0]


def render_post(path: Path, figures: Path, form: str, repository: str | None = None) -> dict[str, bytes]:
    """The files of the post of the notebook ``path``, by name: the page first. See `write_post`."""
    if form not in FORMATS:
        raise PostRefused(f"format: wanted one of {', '.join(FORMATS)}, saw {form!r}")
    if repository is not None and not re.match(r"https?://\S+$", repository):
        raise PostRefused(f"repository: wanted an address that begins with https://, saw {repository!r}")
    notebook = copy.deepcopy(_read(path))
    notebook, _ = CoalesceStreamsPreprocessor(enabled=True).preprocess(notebook, {})
    album = Album(figures)
    for index, cell in enumerate(notebook.cells):
        cell.metadata.clear() if cell.cell_type != "code" else None
        if cell.cell_type == "markdown":
            cell.source = _with_links(cell.source, index, repository)
        elif cell.cell_type == "code":
            _tidy(cell, index, album, form)
    exporter = FORMATS[form](extra_loaders=[DictLoader(TEMPLATES)], template_file=f"post.{form}.j2")
    if isinstance(exporter, HTMLExporter):
        exporter.exclude_anchor_links = True
    page, _ = exporter.from_notebook_node(notebook, {"post": {"title": _title(notebook, path), "css": CSS}})
    page = re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"
    return {path.stem + SUFFIXES[form]: page.encode("utf-8"), **album.files}


class Album:
    """The figures of one post: the files that they are made of, by name, and the HTML that shows one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = folder / "manifest.json"
        entries = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        #: An alternative text holds its figure's numbers, so equal texts are equal figures.
        self.exported: dict[str, str] = {entry["alt"]: name for name, entry in entries.items()}
        self.captions: dict[str, str] = {entry["alt"]: entry["caption"] for entry in entries.values()}
        self.files: dict[str, bytes] = {}
        self.shown = 0

    def show(self, png: bytes, about: dict[str, Any]) -> str:
        """A ``<figure>``; ``about`` is the output's metadata of the image (``alt``, ``caption``, ``width``)."""
        self.shown += 1
        alt = about["alt"]
        caption = about.get("caption") or self.captions.get(alt, "")
        name = self.exported.get(alt)
        if name is not None:
            dark, light, png_name = (f"{FOLDER}/{name}.{end}" for end in ("dark.svg", "light.svg", "light.png"))
            for file in (dark, light, png_name):
                self.files[file] = (self.folder / Path(file).name).read_bytes()
            sources = (
                f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
                f'<source srcset="{light}" type="image/svg+xml">\n'
            )
        else:
            sources, png_name = "", f"{FOLDER}/figure-{self.shown:02}.png"
            self.files[png_name] = png
        columns, rows = struct.unpack(">II", self.files[png_name][16:24])
        width = about.get("width", columns)
        size = f'width="{width}" height="{round(width * rows / columns)}"'
        image = f"<picture>\n{sources}" + f'<img src="{png_name}" {size} alt="{escape(alt)}">\n</picture>'
        below = f"\n<figcaption>{escape(caption, quote=False)}</figcaption>" if caption else ""
        return f"<figure>\n{image}{below}\n</figure>"


def _read(path: Path) -> Any:
    try:
        notebook = nbformat.read(path, as_version=4)
    except (ValueError, KeyError) as error:
        raise PostRefused(f"{path.stem}: not a notebook ({error})") from None
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise PostRefused(f"{path.stem}: cell {index} was not run; run the notebook and save it first")
    return notebook


def _title(notebook: Any, path: Path) -> str:
    head = re.search(r"(?m)^# (.+)$", notebook.cells[0].source) if notebook.cells else None
    return head.group(1) if head else path.stem


def _with_links(source: str, index: int, repository: str | None) -> str:
    image = RELATIVE_IMAGE.search(source)
    if image:
        raise PostRefused(f"cell {index}: {image.group()}: an image in the text; a post's figures are outputs of cells")

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        return text if repository is None else f"[{text}]({urljoin(repository.rstrip('/') + '/notebooks/', target)})"

    return RELATIVE_LINK.sub(link, source)


def _tidy(cell: Any, index: int, album: Album, form: str) -> None:
    """Leaves code without IPython's magics, and outputs that are text, a table or a figure: ``kind`` and ``text``."""
    lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
    hidden = "hide-input" in cell.metadata.get("tags", [])
    cell.source = "" if hidden else "\n".join(lines).strip("\n")
    shown = [piece for output in cell.outputs for piece in _pieces(output, index, album, form)]
    cell.metadata = nbformat.from_dict({"shown": shown})
    cell.outputs = []


def _pieces(output: Any, index: int, album: Album, form: str) -> Iterator[dict[str, str]]:
    """What a post shows of one output: none, or one piece."""
    if output.output_type == "stream":
        lines = [line for line in output.text.splitlines() if not line.startswith("Exception reporting mode:")]
        text = strip_ansi("\n".join(lines)).strip("\n")
        if text.strip():
            yield {"kind": "output", "text": text}
    elif output.output_type == "error":
        yield {"kind": "error", "text": f"{output.ename}: {output.evalue}"}
    elif "image/png" in output.data:
        about = output.metadata.get("image/png", {})
        if not about.get("alt"):
            raise PostRefused(f"cell {index}: a figure without an alternative text")
        yield {"kind": "html", "text": album.show(base64.b64decode(output.data["image/png"]), about)}
    elif WIDGET in output.data:
        return
    elif "<table" in output.data.get("text/html", ""):
        yield {"kind": "html", "text": TABLES[form](_cells(output.data["text/html"]))}
    elif "text/plain" in output.data:
        yield {"kind": "output", "text": output.data["text/plain"]}


def _cells(html: str) -> list[list[str]]:
    """The texts of a data frame's table, row by row, the head first and on one line."""
    rows = [
        [cell.get_text(strip=True) for cell in row.find_all(["th", "td"])]
        for row in BeautifulSoup(html, "html.parser").find_all("tr")
    ]
    if len(rows) > 1 and rows[0][:1] == [""] and rows[1][0] and not any(rows[1][1:]):
        rows[0][0] = rows.pop(1)[0]  # pandas writes the index's name on a line of its own
    return rows


def _html_table(rows: list[list[str]]) -> str:
    def line(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell, quote=False)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = [line("th" if index == 0 else "td", cells) for index, cells in enumerate(rows)]
    return "\n".join(["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", "</table>"])


def _markdown_table(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(re.sub(r"([|*<\\])", r"\\\1", cell) for cell in cells) + " |" for cells in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


TABLES: dict[str, Callable[[list[list[str]]], str]] = {"html": _html_table, "markdown": _markdown_table}

TEMPLATES = {
    "post.markdown.j2": """\
{%- for cell in nb.cells %}
{% if cell.cell_type == "markdown" %}
{{ cell.source }}
{% elif cell.cell_type == "code" %}
{% if cell.source %}
```python
{{ cell.source }}
```
{% endif %}
{% for piece in cell.metadata.shown %}

{% if piece.kind == "html" %}
{{ piece.text }}
{% else %}
```text
{{ piece.text }}
```
{% endif %}
{% endfor %}
{% endif %}

{% endfor %}""",
    "post.html.j2": """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ resources.post.title | e }}</title>
<style>
{{ resources.post.css }}</style>
</head>
<body>
<article class="post">
{% for cell in nb.cells %}
{% if cell.cell_type == "markdown" %}
{{ cell.source | markdown2html }}
{% elif cell.cell_type == "code" %}
{% if cell.source %}
{{ cell.source | highlight_code }}
{% endif %}
{% for piece in cell.metadata.shown %}
{% if piece.kind == "html" %}
{{ piece.text }}
{% else %}
<pre class="{{ piece.kind }}">{{ piece.text | e }}</pre>
{% endif %}
{% endfor %}
{% endif %}
{% endfor %}
</article>
</body>
</html>
""",
}

CSS = """\
.post { color-scheme: light dark; --paper: #fff; --ink: #1b1f27; --muted: #586172; --line: #dfe3e9; --code: #f5f7fa;
  --key: #a71402; --name: #244684; --text: #276b33; --number: #8a5a00; --link: #244684; }
@media (prefers-color-scheme: dark) { .post { --paper: #10141a; --ink: #e8ebf0; --muted: #a3adba; --line: #2b323c;
  --code: #181e26; --key: #ff9a7a; --name: #7cc0f9; --text: #7fdc9f; --number: #e0c05a; --link: #7cc0f9; } }
body { margin: 0; }
.post { box-sizing: border-box; max-width: 48rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; overflow-wrap: break-word;
  font: 1.0625rem/1.6 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
html:has(> body > .post) { color-scheme: light dark; background: #fff; }
@media (prefers-color-scheme: dark) { html:has(> body > .post) { background: #10141a; } }
.post h1, .post h2, .post h3 { line-height: 1.25; margin: 2em 0 .6em; }
.post h1 { margin-top: .5em; }
.post a { color: var(--link); }
.post code, .post pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .875em; }
.post :not(pre) > code { background: var(--code); border-radius: 3px; padding: .1em .3em; }
.post pre { margin: 0; padding: .7em .9em; overflow-x: auto; line-height: 1.45; white-space: pre; }
.post .highlight { margin: 1em 0 .5em; background: var(--code); border-radius: 6px; }
.post .output, .post .error { margin: .5em 0 1em; border-left: 3px solid var(--line); color: var(--muted); }
.post .error { border-color: var(--key); color: var(--key); white-space: pre-wrap; }
.post [class^="k"], .post .ow { color: var(--key); }
.post .nf, .post .nc, .post .nb, .post .nd, .post .nn { color: var(--name); }
.post [class^="s"] { color: var(--text); }
.post [class^="m"] { color: var(--number); }
.post [class^="c"]:not(code) { color: var(--muted); }
.post details { margin: 1em 0; padding: .5em .9em; border: 1px solid var(--line); border-radius: 6px; }
.post summary { cursor: pointer; font-weight: 600; }
.post table { display: block; margin: 1em 0; overflow-x: auto; border-collapse: collapse; font-size: .875em; }
.post th, .post td { padding: .3em .7em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
.post th:first-child, .post td:first-child { text-align: left; }
.post figure { margin: 1.5em 0; }
.post img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff; border-radius: 4px; }
@media (prefers-color-scheme: dark) { .post picture:has(source) img { background: none; } }
.post figcaption { margin-top: .5em; font-size: .9em; color: var(--muted); }
"""
