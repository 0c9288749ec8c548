"""check_sass.py - what tests/gpu/sass.py counts in pieces of SASS as nvdisasm prints it.

usage: check_sass.py ROOT     exit status 0: the counts are as expected
"""
import os
import sys

sys.path.insert(0, os.path.join(sys.argv[1], "tests", "gpu"))
import resources
import sass


def text(*lines):
    return "\n".join([".text.kernel:", *(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))])


HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24"
# (what, SASS, {count: value})
CASES = [
    ("four products in a row", ["WARPGROUP.ARRIVE", HGMMA + ", UP0", "UIADD3 UR12, UR13, 0x2, URZ", HGMMA, HGMMA, HGMMA + ", gsb0",
                                "WARPGROUP.DEPBAR.LE gsb0, 0x1", "FADD R24, R24, R25"], {"wgmma": 4, "wgmma_run": 4, "wgmma_moves": 0}),
    ("sums that are moved between two products", [HGMMA, "IMAD.MOV.U32 R87, RZ, RZ, R3", HGMMA, "WARPGROUP.DEPBAR.LE gsb0, 0x0"],
     {"wgmma": 2, "wgmma_run": 1, "wgmma_moves": 1}),
    ("registers beside the sums", [HGMMA, "IMAD.MOV.U32 R88, RZ, RZ, R3", HGMMA], {"wgmma_run": 2, "wgmma_moves": 0}),
    ("loads in flight", ["LDG.E.128 R4, desc[UR6][R2.64]", "LDG.E.128.CONSTANT R8, desc[UR6][R2.64+0x10]", "@P0 LDG.E R12, desc[UR6][R2.64+0x20]",
                         "FADD R13, R4, R4", "FADD R13, R13, R12"], {"ldg": 3, "ldg_flight": 3, "ldg_bytes": 36}),
    ("loads one after the other", ["LDG.E R4, desc[UR6][R2.64]", "IADD3 R2, R4, R2, RZ", "LDG.E R5, desc[UR6][R2.64]", "FADD R6, R5, R5"],
     {"ldg": 2, "ldg_flight": 1, "ldg_bytes": 4}),
    ("barriers, copies, spills", ["BAR.SYNC.DEFER_BLOCKING 0x0", "MEMBAR.ALL.GPU", "LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64]", "STL [R1], R3", "LDL R3, [R1]",
                                  "ATOMG.E.INC.STRONG.GPU PT, R4, desc[UR4][R2.64], R5"], {"bar": 1, "membar": 1, "cp_async": 1, "local": 2, "atomics": 1}),
]


def main():
    bad = []
    for what, lines, wanted in CASES:
        got = sass.counts(sass.functions(text(*lines))["kernel"])
        bad += [f"{what}: {name} is {got[name]}, not {value}" for name, value in wanted.items() if got[name] != value]
    enums = {"gemm_weight_layout": resources.enumerators("kernels/cuda/gemm/gemm.h", "gemm_weight_layout")}
    if resources.shorten("void tiles_kernel<(gemm_weight_layout)4, gemm_tile<(gemm_weight_layout)4, 32> >(gemm_call)", enums) != "tiles_kernel<w4, gemm_tile<w4, 32> >":
        bad.append("names of kernels are not shortened")
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


sys.exit(main())
