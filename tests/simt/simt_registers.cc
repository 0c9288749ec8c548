/* simt_registers.cc - setmaxnreg: what the warpgroups of a block end up with must be within the
 * registers that it was launched with. On a GPU an increase waits for what others give up, forever
 * if that is not enough.
 *
 * A block is taken to be launched with all registers of an SM, as kernels that use setmaxnreg are
 * (launch bounds of one block per SM). Thread: simt_block.h. */
#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_sm90.h"

enum { SM_REGISTERS = 65536, WARPGROUP_THREADS = 128, WARPGROUPS_MAX = 1024 / WARPGROUP_THREADS };

static unsigned asked[WARPGROUPS_MAX]; /* of a thread; 0: what it was launched with */
static bool is_used;

void simt_registers_begin(void)
{
    if (is_used)
        for (unsigned &n : asked) n = 0;
    is_used = false;
}

void simt_set_registers(unsigned n)
{
    asked[simt_thread_number() / WARPGROUP_THREADS] = n;
    is_used = true;
}

void simt_registers_end(void)
{
    if (!is_used) return;
    const unsigned n_threads = blockDim.x * blockDim.y * blockDim.z,
                   n_groups = n_threads / WARPGROUP_THREADS,
                   launched = SM_REGISTERS / n_threads / 8 * 8;
    for (unsigned rank = 0; rank < simt_n_blocks(); rank++) {
        unsigned sum = 0;
        for (unsigned i = rank * n_groups; i < (rank + 1) * n_groups; i++)
            sum += asked[i] ? asked[i] : launched;
        if (sum <= launched * n_groups) continue;
        simt_die("setmaxnreg: %u warpgroups ask for %u registers together, of %u that they were "
                 "launched with: they would wait forever",
                 n_groups, sum * WARPGROUP_THREADS, launched * n_groups * WARPGROUP_THREADS);
    }
}
