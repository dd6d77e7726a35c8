"""What every command shares: flags, configuration files, reports, exit codes."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphs.errors import EngineError
from runtime import cli
from runtime.config import Decision, EngineConfig, SamplingParams
from runtime.env import EnvSettings
from runtime.errors import (
    BackendUnavailable,
    BadArguments,
    ConfigFileSyntax,
    ConfigFileUnreadable,
    FieldChoiceError,
    FieldRangeError,
    FieldTypeError,
    OutputUnwritable,
    StdoutTaken,
    UnknownField,
    UnknownFlag,
)
from runtime.fields import fields_by_name, flag_of

LIGHT_MODULES = [
    "runtime",
    "runtime.cli",
    "runtime.config",
    "runtime.env",
    "runtime.errors",
    "runtime.fields",
    "runtime.jobs",
    "runtime.kv_cache",
    "runtime.log",
    "runtime.metrics",
    "runtime.progress",
    "runtime.request",
    "runtime.scheduler",
]


def make_parser():
    parser = cli.CommandParser(
        prog="python -m x", description="Do x.", examples=("python -m x --seed 1",)
    )
    cli.add_config_flags(parser, EngineConfig, "engine")
    cli.add_config_flags(parser, SamplingParams, "sampling")
    cli.add_common_flags(parser)
    return parser


def load(*argv, env=None):
    return cli.load_config(make_parser().parse_args(list(argv)), env)


def python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **kwargs
    )


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9)


class TestFlags:
    def test_nothing_given_is_the_defaults(self):
        assert load() == (EngineConfig(), SamplingParams())

    def test_every_flag_reaches_its_field(self):
        argv = shlex.split(
            "--model dir --revision main --max-model-len 100 --max-num-seqs 3 "
            "--max-num-batched-tokens 9 --kv-blocks 7 --block-size 8 --seed 5 --numerics "
            "reference --cache-quant off --act-quant off --kind inductor --num-threads 2 "
            "--temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --sampling-seed 6 --n 2 "
            "--max-tokens 11 --min-tokens 3 --stop 'a, b' --stop c --include-stop-str-in-output "
            "--stop-token-ids 1,2 --ignore-eos --presence-penalty -1 --frequency-penalty 0.5 "
            "--repetition-penalty 1.5 --logit-bias 7=-1,5=2.5 --allowed-token-ids 5,6,7 "
            "--banned-token-ids 6 --bad-words d --logprobs 0 --prompt-logprobs 4 "
            "--truncate-prompt-tokens 8 --skip-special-tokens off"
        )
        given_flags = {word for word in argv if word.startswith("--")}
        fields = [*fields_by_name(EngineConfig).values(), *fields_by_name(SamplingParams).values()]
        assert given_flags == {flag_of(field) for field in fields if flag_of(field)}
        assert load(*argv) == (
            EngineConfig(
                model="dir",
                revision="main",
                max_model_len=100,
                max_num_seqs=3,
                max_num_batched_tokens=9,
                kv_blocks=7,
                block_size=8,
                seed=5,
                numerics="reference",
                cache_quant=False,
                act_quant=False,
                kind="inductor",
                num_threads=2,
            ),
            SamplingParams(
                temperature=0.5,
                top_p=0.9,
                top_k=4,
                min_p=0.1,
                seed=6,
                n=2,
                max_tokens=11,
                min_tokens=3,
                stop=("a, b", "c"),
                include_stop_str_in_output=True,
                stop_token_ids=(1, 2),
                ignore_eos=True,
                presence_penalty=-1.0,
                frequency_penalty=0.5,
                repetition_penalty=1.5,
                logit_bias=((5, 2.5), (7, -1.0)),
                allowed_token_ids=(5, 6, 7),
                banned_token_ids=(6,),
                bad_words=("d",),
                logprobs=0,
                prompt_logprobs=4,
                truncate_prompt_tokens=8,
                skip_special_tokens=False,
            ),
        )

    def test_the_two_seeds_have_two_flags(self):
        config, sampling = load("--seed", "5")
        assert (config.seed, sampling.seed) == (5, None)
        config, sampling = load("--sampling-seed", "5")
        assert (config.seed, sampling.seed) == (0, 5)

    def test_a_switch_may_have_its_word(self):
        assert load("--ignore-eos", "off")[1].ignore_eos is False
        assert load("--ignore-eos", "on")[1].ignore_eos is True

    @pytest.mark.parametrize(
        ("argv", "error", "text"),
        [
            (["--max-num-seq", "3"], UnknownFlag, "'--max-num-seq'. Did you mean --max-num-seqs"),
            (["--max-num-seq=3"], UnknownFlag, "nothing takes '--max-num-seq'."),
            (["word"], UnknownFlag, "nothing takes 'word'"),
            (["--max-num-seqs"], BadArguments, "--max-num-seqs: expected one argument"),
            (["--cache-quant"], BadArguments, "--cache-quant: expected one argument"),
            (["--log-level", "all"], BadArguments, "--log-level: invalid choice"),
            (["--max-num-seqs", "x"], FieldTypeError, "--max-num-seqs: 'max_num_seqs' must be"),
            (["--max-num-seqs", "0"], FieldRangeError, "from 1 to 65535"),
            (["--cache-quant", "true"], FieldTypeError, "must be on or off"),
            (["--numerics", "exact"], FieldChoiceError, "official, reference"),
            (["--top-k", "0"], FieldRangeError, "'top_k' is 0"),
            (["--temperature", "nan"], FieldRangeError, "'temperature' is nan"),
            (["--stop", "a", "--stop", ""], FieldRangeError, "--stop: 'stop' is ''"),
            (["--stop", "a"] * 17, FieldRangeError, "at most 16 entries"),
            (["--logit-bias", "5"], FieldTypeError, "token ids with a number each, got '5'"),
        ],
    )
    def test_a_bad_command_line_is_one_line_and_usage(self, argv, error, text):
        with pytest.raises(error) as caught:
            load(*argv)
        assert text in str(caught.value)
        assert "  " not in str(caught.value)
        assert caught.value.exit_code == cli.EXIT_USAGE

    def test_help_shows_default_and_unit_of_every_flag(self):
        text = " ".join(make_parser().format_help().split())
        for cls in (EngineConfig, SamplingParams):
            for field in fields_by_name(cls).values():
                assert flag_of(field) in text
                unit = field.metadata["unit"]
                assert f"{field.metadata['help']} ({f'unit: {unit}, ' if unit else ''}d" in text
        assert "(unit: tokens, default: 16)" in text
        assert "dynamically (default: on)" in text
        assert "derived from --seed, the id and the prompt)" in text
        assert text.endswith("examples: python -m x --seed 1")


class TestConfigFile:
    def write(self, tmp_path, text):
        path = tmp_path / "c.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def test_order_is_default_environment_file_flag(self, tmp_path):
        path = self.write(tmp_path, "num_threads = 2\nseed = 3\n[sampling]\nseed = 4\ntop_k = 5\n")
        env = EnvSettings(num_threads=7)
        assert load(env=env)[0].num_threads == 7
        config, sampling = load("--config", path, env=env)
        assert (config.num_threads, config.seed) == (2, 3)
        assert (sampling.seed, sampling.top_k, sampling.max_tokens) == (4, 5, 16)
        config, sampling = load("--config", path, "--num-threads", "1", "--top-k", "9", env=env)
        assert (config.num_threads, config.seed, sampling.top_k) == (1, 3, 9)

    def test_a_flag_with_the_default_value_still_wins(self, tmp_path):
        path = self.write(tmp_path, "cache_quant = false\nseed = 3\n")
        config, _ = load("--config", path, "--cache-quant", "on", "--seed", "0")
        assert (config.cache_quant, config.seed) == (True, 0)

    def test_windows_files(self, tmp_path):
        path = self.write(tmp_path, b"\xef\xbb\xbfseed = 3\r\nmodel = 'a'\r\n")
        assert load("--config", path)[0] == EngineConfig(seed=3, model="a")

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("sead = 3", UnknownField, "nothing is named 'sead'. Did you mean seed"),
            ("max_tokens = 3", UnknownField, "belongs into the table [sampling]"),
            ("[sampling]\ntop = 1", UnknownField, "[sampling]: nothing is named 'top'"),
            ("[engine]\nseed = 1", UnknownField, "nothing is named 'engine'"),
            ("[seed]\nx = 1", UnknownField, "'seed' is no table"),
            ("seed = '3'", FieldTypeError, "must be an integer, got '3'"),
            ("seed = 3.0", FieldTypeError, "must be an integer, got 3.0"),
            ("cache_quant = 'on'", FieldTypeError, "must be on or off"),
            ("seed = -1", FieldRangeError, "'seed' is -1"),
            ("[sampling]\nstop_token_ids = [1, true]", FieldTypeError, "got True"),
            ("sampling = 3", ConfigFileSyntax, "'sampling' is 3, not a table"),
            ("seed = ", ConfigFileSyntax, "not valid TOML"),
            ("seed = 1\nseed = 2", ConfigFileSyntax, "not valid TOML"),
            (b"model = '\xff'", ConfigFileSyntax, "not valid TOML"),
        ],
    )
    def test_a_bad_file_names_itself_and_the_key(self, tmp_path, text, error, message):
        path = self.write(tmp_path, text)
        with pytest.raises(error) as caught:
            load("--config", path)
        assert message in str(caught.value)
        assert "c.toml" in str(caught.value)
        assert caught.value.exit_code == cli.EXIT_USAGE

    @pytest.mark.parametrize("name", ["missing.toml", "."])
    def test_a_file_that_cannot_be_opened(self, tmp_path, name):
        with pytest.raises(ConfigFileUnreadable, match="Give --config the path"):
            load("--config", str(tmp_path / name))

    @example(engine={"model": 'a\x7f\n"\\\U0001f600'}, sampling={"stop": ('a\x7f\n"\\\U0001f600',)})
    @given(
        engine=st.fixed_dictionaries(
            {},
            optional={
                "model": TEXT,
                "max_model_len": st.integers(2, 2**31 - 1),
                "kv_blocks": st.none() | st.integers(2, 99),
                "seed": st.integers(0, 2**63 - 1),
                "cache_quant": st.booleans(),
                "kind": st.sampled_from(["auto", "reference", "inductor"]),
            },
        ),
        sampling=st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.just(0.0) | st.floats(1e-5, 1e30),
                "seed": st.none() | st.integers(0, 2**63 - 1),
                "stop_token_ids": st.lists(st.integers(0, 99), max_size=3).map(tuple),
                "ignore_eos": st.booleans(),
                "stop": st.lists(TEXT, max_size=3).map(tuple),
                "logit_bias": st.dictionaries(
                    st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3
                ),
                "allowed_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3),
                "logprobs": st.none() | st.integers(0, 20),
            },
        ),
    )
    def test_what_is_dumped_is_read_back(self, tmp_path_factory, engine, sampling):
        config, params = EngineConfig(**engine), SamplingParams(**sampling)
        path = tmp_path_factory.mktemp("dump") / "c.toml"
        path.write_text(cli.dump_config(config, params), encoding="utf-8", newline="")
        assert load("--config", str(path)) == (config, params)

    def test_a_dump_shows_reasons_and_what_is_open(self):
        text = cli.dump_config(EngineConfig(seed=4), None, [Decision("seed", 4, "a reason")])
        assert "seed = 4  # a reason\n" in text
        assert "# max_model_len: the model's limit, at most 4096\n" in text
        assert "[sampling]" not in text


class TestReport:
    def test_report_has_the_four_parts(self):
        config = EngineConfig(num_threads=3)
        params = SamplingParams(stop_token_ids=(2,), logit_bias={3: 1})
        document = cli.report("x/1", config, {"n": 1}, params)
        assert list(document) == ["schema", "config", "environment", "results"]
        assert document["schema"] == "x/1"
        assert document["results"] == {"n": 1}
        sampling = document["config"].pop("sampling")
        assert document["config"] == dataclasses.asdict(config)
        assert (sampling["stop_token_ids"], sampling["logit_bias"]) == ((2,), {"3": 1.0})
        json.dumps(document)

    def test_environment_names_versions_and_machine(self):
        import torch

        record = cli.environment(num_threads=3)
        assert record["python"] == ".".join(str(part) for part in sys.version_info[:3])
        assert torch.__version__.startswith(record["torch"].partition("+")[0])
        assert record["num_threads"] == 3
        assert record["cores"] == cli.available_cores() >= 1
        assert record["cpu"]
        assert "flashreplay" in record

    def test_a_file_appears_complete_and_replaces_the_old_one(self, tmp_path):
        path = tmp_path / "r.json"
        path.write_text("old")
        cli.write_json(str(path), {"a": 1})
        assert json.loads(path.read_text()) == {"a": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]

    def test_a_failed_write_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "r.json"
        path.write_text("old")

        def fail(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cli.os, "fsync", fail)
        with pytest.raises(OutputUnwritable, match="No space left on device.* --json"):
            cli.write_json(str(path), {"a": 1})
        assert path.read_text() == "old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]

    def test_a_folder_that_is_missing(self, tmp_path):
        with pytest.raises(OutputUnwritable, match="No such file"):
            cli.write_json(str(tmp_path / "no" / "r.json"), {})

    def test_dash_is_stdout(self, capsys):
        cli.write_json("-", {"a": 1})
        assert json.loads(capsys.readouterr().out) == {"a": 1}

    def test_nan_is_never_written(self, tmp_path):
        path = tmp_path / "r.json"
        with pytest.raises(ValueError, match="not JSON compliant"):
            cli.write_json(str(path), {"a": float("nan")})
        assert not path.exists()

    def test_two_outputs_need_two_places(self, tmp_path):
        cli.check_targets({"--output": None, "--json": "-"})
        cli.check_targets({"--output": "/dev/null", "--json": "/dev/null"})
        with pytest.raises(StdoutTaken, match="--output and --json both write to stdout"):
            cli.check_targets({"--output": "-", "--json": "-"})
        path = str(tmp_path / "a")
        with pytest.raises(StdoutTaken, match="both write to"):
            cli.check_targets({"--output": path, "--json": str(tmp_path / "b" / ".." / "a")})


class Failure(EngineError):
    message = "Failure: {what}\nand more"


class TestRunMain:
    def test_the_code_of_the_command_is_returned(self):
        assert cli.run_main(lambda argv: len(argv), ["a", "b"]) == 2

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (Failure(what="it broke"), 1, "Failure: it broke and more\n"),
            (
                UnknownFlag(prog="p", argument="--x", nearest=""),
                2,
                "UnknownFlag: p: nothing takes '--x'. See p --help.\n",
            ),
            (BackendUnavailable(name="n", source="s", reason="r", available="a"), 3, None),
            (KeyboardInterrupt(), 130, "interrupted; finished results are kept\n"),
            (BrokenPipeError(), 1, "stdout was closed before everything was written\n"),
        ],
    )
    def test_an_error_is_one_line_on_stderr(self, capsys, error, code, line):
        def main(_):
            raise error

        assert cli.run_main(main, []) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        if line is not None:
            assert captured.err == line

    def test_a_fault_of_ours_keeps_its_traceback(self):
        with pytest.raises(ZeroDivisionError):
            cli.run_main(lambda _: 1 // 0, [])

    @pytest.mark.parametrize("num_lines", [1, 100_000])
    def test_a_closed_pipe_ends_quietly(self, num_lines):
        code = (
            "import sys\nfrom runtime import cli\n"
            "def main(argv):\n"
            "    sys.stdin.read()\n"  # until the reader of stdout is gone
            f"    for _ in range({num_lines}): sys.stdout.write('x' * 100 + '\\n')\n"
            "    return 0\n"
            "sys.exit(cli.run_main(main, []))\n"
        )
        # Unbuffered output would leave nothing for the interpreter to flush at its end.
        env = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
        process.stdout.close()
        process.stdin.close()
        errors = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait() == 1
        assert errors == "stdout was closed before everything was written\n"


class TestImports:
    def test_nothing_heavy_is_loaded_for_help(self):
        code = (
            f"import sys, {', '.join(LIGHT_MODULES)}\n"
            "print([m for m in ('torch', 'numpy', 'tqdm', 'tokenizers') if m in sys.modules])"
        )
        run = python(code)
        assert (run.stdout.strip(), run.stderr) == ("[]", "")

    @pytest.mark.parametrize("name", LIGHT_MODULES)
    def test_every_module_can_be_imported_first(self, name):
        assert python(f"import {name}").returncode == 0
