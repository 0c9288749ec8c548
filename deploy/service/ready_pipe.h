/* ready_pipe.h - how far the start of a node is, told to the process that waits for it
 * (service_start.h): one byte per stage through a pipe, whose number the node finds in
 * BATON_READY_FD. The pipe's end before the last stage means that the node has ended.
 *
 *     'l'  it listens: options, model and ports were found good
 *     'r'  it is ready: requests are taken
 *
 * Thread: any one at a time. */
#ifndef BATON_DEPLOY_SERVICE_READY_PIPE_H
#define BATON_DEPLOY_SERVICE_READY_PIPE_H

#define READY_PIPE_VARIABLE "BATON_READY_FD"

enum ready_stage { READY_LISTENS = 'l', READY_SERVES = 'r' };

struct ready_pipe {
    int fd; /* -1: nobody waits */
};

/* Takes the pipe from the environment, so that processes which this one starts do not have it. */
struct ready_pipe ready_pipe_take(void);
/* Tells the stage. After the last one the pipe is closed; further calls do nothing. */
void ready_pipe_say(struct ready_pipe *p, enum ready_stage stage);

#endif
