"""The loop: requests enter and leave between steps, every step decodes one token in each running row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nanoserve_lab.buckets import check_pad_inert, check_shape_in_set
from nanoserve_lab.cache.attention import PrefillRead
from nanoserve_lab.cache.paged import PrefillChunk
from nanoserve_lab.captured import check_output_not_held, default_recorder
from nanoserve_lab.compiled import CompiledDecode, Compiler, check_single_graph, torch_compiler
from nanoserve_lab.device import upload
from nanoserve_lab.engine.config import EngineConfig, EngineStats
from nanoserve_lab.engine.deferred import DeferredReadback
from nanoserve_lab.engine.parts import EngineParts, build_parts
from nanoserve_lab.engine.request import Completion, Request, RequestRefused, SamplingParams, TokenEvent
from nanoserve_lab.engine.sampling import Sampler
from nanoserve_lab.engine.scheduler import Prefill, Scheduler
from nanoserve_lab.model.tokenizer import Tokenizer
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.plan import DecodePlan, check_plan_current
from nanoserve_lab.recorders import Recorder
from nanoserve_lab.slots import check_mapping_is_window, check_window_intact

Prompt = str | Sequence[int]


class Engine:
    """Continuous batching over one model and one K/V pool. Not thread-safe: one caller drives ``step``."""

    def __init__(self, parts: EngineParts, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config, self.cache = parts.model, tokenizer, config, parts.cache
        self.decode_graphs, self.planner = parts.decode_graphs, parts.planner
        self.table, self.buckets, self.inputs = parts.table, parts.buckets, parts.inputs
        self.scheduler = Scheduler(self.cache, config.max_step_tokens)
        self.readback = DeferredReadback(config.readback_lag, config.max_rows, self.model.device)
        # The last token of each running row, still on the device: the next step's input.
        self._tokens = torch.empty(0, dtype=torch.int64, device=self.model.device)
        self._sampler: Sampler | None = None
        self._argmax = parts.argmax
        self._live: dict[int, Request] = {}
        self._events: list[TokenEvent] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        # One object for all steps: to make one takes as long as to enter it.
        self._inference_mode = torch.inference_mode()

    @classmethod
    def build(
        cls,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig | None = None,
        compiler: Compiler = torch_compiler,
        recorder: Recorder = default_recorder,
    ) -> Engine:
        """An engine with its K/V pool allocated; ``compiler`` and ``recorder`` are used where the config says so.

        Raises, before anything is allocated, `captured.CaptureUnsound` where recording lacks a switch, and
        `OutOfBlocks` where the memory does not hold the sink and one block.
        """
        config = config or EngineConfig()
        return cls(build_parts(model, config, compiler, recorder), tokenizer, config)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt (text or token ids); the request's id. Raises `RequestRefused`, queueing nothing."""
        params = params or SamplingParams()
        params.check()
        if params.n != 1:
            raise RequestRefused(f"n: {params.n} completions of one prompt come from generate; submit takes n=1")
        return self._queue(prompt, params, 0)

    def _queue(self, prompt: Prompt, params: SamplingParams, index: int) -> int:
        """Queue the ``index``-th of the ``n`` completions of ``prompt``; ``params`` are checked."""
        params.check_vocab(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestRefused("stop: stop strings need a tokenizer, and this engine has none")
        prompt_ids = self._prompt_ids(prompt)
        room = self.cache.max_context - len(prompt_ids) + 1
        if room < 1:
            raise RequestRefused(
                f"prompt: {len(prompt_ids)} tokens can never fit, the maximum context is {self.cache.max_context}"
            )
        stop_ids = set(params.stop_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            stop_ids.update(self.tokenizer.eos_ids)
        request = Request(prompt_ids, params, min(params.max_tokens, room), frozenset(stop_ids), self.tokenizer, index)
        self._live[request.id] = request
        self.scheduler.waiting.append(request)
        self._counts["submitted"] += 1
        return request.id

    def cancel(self, request_id: int) -> bool:
        """End a request now; its last event comes with the next ``step``. False where it has ended already."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._release(request)
        self._tell_end(request.cancel())
        return True

    @property
    def has_work(self) -> bool:
        """Whether another ``step`` has anything to do or to tell."""
        return bool(self._live or len(self.readback) or self._events)

    def step(self) -> list[TokenEvent]:
        """Decode one token in every running row, admit and prefill who fits, and tell of the tokens that are due."""
        self._advance()
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        scheduler = self.scheduler
        with self._inference_mode:
            self._counts["steps"] += 1
            if scheduler.running:
                self._make_room()
            tokens = [self._decode()] if scheduler.running else []
            if chunks := scheduler.chunks():
                tokens.append(self._prefill(chunks))
            if scheduler.running:
                self._tokens = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
                self.readback.push(self._tokens, tuple(scheduler.running))
                # A row that has all of its tokens leaves before the host has read them.
                for row in scheduler.complete():
                    self._retire(row)
            self._read_back(drain=not scheduler.running)

    def _decode(self) -> Tensor:
        """One token a running row, ``[rows]``."""
        self.cache.grow()
        plan = self.planner.plan()
        logits, padding = self.decode(plan, self._input_tensor(self._tokens, plan)), len(plan.rows) - plan.live
        if padding:
            logits = logits[: plan.live]
            self._counts["padded_rows"] += padding
        self._counts["decode_steps"] += 1
        self._counts["decode_rows"] += plan.live
        if self._sampler is None:
            self._sampler = Sampler(self.scheduler.running, self.model.device, self._argmax)
        tokens = self._sample(self._sampler, logits)
        if self.config.strict:
            # The tokens wait for their readback over several steps; the logits live for one.
            for graph in self.decode_graphs.graphs.values():
                check_output_not_held(graph, [tokens])
        return tokens

    def _input_tensor(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        """The tensor ``[rows, 1]`` that the rows' newest ``tokens`` ``[live]``, which are on the device, become.

        Alone it is a view that costs nothing. In the input buffer it is a copy, on purpose: a view lies wherever the
        sampler's last allocation did, and no recording can follow it. What a padded row holds does not matter, as long
        as it is a token: nobody reads its logits.
        """
        if self.inputs is not None:
            return self.inputs.input_ids.write(tokens, window=len(plan.rows))
        padding = len(plan.rows) - plan.live
        return (torch.cat([tokens, tokens.new_zeros(padding)]) if padding else tokens).unsqueeze(1)

    def decode(self, plan: DecodePlan, input_ids: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of one decode step, padded rows included; ``input_ids`` ``[rows, 1]`` int64.

        In strict mode every gate looks at the plan first, its values too, and a forward that was compiled again is
        refused; each raises the `Unsound` of its day.
        """
        if self.config.strict:
            self._check(plan)
        logits = self.decode_graphs(plan, input_ids)
        if self.config.strict and isinstance(self.forward, CompiledDecode):
            check_single_graph(self.forward)
        return logits

    @property
    def forward(self) -> Callable[..., Tensor]:
        """The decode step's forward below the recordings: a `DecodeForward`, or the `CompiledDecode` of one."""
        return self.decode_graphs.forward

    def _check(self, plan: DecodePlan) -> None:
        check_plan_current(plan, self.cache)
        if self.table is not None:
            check_mapping_is_window(plan, self.table)
            check_window_intact(plan, self.table, self.cache)
        if self.buckets is not None:
            check_shape_in_set(plan, self.buckets)
            check_pad_inert(plan)

    def _sample(self, sampler: Sampler, logits: Tensor) -> Tensor:
        """One token a row of ``logits``; their log-probabilities go home with the tokens of this step."""
        tokens = sampler(logits)
        if sampler.logprobs is not None:
            self.readback.attach(sampler.logprobs)
        return tokens

    def _prefill(self, chunks: Sequence[tuple[Prefill, PrefillChunk]]) -> Tensor:
        """The first token of each request whose prompt is complete now, ``[requests]``; they are in rows then."""
        device = self.model.device
        positions, write_slots, spans = self.cache.prefill_addresses([chunk for _, chunk in chunks])
        ids = [token for prefill, chunk in chunks for token in prefill.token_ids[chunk.start : chunk.stop]]
        complete = [i for i, (prefill, chunk) in enumerate(chunks) if chunk.stop == len(prefill.token_ids)]
        last = upload(np.array([spans[i].stop - 1 for i in complete], dtype=np.int64), device)
        input_ids = upload(np.array(ids), device)
        logits = self.model(input_ids, positions, write_slots, self.cache.pool.layers, PrefillRead(spans), last)
        self._counts["prefill_tokens"] += len(ids)
        self._counts["prefill_chunks"] += len(chunks)
        for i in complete:
            self.scheduler.start(chunks[i][0])
            self._sampler = None
        return self._sample(Sampler([chunks[i][0].request for i in complete], device, self._argmax), logits)

    def _make_room(self) -> None:
        """See that every running row can grow by one token, pushing out the youngest requests where it cannot."""
        if self.cache.can_grow():
            return
        # A request is prefilled again from the tokens that the host knows, so those on their way come home first;
        # a stop among them may free the blocks that are missing.
        self._read_back(drain=True)
        while not self.cache.can_grow():
            request = self.scheduler.youngest()
            self._counts["preemptions"] += 1
            self._counts["recomputed_tokens"] += self._release(request)
            self.scheduler.requeue(request)

    @torch.inference_mode()
    def _release(self, request: Request) -> int:
        """Take ``request`` from wherever it is; the number of tokens whose K and V are lost with it."""
        scheduler = self.scheduler
        if request in scheduler.running:
            row = scheduler.running.index(request)
            lost = int(self.cache.lengths[row])
            self._retire(row)
            return lost
        if scheduler.prefill is not None and scheduler.prefill.request is request:
            lost = scheduler.prefill.done
            scheduler.abandon_prefill()
            return lost
        if request in scheduler.waiting:
            scheduler.waiting.remove(request)
        return 0

    @torch.inference_mode()
    def _retire(self, row: int) -> None:
        moved = self.scheduler.retire(row)
        if moved is not None:
            self._tokens[row].copy_(self._tokens[moved])
        self._tokens = self._tokens[: len(self.scheduler.running)]
        self._sampler = None

    def _read_back(self, drain: bool) -> None:
        for request, token in self.readback.due(drain):
            if request.finish_reason is not None:
                self._counts["overshoot_tokens"] += 1
                continue
            event = request.accept(token)
            if event.finish_reason is None:
                self._events.append(event)
            else:
                self._tell_end(event)
                self._release(request)

    def _tell_end(self, event: TokenEvent) -> None:
        assert event.finish_reason is not None
        self._events.append(event)
        self._finished[event.finish_reason] += 1
        del self._live[event.request_id]

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt, in the order given, the ``n`` completions of one side by side. One ``params`` serves
        all, or one a prompt.

        Raises `RequestRefused` before anything runs where one of the requests can never be served.
        """
        if isinstance(prompts, str):
            raise TypeError("generate takes a list of prompts; for one prompt pass [prompt]")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling params")
        ids: list[int] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                one = one or SamplingParams()
                one.check()
                ids += [self._queue(prompt, one, index) for index in range(one.n)]
            done = {event.request_id: event.completion for event in self._run(set(ids)) if event.completion}
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            raise
        return [completion for i in ids if (completion := done[i]) is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[TokenEvent, None, None]:
        """The events of one prompt as they come. Closing the iterator cancels the request."""
        request_id = self.submit(prompt, params)
        return self._stream(request_id)

    def _stream(self, request_id: int) -> Generator[TokenEvent, None, None]:
        try:
            yield from self._run({request_id})
        finally:
            self.cancel(request_id)

    def _run(self, ids: set[int]) -> Iterator[TokenEvent]:
        """Step until every request of ``ids`` has ended; their events. Events of others wait for whoever asks."""
        left = set(ids)
        while left:
            if not self.has_work:
                raise RuntimeError(f"the events of requests {sorted(left)} were taken by another caller of step()")
            self._advance()
            mine = [event for event in self._events if event.request_id in left]
            self._events = [event for event in self._events if event.request_id not in left]
            left -= {event.request_id for event in mine if event.finish_reason is not None}
            yield from mine

    def stats(self) -> EngineStats:
        """The counts so far; see `EngineStats`."""
        allocator = self.cache.pool.allocator
        counts = self._counts
        compiled = self.forward if isinstance(self.forward, CompiledDecode) else None
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running) + (self.scheduler.prefill is not None),
            free_blocks=allocator.num_free,
            total_blocks=allocator.capacity,
            submitted=counts["submitted"],
            finished=dict(self._finished),
            steps=counts["steps"],
            prefill_tokens=counts["prefill_tokens"],
            prefill_chunks=counts["prefill_chunks"],
            preemptions=counts["preemptions"],
            recomputed_tokens=counts["recomputed_tokens"],
            decode_steps=counts["decode_steps"],
            decode_rows=counts["decode_rows"],
            overshoot_tokens=counts["overshoot_tokens"],
            padded_rows=counts["padded_rows"],
            captures=self.decode_graphs.captures,
            replays=self.decode_graphs.replays,
            eager_steps=dict(self.decode_graphs.eager_steps),
            graphs=compiled.graphs if compiled else 0,
            recompiles=len(compiled.recompiles) if compiled else 0,
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestRefused("prompt: text needs a tokenizer, and this engine has none; pass token ids")
            prompt = self.tokenizer.encode(prompt)
        prompt_ids = list(prompt)
        if not prompt_ids:
            raise RequestRefused("prompt: empty")
        vocab = self.model.config.vocab_size
        for token in prompt_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestRefused(f"prompt: wanted token ids of 0 to {vocab - 1}, got {token!r}")
        return prompt_ids
