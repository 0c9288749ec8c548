"""Checks that tests/gpu/run.sh runs every test that needs a GPU. usage: check_gpu_tests.py BUILD

The build's gpu_tests.txt has to name each source of tests that looks for a GPU, and each program that the stages memcheck and racecheck run, with its cases."""
import glob, os, re, sys

from gpu_programs import LIST, ROOT, read_list
from gpu_stages import ALL_CASES, ALONE, BY_GROUP, LIMITS, MEMCHECK, RACECHECK

LOOKS = re.compile(r'need_gpu\(|has_gpu\(|cudaGetDeviceCount|\bEVERY_BACKEND\(|device_count\(|(device_open|rank_device|open_kernels)\("cuda"|BATON_HAVE_CUDA_KERNELS')
NOT = {'test_gemm_cublaslt': 'calls a fake library in the memory of the host', 'test_sample_bits': 'can be compiled for the emulated GPU alone',
       'test_doctor': 'its cases for a GPU want one with little memory, the emulated one'}


def sources():
    """{program: path} of the programs of the harness, by their sources."""
    paths = [p for pattern in ('cuda/test_*.cc', 'conformance/test_*.c', 'unit/*/test_*.c') for p in glob.glob(os.path.join(ROOT, 'tests', pattern))]
    return {os.path.splitext(os.path.basename(p))[0]: p for p in paths}


def main():
    listed = {name for name, _ in read_list(os.path.join(sys.argv[1], LIST))}
    all_sources, bad = sources(), []
    for name, path in sorted(all_sources.items()):
        with open(path, encoding='utf-8') as f:
            text = f.read()
        if ('/cuda/' in path or LOOKS.search(text)) and name not in listed and name not in NOT:
            bad.append(f'{os.path.relpath(path, ROOT)} looks for a GPU, and {LIST} does not name it: tests/CMakeLists.txt writes that')
    bad += [f'{LIST} names {name}, which has no source' for name in sorted(listed - set(all_sources))]
    for kind, chosen in (('memcheck', MEMCHECK), ('racecheck', RACECHECK)):
        for name, cases, _ in chosen:
            if name not in listed:
                bad.append(f'{kind} runs {name}, which {LIST} does not name')
    bad += [f'gpu_stages.py has a line for {name}, which {LIST} does not name' for name in sorted({*ALL_CASES, *ALONE, *BY_GROUP, *LIMITS} - listed)]
    print(*bad, f'{len(listed)} test programs for a GPU, {len(bad)} errors', sep='\n')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
