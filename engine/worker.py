"""One worker without its shell: plans in, steps run, deltas and reports out. No threads, no asyncio, no Ray.

The shell calls ``begin_step`` and ``launch``, runs ``execute`` where it likes (a thread), then calls ``finish_step``;
everything but ``execute`` belongs to one thread. As many steps as ``executor.max_in_flight`` says may have begun; they
are executed and finished in that order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import FinishedSequence, Plan, WorkerReady, WorkerState
from farsight.core.messages.requests import Key
from farsight.core.messages.tokens import DeltaLogprobs, TokenDelta
from farsight.core.request import Fault, Request, SamplingParams, SequenceStatus
from farsight.engine.drafted_steps import DraftedSteps
from farsight.engine.emission import Emission, HeldBack, Output, ended_by_prompt, joined_outputs
from farsight.engine.runner import Copier, Launch, Runner
from farsight.engine.sequence import Detokenizer, LongSequences, OutputText, Sequence
from farsight.engine.step_results import LoggedTokens
from farsight.engine.vision.spans import ImageInputs
from farsight.kvcache import PlanExecutor, StepBatch
from farsight.kvcache.block_manager import are_hashes_of, extend_hashes, root_of, salted_root

if TYPE_CHECKING:  # needs llguidance, which a machine with a GPU alone may lack
    from farsight.tokenization.grammars.compiler import GrammarCompiler

logger = logging.getLogger(__name__)


Prepared = dict[Key, Sequence]
"""New requests of a plan, ready to run."""


class Worker:
    """Runs the sequences that plans name, step by step.

    Args:
        runner: Computes steps.
        executor: Decides what a step holds, and whether outputs are held back until a whole batch has ended.
        detokenizer: Turns output ids into text.
        eos_token_ids: Ids that end a sequence unless it ignores them.
        ready: This worker's capacity, for the scheduler.
        prefix_cache: Whether sequences share the KV of equal beginnings.
        copier: Carries out the executor's copies; needed where it has a host pool.
        speculation: Guesses tokens that a step may verify; None where nothing is guessed.
        grammars: Compiles the grammars of requests; None where the runner follows none.
        image_inputs: What the model makes of images; None where the runner computes nothing.
    """

    def __init__(
        self,
        runner: Runner,
        executor: PlanExecutor,
        detokenizer: Detokenizer,
        eos_token_ids: tuple[int, ...],
        ready: WorkerReady,
        *,
        prefix_cache: bool = False,
        copier: Copier | None = None,
        speculation: DraftedSteps | None = None,
        grammars: GrammarCompiler | None = None,
        image_inputs: ImageInputs | None = None,
        long_sequences: LongSequences | None = None,
    ) -> None:
        self.runner = runner
        self.executor = executor
        self.ready = ready
        self._detokenizer = detokenizer
        self._eos = frozenset(eos_token_ids)
        self._last_tokens: frozenset[int] | None = None  # of the step that computes, once the next one is ready
        self._launched: StepBatch | None = None  # behind the step that computes, before anything of that is known
        self._pending: Plan | None = None
        self._prepared: Prepared = {}
        self._copier = copier
        self._held_back = HeldBack() if executor.returns_together else None
        self._prefix_cache = prefix_cache
        self.speculation = speculation
        self._grammars = grammars
        self._image_inputs = image_inputs
        self._long_sequences = long_sequences
        executor.make_sequence = self._prepared_sequence
        if prefix_cache:
            executor.share_prefixes(self._block_hashes)

    @property
    def _sequences(self) -> dict[str, Sequence]:
        """What the executor holds, all of it made here."""
        return cast("dict[str, Sequence]", self.executor.sequences)

    def _block_hashes(self, request_id: str, num_blocks: int) -> list[int]:
        return self._hash(self._sequences[request_id], num_blocks)

    def _hash(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Returns at least the first ``num_blocks`` hashes of a sequence; each is computed once."""
        root = _root(sequence)
        extend_hashes(sequence.block_hashes, sequence.named_ids, self.ready.block_size, num_blocks, root)
        return sequence.block_hashes

    def _take_hashes(self, sequence: Sequence) -> None:
        """Takes over the hashes in the request if their blocks have this worker's size; computes the others."""
        request, size, hashes = sequence.request, self.ready.block_size, sequence.request.prefix_hashes
        if hashes and are_hashes_of(hashes, sequence.named_ids[: request.prompt_len], size, _root(sequence)):
            sequence.block_hashes = list(hashes)
        self._hash(sequence, request.known_len // size)

    def take_over(self) -> WorkerState:
        """Begins a Scheduler life: returns what it needs to continue where another one left off. Between steps."""
        self._pending = None
        lease = self.executor.take_over()
        report = self.executor.report()
        held = tuple(self._sequences[progress.request_id].request for progress in report.progress)
        return WorkerState(lease, self.ready, held, report)

    def prepare(self, plan: Plan) -> Prepared:
        """Prepares a plan's new requests. Slow, but changes no state, so it may run at any moment.

        What was prepared for the plan that waits is taken over: requests come one by one, and each plan names all.
        """
        prepared, before = {}, self._prepared
        for slot in plan.slots:
            request = slot.request
            if request is not None and not self._has(request):
                key = request.request_id, request.attempt
                prepared[key] = before.get(key) or self._make_sequence(request)
        return prepared

    def _make_sequence(self, request: Request) -> Sequence:
        sequence = Sequence.of(request)
        sequence.text = self._start_text(request)
        if request.sampling.is_followed:
            sequence.follow_grammar(self._grammars)
        sequence.read_images(self._image_inputs)
        if self._long_sequences is not None and request.max_total_len > self._long_sequences.original_len:
            sequence.first_row = self._long_sequences.first_row
        if self._prefix_cache:
            self._take_hashes(sequence)
            if self._copier is not None and sequence.shares:
                self._copier.look(sequence.block_hashes, request.tenant)
        return sequence

    def _prepared_sequence(self, request: Request) -> Sequence:
        """Serves as the executor's ``make_sequence``."""
        return self._prepared.get((request.request_id, request.attempt)) or self._make_sequence(request)

    def _has(self, request: Request) -> bool:
        sequence = self._sequences.get(request.request_id)
        return sequence is not None and sequence.attempt >= request.attempt

    def offer_plan(self, plan: Plan, prepared: Prepared | None = None) -> None:
        """Keeps the newest plan for the next step boundary, with the result of ``prepare``."""
        if plan.lease != self.executor.lease:
            return
        if self._pending is None or plan.plan_seq > self._pending.plan_seq:
            self._pending = plan
            self._prepared = self.prepare(plan) if prepared is None else prepared

    def begin_step(self) -> StepBatch | None:
        """Applies the newest plan and picks the next step, or what has been launched; None if nothing can run."""
        copier = self._copier
        for copy_id, failed in () if copier is None else copier.take_done():
            self.executor.complete_copy(copy_id, failed=failed)
        plan, self._pending = self._pending, None
        if plan is not None:
            self._apply(plan)
        launched, self._launched = self._launched, None
        if launched is not None:
            if (rest := self.executor.rest_of(launched)) is not None:
                return rest
            self.runner.forget_launched()
        batch = self.executor.next_batch()
        if copier is not None:
            for copy in self.executor.take_copies():
                copier.begin(copy)
        if batch is None:
            self.runner.rest()
        else:
            if self.speculation is not None and not batch.may_be_cut_off:
                batch = self.speculation.with_drafts(batch, self._sequences, self.executor)
            self.runner.begin(batch, self._sequences)
        return batch

    def launch(self, batch: StepBatch) -> Launch:
        """Launches the step that ``begin_step`` has returned and, unread, the step after it; where the device can.

        The device then goes from one to the other without the host. ``begin_step`` begins the second when this one is
        booked, without the sequences that have ended or lost their KV meanwhile: what it computes for those is dropped.

        Raises:
            Exception: As ``execute``.
        """
        state, sequences = self.runner.launch(batch, self._sequences), self._sequences
        if state is Launch.NOT or self.speculation is not None or self._held_back is not None:
            return state
        following = self.executor.step_after(batch, unread=True)
        if following is not None and self.executor.begin_after(batch) is following:
            self._launched = following if self.runner.launch_after(following, sequences) else None
        return state

    def when_copied(self, callback: Callable[[], object]) -> None:
        """Sets what is called, from any thread, when the next ``begin_step`` may find more to run."""
        if self._copier is not None:
            self._copier.when_done(callback)

    def wait_for_copy(self) -> None:
        """Returns when a copy in flight has ended; at once if there are none."""
        if self._copier is not None:
            self._copier.wait()

    def _apply(self, plan: Plan) -> None:
        forgotten = self.executor.apply_plan(plan)
        if self._held_back is not None:
            for request_id in forgotten:
                self._held_back.take(request_id)
        self._prepared = {}

    def _start_text(self, request: Request) -> OutputText:
        """Returns the text so far; the client of a resumed request has got all text that its tokens completed."""
        text = self._detokenizer.start(request.sampling.stop, request.prompt_ids, request.sampling.shown_ids)
        for index, token in enumerate(request.output_ids):
            _push(text, token, index, request.sampling)
        return text

    def execute(self, batch: StepBatch) -> list[int | None]:
        """Computes the new token of each item that samples. The slow part; touches the model and its pool alone."""
        return self.runner.execute(batch, self._sequences)

    def look_ahead(self, batch: StepBatch) -> None:
        """Gets the next step ready while ``execute`` computes this one in another thread.

        Nothing changes: ``begin_step`` picks the same step as without it, sooner.
        """
        self._last_tokens = None
        following = self.executor.step_after(batch)
        if following is not None and self.runner.look_ahead(following, self._sequences):
            self._last_tokens = self._possible_ends(batch)

    def go_on(self, batch: StepBatch, tokens: list[int | None]) -> StepBatch | None:
        """Begins the step that ``look_ahead`` has got ready, though this one is computed and not booked.

        ``commit_step`` of this one must be called before that of the next, and may be called while the next computes.

        Returns:
            None if this one may end a sequence, or if something has happened: then ``commit_step``, ``begin_step``.
        """
        last_tokens, self._last_tokens = self._last_tokens, None
        if last_tokens is None or self._pending is not None or getattr(tokens, "changes_books", False):
            return None
        token_ids = [token for token in tokens if token is not None]
        if len(token_ids) < len(tokens) or not last_tokens.isdisjoint(token_ids):
            return None
        if self.speculation is not None and not self.speculation.rests(len(batch.items)):
            return None
        following = self.executor.begin_after(batch)
        if following is not None:
            self.runner.begin(following, self._sequences)
            self.runner.go_on(following, token_ids)
        return following

    def cut_off(self, batch: StepBatch, duration_s: float) -> None:
        """Books a step that ``execute`` has cut off: nothing of it is shown."""
        self.executor.cut_off(batch, duration_s)

    def _possible_ends(self, batch: StepBatch) -> frozenset[int] | None:
        """Returns tokens that may end one of a step's sequences (``_ends``); None if more than the token decides."""
        tokens: set[int] = set()
        for item in batch.items:
            sequence = self._sequences[item.request_id]
            sampling = sequence.sampling
            if sampling.stop or sampling.benchmark_len is not None or self._held_back is not None or sampling.pooling:
                return None
            if sampling.eos_ends:
                tokens |= self._eos
            tokens |= sequence.stop_token_ids
        return frozenset(tokens)

    def finish_step(self, batch: StepBatch, tokens: list[int | None], duration_s: float = 0.0) -> list[Output]:
        """Books the step and returns the new output for the clients."""
        return self.render(self.commit_step(batch, tokens, duration_s))

    def commit_step(self, batch: StepBatch, tokens: list[int | None], duration_s: float = 0.0) -> list[Emission]:
        """Books a step of this duration: all work that must be done before the next one can begin.

        A sequence whose item should have got a token and has none (``LoggedTokens.failures``) fails; the others go on.

        Returns:
            What is to be shown now: of the step's sequences or, where outputs are held back, of those returned.
        """
        stopped = set()
        emissions = {}
        failed = self._take_failures(batch, tokens)
        verified, states = (tokens.further, tokens.states) if isinstance(tokens, LoggedTokens) else ({}, {})
        further: dict[str, int] = {}
        for i, (item, token) in enumerate(zip(batch.items, tokens, strict=True)):
            if token is None or not self.executor.counts(batch, item.request_id):
                continue
            sequence = self._sequences[item.request_id]
            if sequence.sampling.pooling:
                emission, ends = ended_by_prompt(sequence, token, tokens, i), True
            else:
                emission, ends = self._append(sequence, (token, *verified.get(i, ())))
            emissions[item.request_id] = emission
            emission.state = states.get(i, b"")
            if len(emission.token_ids) > 1:
                further[item.request_id] = len(emission.token_ids) - 1
            if ends:
                stopped.add(item.request_id)
        if isinstance(tokens, LoggedTokens):
            self._attach_logprobs(batch, tokens, emissions)
            for i, rows in tokens.pooled.items():  # of prompts that go on; none where steps overlap
                sequence = self._sequences[batch.items[i].request_id]
                sequence.pooled = rows.plus(sequence.pooled)
        emissions |= failed
        if self.speculation is not None:
            self.speculation.observe(batch, further, duration_s)
        finished = self.executor.commit(batch, stopped, failed, further=further, duration_s=duration_s)
        if self._held_back is not None:
            self._held_back.add(emissions.values())
            return self._release(finished, self._held_back)
        for end in finished:
            emissions[end.request_id].end = end
        return list(emissions.values())

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[Emission, bool]:
        """Adds new tokens up to the one that ends the output, if there is one; returns whether there is."""
        start = sequence.output_len
        is_told = not sequence.cached_len or len(sequence.token_ids) > sequence.request.known_len
        cached_len = 0 if is_told else sequence.cached_len or 0
        # Only the text shows whether a stop string has come; text that is not needed for that can wait, since all
        # outputs held back would be decoded in one step.
        at_once = bool(sequence.sampling.stop) or self._held_back is not None
        shown = "" if at_once else None
        for index, token in enumerate(token_ids, start):
            sequence.token_ids.append(token)
            if shown is not None:
                shown += self._show(sequence, token, index)
            if self._ends(sequence, token, index):
                return Emission(sequence, token_ids[: index + 1 - start], start, shown, cached_len), True
        return Emission(sequence, token_ids, start, shown, cached_len), False

    def _take_failures(self, batch: StepBatch, tokens: list[int | None]) -> dict[str, Emission]:
        """Returns why items did not get the token that they should have got, by request id."""
        failed = {}
        for i, failure in tokens.failures.items() if isinstance(tokens, LoggedTokens) else ():
            request_id = batch.items[i].request_id
            if self.executor.counts(batch, request_id):
                sequence = self._sequences[request_id]
                if failure.fault is Fault.MODEL:
                    logger.error("%s fails: %s", request_id, failure.reason)
                failed[request_id] = Emission(sequence, (), sequence.output_len, "", 0, failure=failure)
        return failed

    def _release(self, ends: Iterable[FinishedSequence], held_back: HeldBack) -> list[Emission]:
        """Returns all output of a batch's sequences, one sequence after the other."""
        emissions = []
        for end in ends:
            emissions += held_back.finish(end)
        return emissions

    def _attach_logprobs(self, batch: StepBatch, tokens: LoggedTokens, emissions: dict[str, Emission]) -> None:
        """Attaches log probabilities; those of a prompt are kept until its first output token goes out."""
        for i, found in tokens.logprobs.items():
            request_id = batch.items[i].request_id
            if not self.executor.counts(batch, request_id):
                continue
            sequence = self._sequences[request_id]
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += found.prompt
            if found.output is not None:
                prompt = tuple(sequence.prompt_logprobs or ())
                emissions[request_id].logprobs = DeltaLogprobs((found.output,), prompt)
                sequence.prompt_logprobs = None

    def render(self, emissions: list[Emission]) -> list[Output]:
        """Renders new output of a committed step for the clients; in any thread, but in the order of the steps."""
        outputs = [self._rendered(emission) for emission in emissions]
        return outputs if self._held_back is None else joined_outputs(outputs)

    def _rendered(self, emission: Emission) -> Output:
        sequence, end, failure = emission.sequence, emission.end, emission.failure
        if failure is not None:
            assert end is not None, "a sequence without a next token has ended"
            return self._failure(sequence.request, end, failure.reason, failure.fault)
        text = emission.shown
        if text is None:
            text = ""
            for at, token in enumerate(emission.token_ids, emission.start):
                text += self._show(sequence, token, at)
        if end is not None:
            text += sequence.text.flush()
        delta = TokenDelta(
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            start=emission.start,
            token_ids=emission.token_ids,
            text=text,
            finish_reason=None if end is None else end.status.finish_reason,
            cached_len=emission.cached_len,
            logprobs=emission.logprobs,
            gpu_s=0.0 if end is None else sequence.gpu_s,
            vector=emission.vector,
            state=emission.state,
        )
        return Output(sequence.request.ingress_id, delta)

    def fail_step(self, batch: StepBatch, error: BaseException) -> list[Output]:
        """Ends every sequence of a step that raised: a request gets an answer even from a broken step.

        Sequences whose output is complete and was only held back get it: a broken device does not take their answers.
        """
        logger.error("step with %d sequences failed", len(batch.items), exc_info=error)
        self._launched = None  # of the same sequences
        self.runner.forget_launched()
        message = f"the model step failed: {type(error).__name__}: {error}"
        outputs: list[Output] = []
        if self._held_back is not None:
            outputs += self.render(self._release(self.executor.flush(), self._held_back))
        for request_id in dict.fromkeys(item.request_id for item in batch.items + batch.padding.items):
            if self.executor.holds(request_id):
                outputs += self._end(request_id, SequenceStatus.FINISHED_FAILED, message)
        return outputs

    def abort_ingress(self, ingress_id: str) -> list[Output]:
        """Ends every sequence whose client is held by an ingress replica that has died; between steps."""
        orphans = [rid for rid, sequence in self._sequences.items() if sequence.request.ingress_id == ingress_id]
        outputs: list[Output] = []
        for request_id in orphans:
            outputs += self._end(request_id, SequenceStatus.FINISHED_ABORTED, "the ingress replica died")
        return outputs

    @property
    def ingress_ids(self) -> set[str]:
        """The ingress replicas of the sequences held here."""
        return {sequence.request.ingress_id for sequence in self._sequences.values()}

    def stall(self, slow: Mapping[str, Collection[str] | None]) -> None:
        """Pauses sequences from the next step on whose clients do not read.

        Args:
            slow: By ingress replica, the requests whose clients do not read; None for all of its requests.
        """
        ids = set()
        for request_id, sequence in self._sequences.items():
            named = slow.get(sequence.request.ingress_id, ())
            if named is None or request_id in named:
                ids.add(request_id)
        self.executor.stall(frozenset(ids))

    def _show(self, sequence: Sequence, token: int, start: int) -> str:
        """Returns text that this token completes; an EOS that ends the sequence is not text."""
        sampling = sequence.sampling
        if token in self._eos and sampling.eos_ends:
            return ""
        if token in sequence.stop_token_ids:
            return ""
        return _push(sequence.text, token, start, sampling)

    def _ends(self, sequence: Sequence, token: int, start: int) -> bool:
        sampling = sequence.sampling
        if token in sequence.stop_token_ids or sequence.text.stopped or start + 1 == sampling.benchmark_len:
            return True
        return token in self._eos and sampling.eos_ends

    def _end(self, request_id: str, status: SequenceStatus, error: str) -> list[Output]:
        """Ends a sequence for a reason outside its own text: its last output, behind what was held back of it."""
        request = self._sequences[request_id].request
        end = self.executor.end(request_id, status)
        shown = [] if self._held_back is None else self.render(self._held_back.take(request_id))
        return [*shown, self._failure(request, end, error)]

    @staticmethod
    def _failure(request: Request, end: FinishedSequence, error: str, fault: Fault = Fault.SERVICE) -> Output:
        reason = end.status.finish_reason
        delta = TokenDelta(end.request_id, end.attempt, end.output_len, (), "", reason, error, fault=fault)
        return Output(request.ingress_id, delta)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the executor's books agree, and each sequence has the tokens that they say."""
        self.executor.check_integrity()
        for sequence in self._sequences.values():
            known, booked = len(sequence.token_ids), sequence.num_tokens
            if known != booked:
                raise IntegrityError(f"{sequence.request_id}: {known} tokens are known, {booked} are booked")


def _root(sequence: Sequence) -> int:
    """Returns the root hash of the prefixes that a sequence shares; none where it needs its prompt's own steps."""
    request = sequence.request
    if request.sampling.computes_prompt or sequence.image_problem:
        return root_of(request.request_id, b"request")
    # Keys that were turned by other factors are other keys.
    return root_of(request.cache_salt, b"long factors") if sequence.first_row else salted_root(request.cache_salt)


def _push(text: OutputText, token: int, index: int, sampling: SamplingParams) -> str:
    """Adds output token ``index``; stop strings end nothing among the first ``min_tokens``."""
    return text.push(token, may_stop=False) if index < sampling.min_tokens else text.push(token)
