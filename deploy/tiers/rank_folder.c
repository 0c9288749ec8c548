/* rank_folder.c - see rank_folder.h. */
#include "deploy/tiers/rank_folder.h"

#include <stdio.h>

void rank_folder(const char *folder, uint32_t rank, uint32_t size, char out[RANK_FOLDER_MAX])
{
    enum { NAME_MAX_BYTES = 64 };
    if (size < 2) snprintf(out, RANK_FOLDER_MAX, "%s", folder);
    else
        snprintf(out, RANK_FOLDER_MAX, "%.*s/rank-%u-of-%u", RANK_FOLDER_MAX - NAME_MAX_BYTES,
                 folder, rank, size);
}
