"""A minimal protobuf for editing SentencePiece models: the fields of a message, and a message of
fields.
"""
import struct


def varint(v):
    out = bytearray()
    while v > 0x7F:
        out.append(v & 0x7F | 0x80)
        v >>= 7
    out.append(v)
    return bytes(out)


def read_varint(data, at):
    v = shift = 0
    while True:
        c = data[at]
        at += 1
        v |= (c & 0x7F) << shift
        shift += 7
        if c < 0x80:
            return v, at


def fields(data):
    """[(number, wire type, value)]: bytes for lengths and fixed widths, int for varints."""
    out, at = [], 0
    while at < len(data):
        tag, at = read_varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = read_varint(data, at)
        else:
            n, at = read_varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            value, at = data[at:at + n], at + n
        out.append((tag >> 3, wire, value))
    return out


def message(parts):
    out = bytearray()
    for number, wire, value in parts:
        out += varint(number << 3 | wire)
        if wire == 0:
            out += varint(value)
        else:
            out += varint(len(value)) + value if wire == 2 else value
    return bytes(out)


def pieces(model):
    """(text, score, kind) of every piece."""
    out = []
    for number, _, value in fields(model):
        if number == 1:
            part = {n: v for n, _, v in fields(value)}
            out.append((part.get(1, b"").decode(), struct.unpack("<f", part.get(2, bytes(4)))[0], part.get(3, 1)))
    return out


def with_kinds(model, kind_of):
    """Returns the model with each kind replaced by kind_of(text, kind)."""
    out = []
    for number, wire, value in fields(model):
        if number == 1:
            part = fields(value)
            text = next((v for n, _, v in part if n == 1), b"").decode()
            kind = next((v for n, _, v in part if n == 3), 1)
            value = message([p for p in part if p[0] != 3] + [(3, 0, kind_of(text, kind))])
        out.append((number, wire, value))
    return message(out)
