"""The tokenizer against transformers, and text that comes in pieces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoserve_lab.model import CheckpointError, TextStream, Tokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    "",
    " ",
    "Hello, world",
    "  two  spaces\n\n\ttab",
    "In 2024: 3.14159",
    "naïve 你好 🙂",
    FAMILY,
    "it's I'LL",
    "\ufffd",
]
#: The default model has no token for these and for the bytes F1 and F2; its authors' tokenizer drops them too.
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
#: Unicode text without surrogates (no UTF-8 has them), rich in emoji, joiners and U+FFFD.
texts = st.lists(
    st.one_of(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters=UNKNOWN, max_codepoint=0x3FFFF), max_size=8
        ),
        st.sampled_from([FAMILY, "👍🏽", "🇫🇷", "é", "\u200d", "\ufffd", "你好", "<|im_end|>", " x"]),
    ),
    max_size=12,
).map("".join)
searched = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer(default_model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(default_model_folder)


@pytest.fixture(scope="module")
def reference(default_model_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(default_model_folder)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A tokenizer of Llama 2's kind: Metaspace, the bytes of unknown characters as tokens, BOS by post-processor."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abehlo😀", "▁h", "he"]
    fast = FastTokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "h"), ("h", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(
        fast, chat_template="{{ bos_token }}{{ messages[0]['content'] }}", special_tokens={"bos_token": "<s>"}
    )


def stream_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.text_stream()
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_that_of_transformers(text: str, tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == text


@searched
@given(texts)
def test_any_text_comes_back(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text.replace("<|im_end|>", "")


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  3 + 4? \n"}],
    [
        {"role": "user", "content": "<b>&amp;</b>"},
        {"role": "assistant", "content": "🙂"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
def test_chat_is_that_of_transformers(
    messages: list[dict[str, str]], tokenizer: Tokenizer, reference: PreTrainedTokenizerFast
) -> None:
    for generation in (True, False):
        theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert tokenizer.chat_prompt(messages, generation) == theirs
    encoded = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert tokenizer.encode_chat(messages) == encoded["input_ids"]


def test_names_and_counts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2]) == "a"


TEMPLATE = """\
{%- if messages[0].role == 'user' and tools is none %}
    {%- for m in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {%- generation %}[{{ m.role }}] {{ m.content | tojson }}{% endgeneration %}
{{ eos_token }}
    {%- endfor %}
{%- else %}
    {{- raise_exception('user first') }}
{%- endif %}
{{ strftime_now('%Y') | length }}"""


@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_template_helpers(place: str, default_model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(default_model_folder / "tokenizer.json", tmp_path)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<|im_end|>"}}
    config["chat_template"] = TEMPLATE if place == "config" else "old"
    if place == "named":
        config["chat_template"] = [{"name": "rag", "template": ""}, {"name": "default", "template": TEMPLATE}]
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|im_end|>"}))
    messages = [{"role": "user", "content": f"<é {n}>"} for n in range(3)]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert "é 1" in theirs
    assert "é 2" not in theirs
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.chat_prompt(messages) == theirs
    assert tokenizer.eos_ids == (2,)
    with pytest.raises(ValueError, match=r"the chat template refuses these messages: user first"):
        tokenizer.chat_prompt([{"role": "system", "content": ""}])


def test_bos_is_not_added_twice(fallback: Tokenizer) -> None:
    assert fallback.encode("he")[0] == 1
    assert fallback.encode_chat([{"role": "user", "content": "he"}]).count(1) == 1


def test_errors_are_named(fallback: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not there"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"message 1: content: wanted a string, saw None"):
        fallback.chat_prompt([{"role": "user", "content": ""}, {"role": "user"}])
    fast = fallback._tokenizer
    with pytest.raises(CheckpointError, match=r"no chat template"):
        Tokenizer(fast).chat_prompt([])
    with pytest.raises(CheckpointError, match=r"chat template: .*endfor"):
        Tokenizer(fast, chat_template="{% for m in messages %}").chat_prompt([])
    with pytest.raises(ValueError, match=r"refuses these messages: .*unsafe"):
        Tokenizer(fast, chat_template="{{ messages.__class__.__mro__ }}").chat_prompt([])


@pytest.mark.parametrize("kind", ["tokenizer", "fallback"])
@searched
@given(text=texts)
def test_pieces_join_to_the_text(kind: str, request: pytest.FixtureRequest, text: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text)
    pieces = stream_pieces(tokenizer, ids)
    decoded = tokenizer.decode(ids)
    assert "".join(pieces) == decoded
    assert "\ufffd" in decoded or pieces[-1] == ""


@searched
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_pieces_of_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream_pieces(tokenizer, ids)) == tokenizer.decode(ids)


@searched
@given(data=st.binary(max_size=40))
def test_pieces_of_any_bytes(tokenizer: Tokenizer, data: bytes) -> None:
    single = [i for i in range(17, 1000) if len(tokenizer._tokenizer.id_to_token(i)) == 1]  # ids of one byte each
    ids = [single[byte % len(single)] for byte in data]
    assert "".join(stream_pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer, fallback: Tokenizer) -> None:
    for kind in (tokenizer, fallback):
        ids = kind.encode("🦖")
        pieces = stream_pieces(kind, ids)
        assert len(ids) > 2
        assert [piece for piece in pieces if piece.strip()] == ["🦖"]
        assert pieces[-2] == "🦖"
        assert "\ufffd" in "".join(stream_pieces(kind, ids[:-1]))


class _Counting:
    """A tokenizer that counts the ids it is asked about."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer, self.decoder, self.asked = tokenizer, tokenizer.decoder, 0

    def id_to_token(self, token_id: int) -> str | None:
        self.asked += 1
        return self._tokenizer.id_to_token(token_id)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.asked += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["tokenizer", "fallback"])
def test_work_per_token_is_bounded(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    broken = tokenizer.encode("🦖")[:-1][-1:]  # a byte that no character starts with, or goes on
    work = {}
    for count in (100, 1000):
        counting = _Counting(tokenizer._tokenizer)
        stream = TextStream(counting, frozenset())  # type: ignore[arg-type]
        for token_id in broken * count:
            stream.push(token_id)
        stream.flush()
        work[count] = counting.asked
    assert work[1000] < 11 * work[100]
