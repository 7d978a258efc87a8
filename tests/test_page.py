"""The live page in headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

from foredraft.server.live_page import FOLDER
from page_helpers import CHROMIUM, FLAGS, ScriptLLM
from server_helpers import Running, joined_chat, read_events, running, wait_for

SEA = "The sea is wide. The sea is deep. Été. The sea is wide and deep. 🌊 The sea is wide. The sea is calm."
MARKUP = '<script>document.title = "taken"</script><img src=x onerror="document.title = 1"><b>bold</b> &amp; </p>'
LONG = "All work and no play. " * 150
ANSWERS = {"sea": SEA, "markup": MARKUP, "long": LONG, "wide": "w" * 200, "nothing": ""}
MILLISECONDS = 60_000
"""After which a test gives up; nothing takes so long."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; install the package chromium")

# Ratios of contrast by WCAG 2.2 (1.4.3 and 1.4.11): of all text that is seen, of borders of controls, and of token marks.
CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parse(colour).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const isClear = (colour) => parse(colour).length === 4 && parse(colour)[3] === 0;
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!isClear(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const add = (element, kind, colour, behind) =>
    found.push({ name: `${kind} of ${element.tagName}#${element.id}.${element.className}`, kind, ratio: ratio(colour, behind) });
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || element instanceof SVGElement) continue;
    const style = getComputedStyle(element);
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (hasText || element.matches("input, select, textarea")) add(element, "text", style.color, ground(element));
    if (element.matches("button, input, select, textarea")) {
      add(element, "border", style.borderTopColor, ground(element.parentElement));
    }
    if (element.placeholder) add(element, "text", getComputedStyle(element, "::placeholder").color, ground(element));
    if (element.matches(".accepted, .recovered, .bonus")) {
      add(element, "mark", style.textDecorationColor, ground(element.parentElement));
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Stopped with the module: while it runs, no event loop can run in this thread.
    with sync_playwright() as playwright:
        expect.set_options(timeout=MILLISECONDS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptLLM(ANSWERS)) as server:
        yield server


Visit = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages.  In the end there must have been no error and no request to elsewhere; ``refused`` lets HTTP errors pass."""
    problems: list[str] = []
    origins: set[str] = set()
    visited: set[str] = set()
    contexts = []

    def visit(server: Running, *, refused: bool = False, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(MILLISECONDS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda m: problems.append(m.text) if not (refused and m.text.startswith("Failed to load resource")) else None
        )
        page.on("request", lambda request: origins.add("{0.scheme}://{0.netloc}".format(urlsplit(request.url))))
        visited.add(server.url)
        page.goto(server.url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not problems
    assert origins == visited


def say(page: Page, text: str) -> None:
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def answer(page: Page) -> str:
    """The text of the last answer, when it is complete."""
    expect(page.locator(".assistant").last).not_to_have_attribute("aria-busy", "true")
    return page.locator(".assistant .text").last.text_content() or ""


def shown_tokens(page: Page) -> list[tuple[str, str]]:
    spans = page.locator(".assistant .text").last.locator(".token")
    return [tuple(pair) for pair in spans.evaluate_all("all => all.map((one) => [one.textContent, one.dataset.origin])")]


def bodies(page: Page) -> list[dict[str, Any]]:
    """The bodies of chat requests that the page sends from now on."""
    sent: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append(json.loads(request.post_data or ""))

    page.on("request", note)
    return sent


def stream_of(text: str) -> Callable[[Route], None]:
    return lambda route: route.fulfill(body=text, content_type="text/event-stream")


# ------------------------------------------------------------------------------------------------ answers


def test_tokens_lose_text_or_change_their_origin(server: Running, visit: Visit) -> None:
    page = visit(server)
    sent = bodies(page)
    page.locator("#seed").fill("5")
    say(page, "sea")
    assert answer(page) == SEA
    (body,) = sent
    chunks = read_events(server.post("/v1/chat/completions", body))
    assert joined_chat(chunks)["choices"][0]["text"] == SEA
    tokens = [token for chunk in chunks for token in chunk.get("foredraft", {}).get("tokens", ())]
    assert shown_tokens(page) == [(token["text"], token["origin"]) for token in tokens]
    assert {token["origin"] for token in tokens} == {"accepted", "recovered", "bonus", "plain"}
    marks = {
        origin: page.locator(f".assistant .{origin}").first.evaluate(
            "one => getComputedStyle(one).textDecorationStyle + getComputedStyle(one).textDecorationLine"
        )
        for origin in ("accepted", "recovered", "bonus", "plain")
    }
    assert len(set(marks.values())) == 4, "colour alone tells them apart"
    note = page.locator(".assistant .note").last
    expect(note).to_contain_text(f"{len(tokens)} tokens")
    expect(note).to_contain_text("seed 5")


def test_what_a_model_writes_becomes_markup(server: Running, visit: Visit) -> None:
    page = visit(server)
    say(page, "markup")
    assert answer(page) == MARKUP
    say(page, MARKUP)
    assert answer(page) == MARKUP
    assert page.locator("#log :is(script, img, b)").count() == 0
    assert page.title() == "foredraft"


def test_a_conversation_forgets_its_turns_or_survives_a_new_one(server: Running, visit: Visit) -> None:
    page = visit(server)
    sent = bodies(page)
    for text in ("one", "two"):
        say(page, text)
        assert answer(page) == text
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#log article")).to_have_count(0)
    say(page, "three")
    assert answer(page) == "three"
    turns = [[message["content"] for message in body["messages"]] for body in sent]
    assert turns == [["one"], ["one", "one", "two"], ["three"]]


def test_stop_leaves_the_answer_running(server: Running, visit: Visit) -> None:
    page = visit(server)
    page.locator("#max-tokens").fill("3000")
    say(page, "long")
    expect(page.locator(".assistant .token").nth(5)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    text = answer(page)
    assert 0 < len(text) < len(LONG) and LONG.startswith(text)
    expect(page.locator(".note")).to_contain_text("stopped")
    wait_for(server.is_idle)
    say(page, "sea")
    assert answer(page) == SEA


def test_the_method_does_not_reach_the_server(server: Running, visit: Visit) -> None:
    page = visit(server)
    sent = bodies(page)
    method = page.get_by_label("Draft method", exact=True)
    expect(method.locator("option", has_text="default: ngram")).to_be_attached()
    say(page, "sea")
    assert answer(page) == SEA
    method.select_option("none")
    say(page, "sea")
    assert answer(page) == SEA
    assert {origin for _, origin in shown_tokens(page)} == {"plain"}
    method.select_option("suffix")
    page.get_by_label("Draft length K", exact=True).fill("2")
    page.get_by_label("Verify only what pays", exact=True).check()
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_label("Most tokens", exact=True).fill("7")
    page.get_by_label("Seed", exact=True).fill("11")
    say(page, "sea")
    assert answer(page) == SEA[:7]
    expect(page.locator(".note").last).to_contain_text("cut at the most tokens")
    assert [body.get("speculative") for body in sent] == [
        None,
        {"method": "none"},
        {"method": "suffix", "num_speculative_tokens": 2, "adaptive": True},
    ]
    assert {name: sent[-1][name] for name in ("temperature", "max_tokens", "seed")} == {
        "temperature": 0,
        "max_tokens": 7,
        "seed": 11,
    }


def test_figures_differ_from_what_the_server_says(server: Running, visit: Visit) -> None:
    page = visit(server)
    say(page, "sea")
    assert answer(page) == SEA
    wait_for(server.is_idle)
    page.reload()
    with server.http() as http:
        state = http.get("/v1/speculation").json()
    shares = state["acceptance_per_position"]
    assert len(shares) == 4
    columns = page.locator("#acceptance li > span:first-child")
    expect(columns).to_have_count(4)
    percents = [float(text.strip("%")) for text in columns.all_text_contents()]
    assert percents == pytest.approx([100 * share for share in shares], abs=1)
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#kv")).to_have_text("0 % used")
    expect(page.locator("#exactness")).to_contain_text("bit for bit")
    expect(page.locator("#reason")).to_contain_text("Speculation is")
    expect(page.locator("#drafters")).to_contain_text("ngram")
    assert page.locator("#k-chart > rect").count() > 0 and page.locator("#rate-chart polyline").count() > 0


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_server_with_a_key_cannot_be_used(visit: Visit) -> None:
    with running(ScriptLLM(ANSWERS), api_keys=("secret",)) as server:
        page = visit(server, refused=True)
        key = page.get_by_label("API key of this server", exact=True)
        expect(key).to_be_focused()
        expect(page.locator("#problem")).to_have_text("This server asks for an API key.")
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_have_text("This API key is not accepted.")
        key.fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(key).to_be_hidden()
        expect(page.locator("#problem")).to_be_hidden()
        say(page, "sea")
        assert answer(page) == SEA
        page.reload()
        expect(page.locator("#model")).to_have_text("tiny")


def test_without_a_key_the_page_asks_for_one(server: Running, visit: Visit) -> None:
    page = visit(server)
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#key-form")).to_be_hidden()


def test_an_error_is_not_told_or_loses_the_message(server: Running, visit: Visit) -> None:
    page = visit(server, refused=True)
    problem, message = page.locator("#problem"), page.locator("#message")
    page.get_by_label("Temperature", exact=True).fill("3")
    say(page, "sea")
    expect(problem).to_contain_text("Temperature: ")
    page.get_by_label("Temperature", exact=True).fill("1")
    say(page, "x" * 5000)
    expect(problem).to_contain_text("A prompt must have at most")
    expect(message).to_have_value("x" * 5000)
    expect(page.locator("#log article")).to_have_count(0)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "sea")
    expect(problem).to_contain_text("The server cannot be reached.")
    expect(message).to_have_value("sea")
    page.unroute("**/v1/chat/completions")
    chunk = {"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": None}]}
    tokens = {"tokens": [{"id": 1, "text": "ab", "origin": "plain"}], "drafter": "none", "num_drafted": 0}
    for ending, told in (
        ("", "The connection ended before the answer did."),
        ('data: {"error": {"message": "the model failed."}}\n\n', "The model failed."),
    ):
        text = f"data: {json.dumps({**chunk, 'foredraft': tokens})}\n\n{ending}"
        page.route("**/v1/chat/completions", stream_of(text))
        say(page, "sea")
        expect(problem).to_contain_text(told)
        assert answer(page) == "ab"
        expect(page.locator(".note").last).to_contain_text("broken off")
        page.unroute("**/v1/chat/completions")


# ------------------------------------------------------------------------------------------------ for everybody


def test_the_page_needs_a_mouse(server: Running, visit: Visit) -> None:
    page = visit(server)
    message = page.locator("#message")
    expect(message).to_be_focused()
    page.get_by_label("Most tokens", exact=True).fill("3000")
    page.reload()
    expect(message).to_be_focused()
    page.keyboard.type("se")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("a")
    expect(message).to_have_value("se\na")
    message.fill("sea")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    assert answer(page) == SEA
    expect(page.locator("#status")).to_have_text("The answer is complete.")
    expect(message).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.labels[0].textContent")
    assert focused == "Draft length K"
    message.focus()
    page.keyboard.type("long")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant").last.locator(".token").nth(3)).to_be_attached()
    page.keyboard.press("Escape")
    assert len(answer(page)) < 256
    expect(page.locator("#status")).to_have_text("The answer was stopped.")
    wait_for(server.is_idle)


def test_the_skip_link_leads_nowhere_or_a_control_has_no_name(server: Running, visit: Visit) -> None:
    page = visit(server)
    page.locator("#model").click()
    page.evaluate("document.activeElement.blur()")
    page.get_by_role("link", name="Go to the message box").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#message")).to_be_focused()
    nameless = page.locator("input, select, textarea").evaluate_all(
        "all => all.filter((one) => !one.labels.length).map((one) => one.id)"
    )
    assert nameless == []
    assert page.locator("#log").get_attribute("role") == "log"


def test_a_phone_has_to_scroll_sideways(server: Running, visit: Visit) -> None:
    page = visit(server, viewport={"width": 360, "height": 740})
    say(page, "wide")
    assert answer(page) == "w" * 200
    say(page, LONG)
    answer(page)
    is_wider = "document.scrollingElement.scrollWidth > 360 || document.querySelector('#log').scrollWidth > 360"
    assert not page.evaluate(is_wider)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
    expect(page.locator("#panel")).to_be_hidden()
    toggle = page.get_by_role("button", name="Figures, settings")
    toggle.click()
    expect(page.locator("#panel")).to_be_visible()
    assert toggle.get_attribute("aria-expanded") == "true"
    assert not page.evaluate(is_wider)
    assert page.evaluate("document.querySelector('#panel').scrollWidth <= 360")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_hard_to_read(server: Running, visit: Visit, scheme: str) -> None:
    page = visit(server, color_scheme=scheme)
    say(page, "sea")
    assert answer(page) == SEA
    page.locator("#key-form").evaluate("one => { one.hidden = false; }")
    page.locator("#problem").evaluate("one => { one.hidden = false; one.textContent = 'A problem.'; }")
    found = page.evaluate(CONTRASTS)
    assert {part["kind"] for part in found} == {"text", "border", "mark"} and len(found) > 100
    assert [part for part in found if part["ratio"] < (4.5 if part["kind"] == "text" else 3.0)] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 128) == (scheme == "dark"), ground


def test_a_chosen_theme_is_forgotten(server: Running, visit: Visit) -> None:
    page = visit(server, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.locator("#theme")
    for theme in ("light", "dark"):
        button.click()
        expect(button).to_have_text(f"Theme: {theme}")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(ground) == dark


def test_something_moves_though_none_may(server: Running, visit: Visit) -> None:
    page = visit(server, reduced_motion="reduce")
    page.locator("#max-tokens").fill("3000")
    say(page, "long")
    busy = page.locator("[aria-busy] .text")
    assert busy.evaluate("one => getComputedStyle(one, '::after').animationName") == "none"
    page.keyboard.press("Escape")
    answer(page)


# ------------------------------------------------------------------------------------------------ files


def test_a_file_of_the_page_is_sent_without_its_policy(server: Running) -> None:
    names = sorted(path.name for path in FOLDER.iterdir())
    assert names == ["answer.js", "api.js", "app.js", "figures.js", "icon.svg", "index.html", "style.css", "theme.js"]
    with server.http() as http:
        for path in ("/", *(f"/page/{name}" for name in names)):
            response = http.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            if path.endswith(".js"):
                assert response.headers["content-type"] == "text/javascript; charset=utf-8"
        assert http.get("/page/../app.py").status_code == 404
        assert http.get("/page/%2e%2e/app.py").status_code == 404
