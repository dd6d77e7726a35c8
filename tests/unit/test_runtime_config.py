"""Engine configuration, sampling parameters, and what `resolve` decides."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Decision, EngineConfig, ModelFacts, SamplingParams, resolve
from runtime.errors import (
    FieldChoiceError,
    FieldConflict,
    FieldRangeError,
    FieldTypeError,
    MemoryTooSmall,
    UnknownField,
)
from runtime.fields import fields_by_name, parse_text, values_as_mapping, values_from_mapping


def facts(**changes):
    values = {
        "max_position_embeddings": 1_048_576,
        "device": "cpu",
        "bytes_per_block": 1000,
        "bytes_per_slot": 5000,
        "free_memory_bytes": 10**9,
        "num_threads": 3,
    }
    return ModelFacts(**(values | changes))


class TestDeclarations:
    @pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
    def test_every_field_explains_itself_on_one_line(self, cls):
        for name, field in fields_by_name(cls).items():
            text = field.metadata["help"]
            assert text, name
            assert "\n" not in text, name
            assert not text.endswith("."), name
            assert (field.default is None) == bool(field.metadata["none"]), name

    @pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
    def test_objects_are_frozen_and_take_keywords_only(self, cls):
        instance = cls()
        with pytest.raises(dataclasses.FrozenInstanceError):
            instance.seed = 1
        with pytest.raises(TypeError):
            cls(1)

    def test_sampling_parameters_can_be_dictionary_keys(self):
        given = {"stop_token_ids": [1], "stop": "a", "logit_bias": {"7": 1, 5: -2}, "top_p": 1}
        stored = {"stop_token_ids": (1,), "stop": ("a",), "logit_bias": ((5, -2.0), (7, 1.0))}
        assert len({SamplingParams(**given), SamplingParams(**stored)}) == 1


class TestEngineConfig:
    @pytest.mark.parametrize(
        ("field", "value", "error", "text"),
        [
            ("max_num_seqs", 0, FieldRangeError, "'max_num_seqs' is 0, the rule is: from 1 to"),
            ("max_num_seqs", True, FieldTypeError, "must be an integer, got True"),
            ("max_num_seqs", 2.0, FieldTypeError, "must be an integer, got 2.0"),
            ("max_model_len", 1, FieldRangeError, "from 2 to"),
            ("kv_blocks", 1, FieldRangeError, "from 2 to"),
            ("block_size", 48, FieldRangeError, "a power of two"),
            ("block_size", None, FieldTypeError, "must be an integer"),
            ("seed", -1, FieldRangeError, "from 0 to"),
            ("seed", 2**63, FieldRangeError, "from 0 to"),
            ("numerics", "exact", FieldChoiceError, "'exact', expected one of: official, refer"),
            ("kind", "aoti", FieldChoiceError, "auto, reference, inductor"),
            ("cache_quant", "on", FieldTypeError, "must be on or off, got 'on'"),
            ("cache_quant", 1, FieldTypeError, "must be true or false, got 1"),
            ("model", "", FieldRangeError, "not empty"),
            ("num_threads", 0, FieldRangeError, "in threads"),
        ],
    )
    def test_a_bad_value_is_named_with_field_value_and_rule(self, field, value, error, text):
        with pytest.raises(error) as caught:
            EngineConfig(**{field: value})
        assert f"'{field}'" in str(caught.value)
        assert text in str(caught.value)
        assert f"--{field.replace('_', '-')}" in str(caught.value)
        assert caught.value.exit_code == 2

    def test_a_step_must_hold_a_token_of_every_request(self):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)
        with pytest.raises(FieldConflict, match="Raise the former to 8 or lower the latter to 7"):
            EngineConfig(max_num_seqs=8, max_num_batched_tokens=7)


class TestSamplingParams:
    @pytest.mark.parametrize(
        ("field", "good", "bad"),
        [
            ("temperature", [0, 0.0, 1e-5, 1.0, 50], [-0.1, 1e-6, float("nan"), float("inf")]),
            ("top_p", [1e-9, 1, 1.0], [0, 0.0, 1.0001, -1, float("nan")]),
            ("top_k", [-1, 1, 2**31 - 1], [0, -2, 2**31]),
            ("seed", [None, 0, 2**63 - 1], [-1, 2**63]),
            ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31]),
            ("stop_token_ids", [(), (0, 5), [7]], [(-1,), (5, 2**31)]),
            ("min_p", [0, 0.5, 1], [-0.1, 1.1, float("nan")]),
            ("n", [1, 128], [0, -1, 129]),
            ("min_tokens", [0, 16], [-1, 2**31]),
            (
                "stop",
                [(), "a", ["a"] * 16],
                ["", [""], ("a", ""), ["a"] * 17, "\ud800", ["a\udfff"]],
            ),
            ("bad_words", [(), "a", ["a"] * 99], ["", [""], "\ud800"]),
            ("presence_penalty", [-2, 0, 2], [-2.1, 2.1]),
            ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
            ("repetition_penalty", [1e-5, 0.5, 1, 10], [0, -1, 10.1, float("inf")]),
            (
                "logit_bias",
                [
                    (),
                    {},
                    {5: 100, "6": -100.0},
                    ((6, 1.0), (5, 0.5)),
                    dict.fromkeys(range(1024), 0),
                ],
                [
                    {5: 100.5},
                    {5: float("nan")},
                    {-1: 0},
                    {2**31: 0},
                    {"9999999999": 0},
                    {5: 1, "5": 1},
                    ((5, 1.0), (5, 1.0)),
                    dict.fromkeys(range(1025), 0),
                ],
            ),
            ("allowed_token_ids", [None, [0], (5, 2**31 - 1)], [(), [], [-1], [2**31]]),
            ("banned_token_ids", [(), [0]], [[-1], [2**31]]),
            ("logprobs", [None, 0, 20], [-1, 21]),
            ("prompt_logprobs", [None, 0, 20], [-1, 21]),
            ("truncate_prompt_tokens", [None, 1, 2**31 - 1], [0, -1]),
        ],
    )
    def test_limits(self, field, good, bad):
        for value in good:
            SamplingParams(**{field: value})
        for value in bad:
            with pytest.raises(FieldRangeError, match=f"'{field}'"):
                SamplingParams(**{field: value})

    def test_a_least_length_is_below_the_longest(self):
        SamplingParams(min_tokens=5, max_tokens=5)
        with pytest.raises(FieldConflict, match="'min_tokens' is 6 and 'max_tokens' is 5"):
            SamplingParams(min_tokens=6, max_tokens=5)
        with pytest.raises(FieldConflict, match="'max_tokens' is 3"):
            SamplingParams.from_mapping({"max_tokens": 3}, SamplingParams(min_tokens=4))

    def test_what_is_stored_may_be_given_again(self):
        params = SamplingParams(stop="a", logit_bias={"7": 1, 5: -2}, allowed_token_ids=[3])
        assert dataclasses.replace(params, seed=None) == params
        mapping = values_as_mapping(params)
        assert mapping["logit_bias"] == {"5": -2.0, "7": 1.0}
        assert SamplingParams(**values_from_mapping(SamplingParams, mapping, "x")) == params

    def test_a_number_beyond_every_float_is_refused(self):
        with pytest.raises(FieldRangeError, match="an integer of 33220 bits"):
            SamplingParams(temperature=10**10_000)

    @pytest.mark.parametrize(
        ("mapping", "text"),
        [
            ({"max_tokens": True}, "must be an integer, got True (bool)"),
            ({"max_tokens": "5"}, "must be an integer, got '5' (str)"),
            ({"max_tokens": 5.0}, "must be an integer, got 5.0 (float)"),
            ({"max_tokens": None}, "must be an integer, got None"),
            ({"temperature": "0"}, "must be a number"),
            ({"temperature": False}, "must be a number"),
            ({"ignore_eos": 1}, "must be true or false, got 1"),
            ({"ignore_eos": "on"}, "must be on or off"),
            ({"stop_token_ids": 5}, "must be a list of integers, got 5"),
            ({"stop_token_ids": [True]}, "got True"),
            ({"stop_token_ids": "12"}, "must be a list of integers"),
            ({"seed": {}}, "must be an integer, got {}"),
            ({"n": "2"}, "must be an integer, got '2' (str)"),
            ({"stop": 5}, "must be a string or a list of strings, got 5 (int)"),
            ({"stop": ["a", 5]}, "got 5 (int)"),
            ({"stop": None}, "got None"),
            ({"stop": {"a": 1}}, "got {'a': 1} (dict)"),
            ({"logit_bias": [[5, 1]]}, "must be token ids with a number each, got [[5, 1]] (list)"),
            ({"logit_bias": {"5": "1"}}, "got '1' (str)"),
            ({"logit_bias": {"5": True}}, "got True (bool)"),
            ({"logit_bias": {"a": 1}}, "got 'a' (str)"),
            ({"logit_bias": {"05": 1}}, "got '05' (str)"),
            ({"logit_bias": {"-5": 1}}, "got '-5' (str)"),
            ({"logit_bias": {"\u0665": 1}}, "got '\\u0665' (str)"),
            ({"logit_bias": {True: 1}}, "got True (bool)"),
            ({"logit_bias": None}, "got None"),
            ({"logprobs": True}, "must be an integer, got True"),
        ],
    )
    def test_types_are_strict_in_json(self, mapping, text):
        with pytest.raises(FieldTypeError) as caught:
            SamplingParams.from_mapping(mapping, where="line 3")
        assert str(caught.value).startswith("FieldTypeError: line 3: ")
        assert text in str(caught.value)

    def test_a_mapping_changes_the_defaults_where_it_speaks(self):
        defaults = SamplingParams(temperature=0.5, seed=9, max_tokens=3, stop_token_ids=(1,))
        mapping = {"temperature": 2, "seed": None, "stop_token_ids": [4, 5]}
        params = SamplingParams.from_mapping(mapping, defaults)
        assert params == dataclasses.replace(
            defaults, temperature=2.0, seed=None, stop_token_ids=(4, 5)
        )
        assert isinstance(params.temperature, float)
        assert defaults.seed == 9

    def test_values_of_a_mapping_are_checked_too(self):
        with pytest.raises(FieldRangeError, match="-1 .all tokens. or from 1"):
            SamplingParams.from_mapping({"top_k": 0})

    def test_an_unknown_field_names_the_nearest(self):
        with pytest.raises(UnknownField, match=r"nothing is named 'max_token'.*mean max_tokens"):
            SamplingParams.from_mapping({"max_token": 5})
        with pytest.raises(UnknownField, match=r"Known: allowed_token_ids, .*top_p, tru.*\."):
            SamplingParams.from_mapping({"zzzz": 5})


class TestText:
    @pytest.mark.parametrize(
        ("cls", "field", "text", "value"),
        [
            (EngineConfig, "max_num_seqs", "12", 12),
            (EngineConfig, "cache_quant", "OFF", False),
            (SamplingParams, "temperature", "1e-3", 0.001),
            (SamplingParams, "top_k", "-1", -1),
            (SamplingParams, "stop_token_ids", "1,22", (1, 22)),
            (SamplingParams, "stop_token_ids", "", ()),
            (SamplingParams, "allowed_token_ids", "3", (3,)),
            (SamplingParams, "stop", "a,b \u00e9", ("a,b \u00e9",)),
            (SamplingParams, "logit_bias", "7=-1.5,5=1e1", ((5, 10.0), (7, -1.5))),
            (SamplingParams, "logit_bias", "", ()),
        ],
    )
    def test_good(self, cls, field, text, value):
        assert parse_text(fields_by_name(cls)[field], text, "x") == value

    @pytest.mark.parametrize("text", ["", "1_000", " 1", "1.0", "0x10", "\u0663", "9" * 5000])
    def test_an_integer_is_decimal_digits(self, text):
        with pytest.raises((FieldTypeError, FieldRangeError)):
            parse_text(fields_by_name(EngineConfig)["max_num_seqs"], text, "x")

    @pytest.mark.parametrize("text", ["true", "1", "yes", "", "no"])
    def test_a_switch_is_on_or_off(self, text):
        with pytest.raises(FieldTypeError, match="must be on or off"):
            parse_text(fields_by_name(EngineConfig)["cache_quant"], text, "x")

    @pytest.mark.parametrize("text", ["1,,2", "1,x", ",", "1;2"])
    def test_a_list_has_no_gaps(self, text):
        with pytest.raises(FieldTypeError, match="a list of integers"):
            parse_text(fields_by_name(SamplingParams)["stop_token_ids"], text, "x")

    @pytest.mark.parametrize(
        "text", ["5", "5=", "=1", "5=1,", "5:1", "5=1=2", " 5=1", "x=1", "5=x"]
    )
    def test_biases_are_ids_and_numbers(self, text):
        with pytest.raises(FieldTypeError, match="token ids with a number each"):
            parse_text(fields_by_name(SamplingParams)["logit_bias"], text, "x")

    @pytest.mark.parametrize(
        ("field", "text"),
        [
            ("stop", ""),
            ("logit_bias", "5=1,5=2"),
            ("logit_bias", "5=inf"),
            ("allowed_token_ids", ""),
        ],
    )
    def test_text_obeys_the_rule_of_its_field(self, field, text):
        with pytest.raises(FieldRangeError, match=f"'{field}'"):
            parse_text(fields_by_name(SamplingParams)[field], text, "x")


class TestResolve:
    def test_everything_open_is_closed_with_a_reason(self):
        config, decisions = resolve(EngineConfig(), facts())
        assert config == EngineConfig(
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            kv_blocks=32 * 64 + 1,
            kind="reference",
            num_threads=3,
        )
        assert [decision.field for decision in decisions] == [
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_blocks",
            "kind",
            "num_threads",
        ]
        for decision in decisions:
            assert decision.value == getattr(config, decision.field)
            assert decision.reason

    def test_what_is_given_is_kept_and_not_a_decision(self):
        given_config = EngineConfig(
            model="dir",
            max_model_len=100,
            max_num_seqs=2,
            max_num_batched_tokens=7,
            kv_blocks=5,
            kind="inductor",
            num_threads=1,
        )
        assert resolve(given_config, facts()) == (given_config, [])

    def test_resolving_twice_changes_nothing(self):
        config, _ = resolve(EngineConfig(), facts())
        assert resolve(config, facts()) == (config, [])

    def test_the_model_bounds_the_length(self):
        config, decisions = resolve(EngineConfig(), facts(max_position_embeddings=256))
        assert decisions[0] == Decision(
            "max_model_len", 256, "max_position_embeddings of the model"
        )
        assert config.kv_blocks == 32 * 4 + 1
        with pytest.raises(FieldRangeError, match=r"'max_model_len' is 257.*at most .*256"):
            resolve(EngineConfig(max_model_len=257), facts(max_position_embeddings=256))
        config, _ = resolve(EngineConfig(max_model_len=9000), facts())
        assert config.max_model_len == 9000

    @pytest.mark.parametrize(
        ("given_config", "seqs", "tokens"),
        [
            ({}, 256, 4096),
            ({"max_num_seqs": 6000}, 6000, 6000),
            ({"max_num_batched_tokens": 16}, 16, 16),
            ({"max_num_seqs": 4, "max_num_batched_tokens": 16}, 4, 16),
        ],
    )
    def test_requests_and_tokens_of_a_step_agree(self, given_config, seqs, tokens):
        config, _ = resolve(
            EngineConfig(**given_config), facts(device="cuda", free_memory_bytes=10**12)
        )
        assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)

    def test_little_memory_means_fewer_requests_and_blocks(self):
        # 0.9 of the memory is 900,000: half of it holds 90 slots of 5,000, one of them reserved;
        # then 900,000 - 33 * 5,000 leaves 735 blocks of 1,000.
        config, decisions = resolve(EngineConfig(), facts(free_memory_bytes=1_000_000))
        assert (config.max_num_seqs, config.kv_blocks) == (32, 735)
        reason = next(d.reason for d in decisions if d.field == "kv_blocks")
        assert "735000" not in reason
        assert "165000 bytes of request state" in reason
        config, _ = resolve(EngineConfig(), facts(free_memory_bytes=200_000, bytes_per_block=100))
        assert config.max_num_seqs == 200_000 * 9 // 10 // 2 // 5000 - 1
        # One request runs even where two slots need more than half.
        big = facts(free_memory_bytes=1_000_000, bytes_per_slot=300_000)
        assert resolve(EngineConfig(), big)[0].max_num_seqs == 1

    def test_blocks_never_cost_more_than_the_memory(self):
        for free in range(200_000, 3_000_000, 7_919):
            config, _ = resolve(EngineConfig(max_num_seqs=3), facts(free_memory_bytes=free))
            assert 4 * 5000 + config.kv_blocks * 1000 <= 0.9 * free
            assert config.kv_blocks >= 65

    def test_what_does_not_fit_is_refused_with_the_numbers(self):
        with pytest.raises(MemoryTooSmall) as caught:
            resolve(EngineConfig(max_num_seqs=1), facts(free_memory_bytes=80_000))
        assert "needs 75000 bytes (2 request states of 5000 bytes and 65 blocks" in str(
            caught.value
        )
        assert "72000 bytes are free" in str(caught.value)
        assert caught.value.exit_code == 3
        with pytest.raises(MemoryTooSmall, match="1000000 blocks of 1000 bytes"):
            resolve(EngineConfig(kv_blocks=1_000_000), facts())

    def test_every_token_of_a_request_has_a_place(self):
        """Scoring feeds all of them, though generation never caches the last."""
        config = EngineConfig(max_model_len=64, max_num_seqs=3, block_size=64)
        assert resolve(config, facts())[0].kv_blocks == 3 + 1
        config = EngineConfig(max_model_len=65, max_num_seqs=3, block_size=64)
        assert resolve(config, facts())[0].kv_blocks == 6 + 1

    def test_a_small_pool_may_be_asked_for(self):
        config, _ = resolve(EngineConfig(kv_blocks=2), facts())
        assert config.kv_blocks == 2

    def test_a_model_without_blocks_resolves(self):
        config, _ = resolve(EngineConfig(), facts(bytes_per_block=0, bytes_per_slot=0))
        assert (config.max_num_seqs, config.kv_blocks) == (32, 2049)

    @pytest.mark.parametrize(
        ("device", "has_compiled_units", "kind"),
        [("cpu", False, "reference"), ("cpu", True, "inductor"), ("cuda", False, "inductor")],
    )
    def test_auto_does_not_survive_and_says_how_to_get_the_other(
        self, device, has_compiled_units, kind
    ):
        config, decisions = resolve(
            EngineConfig(), facts(device=device, has_compiled_units=has_compiled_units)
        )
        assert config.kind == kind
        reason = next(d.reason for d in decisions if d.field == "kind")
        other = "inductor" if kind == "reference" else "reference"
        assert f"--kind {other}" in reason

    @given(st.integers(2, 5000), st.integers(1, 40), st.sampled_from([2, 16, 64]))
    def test_a_resolved_pool_holds_a_request_of_full_length(self, length, seqs, block_size):
        config = EngineConfig(max_model_len=length, max_num_seqs=seqs, block_size=block_size)
        try:
            config, _ = resolve(config, facts(free_memory_bytes=600_000))
        except MemoryTooSmall:
            assert (seqs + 1) * 5000 + (1 + -(-(length - 1) // block_size)) * 1000 > 540_000
        else:
            assert (config.kv_blocks - 1) * block_size >= length - 1
