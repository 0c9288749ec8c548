"""Writes a GGUF file that holds a vocabulary and nothing else."""
import struct

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def string(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def value(v):
    if isinstance(v, bool):
        return struct.pack("<IB", BOOL, v)
    if isinstance(v, int):
        return struct.pack("<II", U32, v)
    if isinstance(v, str):
        return struct.pack("<I", STRING) + string(v)
    head = struct.pack("<I", ARRAY)
    if isinstance(v[0], str):
        return head + struct.pack("<IQ", STRING, len(v)) + b"".join(map(string, v))
    kind, code = (F32, "f") if isinstance(v[0], float) else (I32, "i")
    return head + struct.pack("<IQ%d%s" % (len(v), code), kind, len(v), *v)


def write(path, keys):
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)))
        for k, v in keys.items():
            f.write(string(k) + value(v))
