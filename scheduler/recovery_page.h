/* recovery_page.h - docs/recovery.md, written from the tables that the program acts by
 * (`baton docs recovery`). Thread: any. */
#ifndef BATON_SCHEDULER_RECOVERY_PAGE_H
#define BATON_SCHEDULER_RECOVERY_PAGE_H

#include "shared/base/buf.h"

void recovery_markdown(struct buf *out);

#endif
