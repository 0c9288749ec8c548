/* weight_layout_plan.c - the layout, shape and size that a matrix will have once packed; reads no
 * element. Thread: any. */
#include "kernels/cpu/weights/weight_layout.h"
#include "kernels/host/pages.h"
#include "kernels/weight_src.h"

enum status weight_layout_plan(const struct kernel_ctx *c, const struct weight_pack_args *a,
                               struct weight *out, struct err *err)
{
    (void)c;
    struct weight w;
    TRY(weight_src_check(a, &w, err));
    w.layout = weight_layout_of(a->parts[0].dtype, a->quantize);
    if (!__builtin_mul_overflow(panel_count(&w), weight_layout_panel_bytes(w.layout, w.n_in),
                                &w.bytes))
        w.bytes = pages_round(w.bytes);
    else w.bytes = 0;
    if (w.bytes == 0)
        return err_set(err, ERR_TOO_LONG,
                       "a matrix of %zu x %zu elements has more bytes than there are addresses",
                       w.n_out, w.n_in);
    *out = w;
    return OK;
}
