"""The scheduler against a runner of a few lines that checks what it is asked to compute.

Long because the invariants are checked under random arrivals, pools, limits and aborts.
"""

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig, SamplingParams
from runtime.errors import (
    DuplicateRequest,
    PromptTooLong,
    RequestNeverFits,
    SchedulerStalled,
    StalePlan,
    UnknownRequest,
)
from runtime.kv_cache import BlockPool, SlotPool
from runtime.request import Request, RequestStatus
from runtime.scheduler import Scheduler
from runtime.stops import OutputText

EOS = 7
VOCAB = 40
MAX_MODEL_LEN = 48


def next_token(context, seed):
    """A sampler whose result depends on every token and its place."""
    text = repr((seed, context)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % VOCAB


def letter(token_id):
    return chr(ord("A") + token_id)


class Letters:
    """A tokenizer with a letter for every token."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(letter, ids))


def expected_output(request):
    """What a request must return, computed without scheduler and caches."""
    output, params = [], request.params
    while True:
        output.append(next_token(request.prompt_token_ids + output, request.seed))
        if any(stop in "".join(map(letter, output)) for stop in params.stop):
            return output, "stop"
        if len(output) > params.min_tokens:
            if output[-1] == EOS and not params.ignore_eos:
                return output, "stop"
            if output[-1] in params.stop_token_ids:
                return output, "stop"
        if len(output) == params.max_tokens:
            return output, "length"
        if len(request.prompt_token_ids) + len(output) == MAX_MODEL_LEN:
            return output, "length"


@dataclass
class Runner:
    """A cache in blocks and a state in slots, read back to sample: a mix-up changes tokens."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 8
    num_blocks: int = 64
    block_size: int = 4
    cache: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)

    def __post_init__(self):
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        self.blocks = BlockPool(self.num_blocks, self.block_size)
        self.slots = SlotPool(self.max_num_seqs)
        self.scheduler = Scheduler(config, self.blocks, self.slots, eos_token_id=EOS)
        self.starts = []  # ids in the order in which they were computed from their first token
        self.num_steps = 0

    def step(self):
        """Run one step; return the plan and the finished requests, None without work."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.check(plan)
        tokens = [token for chunk in plan.chunks for token in self.compute(chunk)]
        self.num_steps += 1
        return plan, self.scheduler.retire(plan, tokens)

    def run(self):
        """Run to the end; return all finished requests in order."""
        finished = []
        while (result := self.step()) is not None:
            finished += result[1]
            assert self.num_steps < 3000, "livelock"
        self.check_end()
        return finished

    def check_end(self):
        assert not self.scheduler.has_work
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self.blocks.check_idle()
        self.slots.check_idle()

    def check(self, plan):
        """What must hold for every plan."""
        requests = [chunk.request for chunk in plan.chunks]
        assert len({id(request) for request in requests}) == len(requests) <= self.max_num_seqs
        assert self.scheduler.num_running <= self.max_num_seqs
        assert plan.num_tokens == sum(chunk.length for chunk in plan.chunks)
        assert 1 <= plan.num_tokens <= self.max_num_batched_tokens
        assert plan.num_prefill_tokens + plan.num_decode_tokens == plan.num_tokens
        assert plan.num_sampled == sum(chunk.is_sampled for chunk in plan.chunks)
        assert all(request.slot > 0 for request in requests)
        assert len({request.slot for request in requests}) == len(requests)
        held = [block for request in requests for block in request.block_ids]
        assert len(set(held)) == len(held)
        assert 0 not in held
        kinds = [chunk.request.is_decoding for chunk in plan.chunks]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        assert sum(kinds) >= plan.num_decode_tokens
        assert all(chunk.is_sampled for chunk in plan.chunks[:-1]), "only the newest is cut"

    def compute(self, chunk):
        """Store a chunk, and sample from what the cache holds if it ends the known tokens."""
        request = chunk.request
        assert chunk.length >= 1
        assert len(request.block_ids) >= self.blocks.blocks_for(chunk.end)
        if chunk.start == 0:
            self.state[request.slot] = []
            self.starts.append(request.request_id)
        assert len(self.state[request.slot]) == chunk.start, "once each, in order"
        self.state[request.slot] += chunk.token_ids
        for position in range(chunk.start, chunk.end):
            token = chunk.token_ids[position - chunk.start]
            self.cache[self.place(request, position)] = token
        assert chunk.is_sampled == (chunk.end == request.num_tokens)
        if not chunk.is_sampled:
            return []
        context = [self.cache[self.place(request, position)] for position in range(chunk.end)]
        assert context == self.state[request.slot] == request.token_ids
        return [next_token(context, request.seed)]

    def place(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size


def make(name, num_prompt_tokens, max_tokens, *, seed=0, **params):
    prompt = [(seed * 7 + place * 3) % VOCAB for place in range(num_prompt_tokens)]
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(name, prompt, sampling, seed=seed)
    if sampling.stop:
        request.text = OutputText(Letters(), sampling)
    return request


REQUESTS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 20), st.booleans(), st.integers(0, 12)),
    min_size=1,
    max_size=10,
)


def build(rows):
    return [
        make(str(index), length, max_tokens, seed=index, ignore_eos=ignore_eos)
        for index, (length, max_tokens, ignore_eos, _) in enumerate(rows)
    ]


class TestAnyJob:
    @given(
        rows=REQUESTS,
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        extra_blocks=st.sampled_from((0, 0, 1, 3, 100)),
        block_size=st.sampled_from((1, 2, 4, 16)),
    )
    def test_everything_finishes_with_the_tokens_of_a_lone_run(
        self, rows, max_num_seqs, extra_tokens, extra_blocks, block_size
    ):
        # The longest request (24 + 20 tokens, the last one never cached) just fits alone.
        num_blocks = 1 + -(-43 // block_size) + extra_blocks
        runner = Runner(max_num_seqs, max_num_seqs + extra_tokens, num_blocks, block_size)
        requests = build(rows)
        arrivals = sorted(range(len(rows)), key=lambda index: rows[index][3])
        waiting = [requests[index] for index in arrivals]
        finished = []
        while waiting or runner.scheduler.has_work:
            while waiting and rows[int(waiting[0].request_id)][3] <= runner.num_steps:
                runner.scheduler.add(waiting.pop(0))
            result = runner.step()
            if result is None:
                runner.num_steps += 1  # idle until the next arrival
            else:
                finished += result[1]
            assert runner.num_steps < 3000, "livelock"
        runner.check_end()
        assert len(finished) == len(requests)
        firsts = list(dict.fromkeys(runner.starts))
        assert firsts == [str(index) for index in arrivals], "first come, first served"
        for request in requests:
            assert (request.output_token_ids, request.finish_reason) == expected_output(request)
            assert request.status is RequestStatus.FINISHED

    @given(rows=REQUESTS, aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
    def test_aborts_leave_the_others_and_the_pools_alone(self, rows, aborts):
        runner = Runner(3, 6, 14)
        requests = build(rows)
        for request in requests:
            runner.scheduler.add(request)
        while runner.scheduler.has_work:
            for step, index in aborts:
                if step == runner.num_steps and index < len(requests):
                    request = requests[index]
                    if request.status is not RequestStatus.FINISHED:
                        assert runner.scheduler.abort(request.request_id) is request
            if runner.step() is None:
                break
        runner.check_end()
        for request in requests:
            if request.finish_reason == "abort":
                output, _ = expected_output(request)
                count = len(request.output_token_ids)
                assert request.output_token_ids == output[:count]
            else:
                assert (request.output_token_ids, request.finish_reason) == expected_output(request)


class TestPreemption:
    def test_a_tiny_pool_forces_it_and_changes_no_token(self):
        outputs = {}
        for num_blocks in (12, 200):
            runner = Runner(4, 16, num_blocks)
            requests = [make(str(seed), 8, 20, seed=seed, ignore_eos=True) for seed in range(4)]
            for request in requests:
                runner.scheduler.add(request)
            runner.run()
            outputs[num_blocks] = [request.output_token_ids for request in requests]
            preemptions = [request.num_preemptions for request in requests]
            assert (sum(preemptions) > 0) == (num_blocks == 12)
            assert preemptions[0] == 0, "the oldest request is never a victim"
        assert outputs[12] == outputs[200]

    def test_the_newest_goes_back_to_the_front_and_keeps_its_outputs(self):
        runner = Runner(3, 32, 6, block_size=8)  # 5 usable blocks
        requests = [make(str(seed), 15, 20, seed=seed, ignore_eos=True) for seed in range(3)]
        for request in requests:
            runner.scheduler.add(request)
        runner.step()  # two prompts fill four blocks, the third waits: one block for growth
        assert [request.num_computed for request in requests] == [15, 15, 0]
        runner.step()
        runner.step()  # 17 tokens each: the fifth block goes to the oldest
        first, second, third = requests
        assert len(first.block_ids) == 3
        assert (second.num_preemptions, second.num_computed, second.block_ids) == (1, 0, [])
        assert (second.status, second.slot) == (RequestStatus.WAITING, 0)
        assert second.output_token_ids == expected_output(second)[0][:2]
        runner.run()
        assert runner.starts == ["0", "1", "1", "2"]
        assert [third.num_preemptions, second.num_preemptions] == [0, 1]

    @pytest.mark.parametrize(
        ("num_prompt_tokens", "max_tokens", "lengths"),
        [
            (1, 8, [2, 2, 2, 2, 2, 2]),  # then waits for two steps
            (2, 7, [1, 2, 2, 2, 2, 2, 1]),  # the last chunk is what one free place holds
        ],
    )
    def test_a_prompt_that_finds_no_blocks_is_cut_and_waits(
        self, num_prompt_tokens, max_tokens, lengths
    ):
        # Admission sees 9 free blocks for 8 and 1 that grows; by then the other has taken 3 more.
        runner = Runner(2, 3, 11, block_size=2)
        decoding = make("a", num_prompt_tokens, max_tokens, ignore_eos=True)
        prompt = make("b", 16, 2, seed=1)
        runner.scheduler.add(decoding)
        runner.scheduler.add(prompt)
        seen = []
        while decoding.status is not RequestStatus.FINISHED:
            plan, _ = runner.step()
            seen += [chunk.length for chunk in plan.chunks if chunk.request is prompt]
        assert runner.num_steps == max_tokens
        assert seen == lengths
        runner.run()
        assert prompt.num_preemptions == 0
        assert prompt.output_token_ids == expected_output(prompt)[0]


class TestOrder:
    def test_decodes_run_first_and_the_rest_of_the_budget_is_filled_with_prompts(self):
        runner = Runner(3, 8)
        runner.scheduler.add(make("a", 3, 9, ignore_eos=True))
        runner.step()
        runner.scheduler.add(make("b", 20, 2))
        runner.scheduler.add(make("c", 2, 2))
        shapes = []
        for _ in range(3):
            plan, _ = runner.step()
            shapes.append([(chunk.request.request_id, chunk.length) for chunk in plan.chunks])
        assert shapes == [
            [("a", 1), ("b", 7)],
            [("a", 1), ("b", 7)],
            [("a", 1), ("b", 6), ("c", 1)],
        ]

    def test_a_long_prompt_is_cut_and_sampled_only_at_its_end(self):
        runner = Runner(1, 8)
        runner.scheduler.add(make("a", 20, 1))
        plans = [runner.step()[0] for _ in range(3)]
        assert [plan.num_tokens for plan in plans] == [8, 8, 4]
        assert [plan.num_sampled for plan in plans] == [0, 0, 1]
        assert [plan.num_prefill_tokens for plan in plans] == [8, 8, 4]

    def test_blocks_are_taken_chunk_by_chunk(self):
        runner = Runner(1, 8)
        request = make("a", 20, 3, ignore_eos=True)
        runner.scheduler.add(request)
        counts = []
        for _ in range(3):
            runner.step()
            counts.append(len(request.block_ids))
        assert counts == [2, 4, 5]

    def test_a_big_head_is_not_overtaken_for_ever(self):
        runner = Runner(4, 8, 12)
        runner.scheduler.add(make("small", 4, 20, ignore_eos=True))
        runner.step()
        big = make("big", 40, 2)
        runner.scheduler.add(big)
        for index in range(20):
            runner.scheduler.add(make(str(index), 4, 4, seed=index))
        order = [request.request_id for request in runner.run()]
        assert order.index("big") <= 1

    def test_growing_requests_keep_a_block_each_when_others_are_admitted(self):
        runner = Runner(4, 32, 6)  # 5 usable blocks
        first = make("first", 4, 12, ignore_eos=True)
        runner.scheduler.add(first)
        runner.scheduler.add(make("second", 13, 2))  # 4 blocks: all that is free now
        plan, _ = runner.step()
        assert [chunk.request.request_id for chunk in plan.chunks] == ["first"]


class TestStop:
    def run_one(self, **params):
        runner = Runner()
        request = make("a", 4, 30, **params)
        runner.scheduler.add(request)
        assert runner.run() == [request]
        return request

    def first_eos(self):
        return next(
            seed for seed in range(999) if EOS in expected_output(make("a", 4, 30, seed=seed))[0]
        )

    def test_eos_ends_and_is_kept(self):
        request = self.run_one(seed=self.first_eos())
        assert (request.output_token_ids[-1], request.finish_reason) == (EOS, "stop")
        assert EOS not in request.output_token_ids[:-1]

    def test_eos_can_be_ignored(self):
        request = self.run_one(seed=self.first_eos(), ignore_eos=True)
        assert EOS in request.output_token_ids
        assert (len(request.output_token_ids), request.finish_reason) == (30, "length")

    def test_eos_can_be_a_stop_token_all_the_same(self):
        request = self.run_one(seed=self.first_eos(), ignore_eos=True, stop_token_ids=(EOS,))
        assert (request.output_token_ids[-1], request.finish_reason) == (EOS, "stop")

    def test_a_stop_token_ends_and_is_kept(self):
        free = self.run_one(ignore_eos=True)
        stop = free.output_token_ids[3]
        request = self.run_one(ignore_eos=True, stop_token_ids=(VOCAB + 1, stop))
        end = free.output_token_ids.index(stop) + 1
        assert request.output_token_ids == free.output_token_ids[:end]
        assert request.finish_reason == "stop"

    def test_the_model_length_ends(self):
        runner = Runner()
        request = make("a", MAX_MODEL_LEN - 3, 30, ignore_eos=True)
        runner.scheduler.add(request)
        runner.run()
        assert (len(request.output_token_ids), request.finish_reason) == (3, "length")

    def test_a_stop_on_the_last_allowed_token_is_a_stop(self):
        free = self.run_one(ignore_eos=True)
        runner = Runner()
        request = make("a", 4, 1, ignore_eos=True, stop_token_ids=(free.output_token_ids[0],))
        runner.scheduler.add(request)
        runner.run()
        assert request.finish_reason == "stop"

    def test_ends_count_only_behind_min_tokens(self):
        free = self.run_one(seed=self.first_eos(), ignore_eos=True).output_token_ids
        place = free.index(EOS)
        for min_tokens, is_last in ((place, True), (place + 1, False)):
            request = self.run_one(seed=self.first_eos(), min_tokens=min_tokens)
            assert (request.output_token_ids == free[: place + 1]) == is_last
            request = self.run_one(
                ignore_eos=True, stop_token_ids=(free[0],), min_tokens=min_tokens
            )
            assert len(request.output_token_ids) > min_tokens

    def test_min_tokens_may_be_all_of_them(self):
        request = self.run_one(seed=self.first_eos(), min_tokens=30)
        assert (len(request.output_token_ids), request.finish_reason) == (30, "length")

    def test_a_stop_string_ends_and_is_cut_from_the_text_alone(self):
        free = self.run_one(ignore_eos=True).output_token_ids
        stop = "".join(map(letter, free[3:6]))
        request = self.run_one(ignore_eos=True, stop=("nothing", stop))
        assert (request.output_token_ids, request.finish_reason) == (free[:6], "stop")
        assert (request.text.text, request.text.stop) == ("".join(map(letter, free[:3])), stop)

    def test_a_stop_string_on_the_last_allowed_token_is_a_stop(self):
        free = self.run_one(ignore_eos=True).output_token_ids
        runner, request = Runner(), make("a", 4, 2, ignore_eos=True, stop=letter(free[1]))
        runner.scheduler.add(request)
        runner.run()
        assert (len(request.output_token_ids), request.finish_reason) == (2, "stop")

    def test_no_stop_string_begins_in_the_prompt(self):
        free = self.run_one(ignore_eos=True)
        text = "".join(map(letter, free.token_ids))
        request = self.run_one(ignore_eos=True, stop=(text[3:5], text[:4]))
        assert request.output_token_ids == free.output_token_ids

    def test_text_is_finished_with_its_request(self):
        for prepare in (lambda runner: runner.run(), lambda runner: runner.scheduler.abort("a")):
            runner, request = Runner(), make("a", 4, 3, ignore_eos=True, stop="nothing")
            runner.scheduler.add(request)
            runner.step()
            first = letter(request.output_token_ids[0])
            assert request.text.text == first
            prepare(runner)
            assert request.text.text == "".join(map(letter, request.output_token_ids))
            with pytest.raises(AssertionError, match="the output has ended"):
                request.text.append(1)

    def test_preemption_keeps_the_text(self):
        runner = Runner(4, 16, 12)
        requests = [
            make(str(seed), 8, 20, seed=seed, ignore_eos=True, stop="nothing") for seed in range(4)
        ]
        for request in requests:
            runner.scheduler.add(request)
        runner.run()
        assert sum(request.num_preemptions for request in requests) > 0
        for request in requests:
            assert request.text.text == "".join(map(letter, request.output_token_ids))


class TestErrors:
    def test_no_work_is_no_plan(self):
        assert Runner().scheduler.schedule() is None

    def test_a_request_that_never_fits_is_refused_with_the_numbers(self):
        runner = Runner(2, 8, 5)  # 4 usable blocks, 16 tokens
        runner.scheduler.add(make("fits", 10, 7))  # the last output is never cached
        with pytest.raises(RequestNeverFits) as caught:
            runner.scheduler.add(make("a", 10, 8))
        assert "10 prompt tokens and up to 8 outputs need 5 blocks of 4 tokens, the pool has 4" in (
            str(caught.value)
        )
        assert "--kv-blocks to 6" in str(caught.value)
        assert [request.request_id for request in runner.run()] == ["fits"]

    def test_the_model_length_bounds_what_a_request_needs(self):
        runner = Runner(1, 8, 13)
        request = make("a", 4, 10_000, ignore_eos=True)
        runner.scheduler.add(request)
        runner.run()
        assert request.num_tokens == MAX_MODEL_LEN

    def test_prompt_too_long(self):
        with pytest.raises(PromptTooLong, match="the limit is 47"):
            Runner().scheduler.add(make("a", MAX_MODEL_LEN, 1))

    def test_an_id_is_unique_only_among_unfinished_requests(self):
        runner = Runner()
        runner.scheduler.add(make("a", 4, 2))
        with pytest.raises(DuplicateRequest, match="'a'"):
            runner.scheduler.add(make("a", 5, 2))
        runner.run()
        runner.scheduler.add(make("a", 5, 2))
        assert len(runner.run()) == 1

    def test_unknown_abort(self):
        with pytest.raises(UnknownRequest, match="'b'"):
            Runner().scheduler.abort("b")

    def test_a_plan_is_retired_once(self):
        runner = Runner()
        runner.scheduler.add(make("a", 20, 9))
        plan = runner.scheduler.schedule()
        runner.scheduler.retire(plan, [])
        with pytest.raises(StalePlan, match="'a'.* with 0 computed tokens, got running with 8"):
            runner.scheduler.retire(plan, [])

    def test_the_number_of_sampled_tokens_must_match(self):
        runner = Runner()
        runner.scheduler.add(make("a", 4, 9))
        plan = runner.scheduler.schedule()
        with pytest.raises(StalePlan, match="sampled tokens: expected 1, got 2"):
            runner.scheduler.retire(plan, [1, 2])

    def test_a_result_that_arrives_after_an_abort_is_dropped(self):
        runner = Runner()
        first, second = make("a", 4, 9), make("b", 4, 1)
        runner.scheduler.add(first)
        runner.scheduler.add(second)
        plan = runner.scheduler.schedule()
        runner.scheduler.abort("a")
        assert runner.scheduler.retire(plan, [1, 2]) == [second]
        assert (first.output_token_ids, first.finish_reason) == ([], "abort")
        assert second.output_token_ids == [2]
        runner.check_end()

    def test_a_pool_that_somebody_else_emptied_is_found(self):
        runner = Runner(2, 8, 12)
        runner.blocks.allocate(11, "outside")
        runner.scheduler.add(make("a", 4, 2))
        with pytest.raises(SchedulerStalled, match="1 waiting and 0 running requests, 0 free"):
            runner.scheduler.schedule()
