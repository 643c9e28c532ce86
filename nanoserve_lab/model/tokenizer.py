"""Text to token ids and back: ``tokenizer.json``, the checkpoint's chat template, and a stream that holds half
characters back."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from nanoserve_lab.model.checkpoint import read_eos_ids
from nanoserve_lab.model.config import CheckpointError, read_json

#: Special tokens that a template may name, by their key in ``tokenizer_config.json``.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer. ``eos_ids`` are the ids that end a text."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps ``tokenizer``; ``special_tokens`` (such as ``{"bos_token": "<s>"}``) are what a template may name."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder.

        Reads ``tokenizer.json`` and, where they are there, ``tokenizer_config.json``, ``chat_template.jinja`` (which
        goes before the template in the former) and the end ids of `read_eos_ids`, to which the tokenizer's own
        ``eos_token`` is added. Raises `CheckpointError` for a file that is missing or broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not there; a model folder needs tokenizer.json")
        try:
            tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer that the tokenizers library reads ({error})") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special = _special_tokens(config)
        eos_ids = list(read_eos_ids(folder))
        own_eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        if own_eos is not None and own_eos not in eos_ids:
            eos_ids.append(own_eos)
        return cls(tokenizer, eos_ids, _chat_template(folder, config), special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the checkpoint's post-processor adds."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens are skipped, bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """``messages`` (each with ``role`` and ``content``) as the checkpoint's chat template writes them.

        Raises `CheckpointError` where the checkpoint has no template or a broken one, and ValueError for messages
        without role or content and for those that the template refuses.
        """
        for n, message in enumerate(messages):
            for field in ("role", "content"):
                if not isinstance(message.get(field), str):
                    raise ValueError(f"message {n}: {field}: wanted a string, saw {message.get(field)!r}")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `chat_prompt`; the template writes the special tokens itself, so that none is added twice."""
        return list(self._tokenizer.encode(self.chat_prompt(messages), add_special_tokens=False).ids)

    def text_stream(self) -> TextStream:
        """A new stream that turns ids into text as they come."""
        return TextStream(self._tokenizer, self._special_ids)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise CheckpointError(
                "this checkpoint has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        try:
            return _template_environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from None


class TextStream:
    """Text piece by piece as token ids come; a piece never ends inside a character.

    For valid text, the pieces joined equal `Tokenizer.decode` of all ids. With a byte-level tokenizer they do for any
    ids. `tokenizers.decoders.DecodeStream` is not used: it holds back everything that ends in U+FFFD, however long,
    decodes all of it again for each id, and cannot be flushed.
    """

    def __init__(self, tokenizer: FastTokenizer, special_ids: frozenset[int]) -> None:
        self._special_ids = special_ids
        byte_level = isinstance(tokenizer.decoder, ByteLevel)
        self._pieces: _Pieces = _BytePieces(tokenizer) if byte_level else _WindowPieces(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty for a special token and while a character is incomplete."""
        return "" if token_id in self._special_ids else self._pieces.push(token_id)

    def flush(self) -> str:
        """The text still held back, once no more ids come; an incomplete character becomes U+FFFD."""
        return self._pieces.flush()


class _Pieces(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _BytePieces:
    """For byte-level vocabularies, where each token is a string of bytes: an incremental UTF-8 decoder over them."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        # An added token with characters outside the byte alphabet stands for itself.
        values = [_BYTE_OF.get(character) for character in token]
        data = token.encode() if None in values else bytes(value for value in values if value is not None)
        return self._utf8.decode(data)

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _WindowPieces:
    """For other vocabularies (Metaspace with byte fallback): decodes a short window of ids again for each id.

    ``_context`` are ids whose text is out already; they keep the decoder from treating the next id as the first of a
    text. ``_held`` are ids whose text ends in an incomplete character, at most as many as a character has bytes. Byte
    fallback writes a U+FFFD for each byte that it cannot join, so that fewer characters than ids are a whole character.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._held_text()
        if text.endswith("\ufffd") and len(text) >= len(self._held) and len(self._held) < _MAX_UTF8_BYTES:
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        text = self._held_text()
        self._context, self._held = [], []
        return text

    def _held_text(self) -> str:
        out = self._tokenizer.decode(self._context, skip_special_tokens=True)
        text = self._tokenizer.decode(self._context + self._held, skip_special_tokens=True)
        return text[len(out) :]


_MAX_UTF8_BYTES = 4


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet (GPT-2): printable Latin-1 bytes are themselves, the other 68
    follow from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template: wanted a string or a list of them")
    return template


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it without ClassVar)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_environment() -> ImmutableSandboxedEnvironment:
    # Chat templates are written for these settings and helpers; a template is foreign code, hence the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja's own filter escapes characters for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
