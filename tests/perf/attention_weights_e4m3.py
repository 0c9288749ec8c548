#!/usr/bin/env python3
"""attention_weights_e4m3.py - what attention over an e4m3 cache loses if its weights are rounded to e4m3 too, as products of 8 bits need them (docs/kernels.md).

usage: tests/perf/attention_weights_e4m3.py
Needs NumPy. Prints, for numbers of keys and for flat and sharp weights, the error of a result relative to its size: with the cache's rounding alone, with weights
in bf16, and with weights in e4m3, times 2^8 so that small ones remain and with the scales of the values in them."""
import numpy as np

DIM, ROWS, LARGEST, LIFT = 128, 40, 448, 256


def e4m3(x):
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 2.0**-60))), -6)
    return np.sign(x) * np.minimum(np.rint(magnitude / 2.0**(exponent - 3)) * 2.0**(exponent - 3), LARGEST)


def bf16(x):
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def errors(rng, n_keys, sharpness):
    q, k, v = rng.standard_normal(DIM) * sharpness, rng.standard_normal((n_keys, DIM)), rng.standard_normal((n_keys, DIM))
    scale = np.abs(v).max(1, keepdims=True) / LARGEST
    stored, s = e4m3(v / scale), k @ q / np.sqrt(DIM)
    p = np.exp(s - s.max())
    exact, scale = p @ v / p.sum(), scale[:, 0]
    ways = [(p * scale) @ stored, bf16(p * scale) @ stored, e4m3(np.minimum(p * scale / scale.max() * LIFT, LARGEST)) @ stored * (scale.max() / LIFT)]
    return [np.sqrt(np.mean((way / p.sum() - exact)**2) / np.mean(exact**2)) for way in ways]


def main():
    rng = np.random.default_rng(1)
    print(f'{"keys":>6} {"queries":>8} {"cache":>7} {"bf16":>7} {"e4m3":>7}')
    for n_keys in (128, 1024, 8192):
        for sharpness in (1, 3):
            of = np.mean([errors(rng, n_keys, sharpness) for _ in range(ROWS)], 0)
            print(f'{n_keys:>6} {sharpness:>7}x {of[0]:>7.4f} {of[1]:>7.4f} {of[2]:>7.4f}')


if __name__ == '__main__':
    main()
