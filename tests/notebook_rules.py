"""The rules that every lesson keeps. Each takes a notebook and returns its problems by cell, none where it keeps it."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from markdown_it import MarkdownIt
from markdown_it.token import Token

Rule = Callable[[Any], list[str]]

MAX_BYTES = 500_000
MAX_CODE_LINES = 25
MEDIAN_CODE_LINES = (3, 8)
MAX_IGNORED_SHARE = 0.35
IMPORTS = {"nanoserve_lab", "torch", "numpy", "pandas", "matplotlib", "ipywidgets", *sys.stdlib_module_names}
TAGS = {"raises-exception", "nbval-ignore-output", "hide-input"}

ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~<])/(?:home|Users|root|tmp|work|usr|opt|mnt|var|srv|private|etc|content)/[\w.]")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
TIMING = re.compile(r"\b\d+(?:\.\d+\s?(?:s|sec|seconds)|(?:\.\d+)?\s?(?:ms|us|µs|μs|ns))\b")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def code_cells(notebook: Any) -> list[tuple[int, Any]]:
    """``(index, cell)`` of every code cell."""
    return [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def markdown_cells(notebook: Any) -> list[tuple[int, Any]]:
    """``(index, cell)`` of every Markdown cell."""
    return [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "markdown"]


def tags(cell: Any) -> set[str]:
    """The tags in a cell's metadata."""
    return set(cell.metadata.get("tags", []))


def output_texts(cell: Any) -> Iterator[str]:
    """Every text that a cell's outputs hold: streams, text/*, SVG, and errors with their traceback."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield from (output.evalue, *output.traceback)
        else:
            yield from (text for kind, text in output.data.items() if kind.startswith("text/") or "svg" in kind)


def run_in_order(notebook: Any) -> list[str]:
    counts = [cell.execution_count for _, cell in code_cells(notebook)]
    wanted = list(range(1, len(counts) + 1))
    return [] if counts == wanted else [f"execution counts: wanted 1 to {len(counts)}, saw {counts}"]


def plain_kernel(notebook: Any) -> list[str]:
    name = notebook.metadata.get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"kernelspec: wanted python3, saw {name}"]


def no_widget_state(notebook: Any) -> list[str]:
    return ["metadata.widgets: widget state is saved in the file"] if "widgets" in notebook.metadata else []


def small_file(notebook: Any) -> list[str]:
    size = len(nbformat.writes(notebook).encode())
    return [] if size < MAX_BYTES else [f"size: {size} bytes, wanted under {MAX_BYTES}"]


def no_stderr(notebook: Any) -> list[str]:
    return [
        f"cell {index}: stderr output: {output.text.strip().splitlines()[0][:80]}"
        for index, cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]


def errors_are_meant(notebook: Any) -> list[str]:
    """An error is shown in a cell tagged for it, a tagged cell shows one, and there is at least one."""
    problems, meant = [], 0
    for index, cell in code_cells(notebook):
        names = [output.ename for output in cell.outputs if output.output_type == "error"]
        tagged = "raises-exception" in tags(cell)
        meant += bool(names and tagged)
        if names and not tagged:
            problems.append(f"cell {index}: {names[0]} in a cell without the tag raises-exception")
        if tagged and not names:
            problems.append(f"cell {index}: tagged raises-exception, and shows no error")
    return problems or ([] if meant else ["no deliberate failure stays on the page"])


def short_code(notebook: Any) -> list[str]:
    lengths = {
        index: len([line for line in cell.source.splitlines() if line.strip()]) for index, cell in code_cells(notebook)
    }
    problems = [
        f"cell {index}: {lines} lines of code, at most {MAX_CODE_LINES}"
        for index, lines in lengths.items()
        if lines > MAX_CODE_LINES
    ]
    median = statistics.median(lengths.values()) if lengths else 0
    low, high = MEDIAN_CODE_LINES
    if not low <= median <= high:
        problems.append(f"code cells: median of {median} lines, wanted {low} to {high}")
    return problems


def mostly_compared(notebook: Any) -> list[str]:
    """Few cells may skip the comparison, by tag only: a comment in the code is for the reader."""
    cells = code_cells(notebook)
    ignored = [index for index, cell in cells if "nbval-ignore-output" in tags(cell)]
    problems = [
        f"cell {index}: tag {tag} is not used here" for index, cell in cells for tag in sorted(tags(cell) - TAGS)
    ]
    problems += [f"cell {index}: an NBVAL comment; use a tag" for index, cell in cells if "NBVAL_" in cell.source]
    if len(ignored) > MAX_IGNORED_SHARE * len(cells):
        share = f"{len(ignored)} of {len(cells)}"
        problems.append(f"nbval-ignore-output: {share} code cells, at most {MAX_IGNORED_SHARE:.0%}")
    return problems


def opening(notebook: Any) -> list[str]:
    """The first cell says what the reader will be able to do (three verbs), what it builds on, minutes, and the GPU."""
    first = notebook.cells[0]
    if first.cell_type != "markdown":
        return ["cell 0: wanted Markdown"]
    items = count_items(first.source)
    problems = [] if items == 3 else [f"cell 0: wanted a list of three things to do, saw {items} items"]
    wanted = {"minutes": r"\bminutes\b", "what it builds on": r"(?i)\bbuilds on\b", "what a GPU adds": r"\bGPU\b"}
    problems += [
        f"cell 0: does not say {what}" for what, pattern in wanted.items() if not re.search(pattern, first.source)
    ]
    return problems


def ending(notebook: Any) -> list[str]:
    """The last cells: three takeaways, then the ledger's new row, then a link to go on."""
    heads = [index for index, cell in markdown_cells(notebook) if re.search(r"(?im)^#+ .*takeaways", cell.source)]
    if not heads:
        return ["no heading with takeaways"]
    problems = []
    items = count_items(notebook.cells[heads[-1]].source)
    if items != 3:
        problems.append(f"cell {heads[-1]}: wanted three takeaways, saw {items}")
    if not any("ledger" in cell.source for index, cell in code_cells(notebook) if index > heads[-1]):
        problems.append("no code cell with the ledger after the takeaways")
    last = notebook.cells[-1]
    if last.cell_type != "markdown" or not links(last.source):
        problems.append("last cell: wanted Markdown with a link to go on")
    return problems


def images_have_alt_text(notebook: Any) -> list[str]:
    return [
        f"cell {index}: image {source} without alt text"
        for index, cell in markdown_cells(notebook)
        for source in images_without_alt(cell.source)
    ]


def no_absolute_paths(notebook: Any) -> list[str]:
    hint = " (%xmode Minimal shows an error without its files)"
    problems = []
    for index, cell in enumerate(notebook.cells):
        texts = [cell.source, *(output_texts(cell) if cell.cell_type == "code" else ())]
        found = next((match.group() for text in texts if (match := ABSOLUTE_PATH.search(strip_colours(text)))), None)
        if found:
            problems.append(f"cell {index}: absolute path {found}...{hint if cell.cell_type == 'code' else ''}")
    return problems


def no_addresses(notebook: Any) -> list[str]:
    return [
        f"cell {index}: address {match.group()} in the output"
        for index, cell in code_cells(notebook)
        for text in output_texts(cell)
        if (match := ADDRESS.search(text))
    ]


def no_compared_timings(notebook: Any) -> list[str]:
    return [
        f"cell {index}: {match.group()!r} in a compared output; tag the cell nbval-ignore-output"
        for index, cell in code_cells(notebook)
        if "nbval-ignore-output" not in tags(cell)
        for text in output_texts(cell)
        if (match := TIMING.search(text))
    ]


def details_are_closed(notebook: Any) -> list[str]:
    """Every ``<details>`` is closed in its own cell and starts with a summary."""
    problems = []
    for index, cell in markdown_cells(notebook):
        names = re.findall(r"<(/?(?:details|summary))\b", cell.source)
        block = ["details", "summary", "/summary", "/details"]
        if [block[at % 4] for at in range(len(names))] != names or len(names) % 4:
            problems.append(f"cell {index}: <details> without its <summary>, or not closed: {' '.join(names)}")
    return problems


def known_imports(notebook: Any) -> list[str]:
    problems = []
    for index, cell in code_cells(notebook):
        lines = ["pass" if line.startswith(("%", "!")) else line for line in cell.source.splitlines()]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            problems.append(f"cell {index}: not Python: {error.msg}")
            continue
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        unknown = sorted({name.partition(".")[0] for name in names} - IMPORTS)
        problems += [f"cell {index}: imports {name}" for name in unknown]
    return problems


def links_resolve(notebook: Any, folder: Path) -> list[str]:
    """Every local link and image of the Markdown cells, relative to ``folder``."""
    text = "\n\n".join(cell.source for _, cell in markdown_cells(notebook))
    return dead_links(text, folder)


RULES: tuple[Rule, ...] = (
    run_in_order,
    plain_kernel,
    no_widget_state,
    small_file,
    no_stderr,
    errors_are_meant,
    short_code,
    mostly_compared,
    opening,
    ending,
    images_have_alt_text,
    no_absolute_paths,
    no_addresses,
    no_compared_timings,
    details_are_closed,
    known_imports,
)


def strip_colours(text: str) -> str:
    """``text`` without terminal escape sequences, which would hide the beginning of a path."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def count_items(markdown: str) -> int:
    """The number of list items in a Markdown text, nested ones aside."""
    return sum(token.type == "list_item_open" and token.level == 1 for token in MARKDOWN.parse(markdown))


def _tokens(markdown: str) -> Iterator[Token]:
    for token in MARKDOWN.parse(markdown):
        yield token
        yield from token.children or ()


class _Tags(HTMLParser):
    """The start tags of an HTML fragment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, {name: value or "" for name, value in attrs}))


def _html_tags(markdown: str) -> list[tuple[str, dict[str, str]]]:
    fragments = [token.content for token in _tokens(markdown) if token.type in ("html_block", "html_inline")]
    return _Tags("\n".join(fragments)).seen


def links(markdown: str) -> list[str]:
    """The targets of links, Markdown and HTML."""
    found = [str(token.attrs["href"]) for token in _tokens(markdown) if token.type == "link_open"]
    return found + [attributes["href"] for _, attributes in _html_tags(markdown) if "href" in attributes]


def images(markdown: str) -> list[str]:
    """The sources of images, Markdown and HTML, ``<picture>`` included."""
    found = [str(token.attrs["src"]) for token in _tokens(markdown) if token.type == "image"]
    values = [attributes.get(name) for _, attributes in _html_tags(markdown) for name in ("src", "srcset")]
    return found + [value.split()[0] for value in values if value]


def images_without_alt(markdown: str) -> list[str]:
    """The sources of images whose alt text is missing or empty."""
    found = [
        str(token.attrs["src"]) for token in _tokens(markdown) if token.type == "image" and not token.content.strip()
    ]
    found += [a.get("src", "") for tag, a in _html_tags(markdown) if tag == "img" and not a.get("alt", "").strip()]
    return found


def slugs(markdown: str) -> set[str]:
    """The anchors of a text's headings, as GitHub makes them."""
    tokens = list(MARKDOWN.parse(markdown))
    heads = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(markdown: str, folder: Path) -> list[str]:
    """Local links of ``markdown`` that lead nowhere from ``folder``: a file that is not there, or a heading."""
    problems = []
    for target in [*links(markdown), *images(markdown)]:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name
        if name and not path.exists():
            problems.append(f"link {target}: no such file")
        elif anchor and (not name or path.suffix == ".md"):
            text = path.read_text(encoding="utf-8") if name else markdown
            if anchor not in slugs(text):
                problems.append(f"link {target}: no such heading")
    return problems
