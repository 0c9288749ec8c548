/* rank_folder.h - where the ranks of a node keep KV below --kv-cache-dir. Ranks whose KV has the
 * same layout would find each other's blocks in one folder, and each has its own part of a block.
 * Thread: any (pure). */
#ifndef BATON_DEPLOY_TIERS_RANK_FOLDER_H
#define BATON_DEPLOY_TIERS_RANK_FOLDER_H

#include <stdint.h>

enum { RANK_FOLDER_MAX = 4096 };

/* The folder of rank `rank` of `size`; size 0 or 1: `folder` itself. */
void rank_folder(const char *folder, uint32_t rank, uint32_t size, char out[RANK_FOLDER_MAX]);

#endif
