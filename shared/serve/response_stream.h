/* response_stream.h - a streamed answer: one chunk per token, each written at once.
 *
 * With an output parser, a token whose text is held back (it may begin a tag or a stop string) and
 * that has nothing else to report gets no chunk; without one it gets a chunk with empty text.
 * Nothing is sent before the first token exists, so that
 * the time to the first event is the time to the first token, and so that an error until then still
 * has its HTTP status. The first chunk of a choice carries role and content together. After an
 * error the stream ends with the error and [DONE]. Events that the client of a resumed stream has
 * (resume.h) are left out; the others have ids, but for [DONE], which says nothing new, and an
 * error, after which the client may go on from the event before. Thread: loop. */
#ifndef BATON_SERVE_RESPONSE_STREAM_H
#define BATON_SERVE_RESPONSE_STREAM_H

#include "shared/serve/completion_request.h"

/* Sends what came since the last chunk of this choice. */
void response_stream_token(struct choice *ch);
/* Sends the last chunk of this choice. */
void response_stream_finish(struct choice *ch);
/* Sends the usage, when it was asked for, and [DONE]. */
void response_stream_end(struct completion_request *c);
void response_stream_error(struct completion_request *c, struct str json);

#endif
