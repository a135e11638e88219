"""The page's files, without a browser: how much they are, what they may not do, and that both languages say the same."""

import json
import re
from pathlib import Path

import pytest

import shoal
from shoal.dashboard.views.sentences import SENTENCES

PAGE = Path(shoal.__file__).parent / "dashboard" / "page"
MOST_BYTES = 150 * 1024
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
# What would read data as markup or as a script, or needs what the content policy forbids.
FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc",
    r"\beval\(|new Function|setTimeout\(\s*[\"'`]|javascript:",
    r"https?://(?!www\.w3\.org/2000/svg)",
    r"XMLHttpRequest|WebSocket|sendBeacon|importScripts",
    r"method:\s*[\"'](?!GET)",
)
KEYS_MADE = re.compile(r"\bt\(`([^`$]+)\$\{")
KEYS = re.compile(r"\b(?:t|column)\(\"([^\"]+)\"")


def words():
    return json.loads((PAGE / "words.json").read_text())


def test_the_page_is_small():
    sizes = {path.relative_to(PAGE).as_posix(): path.stat().st_size for path in FILES}
    assert sum(sizes.values()) < MOST_BYTES, sizes


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(PAGE).as_posix())
def test_a_script_does_nothing_that_it_may_not(path):
    text = path.read_text()
    assert [found[0] for pattern in FORBIDDEN for found in re.finditer(pattern, text)] == []
    assert len(text.splitlines()) <= 300


@pytest.mark.parametrize(
    "text",
    ["node.innerHTML = name;", "eval(text)", 'fetch("https://elsewhere.org/x")', 'fetch(x, { method: "POST" })'],
)
def test_what_is_forbidden_is_found(text):
    assert any(re.search(pattern, text) for pattern in FORBIDDEN)


def test_the_frame_has_nothing_inline():
    text = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", text) == []
    named = re.findall(r"(?:src|href)=\"(?!#)([^\"]+)\"", text)
    assert len(named) >= 5 and all((PAGE.parent / name).is_file() for name in named)


def test_imports_lead_somewhere():
    for path in SCRIPTS:
        for name in re.findall(r"from \"([^\"]+)\"", path.read_text()):
            assert (path.parent / name).is_file(), f"{path}: {name}"


def test_both_languages_say_the_same():
    holes = re.compile(r"\{(\w+)\}")
    for key, (english, chinese) in words().items():
        assert chinese, key
        if key.startswith("said."):
            # What the server says in English itself: its sentence is the other language.
            english = SENTENCES[key.removeprefix("said.")][1]
            assert set(holes.findall(chinese)) <= set(holes.findall(english)), key
        else:
            assert english and sorted(holes.findall(english)) == sorted(holes.findall(chinese)), key


def test_every_word_is_there_and_is_used():
    sources = "".join(path.read_text() for path in SCRIPTS)
    asked, made = set(KEYS.findall(sources)), tuple(KEYS_MADE.findall(sources))
    known = set(words())
    assert asked - known == set()
    # The list of keys names its words in a table; a curve's words are looked for by the curve's name.
    unused = {key for key in known - asked if not key.startswith((*made, "curve.")) and f'"{key}"' not in sources}
    assert unused == set()
