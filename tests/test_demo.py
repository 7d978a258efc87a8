"""The demo: what it shows, and that "identical" is earned."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli_helpers import FakeLLM, Passes
from foredraft import cli, demo
from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foredraft.terminal import (
    DownloadBar,
    OriginSplitter,
    Transcript,
    deferred_interrupt,
    format_table,
    has_colour,
    legend,
    mark,
    open_llm,
)
from foredraft.types import SpeculationStats

PLAIN: Passes = [(b"", bytes([byte])) for byte in b"abcdef"]
DRAFTED: Passes = [(b"", b"a"), (b"bcd", b"e"), (b"", b"f")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_demo(drafted: Passes = DRAFTED, plain: Passes = PLAIN, **options: Any) -> tuple[int, str, FakeLLM]:
    out = io.StringIO()
    llm = FakeLLM(answers_by_method={"none": plain, "auto": drafted}, **options)
    code = demo.run("m", cast(Any, llm.open), out)
    return code, out.getvalue(), llm


def test_both_answers_are_shown_with_drafts_marked_and_compared() -> None:
    code, text, llm = run_demo()
    assert code == 0
    lines = text.splitlines()
    assert lines[lines.index("--- plain decoding: one token per pass of the model") + 1] == "abcdef"
    assert "a[bcd]ef" in lines
    assert "plain             6      10.0               1.00              6" in lines
    assert "speculative       6      25.0               2.00              3" in lines
    assert "speed: 2.50 times plain" in lines
    assert lines[-1] == "identical: yes, all 6 token ids"
    assert llm.options["enable_prefix_caching"] is False, "the second run would not read the prompt"
    assert llm.requests[0][0] == llm.requests[1][0]


def test_a_difference_is_named_and_fails() -> None:
    code, text, _ = run_demo(drafted=[(b"", b"a"), (b"bX", b"d")])
    assert code == 1
    assert text.splitlines()[-1] == "identical: NO, token 2 is 99 ('c') plainly and 88 ('X') with drafts"


def test_an_answer_that_is_only_shorter_is_a_difference() -> None:
    code, text, _ = run_demo(drafted=[(b"", b"a"), (b"bc", b"d")])
    assert code == 1
    assert text.splitlines()[-1] == "identical: NO, token 4 is 101 ('e') plainly and absent with drafts"


def test_the_same_text_from_other_tokens_is_a_difference() -> None:
    assert demo.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert demo.first_difference([], []) is None
    assert demo.first_difference([1, 2], [1, 3]) == 1
    assert demo.first_difference([1, 2], [1, 2, 3]) == 2


def test_a_model_without_a_chat_template_gets_the_prompt_as_text() -> None:
    _, _, llm = run_demo(has_chat_template=False)
    assert llm.conversations == []
    assert llm.requests[0][0] == list(demo.PROMPT.encode())


def test_the_command_passes_the_exit_code_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "load_llm", FakeLLM(answers_by_method={"none": PLAIN, "auto": DRAFTED[:2]}).open)
    assert cli.main(["demo"]) == 1
    assert "identical: NO" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ terminal


def test_colours_are_for_terminals_whose_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour(Terminal())
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())


def test_each_origin_has_its_colour_and_plain_has_none() -> None:
    runs = [("plain", "a"), ("accepted", "b"), ("recovered", "c"), ("bonus", "d")]
    assert mark(runs, colour=True) == "a\x1b[32mb\x1b[0m\x1b[33mc\x1b[0m\x1b[36md\x1b[0m"
    assert mark(runs, colour=False) == "a[b]cd"
    for code in ("\x1b[32m", "\x1b[33m", "\x1b[36m"):
        assert code in legend(colour=True)


def output_of(text: str, origin: str = "plain") -> RequestOutput:
    chunk = CompletionOutput(0, text, list(text.encode()), origins=[origin] * len(text.encode()))
    return RequestOutput("0", None, [1], [chunk], False, 1, RequestMetrics(0.1, 0.2, SpeculationStats()))


def test_a_model_cannot_steer_the_terminal_but_a_pipe_gets_its_exact_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = "a\x1b[2Jb\r\tc\x9b\n"
    for out, shown in ((Terminal(), "a\ufffd[2Jb\ufffd\tc\ufffd\n"), (io.StringIO(), text)):
        transcript = Transcript(out)
        transcript.add(output_of(text))
        transcript.close()
        assert out.getvalue() == shown
        assert transcript.answers[0].text == text


def test_split_text_is_the_text_whatever_is_held_back_or_cut() -> None:
    tokenizer = FakeLLM().open("m").checkpoint.tokenizer
    splitter = OriginSplitter(tokenizer, [1])
    first = CompletionOutput(0, "ab", list(b"abST"), origins=["accepted"] * 3 + ["bonus"])
    second = CompletionOutput(0, "ST", list(b"OPx"), origins=["plain"] * 3)
    assert splitter.split(first) == [("accepted", "ab")]
    assert splitter.split(second) == [("accepted", "S"), ("bonus", "T")]


def test_speed_does_not_count_the_time_to_read_the_prompt() -> None:
    transcript = Transcript(io.StringIO())
    assert transcript.tokens_per_second == 0.0
    transcript.add(output_of("abc"))
    assert transcript.tokens_per_second == pytest.approx(3 / 0.2), "all there is, when everything came at once"
    transcript.add(output_of("d"))
    assert transcript.tokens_per_second == pytest.approx(1 / 0.1)


def test_numbers_are_aligned_right_and_words_left() -> None:
    assert format_table([["what", "size"], ["a", "10"], ["bcdef", "9"]]) == "what   size\na        10\nbcdef     9"


def test_interrupts_are_not_deferred_in_a_thread() -> None:
    import threading

    seen = []

    def work() -> None:
        with deferred_interrupt() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with DownloadBar("m") as progress:
        progress(10_000_000, 93_000_000)
        progress(93_000_000, 93_000_000)
    assert "fetching m" in terminal.getvalue()
    assert "93.0" in terminal.getvalue()


def test_start_lines_come_from_the_llm_and_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(model: str, *, progress: DownloadBar, **options: Any) -> Any:
        progress(1, 2_000_000)
        return SimpleNamespace(describe=lambda: ["first", "second"], options=options)

    monkeypatch.setattr("foredraft.llm.LLM", make)
    assert cast(Any, open_llm("m", threads=1)).options == {"threads": 1}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "loading m ...\nfetching m (2 MB)\nfirst\nsecond\n"


# ------------------------------------------------------------------------------------------------ the real model


@pytest.mark.model
def test_the_demo_drafts_and_is_identical(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "MAX_TOKENS", 16)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "[" in out.split("--- speculative")[1].split("\n\n")[0].split("\n", 2)[2]
    assert out.endswith("identical: yes, all 16 token ids\n")
