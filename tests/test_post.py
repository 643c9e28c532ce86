"""Posts: every lesson as HTML and Markdown, figures beside it, and the posts that are refused."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import notebook_rules as rules
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from typer.testing import CliRunner

from nanoserve_lab import cli
from nanoserve_lab.post import FORMATS, PostRefused, find_lesson, render_post, write_post

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "figures"
MANIFEST = json.loads((FIGURES / "manifest.json").read_text(encoding="utf-8"))
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))

lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
formats = pytest.mark.parametrize("form", FORMATS)


class Tags(HTMLParser):
    """The start tags of a page, and what is left open at its end."""

    VOID = frozenset({"meta", "img", "source", "br", "hr", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1:] == [tag]:
            self.open.pop()
        elif tag not in self.VOID:
            self.open.append(f"/{tag}")


def outputs_with(notebook: Any, kind: str) -> list[Any]:
    cells = [cell for _, cell in rules.code_cells(notebook)]
    return [output for cell in cells for output in cell.outputs if kind in output.get("data", {})]


@lessons
@formats
def test_a_lesson_keeps_its_figures_and_details_and_nothing_of_jupyter(path: Path, form: str) -> None:
    files = render_post(path, FIGURES, form)
    page = next(iter(files.values())).decode("utf-8")
    notebook = nbformat.read(path, as_version=4)
    tags = Tags(page)
    shown = [attributes["alt"] for tag, attributes in tags.seen if tag == "img"]
    assert shown == [output.metadata["image/png"]["alt"] for output in outputs_with(notebook, "image/png")]
    captions = [entry["caption"] for entry in MANIFEST.values() if entry["alt"] in shown]
    assert page.count("<figcaption>") >= len(captions)
    sources = [attributes.get("src") or attributes.get("srcset") for tag, attributes in tags.seen]
    assert {source for source in sources if source} == set(list(files)[1:])
    texts = [cell.source for _, cell in rules.markdown_cells(notebook)]
    assert sum(tag == "details" for tag, _ in tags.seen) == sum(text.count("<details>") for text in texts) > 0
    assert not rules.ABSOLUTE_PATH.search(page)
    assert not re.search(r"kernelspec|jp-|data:image|widget-view|dataframe|In \[|%xmode|reporting mode", page)
    assert [link for link in rules.links(page) if not re.match("https?:|#", link)] == []


@lessons
def test_html_is_whole_and_stands_alone(path: Path) -> None:
    page = next(iter(render_post(path, FIGURES, "html").values())).decode("utf-8")
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags.seen}
    assert page.count("<style>") == 1
    title = re.search("<title>(.*)</title>", page)
    assert title is not None
    assert page.count(f">{title.group(1)}</h1>") == 1


def picture(alt: str | None, caption: str | None = None, width: int = 2) -> Any:
    """An output with a PNG image of 4 x 2 pixels."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAQAAAACCAIAAADwyuo0AAAAEklEQVR4nGP8z8DAwMDAxAADAAkbAQMjgrKFAAAAAElFTkSuQmCC"
    about = {"width": width, "alt": alt, "caption": caption}
    about = {name: value for name, value in about.items() if value is not None}
    data = {"image/png": pixel, "text/plain": "<Picture>"}
    return new_output("display_data", data=data, metadata={"image/png": about})


def lesson(folder: Path, *cells: Any, name: str = "03_small") -> Path:
    """A course of one notebook, in ``folder``; returns the notebook."""
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Small <b>"), *cells]), path)
    return path


def code(source: str, *outputs: Any, **metadata: Any) -> Any:
    return new_code_cell(source, execution_count=1, outputs=list(outputs), metadata=metadata)


def page_of(path: Path, form: str = "markdown", **options: Any) -> str:
    return next(iter(render_post(path, FIGURES, form, **options).values())).decode("utf-8")


def test_outputs_as_they_are_shown(tmp_path: Path) -> None:
    table = (
        "<style>b {}</style><table border='1' class='dataframe'><tr style='x'><th></th><th>a|b</th></tr>"
        "<tr><th>row</th><th></th></tr><tr><th>0</th><td>1&lt;2</td></tr></table>"
    )
    traceback = ["\x1b[31mFile /home/me/x.py\x1b[0m", "ValueError: 3"]
    path = lesson(
        tmp_path,
        code(
            "%xmode Minimal\nx = 1",
            new_output("stream", text="Exception reporting mode: Minimal\n"),
            new_output("stream", text="one\n"),
            new_output("stream", text="\x1b[1mtwo\x1b[0m\n"),
        ),
        code("frame", new_output("execute_result", data={"text/html": table, "text/plain": "plain"})),
        code("bad()", new_output("error", ename="ValueError", evalue="3", traceback=traceback)),
        code("slider", new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}})),
        code("shy = 1", new_output("stream", text="seen\n"), tags=["hide-input"]),
        code("'<i>'", new_output("execute_result", data={"text/plain": "'<i>'"})),
    )
    assert page_of(path).split("\n\n") == [
        "# Small <b>",
        "```python\nx = 1\n```",
        "```text\none\ntwo\n```",
        "```python\nframe\n```",
        "| row | a\\|b |\n| --- | --- |\n| 0 | 1\\<2 |",
        "```python\nbad()\n```",
        "```text\nValueError: 3\n```",
        "```python\nslider\n```",
        "```text\nseen\n```",
        "```python\n'<i>'\n```",
        "```text\n'<i>'\n```\n",
    ]
    page = page_of(path, "html")
    assert '<pre class="output">one\ntwo</pre>' in page
    assert '<pre class="error">ValueError: 3</pre>' in page
    assert "<thead><tr><th>row</th><th>a|b</th></tr></thead>" in page
    assert "<tr><td>0</td><td>1&lt;2</td></tr>" in page
    assert """<pre class="output">'&lt;i&gt;'</pre>""" in page
    assert "<title>Small &lt;b&gt;</title>" in page


def test_a_registered_figure_comes_in_both_themes_and_another_as_it_was_drawn(tmp_path: Path) -> None:
    entry = MANIFEST["decode_step_path"]
    drawn = picture("Two <dots>", "A & B", width=100)
    path = lesson(tmp_path, code("a()", picture(entry["alt"])), code("b()", drawn))
    files = render_post(path, FIGURES, "html")
    page, dark, light, png, other = files
    assert (dark, light, png, other) == (
        "figures/decode_step_path.dark.svg",
        "figures/decode_step_path.light.svg",
        "figures/decode_step_path.light.png",
        "figures/figure-02.png",
    )
    for name in (dark, light, png):
        assert files[name] == (FIGURES / Path(name).name).read_bytes()
    assert files[other] == base64.b64decode(drawn.data["image/png"])
    text = files[page].decode("utf-8")
    assert f'media="(prefers-color-scheme: dark)" srcset="{dark}"' in text
    assert f"<figcaption>{entry['caption']}</figcaption>" in text
    images = [attributes for tag, attributes in Tags(text).seen if tag == "img"]
    assert images[1] == {"src": other, "width": "100", "height": "50", "alt": "Two <dots>"}
    assert "<figcaption>A &amp; B</figcaption>" in text


def test_links_to_the_course_are_text_unless_the_repository_is_named(tmp_path: Path) -> None:
    text = (
        "[four](04_x.ipynb), [list](../README.md#the-lessons), [torch](https://pytorch.org), [here](#small), `a[0](x)`"
    )
    path = lesson(tmp_path, new_markdown_cell(text))
    assert page_of(path).splitlines()[2] == ("four, list, [torch](https://pytorch.org), [here](#small), `a[0](x)`")
    linked = page_of(path, repository="https://example.org/course/blob/main/")
    assert rules.links(linked) == [
        "https://example.org/course/blob/main/notebooks/04_x.ipynb",
        "https://example.org/course/blob/main/README.md#the-lessons",
        "https://pytorch.org",
        "#small",
    ]


@formats
def test_the_same_lesson_gives_the_same_bytes(tmp_path: Path, form: str) -> None:
    first, second = (write_post(ROOT, "04", tmp_path / name, form) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert write_post(ROOT, "04_bucketing", tmp_path / "a", form) == first, "an earlier post of its own is replaced"
    assert sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file()) == sorted(first)


def test_both_formats_share_a_folder(tmp_path: Path) -> None:
    pages = [write_post(ROOT, "4", tmp_path, form)[0].name for form in FORMATS]
    assert pages == ["04_bucketing.html", "04_bucketing.md"]
    assert all((tmp_path / page).is_file() for page in pages)


def test_a_lesson_is_found_by_number_or_name() -> None:
    for name in ("0", "00", "00_decode_step", "00_decode_step.ipynb"):
        assert find_lesson(ROOT / "notebooks", name).stem == "00_decode_step"
    with pytest.raises(PostRefused, match=r"lesson 99: wanted one of 00_decode_step, 01_graph_breaks"):
        find_lesson(ROOT / "notebooks", "99")


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        (new_code_cell("x = 1"), {}, "03_small: cell 1 was not run"),
        (code("a()", picture(None)), {}, "cell 1: a figure without an alternative text"),
        (new_markdown_cell("![a](../figures/a.png)"), {}, r"cell 1: !\[a\]\(../figures/a.png\): an image in the text"),
        (code("x"), {"form": "pdf"}, "format: wanted one of html, markdown, saw 'pdf'"),
        (code("x"), {"repository": "github.com/a/b"}, "repository: wanted an address that begins with https://"),
        (code("x"), {"lesson": "4"}, "lesson 4: wanted one of 03_small"),
    ],
)
def test_a_post_is_refused_before_anything_is_written(
    tmp_path: Path, cell: Any, options: dict[str, Any], message: str
) -> None:
    lesson(tmp_path, cell)
    with pytest.raises(PostRefused, match=message):
        write_post(tmp_path, out=tmp_path / "out", **{"lesson": "3", **options})
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    (out / "figures" / "holiday.png").write_bytes(b"")
    lesson(tmp_path, code("x"))
    with pytest.raises(PostRefused, match=r"out: wanted an empty folder .* of 03_small, saw figures/holiday.png"):
        write_post(tmp_path, "3", out)
    assert [path.name for path in out.rglob("*")] == ["figures", "holiday.png"]
    (tmp_path / "file").touch()
    with pytest.raises(PostRefused, match="file: wanted a folder, saw a file"):
        write_post(tmp_path, "3", tmp_path / "file")


def test_no_notebook_is_named(tmp_path: Path) -> None:
    lesson(tmp_path, code("x")).write_text("{", encoding="utf-8")
    with pytest.raises(PostRefused, match="03_small: not a notebook"):
        write_post(tmp_path, "3", tmp_path / "out")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["post", "00", "--format", "markdown"])
    assert (done.exit_code, done.stderr) == (0, "")
    names = done.stdout.split()
    assert names[0] == "out/00_decode_step/00_decode_step.md"
    assert all((tmp_path / name).is_file() for name in names)
    refused = CliRunner().invoke(cli.app, ["post", "77"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("PostRefused: lesson 77: wanted one of 00_decode_step")
