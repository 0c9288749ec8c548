"""Random strings for tests of tokenizers: every script, emoji and their sequences, marks, controls,
white space, digits, code.

texts(n, seed) returns n strings; the same seed gives the same strings. Only characters that this
Python's Unicode tables know are drawn, and those of FRESH, which came with Unicode 15 and 16; no
surrogates, and no U+0000 (which C JSON readers cannot hold).
"""
import random
import unicodedata

SPACES = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
NO_SPACES = "\u180e\u200b\u200c\u200d\u2060\ufeff\u00ad"
FRESH = "\U0001fa77\U0001fae8\U0001fadc\U0001e4d0\U0001e4f1\U0002ebf0\U00010d4a\U00010d41\U00011bf1\U0001cc00\u1c89"
ODD = "\u017f\u212a\u0130\u0131\u00df\ufb03\u1e9e\u2581\u0120\u010a\ufffd\ue000\u0e33\uac00\u1100\u1161\u11a8\u0344\u0958\ufb1d\u2126"
WORDS = ["Hello", "world", "the", "ſtraße", "I'll", "don't", "WE'VE", "it's", "'S", "’re", "'ſ", "x_y", "foo.bar", "__init__", "naïve", "Ελλάδα", "привет",
         "你好", "世界", "こんにちは", "カタカナ", "안녕하세요", "مرحبا", "שלום", "नमस्ते", "สวัสดี", "ERNIE", "4.5", "12345", "٣٤٥", "１２３", "½", "²", "Ⅷ", "e\u0301",
         "de\u0301ja\u0300", "\u1112\u1161\u11ab", "for(int i=0;i<10;i++){ x+=i; }", "http://a.b/c?d=e&f#g", "\\n", "$x^2$", "===", "--", "...", "!!", "/*", "*/", "\"\"\""]
EMOJI = ["🙂", "👨\u200d👩\u200d👧", "👍🏽", "🇩🇪", "🏴\U000e0067\U000e0062\U000e007f", "❤\ufe0f", "1\ufe0f\u20e3", "🤷🏿\u200d♀\ufe0f"]


def assigned():
    groups = {}
    for c in range(1, 0x110000):
        category = unicodedata.category(chr(c))
        if category in ("Cn", "Cs", "Co"):
            continue
        # One group per block of 256 and kind: small scripts are drawn as often as large ones.
        groups.setdefault((c >> 8, category[0]), []).append(chr(c))
    return list(groups.values())


GROUPS = assigned()


def a_piece(r):
    kind = r.randrange(14)
    if kind == 0:
        return "".join(chr(r.randrange(32, 127)) for _ in range(r.randrange(1, 12)))
    if kind == 1:
        return "".join(r.choice(SPACES) for _ in range(r.randrange(1, 6)))
    if kind == 2:
        return r.choice(" \n\t") * r.randrange(1, 20)
    if kind == 3:
        return "".join(chr(r.randrange(1, 32)) for _ in range(r.randrange(1, 4)))
    if kind == 4:
        group = r.choice(GROUPS)
        return "".join(r.choice(group) for _ in range(r.randrange(1, 10)))
    if kind == 5:
        return "".join(r.choice(r.choice(GROUPS)) for _ in range(r.randrange(1, 8)))
    if kind == 6:
        return "".join(r.choice(EMOJI) for _ in range(r.randrange(1, 4)))
    if kind == 7:
        return r.choice(["0123456789", "٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９", "½²Ⅷ①"])[r.randrange(4):] * r.randrange(1, 3)
    if kind == 8:
        return r.choice(ODD + FRESH + NO_SPACES)
    if kind == 9:
        return r.choice(["a", "-", "=", "\u4e00", "ab", "\u0301", "\u3000", "."]) * r.randrange(1, 120)
    if kind == 10:
        return "e" + "".join(chr(r.randrange(0x300, 0x370)) for _ in range(r.randrange(1, 6)))
    return r.choice(["", " ", " "]) + r.choice(WORDS)


def texts(n, seed):
    r = random.Random(seed)
    return ["".join(a_piece(r) for _ in range(r.randrange(1, 9))) for _ in range(n)]
