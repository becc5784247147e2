#!/usr/bin/env python3
"""Expected token ids from Python's tiktoken, the reference for crates/rill-text.

    tokenizer_corpus.py            writes crates/rill-text/tests/data/corpus.jsonl (same seed, same file)
    tokenizer_corpus.py --print    prints that file instead
    tokenizer_corpus.py --encode   answers the live test: JSON on stdin
                                   {"model": lines of a tiktoken.model, "cases": [base64, ...]} -> [[id, ...], ...]

Each line of the corpus is ["base64 of the bytes", [ids]]; malformed UTF-8 is decoded with 'replace' first.
Needs tiktoken (made with 0.14.0). The vocabulary is models/k3-nano/tiktoken.model.
"""

import base64
import json
import random
import sys
from pathlib import Path

import tiktoken

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/k3-nano/tiktoken.model"
CORPUS = ROOT / "crates/rill-text/tests/data/corpus.jsonl"
SEED = 20240817

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        LEAD + UPPER + "*" + LOWER + "+" + CONTRACTION,
        LEAD + UPPER + "+" + LOWER + "*" + CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def encoding(model: bytes) -> tiktoken.Encoding:
    ranks = {}
    for line in model.splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def encode(enc: tiktoken.Encoding, data: bytes) -> list[int]:
    return enc.encode_ordinary(data.decode("utf-8", "replace"))


PROSE = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money",
    "And God said, Let there be light: and there was light.",
    "The quick brown fox jumps over the lazy dog, 3.14159 times (approx.).",
    "Café naïve façade Zürich Ærø Łódź Ünïcödé ñandú; ¿qué? ¡sí!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "נקודה: שָׁלוֹם עולם, مَرْحَبًا بالعالم ١٢٣ ۴۵۶",
    "नमस्ते दुनिया १२३ বাংলা ভাষা தமிழ் ภาษาไทย ລາວ မြန်မာ ខ្មែរ",
    "한국어 텍스트와 자모 ㄱㄴㄷ 한글",
    "Tiếng Việt có dấu, Türkçe İıĞğ, Gaeilge ḃċḋ",
]
CJK = [
    "人工智能模型在一台普通的机器上运行。",
    "東京は日本の首都です。ひらがなとカタカナと漢字が混ざる文章。",
    "々〇〆ヶ㐀𠀀𪚥⺀⼀﨎丽 漢字ー長音ヽヾゝゞ",
    "中文English混排123中文，标点“引号”……",
    "価格は1,234円（税込）。ＡＢＣ１２３ｱｲｳ",
]
EMOJI = ["👩‍👩‍👧‍👦", "👨🏽‍💻", "🏳️‍🌈", "🇮🇹🇯🇵", "❤️", "1️⃣", "🫠", "☃︎", "✌🏿", "🧑‍🚀🚀"]
CODE = [
    'fn main() {\n    println!("{:?}", vec![1, 2, 3]);\n}\n',
    "def f(x):\n\treturn x**2  # squared\n\n\n",
    "SELECT * FROM t WHERE a <> 'b' AND c != \"d\";\r\n",
    "<div class=\"a-b\">&amp;</div>\n\t\t<br/>\r\n\r\n",
    "x = {'a': [1, 2.5e-10, None], \"b\": 0xFF}\n",
    "camelCaseHTTPServer snake_case_name SCREAMING_CASE kebab-case",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }   // loop\n",
    "$ ls -la | grep '^d' && echo $HOME/.config > /dev/null 2>&1",
    "```json\n{\"k\":\"v\"}\n```",
]
WORDS = "it It IT don DON we They y'all can I O’Neil Ærø ǅ ǆ ŉ é ʼn 中 あ ア ㄱ x1 A1 ß ẞ İ ı ſ K Å".split()
TAILS = ["'s", "'S", "'ſ", "'t", "'T", "'re", "'RE", "'rE", "'ve", "'Ve", "'m", "'M", "'ll", "'LL", "'lL", "'d", "'D"]
TAILS += ["'", "''", "'x", "'sa", "'ſa", "'Sa", "'st", "'res", "'l", "'r", "'v", "’s", "'ß", "'K", "'S's", "'t've"]
SPACES = [" ", "\t", "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u180e", "\u2000"]
SPACES += ["\u2009", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\ufeff"]
NUMBERS = list("0123456789") + list("²³¹¼½¾ⅣⅧⅻↂ①⑳㉈㊿一〇〡〩५৩٤۷๓１９𝟘𝟿🄀𐄈፲൰൵㆒")
LETTERS = list("ǅǈǋǲᾈᾬʰʲˠꜰᵃⁿªºꟸˑːׯאبअकกあアㄱ가") + ["A", "b", "é", "Z", "ß", "中", "々"]
MARKS = ["\u0301", "\u0308", "\u20e3", "\ufe0f", "\u093f", "\u0e31", "\u302a", "\u3099", "\U0001d165", "\u0345", "\u0483"]
RESERVED = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]", "[PAD]", "<|media_begin|>"]
RESERVED += ["<|reserved_token_3900|>", "<|im_end|>", "<|reserved_token_", "<|", "|>", "[BOS", "<|op\u200ben|>"]
MALFORMED = [b"\x80", b"\xc3", b"\xc0\xaf", b"\xe2\x82", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xf4\x90\x80\x80"]
MALFORMED += [b"\xf8\x88\x80\x80\x80", b"\xfe\xff", b"\xf0\x80\x80", b"\xef\xbf", b"\xf1\x80", b"\xed\xb0\x80\xed"]
# Where scripts, numbers, marks and spaces of all kinds live, and some unassigned points between them.
RANGES = [(0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x3FF), (0x400, 0x6FF), (0x900, 0xFFF), (0x1000, 0x1FFF), (0x2000, 0x2BFF)]
RANGES += [(0x2C00, 0x33FF), (0x3400, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x1FFFF), (0x20000, 0x323AF), (0xE0000, 0x10FFFF)]


def random_char(rng: random.Random) -> str:
    while True:
        low, high = rng.choice(RANGES)
        c = rng.randint(low, high)
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def cases() -> list[bytes]:
    rng = random.Random(SEED)

    def some(pool, low, high):
        return "".join(rng.choice(pool) for _ in range(rng.randint(low, high)))

    out = [""]
    out += PROSE + CJK + EMOJI + CODE + WORDS + TAILS + SPACES + NUMBERS + LETTERS + MARKS + RESERVED
    out += [w + t for w in WORDS[:12] + ["", "é", "中", "1"] for t in TAILS]
    out += [w + t + e for w in ["it", "IT", "中"] for t in TAILS for e in ["a", "B", " c", "中", "1"]]
    out += [a + s + b for s in SPACES for a, b in [("a", "b"), ("a ", "b"), ("", " b"), ("1", "\n"), (".", ""), ("中", ".")]]
    texts = PROSE + CJK + CODE
    for _ in range(150):
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        out.append(text[start : start + rng.randint(1, 60)])
    for _ in range(120):
        out.append(some(SPACES, 1, 12))
        out.append(some(["a", "B", "1", ".", "中", ""], 1, 1) + some(SPACES, 1, 8) + some(["a", "'s", "1", "!", "中", ""], 1, 1))
        out.append(some(NUMBERS + [" ", ".", ",", "a"], 1, 14))
        out.append(some(LETTERS + MARKS + [" ", "'s", "."], 1, 14))
        out.append(some(EMOJI + MARKS + ["\u200d", " ", "\n", "a"], 1, 6))
        out.append(some(RESERVED + WORDS + [" "], 1, 6))
        out.append(some(WORDS + TAILS + [" "], 2, 9))
        out.append("".join(random_char(rng) for _ in range(rng.randint(1, 24))))
        out.append(some(WORDS + TAILS + SPACES + NUMBERS + LETTERS + MARKS + EMOJI + ["(", "--", "...", "!?\n"], 4, 30))
    for piece in ["a", "A", " ", "\n", "中", "0", ".", "é", "ab", "the", "\u0301", "🙂", "\t ", "aB", "ʰ", "あA", "= ", "\r\n "]:
        out += [piece * n for n in (2, 3, 7, 99, 100, 101, 300)]
        out.append(piece * 300 + "x")
    for _ in range(12):
        out.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(100, 700))))
        out.append("".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(100, 700))))

    data = [text.encode("utf-8") for text in out]
    data += MALFORMED
    for _ in range(150):
        parts = [rng.choice(MALFORMED + [b"a", b" b", b"\n", "é中".encode(), bytes([rng.randrange(256)])]) for _ in range(rng.randint(1, 6))]
        data.append(b"".join(parts))
    for _ in range(80):
        data.append(bytes(rng.randrange(256) for _ in range(rng.randint(1, 20))))
    for _ in range(80):
        text = rng.choice(texts + EMOJI).encode("utf-8")
        start = rng.randrange(len(text))
        data.append(text[start : start + rng.randint(1, 24)])
    return list(dict.fromkeys(data))


def corpus() -> str:
    enc = encoding(MODEL.read_bytes())
    lines = [
        json.dumps([base64.b64encode(data).decode(), encode(enc, data)], separators=(",", ":")) for data in cases()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--encode"]:
        request = json.load(sys.stdin)
        enc = encoding(request["model"].encode())
        json.dump([encode(enc, base64.b64decode(case)) for case in request["cases"]], sys.stdout)
    elif sys.argv[1:] == ["--print"]:
        sys.stdout.buffer.write(corpus().encode())
    elif not sys.argv[1:]:
        CORPUS.parent.mkdir(parents=True, exist_ok=True)
        CORPUS.write_bytes(corpus().encode())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
