"""Environment variables: strict, typed, and documented by one table."""

import pytest

from runtime.env import EnvSettings, check_backend, environment_table, read_environment
from runtime.errors import BackendUnavailable, BadVariable, UnknownVariable
from runtime.fields import fields_by_name


def test_other_variables_are_ignored():
    environ = {"PATH": "/bin", "MY_FLASHREPLAY_X": "1", "flashreplay_log_level": "?"}
    assert read_environment(environ) == EnvSettings()


def test_every_variable_is_read():
    environ = {
        "FLASHREPLAY_LOG_LEVEL": "debug",
        "FLASHREPLAY_BACKEND": "cpu",
        "FLASHREPLAY_NUM_THREADS": "2",
    }
    assert set(environ) == {f"FLASHREPLAY_{name.upper()}" for name in fields_by_name(EnvSettings)}
    assert read_environment(environ) == EnvSettings(log_level="debug", backend="cpu", num_threads=2)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LOG_LEVEL", "DEBUG", "one of debug, info, warning, error"),
        ("LOG_LEVEL", "", "one of debug"),
        ("NUM_THREADS", "", "an integer from 1 to 4096"),
        ("NUM_THREADS", "0", "an integer from 1 to 4096"),
        ("NUM_THREADS", "two", "an integer from 1 to 4096"),
        ("NUM_THREADS", "2.0", "an integer from 1 to 4096"),
        ("BACKEND", "tpu", "one of cpu, cuda, ascend"),
    ],
)
def test_a_bad_value_is_an_error_and_never_replaced(name, value, expected):
    with pytest.raises(BadVariable) as caught:
        read_environment({f"FLASHREPLAY_{name}": value})
    assert f"FLASHREPLAY_{name} is {value!r}, expected {expected}" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_variable_names_the_nearest():
    with pytest.raises(UnknownVariable, match=r"mean FLASHREPLAY_LOG_LEVEL\?") as caught:
        read_environment({"FLASHREPLAY_LOGLEVEL": "info"})
    assert caught.value.exit_code == 2
    with pytest.raises(UnknownVariable, match="FLASHREPLAY_ is not known"):
        read_environment({"FLASHREPLAY_": "1"})


@pytest.mark.parametrize("name", ["cuda", "ascend"])
def test_a_backend_that_is_not_here_says_why_and_is_exit_code_3(name):
    with pytest.raises(BackendUnavailable) as caught:
        read_environment({"FLASHREPLAY_BACKEND": name})
    assert f"'{name}' was asked for by FLASHREPLAY_BACKEND: no " in str(caught.value)
    assert "Available: cpu." in str(caught.value)
    assert caught.value.exit_code == 3


def test_check_backend_passes_what_is_here():
    check_backend("cpu", "a flag")
    with pytest.raises(BackendUnavailable, match="by a flag: no such backend"):
        check_backend("tpu", "a flag")


def test_the_table_has_one_row_for_every_variable():
    header, ruler, *rows = environment_table().splitlines()
    assert header.count("|") == ruler.count("|") == 5
    names = [row.split("`")[1] for row in rows]
    assert names == [f"FLASHREPLAY_{name.upper()}" for name in fields_by_name(EnvSettings)]
    assert all(row.count("|") == 5 for row in rows)
    assert "| one of debug, info, warning, error | info |" in rows[0]
