"""Caption cleaning of Open-Sora-Plan, rule by rule, equal to the published code.

The rules were made for alt texts of web images: addresses, file names, article numbers and advertisements go, marks are
brought to one form. Some are too keen for captions ("jpg" inside a sentence, four hyphens, a word such as "mp4"), and
the double removal of HTML entities leaves a stray semicolon. All of that is kept: the published models were trained on
captions cleaned so, and a caption cleaned better would be another caption to them.
"""

from __future__ import annotations

import html
import re
import warnings
from typing import Literal
from urllib.parse import unquote_plus

import ftfy
from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning
from bs4.exceptions import ParserRejectedMarkup

from frameloom.core.errors import DataError

Cleaning = Literal["off", "once", "twice", "list"]

Rule = tuple[re.Pattern[str], str]


def _rule(pattern: str, replacement: str = "") -> Rule:
    return re.compile(pattern), replacement


_DOMAIN = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_FILE_TYPES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)

# After lower-casing, before the markup is read.
_ADDRESSES = (
    _rule("<person>", "person"),
    # Only the scheme of an address goes with its first slashes; the rest of it is caught as a domain, up to a "?".
    _rule(rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})"),
    _rule(rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_DOMAIN})"),
)
_NAMES_AND_SIGNS = (
    _rule(r"@\w+\b"),
    # Strokes, phonetic extensions, enclosed and compatibility signs, extension A, hexagrams.
    _rule("[\u31c0-\u4dff]+"),
)
_CHINESE = _rule("[\u4e00-\u9fff]+")
_MARKS = (
    _rule(f"[{_DASHES}]+", "-"),
    _rule("[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    _rule("[\u2018\u2019]", "'"),
    _rule("&quot;?"),
    _rule("&amp"),
    _rule(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    _rule(r"\d:\d\d\s+$"),
    _rule(r"\\n", " "),
    _rule(r"#\d{1,3}\b"),
    _rule(r"#\d{5,}\b"),
    _rule(r"\b\d{6,}\b"),
    _rule(rf"\S+\.(?:{_FILE_TYPES})"),
    _rule("[\"']{2,}", '"'),
    _rule(r"\.{2,}", " "),
    _rule(r"[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\[\]{}|\\/*]+", " "),
    _rule(r"\s+\.\s+", " "),
)
_JOINERS = re.compile("[-_]")
_MAX_JOINERS = 3  # more of them, and they stand for spaces: this-is-my-cute-cat
_CODES_AND_ADVERTS = (
    _rule(r"\b[a-zA-Z]{1,3}\d{3,15}\b"),
    _rule(r"\b[a-zA-Z]+\d+[a-zA-Z]+\b"),
    _rule(r"\b\d+[a-zA-Z]+\d+\b"),
    _rule(r"(?:worldwide\s+)?(?:free\s+)?shipping"),
    _rule(r"(?:free\s)?download(?:\sfree)?"),
    _rule(r"\bclick\b\s(?:for|on)\s\w+"),
    _rule(rf"\b(?:{_FILE_TYPES})(?:\simages?)?"),
    _rule(r"\bpage\s+\d+\b"),
    _rule(r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    _rule("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b"),  # 3x4, also with the Cyrillic letter and the sign
    _rule(r"\b\s+:\s+", ": "),
    _rule(r"(\D[,./])\b", r"\1 "),
    _rule(r"\s+", " "),
)
_ENDS = (
    _rule("^[\"']([\\w\\W]+)[\"']$", r"\1"),
    _rule("^['_,\\-:;]"),
    _rule("['_,\\-:+]$"),
    _rule(r"^\.\S+$"),
)


def clean_caption(caption: str, *, keep_chinese: bool) -> str:
    """One pass of all rules, in their order. `keep_chinese`: the text encoder knows Chinese (mT5)."""
    text = unquote_plus(caption).strip().lower()
    text = _apply(_ADDRESSES, text)
    text = _strip_markup(text)
    text = _apply(_NAMES_AND_SIGNS, text)
    if not keep_chinese:
        text = _apply((_CHINESE,), text)
    text = _apply(_MARKS, text)
    if len(_JOINERS.findall(text)) > _MAX_JOINERS:
        text = _JOINERS.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    text = _apply(_CODES_AND_ADVERTS, text)
    return _apply(_ENDS, text).strip()


def clean_as(caption: str, cleaning: Cleaning, *, keep_chinese: bool) -> str:
    """A caption as a published system saw it in training.

    once    one pass
    twice   two passes (Open-Sora-Plan 1.1, and its MindSpore port in all versions)
    list    one pass over the caption written as a Python list, `['...']` (Open-Sora-Plan 1.3): its datasets handed the
            cleaner a list of one caption. Traces of quotes may stay; the checkpoints were trained with them.

    The empty caption stays empty in every mode: it is the null prompt, which the originals put in after cleaning.
    """
    if cleaning == "off" or not caption:
        return caption
    cleaned = clean_caption(str([caption]) if cleaning == "list" else caption, keep_chinese=keep_chinese)
    return clean_caption(cleaned, keep_chinese=keep_chinese) if cleaning == "twice" else cleaned


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _strip_markup(text: str) -> str:
    with warnings.catch_warnings():
        # It wonders whether a short caption was meant as the name of a file.
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)
        try:
            return BeautifulSoup(text, features="html.parser").text
        except ParserRejectedMarkup as error:
            raise DataError(
                f"caption {text[:80]!r}: its markup cannot be read; correct the caption, or use cleaning: off"
            ) from error
