"""The page at `/` in headless Chromium, served by the real app around the stub engine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from server.args import ServerConfig
from server.page import page_paths
from tests.server.http_client import send
from tests.server.serving import Served, serving, until
from tests.server.stub import StubEngine

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ANSWER = "First <b>words</b>.\n```\ncode <i>here</i>\n```\n" + "and a long tail of words " * 12
FOREIGN = re.compile(r"""(?:src|href|import|from|url)\W{1,3}(?:https?:)?//""")


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine(answer=ANSWER, step_seconds=0.002, max_len=1024)


@pytest.fixture(scope="module")
def served(engine: StubEngine) -> Iterator[Served]:
    with serving(engine, ServerConfig(http_port=0)) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium among the system's packages: the page is tested in one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def problems() -> list[str]:
    """What the browser complained of; a broken policy among it."""
    return []


@pytest.fixture
def page(browser: Browser, served: Served, problems: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 760})
    context.set_default_timeout(10_000)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(served.http + "/")
    yield page
    context.close()
    assert problems == []


def say(page: Page, text: str = "Hello") -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def test_it_needs_nothing_from_elsewhere(served: Served) -> None:
    for path, file in page_paths().items():
        reply = send(served.http, "GET", path)
        assert reply.status == 200 and reply.body == file.read_bytes()
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not FOREIGN.search(reply.body.decode()), path
        again = send(served.http, "GET", path, headers={"if-none-match": reply.headers["etag"]})
        assert again.status == 304 and again.body == b""


def test_a_message_is_answered_as_it_comes(page: Page) -> None:
    expect(page.locator("#model-name")).to_have_text("stub")
    say(page, "Hello <script>document.title='broken'</script>")
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("First")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()  # it is still coming
    expect(answer.locator(".facts")).to_contain_text(f"{len(ANSWER.encode()) + 1} tokens")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    # What people and models write is text, never markup.
    expect(answer).to_contain_text("First <b>words</b>.")
    expect(answer.locator("pre")).to_have_text("code <i>here</i>")
    assert answer.locator(".text b, .text i").count() == 0
    expect(page.get_by_role("article", name="You")).to_contain_text("<script>")
    assert page.title() == "stub · jaxserve"


def test_stop_ends_the_answer_here_and_in_the_engine(page: Page, engine: StubEngine) -> None:
    before = len(engine.aborted)
    say(page)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("First")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".facts")).to_contain_text("stopped")
    until(lambda: len(engine.aborted) > before, 5)
    until(lambda: engine.running == 0, 5)
    expect(page.get_by_label("Your message")).to_be_focused()


def test_retry_asks_again_from_the_same_conversation(page: Page, engine: StubEngine) -> None:
    page.get_by_label("Max tokens").fill("5")
    say(page)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".facts")).to_have_count(1)
    expect(page.locator(".facts")).to_contain_text("5 tokens")
    first, second = engine.requests[-2:]
    assert first.prompt_ids == second.prompt_ids and first.id != second.id
    assert page.get_by_role("article", name="Answer").count() == 1


def test_every_setting_reaches_the_engine(page: Page, engine: StubEngine) -> None:
    settings = {
        "Temperature": "0.5", "Top p": "0.9", "Top k": "7", "Min p": "0.1", "Max tokens": "4",
        "Seed": "18446744073709551615", "Presence": "0.5", "Frequency": "-0.5", "Repetition": "1.5",
        "Stop at": "END\\n\nsecond", "System prompt": "Be brief.",
    }  # fmt: skip
    for name, value in settings.items():
        page.get_by_label(name, exact=True).fill(value)
    say(page)
    expect(page.locator(".facts")).to_contain_text("seed 18446744073709551615")
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (params.max_tokens, params.seed, params.stop) == (4, 2**64 - 1, ("END\n", "second"))
    assert b"Be brief." in bytes(i for i in engine.requests[-1].prompt_ids if i < 256)


def test_a_refusal_is_a_sentence_and_the_chat_goes_on(page: Page) -> None:
    page.get_by_label("Top p").fill("7")
    say(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("top_p must be between 0.0 and 1.0, got 7")
    page.get_by_label("Top p").fill("")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".facts")).to_contain_text("3 tokens")
    expect(alert).to_have_count(0)


def test_a_server_that_is_gone_is_told(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page)
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_the_key_is_sent_and_kept_nowhere(page: Page) -> None:
    seen: list[str | None] = []

    def listen(route: Route) -> None:
        seen.append(route.request.headers.get("authorization"))
        route.continue_()

    page.route("**/v1/chat/completions", listen)
    page.get_by_label("Max tokens").fill("2")
    page.get_by_label("API key").fill("secret-key")
    say(page)
    expect(page.locator(".facts")).to_contain_text("2 tokens")
    assert seen == ["Bearer secret-key"]
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_the_gauges_follow_the_metrics(page: Page) -> None:
    scrapes = 0

    def metrics(route: Route) -> None:
        nonlocal scrapes
        scrapes += 1
        lines = [
            "# HELP jaxserve:num_requests_running running",
            f"jaxserve:num_requests_running {float(scrapes)}",
            'jaxserve:num_requests_waiting{model_name="a b"} 2.0',
            "jaxserve:kv_cache_usage_perc 0.25",
            f"jaxserve:generation_tokens_total {1000.0 * scrapes}",
            f"jaxserve:spec_decode_num_draft_tokens_total {40.0 * scrapes}",
            f"jaxserve:spec_decode_num_accepted_tokens_total {30.0 * scrapes}",
        ]
        route.fulfill(body="\n".join(lines) + "\n", content_type="text/plain")

    page.route("**/metrics", metrics)
    page.reload()
    running = page.locator("#running")
    expect(running).not_to_have_text("–")
    before = running.inner_text()
    expect(running).not_to_have_text(before)  # the next look, a second later
    expect(page.locator("#queued")).to_have_text("2")
    expect(page.locator("#pool")).to_have_text("25%")
    expect(page.locator("#acceptance")).to_have_text("75%")
    shown = float(page.locator("#rate").inner_text().replace(",", ""))
    assert 500 < shown < 1100  # 1000 tokens each second, and what a look takes


def test_it_works_on_a_phone_and_by_keyboard(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    settings = page.get_by_role("complementary", name="Settings")
    expect(settings).to_be_hidden()
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(settings).to_be_visible()
    page.keyboard.press("Escape")
    expect(settings).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
    say(page)
    expect(page.get_by_role("article", name="Answer")).to_contain_text("First")
    page.keyboard.press("Escape")
    expect(page.locator(".facts")).to_contain_text("stopped")


def test_every_control_has_a_name(page: Page) -> None:
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, button')]"
        ".filter((e) => !e.labels?.length && !e.textContent.trim() && !e.ariaLabel).map((e) => e.id)"
    )
    assert unnamed == []


def test_with_a_key_the_page_opens_asks_for_it_and_shows_the_engines_own_gauges(
    browser: Browser, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    keys.chmod(0o600)
    engine = StubEngine(answer=ANSWER)
    with serving(engine, ServerConfig(http_port=0, api_key_file=str(keys))) as served:
        page = browser.new_page()
        page.goto(served.http + "/")
        expect(page.locator("#model-name")).to_have_text("needs an API key")
        expect(page.locator("#gauges-note")).to_contain_text("need a key")
        say(page)
        expect(page.get_by_role("alert")).to_contain_text("wants an API key")
        engine.hold()
        page.get_by_label("API key").fill("secret-key")
        page.get_by_role("button", name="Retry").click()
        expect(page.locator("#running")).to_have_text("1")
        engine.release()
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator("#gauges-note")).to_be_hidden()
        page.close()
