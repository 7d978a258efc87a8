"""The command line: what it hands to the engine, what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import END, FakeLLM, Run
from cli_helpers import run as run
from foredraft import __version__, cli, cli_models, cli_options
from foredraft.array_file import write_text
from foredraft.terminal import DownloadBar
from foredraft.types import ConfigError, ModelNotFoundError, StructuredOutputs

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'

# ------------------------------------------------------------------------------------------------ the program itself


def test_help_loads_no_heavy_module() -> None:
    heavy = ["torch", "transformers", "numpy", "huggingface_hub", "tokenizers", "rich"]
    code = f"import sys; from foredraft.cli import main; main(['--help']); print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "generate" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_python_dash_m_runs_the_same_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "foredraft", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"foredraft {__version__}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "experiments", "plan", "models", "demo"])
def test_each_command_explains_itself(run: Run, command: str) -> None:
    code, out, _ = run(None, command, "--help")
    assert code == 0
    assert out.startswith(f"Usage: foredraft {command}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generat"], "Did you mean 'generate'?"),
        (["generate", "m", "hello", "--temprature", "1"], "--temperature"),
        (["generate", "m"], "Missing argument"),
        (["generate", "m", "hello", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "m", "hello", "--system", "Be brief."], "--chat"),
        (["generate", "m", "hello", "--logprobs", "2"], "--json"),
        (["generate", "m", "hello", "--json", "--show-drafts"], "--show-drafts"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_hint(run: Run, arguments: list[str], says: str) -> None:
    llm = FakeLLM()
    code, out, err = run(llm, *arguments)
    assert code == 2
    assert says in err
    assert out == ""
    assert llm.requests == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "2"], "top_p must be"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", '{"num_spec": 3}'], "did you mean"),
        (["--device", "gpu"], "device"),
        (["--kv-cache-memory", "much"], "512MB"),
        (["--threads", "0"], "threads must be"),
        (["--regex", "a", "--choice", "b"], "must set exactly one of"),
        (["--json-schema", "no-such-file.json"], "the schema no-such-file.json cannot be read"),
        (["--json-schema", "{"], "structured_outputs.json is not valid JSON"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos must be false"),
    ],
)
def test_a_users_mistake_is_one_line_without_a_traceback(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run(FakeLLM(), "generate", "m", "hello", *arguments)
    assert code == 2
    assert err.startswith("foredraft: ") and err.count("\n") == 1
    assert says in err
    assert out == ""


def test_a_message_of_several_lines_is_printed_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **options: Any) -> FakeLLM:
        raise ModelNotFoundError("no model\nof this name")

    monkeypatch.setattr(cli, "load_llm", fail)
    assert run(None, "generate", "m", "hello") == (2, "", "foredraft: no model of this name\n")


def test_our_own_mistake_is_not_passed_off_as_the_users(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **options: Any) -> FakeLLM:
        raise ValueError("a bug")

    monkeypatch.setattr(cli, "load_llm", fail)
    with pytest.raises(ValueError, match="a bug"):
        run(None, "generate", "m", "hello")


def test_interrupting_a_download_ends_cleanly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: str, **options: Any) -> FakeLLM:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_llm", interrupted)
    assert run(None, "generate", "m", "hello") == (130, "", "stopped\n")


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    code = (
        "import sys; from cli_helpers import FakeLLM; from foredraft import cli;"
        "cli.load_llm = FakeLLM([(b'', b'x' * 200)] * 5000).open;"
        "sys.exit(cli.main(['generate', 'm', 'hello']))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    with process, process.stdout, process.stderr:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512_000_000), ("1GiB", 2**30), ("1.5 gib", 3 * 2**29), ("123456789012345678", 123456789012345678), (None, None)],
)
def test_sizes_are_read_with_decimal_and_binary_units(text: str | None, size: int | None) -> None:
    assert cli_options.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "1G", "-5MB", "1e9", "GiB", "1.2.3MB", "٣MBx"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        cli_options.parse_bytes(text)


# ------------------------------------------------------------------------------------------------ generate


def test_text_goes_to_stdout_and_all_else_to_stderr(run: Run) -> None:
    code, out, err = run(FakeLLM(), "generate", "m", "hello")
    assert (code, out) == (0, "abcde\n")
    assert err == "5 tokens, 20.0 tokens/s, acceptance length 1.67, acceptance rate 1.00 (2 of 2 drafted), seed 99\n"


def test_defaults_are_greedy_256_tokens_and_otherwise_the_classes_own(run: Run) -> None:
    llm = FakeLLM()
    run(llm, "generate", "m", "hello")
    ((prompt, params),) = llm.requests
    assert prompt == "hello"
    assert params == type(params)(temperature=0.0, max_tokens=256)
    assert llm.options == {"model": "m", "speculative_config": None}


def test_every_option_reaches_the_engine(run: Run) -> None:
    llm = FakeLLM()
    options = (
        "--temperature .5 --seed 3 --top-p .9 --top-k 7 --min-p .1 --stop X --stop Y --ignore-eos --max-tokens 9 --n 2 --logprobs 1"
    )
    engine = "--device cpu --dtype float32 --ops torch --threads 2 --max-model-len 64 --kv-cache-memory 1MiB"
    run(llm, "generate", "m", "hello", *options.split(), *engine.split(), "--json", "--speculative-config", NGRAM)
    params = llm.requests[0][1]
    expected = {"temperature": 0.5, "seed": 3, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "stop": ("X", "Y"), "ignore_eos": True}
    assert params == type(params)(**expected, max_tokens=9, n=2, logprobs=1)  # type: ignore[arg-type]
    given: Mapping[str, Any] = {"device": "cpu", "dtype": "float32", "ops": "torch", "threads": 2, "max_model_len": 64}
    assert llm.options == {"model": "m", "speculative_config": NGRAM, **given, "kv_cache_memory": 2**20}


def test_a_shape_does_not_reach_the_engine(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": "é"}', encoding="utf-8")
    for options, shape in (
        (["--json-schema", str(schema)], {"json": {"const": "é"}}),
        (["--json-schema", ' {"const": "é"}'], {"json": {"const": "é"}}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
    ):
        llm = FakeLLM()
        run(llm, "generate", "m", "hello", *options)
        assert llm.requests[0][1].structured_outputs == StructuredOutputs.parse(shape)


def test_a_trace_is_not_written_or_its_file_not_checked(run: Run, tmp_path: Path) -> None:
    class Deciding(FakeLLM):
        def chat_prompt(self, conversation: Any) -> list[int]:
            self.options["trace"]({"step": 1, "num_tokens": [2]})
            return super().chat_prompt(conversation)

    path = tmp_path / "trace.jsonl"
    assert run(Deciding(), "generate", "m", "hello", "--chat", "--trace", str(path))[0] == 0
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "num_tokens": [2]}]
    code, _, err = run(FakeLLM(), "generate", "m", "hello", "--trace", str(tmp_path / "no" / "trace"))
    assert code == 2 and "the trace" in err and "cannot be written" in err and err.count("\n") == 1


def test_chat_puts_the_prompt_and_the_system_message_through_the_template(run: Run) -> None:
    llm = FakeLLM()
    run(llm, "generate", "m", "hello", "--chat", "--system", "Be brief.")
    assert llm.conversations == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]]
    assert llm.requests[0][0] == list(b"<system>Be brief.<user>hello")


def test_a_dash_reads_the_prompt_without_the_newline_that_echo_adds(run: Run) -> None:
    llm = FakeLLM()
    run(llm, "generate", "m", "-", stdin="two\nlines\n")
    assert llm.requests[0][0] == "two\nlines"


def test_json_is_one_object_and_nothing_else(run: Run) -> None:
    code, out, err = run(FakeLLM(), "generate", "m", "hello", "--json", "--seed", "5", "--speculative-config", NGRAM)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert out.count("\n") == 1
    assert result["model"] == "m"
    assert result["prompt"] == "hello"
    assert result["speculative_config"]["method"] == "ngram"
    assert result["outputs"][0]["text"] == "abcde"
    assert result["outputs"][0]["token_ids"] == list(b"abcde")
    assert result["outputs"][0]["origins"] == ["plain", "accepted", "accepted", "bonus", "plain"]
    assert result["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert result["seed"] == 5


def test_several_answers_do_not_mix(run: Run) -> None:
    _, out, err = run(FakeLLM(), "generate", "m", "hello", "--n", "2")
    assert out == "--- answer 1 of 2\nabcde\n--- answer 2 of 2\nabcde\n"
    assert err.startswith("10 tokens, 40.0 tokens/s")


def test_an_interrupted_answer_stays_on_the_screen(run: Run) -> None:
    def before(index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    llm = FakeLLM(before=before)
    assert run(llm, "generate", "m", "hello") == (130, "abcd\n", "stopped\n")
    assert llm.cancelled == 1


def test_accepted_drafts_are_in_brackets_without_colour(run: Run) -> None:
    _, out, err = run(FakeLLM(), "generate", "m", "hello", "--show-drafts", "--speculative-config", NGRAM)
    assert out == "a[bc]de\n"
    assert err.startswith("drafts: [accepted draft tokens]")


def test_marking_drafts_without_speculation_says_why_nothing_is_marked(run: Run) -> None:
    _, out, err = run(
        FakeLLM([(b"", b"a")]), "generate", "m", "hello", "--show-drafts", "--speculative-config", '{"method": "none"}'
    )
    assert out == "a\n"
    assert "speculation is off" in err
    assert "nothing drafted" in err


def test_a_character_of_several_tokens_goes_with_the_token_that_completes_it(run: Run) -> None:
    euro = "€".encode()
    llm = FakeLLM([(euro[:1], euro[1:2]), (euro[2:] + b"x", b"y"), (b"z", euro[:1])])
    _, out, _ = run(llm, "generate", "m", "hello", "--show-drafts", "--speculative-config", NGRAM)
    assert out == "[€x]y[z]\ufffd\n"


def test_text_held_back_for_a_stop_string_keeps_its_origin(run: Run) -> None:
    llm = FakeLLM([(b"ab", b"S"), (b"T", b"c")])
    _, out, _ = run(llm, "generate", "m", "hello", "--show-drafts", "--stop", "STOP", "--speculative-config", NGRAM)
    assert out == "[ab]S[T]c\n"


def test_special_tokens_have_no_text_to_mark(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM([(b"ab", [END])])  # type: ignore[list-item]
    assert run(llm, "generate", "m", "hello", "--show-drafts", "--speculative-config", NGRAM)[1] == "[ab]\n"


# ------------------------------------------------------------------------------------------------ chat


def test_chat_keeps_the_history_and_answers_to_stdout_only(run: Run) -> None:
    llm = FakeLLM()
    code, out, err = run(llm, "chat", "m", "--system", "Be brief.", stdin="one\n\ntwo\n")
    assert (code, out, err) == (0, "abcde\nabcde\n", "")
    assert [message["content"] for message in llm.conversations[-1]] == ["Be brief.", "one", "abcde", "two"]


def test_reset_forgets_and_system_replaces(run: Run) -> None:
    llm = FakeLLM()
    run(llm, "chat", "m", stdin="one\n/reset\n/system Be kind.\ntwo\n/system\nthree\n")
    assert [message["content"] for message in llm.conversations[1]] == ["Be kind.", "two"]
    assert [message["content"] for message in llm.conversations[2]] == ["two", "abcde", "three"]


def test_exit_ends_the_chat_and_stats_sums_its_answers(run: Run) -> None:
    llm = FakeLLM()
    code, _, err = run(llm, "chat", "m", stdin="/stats\none\ntwo\n/stats\n/exit\nthree\n")
    assert code == 0
    assert len(llm.requests) == 2
    empty, full = err.splitlines()
    assert empty.startswith("answers: 0, 0 tokens, 0.0 tokens/s")
    assert full == "answers: 2, 10 tokens, 20.0 tokens/s, acceptance length 1.67, acceptance rate 1.00 (4 of 4 drafted)"


def test_an_unknown_chat_command_is_refused_but_a_path_is_a_question(run: Run) -> None:
    llm = FakeLLM()
    _, _, err = run(llm, "chat", "m", stdin="/rest\n/etc/hosts is what?\n")
    assert err == "foredraft: unknown chat command '/rest'; did you mean '/reset'?\n"
    assert [conversation[-1]["content"] for conversation in llm.conversations] == ["/etc/hosts is what?"]


def test_ctrl_c_stops_the_answer_between_two_steps_and_keeps_it(run: Run) -> None:
    def before(index: int) -> None:
        if index == 1 and len(llm.requests) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm = FakeLLM(before=before)
    handler = signal.getsignal(signal.SIGINT)
    code, out, err = run(llm, "chat", "m", stdin="one\ntwo\n")
    assert (code, out, err) == (0, "abcd\nabcde\n", "stopped\n")
    assert [message["content"] for message in llm.conversations[-1]] == ["one", "abcd", "two"]
    assert llm.cancelled == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_during_an_answer_ends_the_program(run: Run) -> None:
    def before(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    llm = FakeLLM(before=before)
    assert run(llm, "chat", "m", stdin="one\ntwo\n") == (130, "a\n", "stopped\n")
    assert llm.cancelled == 1


def test_ctrl_c_at_the_prompt_ends_the_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(sign: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert run(FakeLLM(), "chat", "m") == (0, "", "")


def test_a_full_context_forgets_the_oldest_turns_and_says_so(run: Run) -> None:
    llm = FakeLLM(max_model_len=80)
    _, out, err = run(llm, "chat", "m", stdin="one\ntwo\nthree\n")
    assert out == "abcde\n" * 3
    assert err == ("the context of 80 tokens is nearly full: the oldest question and answer are forgotten; /reset starts afresh\n")
    assert [message["content"] for message in llm.conversations[-1]] == ["two", "abcde", "three"]


def test_a_question_that_does_not_fit_is_refused_and_not_kept(run: Run) -> None:
    llm = FakeLLM(max_model_len=60)
    code, out, err = run(llm, "chat", "m", stdin=f"{'long' * 20}\none\n")
    assert (code, out) == (0, "abcde\n")
    assert err.startswith("foredraft: a prompt must have at most 59 tokens")
    assert [message["content"] for message in llm.conversations[-1]] == ["one"]


def test_a_model_without_a_chat_template_is_refused_at_once(run: Run) -> None:
    code, out, err = run(FakeLLM(has_chat_template=False), "chat", "m", stdin="one\n")
    assert (code, out) == (2, "")
    assert "no chat template" in err


def test_chat_marks_drafts(run: Run) -> None:
    assert run(FakeLLM(), "chat", "m", "--show-drafts", stdin="one\n")[1] == "a[bc]de\n"


# ------------------------------------------------------------------------------------------------ models, downloads


def test_models_lists_aliases_and_drafters_without_any_cache(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, _ = run(None, "models")
    assert code == 0
    header, first, *_ = out.splitlines()
    assert header.split() == ["MODEL", "CACHED", "SIZE", "LICENCE", "ABOUT"]
    assert first.split()[:5] == ["smollm2-135m", "no", "98", "MB", "Apache-2.0"]
    assert "ngram" in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_listed_as_empty(run: Run, tmp_path: Path) -> None:
    code, out, err = run(None, "models", str(tmp_path / "none"))
    assert (code, out) == (2, "") and "there is no folder" in err and err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_found_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    path.chmod(0o400)
    with pytest.raises(ConfigError, match="--json must name a file"):
        cli_options.check_output("--json", path)


def test_figures_that_nobody_else_may_read_are_opened_to_all(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "new", "{}")
    finally:
        os.umask(before)
    (tmp_path / "old").write_text("{}")
    (tmp_path / "old").chmod(0o640)
    write_text(tmp_path / "old", "[]")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "old")] == [0o600, 0o640]
    assert (tmp_path / "old").read_text() == "[]"


def test_a_device_is_replaced_by_a_file_or_refused() -> None:
    null = Path("/dev/null")
    cli_options.check_output("--json", null)
    write_text(null, "{}")
    assert null.is_char_device()


def test_models_lists_what_the_hub_has_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, files in {"org--whole": ("config.json", "model.safetensors"), "org--partial": ("config.json",)}.items():
        snapshot = tmp_path / f"models--{name}" / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        for file in files:
            (snapshot / file).write_bytes(b"x" * 1000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert cli_models.hub_models() == [("org/whole", 2000)]


def test_models_lists_heads_by_the_target_they_fit(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    layer = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 67}
    configs = {
        "a": {"speculators_model_type": "eagle3", "draft_vocab_size": 40, "transformer_layer_config": layer},
        "b": {"model_type": "llama", "vocab_size": 67},
        "c": {"speculators_model_type": "medusa"},
    }
    for name, config in configs.items():
        (tmp_path / "cache" / "drafters" / name).mkdir(parents=True)
        (tmp_path / "cache" / "drafters" / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "cache" / "drafters" / "a" / "provenance.json").write_text(json.dumps({"target": {"model": "tiny"}}))
    code, out, _ = run(None, "models", str(tmp_path / "cache" / "drafters" / "a"))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["FOR", "METHOD", "WHERE", "ABOUT"] in lines
    assert sum(line[:2] == ["tiny", "eagle3"] for line in lines) == 2
    assert sum("draft_model" in line and "67" in line for line in lines) == 1
    assert sum("speculators_model_type" in line for line in lines) == 1


def test_a_download_is_announced_once_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with DownloadBar("m") as progress:
        for done in range(0, 93_000_001, 31_000_000):
            progress(done, 93_000_000)
    assert capsys.readouterr().err == "fetching m (93 MB)\n"


# ------------------------------------------------------------------------------------------------ the real model


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [
        ["one two three four one two three four one two", "--max-tokens", "24"],
        ["Repeat: the cat sat on the mat.", "--chat", "--seed", "7", "--temperature", "0.8", "--max-tokens", "16"],
    ],
    ids=["greedy", "sampled"],
)
def test_drafts_do_not_change_what_the_command_prints(run: Run, arguments: list[str]) -> None:
    results = []
    for method in ("none", "ngram"):
        config = json.dumps({"method": method, "num_speculative_tokens": 4, "adaptive": False})
        options = ["--json", "--threads", "1", "--max-model-len", "256", "--speculative-config", config]
        code, out, _ = run(None, "generate", "smollm2-135m", *arguments, *options)
        assert code == 0
        results.append(json.loads(out))
    plain, drafted = results
    assert drafted["metrics"]["speculation"]["drafted_tokens"] > 0 == plain["metrics"]["speculation"]["drafted_tokens"]
    assert drafted["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert drafted["outputs"][0]["text"] == plain["outputs"][0]["text"]
