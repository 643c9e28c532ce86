"""Every committed lesson keeps the rules of ``notebook_rules``; each rule catches a notebook that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import notebook_rules as rules
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ("README.md", "CONTRIBUTING.md")

lessons = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_is_a_lesson() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["00_decode_step.ipynb"]


@lessons
@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_lesson_keeps(path: Path, rule: rules.Rule) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert rule(notebook) == []


@lessons
def test_lesson_links_resolve(path: Path) -> None:
    assert rules.links_resolve(nbformat.read(path, as_version=4), path.parent) == []


@pytest.mark.parametrize("name", PAGES)
def test_page_links_resolve_and_images_have_alt_text(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(rules.links(text)) > 0
    assert rules.dead_links(text, ROOT) == []
    assert rules.images_without_alt(text) == []


OPENING = """# A lesson
You will be able to
- count launches
- name buffers
- compare addresses

Builds on lesson 00. 20 minutes on a laptop; a GPU adds real captures."""


def stream(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def lesson() -> Any:
    """A small notebook that keeps every rule: opening, import, count, failure, question, takeaways, ledger, link."""
    code = [
        new_code_cell("%xmode Minimal\nimport torch\nfrom nanoserve_lab import Engine", execution_count=1),
        new_code_cell("x = torch.ones(2, 3)\nn = x.numel()\nprint(n)", execution_count=2, outputs=[stream("6\n")]),
        new_code_cell(
            "rows = (0, 1)\nplan = rows[:1]\nraise ValueError(plan)",
            execution_count=3,
            metadata={"tags": ["raises-exception"]},
            outputs=[new_output("error", ename="ValueError", evalue="(0,)", traceback=["ValueError: (0,)"])],
        ),
        new_code_cell("row = 4\nledger = [row]\nledger", execution_count=4),
    ]
    takeaways = "## Three takeaways\n1. one\n2. two\n3. three"
    cells = [
        new_markdown_cell(OPENING),
        *code[:3],
        new_markdown_cell("<details><summary>Why?</summary>\n\nBecause.\n\n</details>"),
        new_markdown_cell(takeaways),
        code[3],
        new_markdown_cell("Next: [the list](../README.md#the-lessons)"),
    ]
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def test_a_good_lesson_passes() -> None:
    notebook = lesson()
    nbformat.validate(notebook)
    assert {rule.__name__: rule(notebook) for rule in rules.RULES if rule(notebook)} == {}
    assert rules.links_resolve(notebook, ROOT / "notebooks") == []


def source(index: int, text: str) -> Callable[[Any], None]:
    return lambda notebook: notebook.cells[index].update(source=text)


def shows(index: int, *outputs: Any) -> Callable[[Any], None]:
    return lambda notebook: notebook.cells[index].update(outputs=list(outputs))


def tagged(index: int, *names: str) -> Callable[[Any], None]:
    return lambda notebook: notebook.cells[index].metadata.update(tags=list(names))


def stripped(notebook: Any) -> None:
    for _, cell in rules.code_cells(notebook):
        cell.update(outputs=[], execution_count=None)


def error(*traceback: str) -> Any:
    return new_output("error", ename="ValueError", evalue="(0,)", traceback=list(traceback))


def html(text: str) -> Any:
    return new_output("display_data", data={"text/html": text})


BROKEN: list[tuple[rules.Rule, Callable[[Any], Any], str]] = [
    (rules.run_in_order, stripped, "execution counts: wanted 1 to 4, saw [None, None, None, None]"),
    (rules.run_in_order, lambda nb: nb.cells[2].update(execution_count=7), "saw [1, 7, 3, 4]"),
    (rules.plain_kernel, lambda nb: nb.metadata.kernelspec.update(name="lab"), "wanted python3, saw lab"),
    (rules.plain_kernel, lambda nb: nb.metadata.pop("kernelspec"), "wanted python3, saw None"),
    (rules.no_widget_state, lambda nb: nb.metadata.update(widgets={}), "metadata.widgets"),
    (rules.small_file, shows(2, stream("x" * 500_000)), "wanted under 500000"),
    (rules.no_stderr, shows(2, stream("UserWarning: late\n", "stderr")), "cell 2: stderr output: UserWarning: late"),
    (rules.errors_are_meant, tagged(3), "cell 3: ValueError in a cell without the tag raises-exception"),
    (rules.errors_are_meant, shows(3), "cell 3: tagged raises-exception, and shows no error"),
    (rules.errors_are_meant, lambda nb: nb.cells.pop(3), "no deliberate failure"),
    (rules.short_code, source(2, "x = 1\n" * 26), "cell 2: 26 lines of code, at most 25"),
    (rules.short_code, lambda nb: [cell.update(source="x = 1") for _, cell in rules.code_cells(nb)], "median of 1"),
    (rules.short_code, lambda nb: [c.update(source="x = 1\n" * 9) for _, c in rules.code_cells(nb)], "median of 9"),
    (rules.mostly_compared, lambda nb: [tagged(at, "nbval-ignore-output")(nb) for at in (1, 2)], "2 of 4 code cells"),
    (rules.mostly_compared, tagged(2, "nbval-skip"), "cell 2: tag nbval-skip is not used here"),
    (rules.mostly_compared, source(2, "# NBVAL_IGNORE_OUTPUT\nx = 1"), "cell 2: an NBVAL comment; use a tag"),
    (rules.opening, lambda nb: nb.cells.pop(0), "cell 0: wanted Markdown"),
    (rules.opening, source(0, OPENING.replace("- name buffers\n", "")), "saw 2 items"),
    (rules.opening, source(0, OPENING.replace("20 minutes", "A while")), "does not say minutes"),
    (rules.opening, source(0, OPENING.replace("Builds on", "After")), "does not say what it builds on"),
    (rules.opening, source(0, OPENING.replace("a GPU", "a card")), "does not say what a GPU adds"),
    (rules.ending, lambda nb: nb.cells.pop(5), "no heading with takeaways"),
    (rules.ending, source(5, "## Takeaways\n- one\n- two"), "cell 5: wanted three takeaways, saw 2"),
    (rules.ending, source(6, "x = 1"), "no code cell with the ledger after the takeaways"),
    (rules.ending, source(7, "The end."), "wanted Markdown with a link to go on"),
    (rules.images_have_alt_text, source(4, "![](a.png)"), "cell 4: image a.png without alt text"),
    (rules.images_have_alt_text, source(4, '<img src="a.png">'), "cell 4: image a.png without alt text"),
    (rules.no_absolute_paths, shows(2, stream("/home/me/a.csv")), "cell 2: absolute path /home/m..."),
    (rules.no_absolute_paths, source(2, "open('/tmp/a')"), "cell 2: absolute path /tmp/a..."),
    (rules.no_absolute_paths, source(4, "See /opt/x."), "cell 4: absolute path /opt/x..."),
    (rules.no_absolute_paths, shows(3, error("\x1b[32m/usr/lib/a.py\x1b[0m")), "cell 3: absolute path /usr/l..."),
    (rules.no_addresses, shows(2, html("<b at 0x7f3a2c001d30>")), "cell 2: address 0x7f3a2c001d30"),
    (rules.no_compared_timings, shows(2, stream("took 1.25 ms")), "cell 2: '1.25 ms' in a compared output"),
    (rules.no_compared_timings, shows(2, stream("took 3.5s")), "cell 2: '3.5s' in a compared output"),
    (rules.no_compared_timings, shows(2, html("<td>12 us</td>")), "cell 2: '12 us' in a compared output"),
    (rules.details_are_closed, source(4, "<details><summary>Why?</summary>"), "cell 4: <details>"),
    (rules.details_are_closed, source(4, "<details>\nno summary\n</details>"), "cell 4: <details>"),
    (rules.known_imports, source(2, "def late():\n    import transformers.utils"), "cell 2: imports transformers"),
    (rules.known_imports, source(2, "from scipy import linalg"), "cell 2: imports scipy"),
    (rules.known_imports, source(2, "print(1"), "cell 2: not Python"),
]


@pytest.mark.parametrize(("rule", "breaks", "problem"), BROKEN, ids=[f"{row[0].__name__}-{row[2]}" for row in BROKEN])
def test_a_broken_lesson_is_caught(rule: rules.Rule, breaks: Callable[[Any], Any], problem: str) -> None:
    notebook = lesson()
    breaks(notebook)
    assert any(problem in found for found in rule(notebook)), rule(notebook)


def test_every_rule_is_broken_once() -> None:
    assert {row[0] for row in BROKEN} == set(rules.RULES)


def test_ignored_cells_may_print_timings() -> None:
    notebook = lesson()
    notebook.cells[2].update(outputs=[stream("took 1.25 ms")])
    tagged(2, "nbval-ignore-output")(notebook)
    assert rules.no_compared_timings(notebook) == []


@pytest.mark.parametrize(
    ("markdown", "problem"),
    [
        ("[a](nowhere.md)", "link nowhere.md: no such file"),
        ("![a](nowhere.png)", "link nowhere.png: no such file"),
        ('<picture><source srcset="nowhere.png 2x"></picture>', "link nowhere.png: no such file"),
        ("[a](README.md#no-such-part)", "link README.md#no-such-part: no such heading"),
        ("# Here\n[a](#there)", "link #there: no such heading"),
    ],
)
def test_a_dead_link_is_caught(markdown: str, problem: str) -> None:
    assert rules.dead_links(markdown, ROOT) == [problem]
    assert rules.links_resolve(new_notebook(cells=[new_markdown_cell(markdown)]), ROOT) == [problem]


def test_links_that_lead_somewhere_pass() -> None:
    assert (
        rules.dead_links("# Here\n[a](#here) [b](README.md#the-lessons) [c](https://pytorch.org) ![d](LICENSE)", ROOT)
        == []
    )
