/* hub.h - how hubs are asked: addresses of lists and files, and who asks.
 *
 *     Hugging Face  ENDPOINT/api/models/ORG/NAME/revision/REVISION?blobs=true
 *                   ENDPOINT/ORG/NAME/resolve/COMMIT/FILE    (redirects to where the bytes are)
 *     ModelScope    ENDPOINT/api/v1/models/ORG/NAME/repo/files?Revision=REVISION&Recursive=True
 *                   ENDPOINT/api/v1/models/ORG/NAME/repo?Revision=REVISION&FilePath=FILE
 *
 * A token comes from the environment (HF_TOKEN, HUGGING_FACE_HUB_TOKEN; MODELSCOPE_API_TOKEN) or,
 * for Hugging Face, from the file that its login writes (HF_TOKEN_PATH, HF_HOME/token). It is sent
 * to the endpoint alone, never to where that redirects, and not over plain HTTP but to this host.
 * Thread: main. */
#ifndef BATON_DEPLOY_PULL_HUB_H
#define BATON_DEPLOY_PULL_HUB_H

#include "deploy/pull/source.h"

enum { HUB_AUTH_MAX = 1024 };

struct model_hub {
    enum pull_from from;
    char endpoint[URL_MAX];  /* without a '/' at its end */
    char auth[HUB_AUTH_MAX]; /* a header line; "": none */
};

/* `endpoint`: a host, or an address with http:// or https://. ERR_CONFIG. */
enum status hub_init(struct model_hub *h, enum pull_from from, const char *endpoint,
                     struct err *err) MUST_CHECK;
/* Appends the address at which the source's files are listed. */
void hub_list_url(const struct model_hub *h, const struct pull_source *s, struct buf *out);
/* Appends the address of a file; `commit` is the list's, "" where it has none. */
void hub_file_url(const struct model_hub *h, const struct pull_source *s, const char *commit,
                  const char *name, struct buf *out);
/* Appends the page on which people see the repository, and accept its terms. */
void hub_page_url(const struct model_hub *h, const struct pull_source *s, struct buf *out);
/* Appends the address of a file of this host. */
void hub_local_url(const char *path, struct buf *out);
/* Is the address below the endpoint? */
bool hub_has(const struct model_hub *h, const char *url);
/* The variable whose token would help. */
const char *hub_token_name(const struct model_hub *h);

#endif
